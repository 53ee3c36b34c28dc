"""How long a launch takes on sm_100a, in SM cycles: what the busiest SM does, term by term.

For one stage of one tile the main loop takes the longest of

    mma     an MMA of N columns and 16 steps of K takes N / 2 cycles, be it 128 rows that a CTA has of it or
            64; or as long as its operands take to come out of shared memory
    fill    the bytes of A and B asked of L2 over the CTA's share of L2's rate
    local   all bytes of the stage over what one SM takes in, whoever else they are shared with
    move    lines that are shifted into place on their way, where TMA cannot put an operand there: as long as
            the warps take that do it, or what goes into and out of shared memory for it

plus the cost of passing a stage on. A tile's epilogue runs under the next tile's main loop: what shows of it
is what is longer than that, and the last one. Device memory bounds the launch from below.

None of this has been measured on a GPU with tensor memory. Rates per SM that are not in the vendor's
documents are those fitted on an H200 (cutegemm/costmodel.py), on the assumption that they are no worse.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutegemm.blackwell.plan import CLUSTER_N, TILE_M, BlackwellPlan, plan
from cutegemm.config import GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.hardware import Gpu
from cutegemm.parts.paths import Paths
from cutegemm.problem import GemmProblem
from cutegemm.work import Cost, Work

MIN_STAGES = 3  # a shallower pipeline does not hide the latency of a load
TILES_N = (*range(8, 121, 8), *range(128, 257, 16))
LINE_BYTES = 128


@dataclass(frozen=True)
class Constants:
    """The rates of an SM; cycles are those of the GPU's highest clock.

    macs_per_cycle          16-bit MACs: 2.25 Pflop/s dense are 4096 for each of 148 SMs at 1.86 GHz
    smem_bytes_per_cycle    of one SM, read by MMAs
    launch_cycles           launch, set-up with tensor memory, the first load and the last store
    cluster_launch_cycles   more, with clusters
    tile_cycles             refilling the pipeline of MMAs when a tile's first loads come late
    stage_cycles            passing a stage on: load warp and MMA warp run apart, so that little of it shows
    store_cycles            a tile's store, whatever its size
    store_bytes_per_cycle   of one epilogue warpgroup's store
    l2_bytes_per_cycle      one SM's share when all SMs ask
    l2_bytes_per_cycle_alone   for one SM when few ask
    local_bytes_per_cycle   what one SM takes in
    line_warp_cycles        a warp's time for moving 128 bytes from the staging buffer to their place
    off_line                what rows cost L2 that do not start on 128-byte lines; others cost 1
    multicast_share         of an operand that a cluster shares, what it costs L2
    coincidence_share       of an operand that other CTAs ask for at the same time
    hidden_share            of the shorter of mma and fill that shows all the same
    reduce_cycles           the two meetings of a split tile's CTAs
    reduce_cta_cycles       more, for each CTA
    reduce_square_cycles    for each square of a CTA's share that a thread has: read, added, written
    reduce_bytes_per_cycle  partial sums read from the cluster's shared memory
    split_margin            split tiles have to be cheaper by this: their estimates scatter more
    dram_share              of the peak rate
    overlap_loss            of the shorter of SM work and device memory that shows all the same
    """

    macs_per_cycle: float = 4096.0
    smem_bytes_per_cycle: float = 128.0
    launch_cycles: float = 2400.0
    cluster_launch_cycles: float = 135.0
    tile_cycles: float = 150.0
    stage_cycles: float = 16.0
    store_cycles: float = 1094.0
    store_bytes_per_cycle: float = 17.5
    l2_bytes_per_cycle: float = 50.7
    l2_bytes_per_cycle_alone: float = 54.6
    local_bytes_per_cycle: float = 85.7
    line_warp_cycles: float = 4 * 8.2
    off_line: float = 1.53
    multicast_share: float = 0.583
    coincidence_share: float = 0.806
    hidden_share: float = 0.08
    reduce_cycles: float = 2179.0
    reduce_cta_cycles: float = 215.0
    reduce_square_cycles: float = 830.0
    reduce_bytes_per_cycle: float = 115.0
    split_margin: float = 1.1
    dram_share: float = 0.9
    overlap_loss: float = 0.3


ASSUMED = Constants()


@dataclass(frozen=True)
class Table:
    """Kernels, one a row: their plans, and what the model needs of them as arrays."""

    plans: tuple[BlackwellPlan, ...]
    tile_m: np.ndarray
    tile_n: np.ndarray
    tile_k: np.ndarray
    cta_m: np.ndarray
    cta_n: np.ndarray  # columns of B that one CTA loads
    teams_m: np.ndarray
    cluster_n: np.ndarray
    ctas: np.ndarray  # of a cluster, those that split K included
    splits: np.ndarray
    movers: np.ndarray  # warps; 0 where TMA puts both operands in their places
    moved_bytes: np.ndarray  # of a stage
    staged_bytes: np.ndarray  # the same in the staging buffer, where lines are longer
    moved_a: np.ndarray  # whether A is moved
    moved_b: np.ndarray
    squares: np.ndarray  # of elements that an epilogue thread holds of a tile
    consumers: np.ndarray
    swapped: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[BlackwellPlan], kind: GemmProblem) -> "Table":
        """The rows of plans."""
        configs = [p.config for p in plans]

        def column(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        return cls(
            tuple(plans),
            column([c.tile_m for c in configs]),
            column([c.tile_n for c in configs]),
            column([c.tile_k for c in configs]),
            column([p.cta_m for p in plans]),
            column([p.cta_n for p in plans]),
            column([p.teams_m for p in plans]),
            column([c.cluster_n for c in configs]),
            np.array([p.cluster_ctas for p in plans], dtype=np.intp),
            column([p.splits for p in plans]),
            column([p.line_boxes.movers for p in plans]),
            column([p.line_boxes.moved_bytes for p in plans]),
            column([p.line_boxes.staged_bytes for p in plans]),
            np.array([p.line_boxes.a is not None for p in plans], dtype=bool),
            np.array([p.line_boxes.b is not None for p in plans], dtype=bool),
            column([p.squares(0) for p in plans]),
            column([c.consumers for c in configs]),
            np.array([c.swap_ab for c in configs], dtype=bool),
        )


@functools.lru_cache(maxsize=64)
def candidates(kind: GemmProblem, paths: Paths, splits: tuple[int, ...]) -> Table:
    """Every kernel considered for a kind of problem."""
    plans = []
    for ways in splits:
        for config in _space():
            if ways > 1 and config.cluster_size > 1:
                continue
            try:
                seen, seen_paths = (kind.swapped(), paths.swapped()) if config.swap_ab else (kind, paths)
                worked_out = plan(config, seen, seen_paths, ways)
            except ConfigError:
                continue
            if worked_out.stages_ahead >= MIN_STAGES:
                plans.append(worked_out)
    return Table.of(plans, kind)


def _space() -> list[GemmConfig]:
    """The configurations worth estimating."""
    return [
        GemmConfig(tile_m, tile_n, tile_k, cluster_m, cluster_n, consumers, swap_ab=swap, mma_ctas=mma_ctas)
        for mma_ctas, sizes in TILE_M.items()
        for tile_m in sizes
        for tile_n in TILES_N
        for cluster_m in ((1, 2) if mma_ctas == 1 else (2, 4))
        for cluster_n in CLUSTER_N
        for consumers in (1, 2)
        for tile_k in ((64, 128) if tile_m * tile_n <= 128 * 64 else (64,))
        for swap in ((False, True) if tile_n <= 128 else (False,))
    ]


def cost(table: Table, work: Work, gpu: Gpu, constants: Constants = ASSUMED) -> Cost:
    """What every kernel of the table takes for a problem on a GPU."""
    c = constants
    m, n = (np.where(table.swapped, a, b) for a, b in ((work.n, work.m), (work.m, work.n)))
    along_m = np.ceil(m / (table.tile_m * table.teams_m))
    along_n = np.ceil(n / (table.tile_n * table.cluster_n))
    clusters = along_m * along_n * work.batch
    workers = _resident(gpu)[table.ctas]
    waves = np.ceil(clusters / workers)
    k_tiles = np.ceil(np.ceil(work.k / table.tile_k) / table.splits)
    stage_bytes = (table.cta_m + table.cta_n) * table.tile_k * work.in_bytes
    mma = _mma(table, work, c)
    fill = _asked_of_l2(table, along_m, along_n, c) * table.tile_k * work.in_bytes
    busy = np.clip(clusters, 1, workers) * table.ctas  # an empty problem has no clusters
    fill = fill / np.minimum(c.l2_bytes_per_cycle * gpu.sms / busy, c.l2_bytes_per_cycle_alone)
    local = stage_bytes / c.local_bytes_per_cycle
    longest = np.maximum(np.maximum(mma, fill), np.maximum(local, _move(table, stage_bytes, c)))
    loop = k_tiles * (longest + c.hidden_share * np.minimum(mma, fill) + c.stage_cycles)
    store = c.store_cycles + table.cta_m * table.tile_n * work.out_bytes / (
        c.store_bytes_per_cycle * table.consumers
    )
    reduce = _reduction(table, c)
    shown = np.where(table.splits > 1, reduce, store)
    body = loop + (waves - 1) * np.maximum(loop + c.tile_cycles, shown) + shown
    dram = work.bytes / (c.dram_share * gpu.memory_bytes_per_s / gpu.sm_clock_hz) + np.zeros_like(body)
    total = c.launch_cycles + c.cluster_launch_cycles * (table.ctas > 1)
    total = total + np.maximum(body, dram) + c.overlap_loss * np.minimum(body, dram)
    return Cost(
        tiles=clusters * table.teams_m * table.cluster_n,
        waves=waves,
        mma=mma * k_tiles,
        fill=fill * k_tiles,
        store=np.where(table.splits > 1, 0.0, store),
        dram=dram,
        reduce=reduce,
        total=total * np.where(table.splits > 1, c.split_margin, 1.0),
    )


def _mma(table: Table, work: Work, c: Constants) -> np.ndarray:
    """Cycles of one stage's MMAs in one CTA: 128 lanes of results at a time, be they all used or not."""
    folded = (table.cta_m == 64) & (table.cta_n < table.tile_n)
    columns = np.where(folded, 0.5, 1.0) * table.tile_n
    computing = 128 * columns * 16 / c.macs_per_cycle
    reading = (table.cta_m + table.cta_n) * 16 * work.in_bytes / c.smem_bytes_per_cycle
    return np.maximum(computing, reading) * table.tile_k / 16


def _move(table: Table, stage_bytes: np.ndarray, c: Constants) -> np.ndarray:
    """Cycles of moving one stage's lines; 0 where there are none to move."""
    warps = table.moved_bytes / LINE_BYTES * c.line_warp_cycles / np.maximum(table.movers, 1)
    # Every 16 bytes are read with the 16 after them, and written; TMA writes and MMAs read them besides.
    accesses = table.staged_bytes + 3 * table.moved_bytes + stage_bytes
    return np.where(table.movers > 0, np.maximum(warps, accesses / c.smem_bytes_per_cycle), 0.0)


def _reduction(table: Table, c: Constants) -> np.ndarray:
    """Cycles of adding and writing a tile whose K is split; 0 for others."""
    reduce = c.reduce_cycles + c.reduce_cta_cycles * table.splits
    reduce = reduce + c.reduce_square_cycles * np.ceil(table.squares / table.splits)
    reduce = reduce + table.cta_m * table.tile_n * 4 / c.reduce_bytes_per_cycle
    return np.where(table.splits > 1, reduce, 0.0)


def _asked_of_l2(table: Table, along_m: np.ndarray, along_n: np.ndarray, c: Constants) -> np.ndarray:
    """Rows of A and B that one CTA's part of a tile costs L2."""
    alone_a, alone_b = (np.where(along > 1, c.coincidence_share, 1.0) for along in (along_n, along_m))
    share_a = np.where(table.cluster_n > 1, c.multicast_share, alone_a)
    share_b = np.where(table.teams_m > 1, c.multicast_share, alone_b)
    line_a, line_b = (np.where(moved, c.off_line, 1.0) for moved in (table.moved_a, table.moved_b))
    return table.cta_m * share_a * line_a + table.cta_n * share_b * line_b


@functools.lru_cache(maxsize=64)
def _resident(gpu: Gpu) -> np.ndarray:
    """Clusters that run at once, by their CTAs."""
    return np.array([0.0, *(gpu.resident_clusters(ctas) for ctas in range(1, 17))])
