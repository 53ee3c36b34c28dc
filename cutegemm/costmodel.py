"""How long a launch takes on sm_90a, in SM cycles: what the busiest SM does, term by term.

For one stage of one tile the main loop takes the longest of

    mma     m64nNk16 takes N / 2 cycles, or as long as its operands take to come out of shared memory,
            (64 + N) x 32 bytes at 128 bytes a cycle
    fill    the bytes of A and B asked of L2 over the CTA's share of L2's rate. An operand that a cluster
            multicasts, or that neighbouring CTAs happen to ask for at the same time, counts in part; rows
            that do not start on 128-byte lines count for more
    local   all bytes of the stage over what one SM takes in, whoever else they are shared with
    move    lines that are shifted into place on their way, where TMA cannot put an operand there

plus the cost of passing a stage on. SMs of a last wave that is not full share L2 among fewer. A
cooperative tile then shows its whole epilogue, a ping-pong CTA only the last one; stores in narrow pieces
take longer. CTAs that share a tile's K meet to add their sums. Device memory bounds the launch from below,
with imperfect overlap.

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


@dataclass(frozen=True)
class Constants:
    """What is fitted; cycles are those of the GPU's highest clock.

    launch_cycles              launch, set-up, the first load and the last store
    cluster_launch_cycles      more, with clusters
    tile_cycles                scheduling a tile and refilling the consumers' view of the pipeline
    stage_cycles               passing a stage between producer and consumers
    cluster_stage_cycles       more, with clusters
    store_cycles               a tile's store, whatever its size
    store_bytes_per_cycle      of one CTA's store
    store_segment_cycles       for each contiguous piece of at most 128 bytes that a tile is stored in
    l2_bytes_per_cycle         one SM's share when all SMs ask
    l2_bytes_per_cycle_alone   for one SM when few ask
    local_bytes_per_cycle      what one SM takes in
    line_cycles                moving 128 bytes from the staging buffer to their place
    multicast_share            of an operand that a cluster shares, what it costs L2
    coincidence_share          of an operand that other CTAs ask for at the same time
    off_line                   what rows cost that do not start on 128-byte lines; others cost 1
    hidden_share               of the shorter of mma and fill that shows all the same
    reduce_cycles              the two meetings of a split tile's CTAs
    reduce_cta_cycles          more, for each CTA
    reduce_square_cycles       for each square of accumulators of a CTA's share: read, added, written
    reduce_bytes_per_cycle     partial sums read from the cluster's shared memory
    split_margin               split tiles have to be cheaper by this: their estimates scatter more
    dram_share                 of the peak rate; overlap_loss comes on top, so this is no rate seen alone
    overlap_loss               of the shorter of SM work and device memory that shows all the same
    """

    launch_cycles: float = 1944.0
    cluster_launch_cycles: float = 135.0
    tile_cycles: float = 376.0
    stage_cycles: float = 47.0
    cluster_stage_cycles: float = 7.36
    store_cycles: float = 1094.0
    store_bytes_per_cycle: float = 17.5
    store_segment_cycles: float = 1.79
    l2_bytes_per_cycle: float = 50.7
    l2_bytes_per_cycle_alone: float = 54.6
    local_bytes_per_cycle: float = 85.7
    line_cycles: float = 8.2
    multicast_share: float = 0.583
    coincidence_share: float = 0.806
    off_line: float = 1.53
    hidden_share: float = 0.08
    reduce_cycles: float = 2179.0
    reduce_cta_cycles: float = 215.0
    reduce_square_cycles: float = 830.0
    reduce_bytes_per_cycle: float = 115.0
    split_margin: float = 1.1
    dram_share: float = 1.02
    overlap_loss: float = 0.601


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
    last = grid.clusters - (grid.waves - 1) * grid.workers
    busy, busy_last = (np.minimum(n, grid.workers) * table.ctas for n in (grid.clusters, last))
    mma, row_bytes = _mma(table, work, gpu), table.tile_k * work.in_bytes
    asked = _asked_of_l2(table, work, grid, c) * row_bytes
    fill, fill_last = (asked / _l2_rate(gpu, sms, c) for sms in (busy, busy_last))
    local = (table.tile_m + table.tile_n) * row_bytes / c.local_bytes_per_cycle
    move = table.moved_lines * c.line_cycles
    stage = c.stage_cycles + c.cluster_stage_cycles * (table.ctas > table.splits)

    def loop(fill: np.ndarray) -> np.ndarray:
        longest = np.maximum(np.maximum(mma, fill), np.maximum(local, move))
        return grid.k_tiles * (longest + c.hidden_share * np.minimum(mma, fill) + stage)

    store, reduce = _epilogue(table, work, c)
    fused = table.tile_m * table.tile_n * work.fused_cycles / table.splits
    # One team's epilogue hides behind the other's main loop, as far as that is long enough.
    beyond = np.maximum(0.0, fused - loop(fill))
    exposed = np.where(table.pingpong, beyond, np.where(table.splits > 1, fused, store + fused))
    body = (grid.waves - 1) * loop(fill) + loop(fill_last)
    body = body + grid.waves * (c.tile_cycles + exposed + reduce) + np.where(table.pingpong, store, 0.0)
    dram = work.bytes / (c.dram_share * gpu.memory_bytes_per_s / gpu.sm_clock_hz) + np.zeros_like(body)
    total = c.launch_cycles + c.cluster_launch_cycles * (table.ctas > 1)
    total = total + np.maximum(body, dram) + c.overlap_loss * np.minimum(body, dram)
    return Cost(
        tiles=grid.clusters * table.cluster_m * table.cluster_n,
        waves=grid.waves,
        mma=mma * grid.k_tiles,
        fill=fill * grid.k_tiles,
        store=exposed,
        dram=dram,
        reduce=reduce,
        total=total * np.where(table.splits > 1, c.split_margin, 1.0),
    )


def _mma(table: Table, work: Work, gpu: Gpu) -> np.ndarray:
    """m64nNk16 takes as long as its MACs, or as its operands take to come out of shared memory."""
    per_mma = np.maximum(
        64 * table.warpgroup_n * 16 / _macs_per_cycle(gpu),
        (64 + table.warpgroup_n) * 16 * work.in_bytes / SMEM_BYTES_PER_CYCLE,
    )
    return table.tile_m / 64 * (table.tile_n / table.warpgroup_n) * per_mma * (table.tile_k / 16)


def _asked_of_l2(table: Table, work: Work, grid: _Grid, c: Constants) -> np.ndarray:
    """Rows of A and B that one CTA's tile costs L2."""
    alone_a, alone_b = (
        np.where(along > 1, c.coincidence_share, 1.0) for along in (grid.along_n, grid.along_m)
    )
    share_a = np.where(table.cluster_n > 1, c.multicast_share, alone_a)
    share_b = np.where(table.cluster_m > 1, c.multicast_share, alone_b)
    line_a, line_b = _line_factors(table, work, grid, c)
    return table.tile_m * share_a * line_a + table.tile_n * share_b * line_b


def _line_factors(table: Table, work: Work, grid: _Grid, c: Constants) -> tuple[np.ndarray, np.ndarray]:
    """off_line for an operand whose lines, if dense, do not start on 128-byte lines of memory."""

    def factor(is_k: np.ndarray, extent: np.ndarray) -> np.ndarray:
        pitch = np.where(is_k, work.k, extent) * work.in_bytes
        return np.where(pitch % LINE_BYTES == 0, 1.0, c.off_line)

    # After a swap the kernel's A is the user's B.
    first_is_k = np.where(table.swapped, work.b_is_k, work.a_is_k)
    second_is_k = np.where(table.swapped, work.a_is_k, work.b_is_k)
    return factor(first_is_k, grid.m), factor(second_is_k, grid.n)


def _l2_rate(gpu: Gpu, sms: np.ndarray, c: Constants) -> np.ndarray:
    """Bytes in a cycle that L2 gives each of so many SMs at work."""
    return np.minimum(c.l2_bytes_per_cycle * gpu.sms / np.maximum(sms, 1), c.l2_bytes_per_cycle_alone)


def _epilogue(table: Table, work: Work, c: Constants) -> tuple[np.ndarray, np.ndarray]:
    """Cycles of a tile's store, and of the sum and store of a tile whose K is split."""
    area, segments = table.tile_m * table.tile_n, c.store_segment_cycles * table.segments
    store = c.store_cycles + area * work.out_bytes / c.store_bytes_per_cycle + segments
    reduce = c.reduce_cycles + c.reduce_cta_cycles * table.splits + segments
    reduce = reduce + c.reduce_square_cycles * np.ceil(table.squares / table.splits)
    reduce = reduce + area * 4 / c.reduce_bytes_per_cycle
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
