"""Which configuration for which problem: candidates -> legality -> cost in cycles -> the cheapest.

The model adds up what the busiest SM does, in SM cycles, from facts of the GPU and of the problem; it
knows no shapes. For one stage of one tile the main loop takes the longest of

    mma     m64nNk16 takes N / 2 cycles, or as long as its operands take to come out of shared memory,
            (64 + N) x 32 bytes at 128 bytes a cycle
    fill    the bytes of A and B asked of L2 over the CTA's share of L2's rate. An operand that a cluster
            multicasts, or that neighbouring CTAs happen to ask for at the same time, counts in part; rows
            that do not start on 128-byte lines count for more
    local   all bytes of the stage over what one SM takes in, whoever else they are shared with

plus the cost of passing a stage on. SMs of a last wave that is not full share L2 among fewer. A
cooperative tile then shows its whole epilogue, a ping-pong CTA only the last one; stores in narrow pieces
take longer. CTAs that share a tile's K meet to add their sums. Device memory bounds the launch from below,
with imperfect overlap.

The constants were fitted to timings of random shapes on an H200 (docs/performance-log.md).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutegemm.config import GemmConfig, Schedule
from cutegemm.errors import ConfigError
from cutegemm.hardware import Gpu
from cutegemm.hopper.plan import SPLITS, HopperPlan, StorePath, plan
from cutegemm.problem import GemmProblem, dtype_bytes

SMEM_BYTES_PER_CYCLE = 128  # of one SM, read by WGMMA
FULL_RATE_MACS = 2048  # 16-bit MACs an uncut SM does in a cycle
LINE_BYTES = 128

# Fitted.
LAUNCH_CYCLES = 1944  # launch, set-up, the first load and the last store
CLUSTER_LAUNCH_CYCLES = 135
TILE_CYCLES = 376  # scheduling a tile and refilling the consumers' view of the pipeline
STAGE_CYCLES = 47  # passing a stage between producer and consumers
CLUSTER_STAGE_CYCLES = 7.36
STORE_CYCLES = 1094
STORE_BYTES_PER_CYCLE = 17.5
L2_BYTES_PER_CYCLE = 50.7  # for one SM when all ask
L2_BYTES_PER_CYCLE_ALONE = 54.6
LOCAL_BYTES_PER_CYCLE = 85.7
MULTICAST_SHARE = 0.583
COINCIDENCE_SHARE = 0.806
OFF_LINE = 1.53
HIDDEN_SHARE = 0.08  # of the shorter of mma and fill that shows all the same: shared memory and power
STORE_SEGMENT_CYCLES = 1.79  # a contiguous piece of at most 128 bytes that a tile is stored in
REDUCE_CYCLES = 2179  # the two meetings of a split tile's CTAs
REDUCE_CTA_CYCLES = 215  # more, for each CTA
REDUCE_SQUARE_CYCLES = 830  # for each square of accumulators of a CTA's share: read from all, added, written
REDUCE_BYTES_PER_CYCLE = 115  # partial sums read from the cluster's shared memory
SPLIT_MARGIN = 1.1  # split tiles have to be cheaper by this: their estimates scatter more
DRAM_SHARE = 1.02  # of the peak rate; OVERLAP_LOSS comes on top, so this is no rate seen alone
OVERLAP_LOSS = 0.601  # of the shorter of SM work and device memory that shows all the same

UNKNOWN_SIZE = 4096  # stands for a size known only at the call
MIN_STAGES = 3  # a shallower pipeline does not hide the latency of a load
TILES_N = (*range(8, 121, 8), *range(128, 257, 16))


@dataclass(frozen=True)
class Estimate:
    """The model's account of one configuration; all times in SM cycles.

    splits          CTAs that share a tile's K
    tiles           output tiles, those beyond the edge of the last clusters included
    waves           tiles of the busiest SM
    mma, fill       the main loop of one tile if only that mattered
    store           exposed epilogue of one tile
    dram            device memory alone, for the whole problem
    reduce          adding up the sums of a tile whose K is split
    total           predicted length of the launch; with K split, times SPLIT_MARGIN
    """

    config: GemmConfig
    splits: int
    tiles: int
    waves: int
    mma: float
    fill: float
    store: float
    dram: float
    reduce: float
    total: float


def choose(
    problem: GemmProblem, gpu: Gpu, store: StorePath = "tma", splits: tuple[int, ...] = SPLITS
) -> Estimate:
    """The configuration with the lowest predicted cost. Unknown M, N, K count as 4096, an unknown L as 1.

    splits: the numbers of CTAs that may share a tile's K.
    """
    return ranked(problem, gpu, 1, store, splits)[0]


@functools.lru_cache(maxsize=4096)
def ranked(
    problem: GemmProblem,
    gpu: Gpu,
    count: int,
    store: StorePath = "tma",
    splits: tuple[int, ...] = SPLITS,
) -> tuple[Estimate, ...]:
    """The ``count`` cheapest configurations that are legal with this store, best first."""
    estimates: list[Estimate] = []
    for ways in splits:
        estimates += _cheapest(_candidates(problem.kind(), store, ways), problem, gpu, ways, count)
    return tuple(sorted(estimates, key=lambda estimate: estimate.total)[:count])


def estimate(worked_out: HopperPlan, problem: GemmProblem, gpu: Gpu) -> Estimate:
    """The model's account of one configuration, be it among the candidates or not."""
    table = _table([worked_out], problem.kind())
    (found,) = _cheapest(table, problem, gpu, worked_out.splits, 1)
    return found


def _cheapest(table: "_Table", problem: GemmProblem, gpu: Gpu, splits: int, count: int) -> list[Estimate]:
    terms = _cost(table, problem, gpu, splits)
    return [
        Estimate(
            table.plans[i].config,
            splits,
            int(terms["tiles"][i]),
            int(terms["waves"][i]),
            *(float(terms[name][i]) for name in ("mma", "fill", "store", "dram", "reduce", "total")),
        )
        for i in np.argsort(terms["total"], kind="stable")[:count]
    ]


@dataclass(frozen=True)
class _Table:
    """Every candidate's plan and its fields as arrays, for one kind of problem."""

    plans: tuple[HopperPlan, ...]
    tile_m: np.ndarray
    tile_n: np.ndarray
    tile_k: np.ndarray
    cluster_m: np.ndarray
    cluster_n: np.ndarray
    warpgroup_n: np.ndarray
    segments: np.ndarray
    squares: np.ndarray  # 2 x 2 accumulators a thread holds of a tile: what a split tile is shared out in
    pingpong: np.ndarray
    swapped: np.ndarray


@functools.lru_cache(maxsize=64)
def _candidates(kind: GemmProblem, store: StorePath, splits: int) -> _Table:
    plans = []
    for config in _space():
        try:
            worked_out = plan(config, kind.swapped() if config.swap_ab else kind, store, splits)
        except ConfigError:
            continue
        if worked_out.stages >= MIN_STAGES:
            plans.append(worked_out)
    return _table(plans, kind)


def _table(plans: Sequence[HopperPlan], kind: GemmProblem) -> _Table:
    configs = [p.config for p in plans]

    def column(values: Sequence[float]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    return _Table(
        tuple(plans),
        column([c.tile_m for c in configs]),
        column([c.tile_n for c in configs]),
        column([c.tile_k for c in configs]),
        column([c.cluster_m for c in configs]),
        column([c.cluster_n for c in configs]),
        column([p.warpgroup_n for p in plans]),
        column([_store_segments(p, kind.swapped() if p.config.swap_ab else kind) for p in plans]),
        column([p.accumulator_registers // 4 for p in plans]),
        np.array([p.teams == 2 for p in plans]),
        np.array([c.swap_ab for c in configs]),
    )


def _space() -> list[GemmConfig]:
    """The configurations worth estimating: each tile with the schedules that suit its size."""
    found = []
    for tile_m in (64, 128, 192, 256):
        for tile_n in TILES_N:
            area = tile_m * tile_n
            schedules: list[tuple[int, Schedule]] = []
            if tile_m == 64 or (tile_m == 128 and tile_n <= 64):
                schedules.append((1, "cooperative"))
            if area >= 128 * 96:
                schedules.append((2, "cooperative"))
            if area >= 64 * 96:
                schedules.append((2, "pingpong"))
            for schedule in schedules:
                for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2)):
                    for tile_k in (64, 128) if area <= 128 * 64 else (64,):
                        found += [
                            GemmConfig(tile_m, tile_n, tile_k, cluster_m, cluster_n, *schedule, swap_ab=swap)
                            for swap in ((False, True) if tile_n <= 128 else (False,))
                        ]
    return found


def _cost(table: _Table, problem: GemmProblem, gpu: Gpu, splits: int) -> dict[str, np.ndarray]:
    m_asked, n_asked, k = (
        UNKNOWN_SIZE if size is None else size for size in (problem.m, problem.n, problem.k)
    )
    batch = 1 if problem.l is None else problem.l
    a_bytes, d_bytes = dtype_bytes(problem.a_dtype), dtype_bytes(problem.out_dtype)
    m = np.where(table.swapped, n_asked, m_asked)
    n = np.where(table.swapped, m_asked, n_asked)

    cluster = table.cluster_m * table.cluster_n
    along_m = np.ceil(m / (table.tile_m * table.cluster_m))
    along_n = np.ceil(n / (table.tile_n * table.cluster_n))
    clusters = along_m * along_n * batch
    sizes, which = np.unique(cluster * splits, return_inverse=True)
    workers = np.array([gpu.resident_clusters(int(size)) for size in sizes])[which]
    waves = np.ceil(clusters / workers)
    busy = np.minimum(clusters, workers) * cluster * splits
    busy_last = (clusters - (waves - 1) * workers) * cluster * splits
    k_tiles = np.ceil(np.ceil(k / table.tile_k) / splits)

    per_mma = np.maximum(
        64 * table.warpgroup_n * 16 / _macs_per_cycle(gpu),
        (64 + table.warpgroup_n) * 16 * a_bytes / SMEM_BYTES_PER_CYCLE,
    )
    mma = table.tile_m / 64 * (table.tile_n / table.warpgroup_n) * per_mma * (table.tile_k / 16)

    share_a = np.where(table.cluster_n > 1, MULTICAST_SHARE, np.where(along_n > 1, COINCIDENCE_SHARE, 1.0))
    share_b = np.where(table.cluster_m > 1, MULTICAST_SHARE, np.where(along_m > 1, COINCIDENCE_SHARE, 1.0))
    line_a, line_b = _line_factors(table, problem, m, n, k)
    row_bytes = table.tile_k * a_bytes
    fill_bytes = (table.tile_m * share_a * line_a + table.tile_n * share_b * line_b) * row_bytes
    fill, fill_last = (fill_bytes / _l2_rate(gpu, sms) for sms in (busy, busy_last))
    local = (table.tile_m + table.tile_n) * row_bytes / LOCAL_BYTES_PER_CYCLE

    stage = STAGE_CYCLES + CLUSTER_STAGE_CYCLES * (cluster > 1)

    def loop(fill: np.ndarray) -> np.ndarray:
        longest = np.maximum(np.maximum(mma, fill), local)
        return k_tiles * (longest + HIDDEN_SHARE * np.minimum(mma, fill) + stage)

    loops = (waves - 1) * loop(fill) + loop(fill_last)
    store = STORE_CYCLES + table.tile_m * table.tile_n * d_bytes / STORE_BYTES_PER_CYCLE
    store = store + STORE_SEGMENT_CYCLES * table.segments
    reduce = np.zeros_like(mma)
    if splits > 1:  # the reduction stores as well
        store = np.zeros_like(mma)
        reduce = REDUCE_CYCLES + REDUCE_CTA_CYCLES * splits
        reduce = reduce + REDUCE_SQUARE_CYCLES * np.ceil(table.squares / splits)
        reduce = reduce + table.tile_m * table.tile_n * 4 / REDUCE_BYTES_PER_CYCLE
        reduce = reduce + STORE_SEGMENT_CYCLES * table.segments
    exposed = np.where(table.pingpong, 0.0, store)
    body = loops + waves * (TILE_CYCLES + exposed + reduce) + np.where(table.pingpong, store, 0.0)
    dram_bytes = (
        float(m_asked * k + k * n_asked) * batch * a_bytes + float(m_asked * n_asked) * batch * d_bytes
    )
    dram = dram_bytes / (DRAM_SHARE * gpu.memory_bytes_per_s / gpu.sm_clock_hz)
    total = (
        LAUNCH_CYCLES
        + CLUSTER_LAUNCH_CYCLES * (cluster * splits > 1)
        + np.maximum(body, dram)
        + OVERLAP_LOSS * np.minimum(body, dram)
    ) * (SPLIT_MARGIN if splits > 1 else 1.0)
    return {
        "tiles": clusters * cluster, "waves": waves, "mma": mma * k_tiles, "fill": fill * k_tiles,
        "store": exposed, "dram": np.full_like(mma, dram), "reduce": reduce, "total": total,
    }  # fmt: skip


def _store_segments(plan: HopperPlan, seen: GemmProblem) -> float:
    """Contiguous pieces of at most 128 bytes in which a tile of D reaches memory."""
    config, element = plan.config, dtype_bytes(seen.out_dtype)
    if seen.out_major == "m":
        return config.tile_n * config.tile_m * element / LINE_BYTES
    widths = [width * element for _, width in plan.chunks]
    spans = [next(span for span in (128, 64, 32, 16) if width % span == 0) for width in widths]
    pieces = sum(width / span for width, span in zip(widths, spans, strict=True))
    return pieces * plan.warpgroups_n * config.tile_m


def _l2_rate(gpu: Gpu, sms: np.ndarray) -> np.ndarray:
    """Bytes in a cycle that L2 gives each of so many SMs at work."""
    return np.minimum(L2_BYTES_PER_CYCLE * gpu.sms / np.maximum(sms, 1), L2_BYTES_PER_CYCLE_ALONE)


def _line_factors(
    table: _Table, problem: GemmProblem, m: np.ndarray, n: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """OFF_LINE for an operand whose lines, if dense, do not start on 128-byte lines of memory."""
    elements = LINE_BYTES // dtype_bytes(problem.a_dtype)
    a_is_k, b_is_k = problem.a_major == "k", problem.b_major == "k"
    # After a swap the kernel's A is the user's B.
    first_is_k = np.where(table.swapped, b_is_k, a_is_k)
    second_is_k = np.where(table.swapped, a_is_k, b_is_k)

    def factor(is_k: np.ndarray, extent: np.ndarray) -> np.ndarray:
        return np.where(np.where(is_k, k, extent) % elements == 0, 1.0, OFF_LINE)

    return factor(first_is_k, m), factor(second_is_k, n)


def _macs_per_cycle(gpu: Gpu) -> float:
    """16-bit MACs of one SM in a cycle; parts with cut-down tensor cores (H20) show it in their peak."""
    implied = gpu.bf16_flops / (2 * gpu.sms * gpu.sm_clock_hz)
    # Peaks are quoted at a clock somewhat below the highest.
    return FULL_RATE_MACS if implied > 0.8 * FULL_RATE_MACS else math.ceil(1.1 * implied)
