"""How long a launch takes, in SM cycles: what a configuration asks of each resource of the GPU.

The resources a stage of the main loop needs work side by side, so that it takes about as long as the one
most in demand; those that come near add to it, as in a norm. The four that loads pass through stand in each
other's way more than they stand in that of the tensor cores: a norm for the loads, a sharper one for both.

    mma      tensor cores; or one warpgroup's own MMAs and its wait for the next stage, if that is longer;
             or what the power allows that all tensor cores draw together, if that is less
    issue    the TMA unit asks for a row of 128 bytes at a time, and longer for rows that straddle lines
    refill   a stage is asked for when it is free and arrives a latency later: with few stages this shows
    l2       what all SMs ask of L2. Neighbours in the order of tiles ask for the same line at the same moment
             and are served together in part, while they have not drifted apart; a cluster's CTAs ask once
             for all of them; rows beyond the matrix are fetched as well, by every SM from the same place
    move     lines that are shifted into place on their way, where TMA cannot put an operand there
    dram     device memory: A and B read once, D written once, divided among the tiles

A wave that is not full shares L2 and device memory among fewer. Around the main loop: the launch, the
scheduling of a tile, its store (after the last tile only, if ping-pong hides the others), what an epilogue
computes, and the sum of a split K.

The constants of the class ``Constants`` are fitted to timings of random shapes on an H200
(``benchmarks/fit_heuristic.py`` prints a new fit); everything else is a fact of the GPU, of the kernel or of
the problem. No shape is known here.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutegemm.hardware import Gpu
from cutegemm.hopper.plan import HopperPlan
from cutegemm.problem import GemmProblem, dtype_bytes
from cutegemm.work import Cost, Work

SMEM_BYTES_PER_CYCLE = 128  # of one SM, read by WGMMA
FULL_RATE_MACS = 2048  # 16-bit MACs an uncut SM does in a cycle
LINE_BYTES = 128
SECTOR_BYTES = 32
STRIP = 8  # clusters across a strip of the order kernels get by default
NEIGHBOURS = 32  # CTAs, of a full wave, close enough in the order for their requests of one line to meet
# Times as long a fused epilogue takes one warpgroup as it takes two on halves; from few measurements.
LONE_EPILOGUE = 1.6


@dataclass(frozen=True)
class Constants:
    """What is fitted; cycles are those of the GPU's highest clock.

    sharpness                  exponent of the norm in which the resources of loads add up
    mma_sharpness              of the one in which loads and MMAs do
    sustained_macs             of one SM in a cycle of the highest clock, when all tensor cores are at work:
                               power is the limit then
    stage_cycles               a consumer's wait between stages, if nothing is in flight meanwhile
    cluster_stage_cycles       more, where a cluster's CTAs wait for each other
    row_cycles                 TMA, for each 128 bytes that are one line of memory
    row_cycles_off_line        ... that lie across two lines
    row_cycles_off_sector      ... and do not start on a 32-byte sector
    line_cycles                moving 128 bytes from the staging buffer to their place
    refill_cycles              for each 128 bytes of a stage, divided by the stages in flight
    l2_bytes_per_cycle         one SM's share when all SMs ask
    l2_off_line, l2_off_sector what L2 serves more, for rows that lie so
    coincidence                r requests for one line that meet cost L2 r to the power of 1 less this
    outside_rows               what a row beyond the matrix costs L2; one inside costs 1
    multicast_cost             what a multicast request costs L2; a plain one costs 1
    pair_share                 how far SMs alone on their TPC wait for those that share one
    dram_share                 of the peak rate; the norm adds to it, so this is no rate seen alone
    dram_unevenness            the same for device memory: exponent of SMs over those at work
    launch_cycles              launch, set-up, the first load and the last store
    cluster_launch_cycles      more, with clusters
    tile_cycles                scheduling a tile and refilling the consumers' view of the pipeline
    store_bytes_per_cycle      of one CTA's store
    store_segment_cycles       for each contiguous piece of at most 128 bytes that a tile is stored in
    reduce_cycles              the two meetings of a split tile's CTAs
    reduce_cta_cycles          more, for each CTA
    reduce_square_cycles       for each square of accumulators of a CTA's share: read, added, written
    split_margin               split tiles have to be cheaper by this: their estimates scatter more
    """

    sharpness: float = 1.65
    mma_sharpness: float = 5.0
    sustained_macs: float = 1600.0
    stage_cycles: float = 151.0
    cluster_stage_cycles: float = 27.4
    row_cycles: float = 0.844
    row_cycles_off_line: float = 1.93
    row_cycles_off_sector: float = 2.87
    line_cycles: float = 8.2
    refill_cycles: float = 3.16
    l2_bytes_per_cycle: float = 58.0
    l2_off_line: float = 1.02
    l2_off_sector: float = 1.0
    coincidence: float = 0.306
    outside_rows: float = 2.8
    multicast_cost: float = 1.33
    pair_share: float = 0.248
    dram_share: float = 1.32
    dram_unevenness: float = 0.821
    launch_cycles: float = 3640.0
    cluster_launch_cycles: float = 94.1
    tile_cycles: float = 175.0
    store_bytes_per_cycle: float = 16.7
    store_segment_cycles: float = 2.14
    reduce_cycles: float = 899.0
    reduce_cta_cycles: float = 132.0
    reduce_square_cycles: float = 552.0
    split_margin: float = 1.19


FITTED = Constants()


@dataclass(frozen=True)
class Table:
    """Kernels, one a row: their plans, and what the model needs of them as arrays."""

    plans: tuple[HopperPlan, ...]
    tile_m: np.ndarray
    tile_n: np.ndarray
    tile_k: np.ndarray
    cluster_m: np.ndarray
    cluster_n: np.ndarray
    splits: np.ndarray
    ctas: np.ndarray  # of a cluster, those that split K included
    stages: np.ndarray
    moved_lines: np.ndarray  # of 128 bytes, of a stage
    warpgroup_n: np.ndarray
    teams: np.ndarray  # warpgroups that share a tile
    segments: np.ndarray  # contiguous pieces in which a tile is stored
    squares: np.ndarray  # 2 x 2 accumulators a thread holds of a tile: what a split tile is shared out in
    pingpong: np.ndarray
    swapped: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[HopperPlan], kind: GemmProblem) -> "Table":
        """The rows of plans for one kind of problem."""
        configs = [p.config for p in plans]

        def column(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        return cls(
            tuple(plans),
            column([c.tile_m for c in configs]),
            column([c.tile_n for c in configs]),
            column([c.tile_k for c in configs]),
            column([c.cluster_m for c in configs]),
            column([c.cluster_n for c in configs]),
            column([p.splits for p in plans]),
            np.array([p.cluster_ctas for p in plans], dtype=np.intp),
            column([p.stages for p in plans]),
            column([p.line_boxes.moved_bytes / LINE_BYTES for p in plans]),
            column([p.warpgroup_n for p in plans]),
            column([p.warpgroups_m * p.warpgroups_n for p in plans]),
            column([_store_segments(p, kind.swapped() if p.config.swap_ab else kind) for p in plans]),
            column([p.accumulator_registers // 4 for p in plans]),
            np.array([p.teams == 2 for p in plans], dtype=bool),
            np.array([c.swap_ab for c in configs], dtype=bool),
        )


@dataclass(frozen=True)
class _Grid:
    """The tiles of each row, and how they fall into waves."""

    along_m: np.ndarray  # clusters
    along_n: np.ndarray
    clusters: np.ndarray
    workers: np.ndarray  # clusters that run at once
    waves: np.ndarray
    k_tiles: np.ndarray  # stages of one CTA's share of K
    m: np.ndarray  # sizes as the kernel sees them
    n: np.ndarray

    @classmethod
    def of(cls, table: Table, work: Work, gpu: Gpu) -> "_Grid":
        m = np.where(table.swapped, work.n, work.m)
        n = np.where(table.swapped, work.m, work.n)
        along_m = np.ceil(m / (table.tile_m * table.cluster_m))
        along_n = np.ceil(n / (table.tile_n * table.cluster_n))
        clusters = along_m * along_n * work.batch
        workers = _resident(gpu)[table.ctas]
        k_tiles = np.ceil(np.ceil(work.k / table.tile_k) / table.splits)
        return cls(along_m, along_n, clusters, workers, np.ceil(clusters / workers), k_tiles, m, n)


def cost(table: Table, work: Work, gpu: Gpu, constants: Constants = FITTED) -> Cost:
    """What every kernel of the table takes for a problem on a GPU."""
    c, grid = constants, _Grid.of(table, work, gpu)
    stage = _Stage.of(table, work, grid, gpu, c)
    store, reduce = _epilogue(table, grid, work, c)
    last = grid.clusters - (grid.waves - 1) * grid.workers
    full_ctas, last_ctas = (np.minimum(n, grid.workers) * table.ctas for n in (grid.clusters, last))
    dram_rate = c.dram_share * gpu.memory_bytes_per_s / gpu.sm_clock_hz
    dram_of_cluster = work.bytes / dram_rate / np.maximum(grid.clusters, 1)

    full = stage.loop(full_ctas, dram_of_cluster)
    fused = table.tile_m * table.tile_n * work.fused_cycles / table.splits
    # A warpgroup alone waits for its own results; two fill each other's gaps.
    fused = fused * np.where(table.teams == 1, LONE_EPILOGUE, 1.0)
    # One team's epilogue hides behind the other's main loop, as far as that is long enough.
    beyond = np.maximum(0.0, fused - full)
    exposed = np.where(table.pingpong, beyond, np.where(table.splits > 1, fused, store + fused))
    per_tile = c.tile_cycles + exposed + reduce
    loops = (grid.waves - 1) * full + stage.loop(last_ctas, dram_of_cluster)
    body = loops + grid.waves * per_tile + np.where(table.pingpong, store + fused - beyond, 0.0)
    total = c.launch_cycles + c.cluster_launch_cycles * (table.ctas > 1) + body
    return Cost(
        tiles=grid.clusters * table.cluster_m * table.cluster_n,
        waves=grid.waves,
        mma=stage.mma * grid.k_tiles,
        fill=functools.reduce(np.maximum, (stage.issue, stage.refill, stage.move, stage.l2 * full_ctas))
        * grid.k_tiles,
        store=exposed,
        dram=np.zeros_like(total) + work.bytes / dram_rate,
        reduce=reduce,
        total=total * np.where(table.splits > 1, c.split_margin, 1.0),
    )


@dataclass(frozen=True)
class _Stage:
    """One stage of the main loop of one tile: cycles of each resource if only that mattered."""

    mma: np.ndarray
    macs: np.ndarray  # multiplications, not cycles
    issue: np.ndarray
    refill: np.ndarray
    move: np.ndarray
    l2: np.ndarray  # for each CTA at work
    k_tiles: np.ndarray
    ctas: np.ndarray
    gpu: Gpu
    constants: Constants

    @classmethod
    def of(cls, table: Table, work: Work, grid: _Grid, gpu: Gpu, c: Constants) -> "_Stage":
        depth = table.tile_k * work.in_bytes / LINE_BYTES  # rows of 128 bytes for each row of the tile
        rows_a, rows_b = np.minimum(table.tile_m, grid.m), np.minimum(table.tile_n, grid.n)
        straddle = _straddles(table, work, grid)
        issue = sum(
            rows / sharers * np.array((c.row_cycles, c.row_cycles_off_line, c.row_cycles_off_sector))[where]
            for rows, sharers, where in zip(
                (rows_a, rows_b), (table.cluster_n, table.cluster_m), straddle, strict=True
            )
        )
        # With all of K in flight at once there is nothing to wait for.
        recurring = np.clip((grid.k_tiles - table.stages + 1) / np.maximum(grid.k_tiles, 1), 0, 1)
        refill = c.refill_cycles * (table.tile_m + table.tile_n) / (table.stages - 1) * recurring
        asked = _asked_of_l2(table, work, grid, straddle, c)
        return cls(
            _mma(table, work, gpu, c),
            table.tile_m * table.tile_n * table.tile_k,
            issue * depth,
            refill * depth,
            table.moved_lines * c.line_cycles,
            asked * depth * LINE_BYTES / (c.l2_bytes_per_cycle * gpu.sms),
            grid.k_tiles,
            table.ctas,
            gpu,
            c,
        )

    def loop(self, busy: np.ndarray, dram_of_cluster: np.ndarray) -> np.ndarray:
        """The main loop of a tile while ``busy`` CTAs are at work."""
        c, sms = self.constants, self.gpu.sms
        paired = (self.ctas > 1) | (busy > sms / 2)  # some TPC's two SMs are at work
        asking = np.where(paired, busy + c.pair_share * (sms - busy), busy)
        uneven = np.where((self.ctas == 1) & paired, sms / np.maximum(busy, 1), 1.0)
        dram = dram_of_cluster * busy / self.ctas / np.maximum(self.k_tiles, 1) * uneven**c.dram_unevenness
        # All SMs' tensor cores together draw more power than there is: the clock falls until it suffices.
        mma = np.maximum(self.mma, self.macs / c.sustained_macs * busy / sms)
        loads = _norm((self.issue, self.refill, self.move, self.l2 * asking, dram), c.sharpness)
        return self.k_tiles * _norm((mma, loads), c.mma_sharpness)


def _norm(demands: Sequence[np.ndarray], sharpness: float) -> np.ndarray:
    """How long resources take side by side: the longest of them, and more where others come near."""
    longest = np.maximum(functools.reduce(np.maximum, demands), 1e-9)  # there may be nothing to do
    return longest * sum((demand / longest) ** sharpness for demand in demands) ** (1 / sharpness)


def _mma(table: Table, work: Work, gpu: Gpu, c: Constants) -> np.ndarray:
    """m64nNk16 takes as long as its MACs, or as its operands take to come out of shared memory."""
    per_mma = np.maximum(
        64 * table.warpgroup_n * 16 / _macs_per_cycle(gpu),
        (64 + table.warpgroup_n) * 16 * work.in_bytes / SMEM_BYTES_PER_CYCLE,
    )
    mma = table.tile_m / 64 * (table.tile_n / table.warpgroup_n) * per_mma * (table.tile_k / 16)
    wait = c.stage_cycles + c.cluster_stage_cycles * (table.ctas > table.splits)
    return np.maximum(mma, np.hypot(mma / table.teams, wait))


def _asked_of_l2(
    table: Table, work: Work, grid: _Grid, straddle: tuple[np.ndarray, np.ndarray], c: Constants
) -> np.ndarray:
    """Rows of 128 bytes that one CTA's stage costs L2, for each 128 bytes along K."""
    cluster = table.cluster_m * table.cluster_n
    inside_a = grid.m / np.maximum(grid.along_m * table.cluster_m, 1)
    inside_b = grid.n / np.maximum(grid.along_n * table.cluster_n, 1)
    outside_a, outside_b = table.tile_m - inside_a, table.tile_n - inside_b
    # Neighbours in the order lie along M first, as far as a strip goes, and share B; then along N, with A.
    ctas = np.minimum(grid.clusters, grid.workers) * cluster
    met = np.maximum(1.0, NEIGHBOURS * ctas / (grid.workers * cluster) / cluster)
    met_along_m = np.clip(met, 1.0, np.maximum(np.minimum(grid.along_m, STRIP), 1.0))
    met_along_n = np.clip(met / met_along_m, 1.0, np.maximum(grid.along_n, 1.0))
    factors = np.array((1.0, c.l2_off_line, c.l2_off_sector))
    # Multicast requests do not meet others, and CTAs that start a wave together drift apart in the next.
    meeting = c.coincidence / np.maximum(grid.waves, 1)
    inside_a = inside_a / np.where(table.cluster_n > 1, 1.0, met_along_n**meeting)
    inside_b = inside_b / np.where(table.cluster_m > 1, 1.0, met_along_m**meeting)
    a = inside_a * factors[straddle[0]] + outside_a * c.outside_rows
    b = inside_b * factors[straddle[1]] + outside_b * c.outside_rows
    return (a / table.cluster_n + b / table.cluster_m) * np.where(cluster > 1, c.multicast_cost, 1.0)


def _straddles(table: Table, work: Work, grid: _Grid) -> tuple[np.ndarray, np.ndarray]:
    """How the rows of 128 bytes of A and B lie, if dense: 0 on lines, 1 on sectors, 2 on neither."""

    def where(is_k: np.ndarray, extent: np.ndarray) -> np.ndarray:
        pitch = np.where(is_k, work.k, extent) * work.in_bytes
        return np.where(pitch % LINE_BYTES == 0, 0, np.where(pitch % SECTOR_BYTES == 0, 1, 2))

    # After a swap the kernel's A is the user's B.
    first_is_k = np.where(table.swapped, work.b_is_k, work.a_is_k)
    second_is_k = np.where(table.swapped, work.a_is_k, work.b_is_k)
    return where(first_is_k, grid.m), where(second_is_k, grid.n)


def _epilogue(table: Table, grid: _Grid, work: Work, c: Constants) -> tuple[np.ndarray, np.ndarray]:
    """Cycles of a tile's store, and of the sum and store of a tile whose K is split."""
    inside = np.minimum(1.0, grid.m / table.tile_m) * np.minimum(1.0, grid.n / table.tile_n)
    segments = c.store_segment_cycles * table.segments * inside
    store = table.tile_m * table.tile_n * inside * work.out_bytes / c.store_bytes_per_cycle + segments
    reduce = c.reduce_cycles + c.reduce_cta_cycles * table.splits + segments
    reduce = reduce + c.reduce_square_cycles * np.ceil(table.squares / table.splits)
    return store, np.where(table.splits > 1, reduce, 0.0)


def _store_segments(plan: HopperPlan, seen: GemmProblem) -> float:
    """Contiguous pieces of at most 128 bytes in which a tile of D reaches memory."""
    config, element = plan.config, dtype_bytes(seen.out_dtype)
    if seen.out_major == "m":
        return config.tile_n * config.tile_m * element / LINE_BYTES
    widths = [width * element for _, width in plan.chunks]
    spans = [next(span for span in (128, 64, 32, 16) if width % span == 0) for width in widths]
    pieces = sum(width / span for width, span in zip(widths, spans, strict=True))
    return pieces * plan.warpgroups_n * config.tile_m


@functools.lru_cache(maxsize=64)
def _resident(gpu: Gpu) -> np.ndarray:
    """Clusters that run at once, by their CTAs."""
    return np.array([0.0, *(gpu.resident_clusters(ctas) for ctas in range(1, 17))])


def _macs_per_cycle(gpu: Gpu) -> float:
    """16-bit MACs of one SM in a cycle; parts with cut-down tensor cores (H20) show it in their peak."""
    implied = gpu.bf16_flops / (2 * gpu.sms * gpu.sm_clock_hz)
    # Peaks are quoted at a clock somewhat below the highest.
    return FULL_RATE_MACS if implied > 0.8 * FULL_RATE_MACS else math.ceil(1.1 * implied)
