"""Which configuration for which problem: candidates -> legality -> cost in cycles -> the cheapest.

The model adds up what the busiest SM does, in SM cycles, from facts of the GPU and of the problem; it
knows no shapes. For one stage of one tile the main loop takes the longest of

    mma     m64nNk16 takes N / 2 cycles, or as long as its operands take to come out of shared memory,
            (64 + N) x 32 bytes at 128 bytes a cycle
    fill    the bytes of A and B asked of L2 over the CTA's share of L2's rate. An operand that a cluster
            multicasts, or that neighbouring CTAs happen to ask for at the same time, counts in part; rows
            that do not start on 128-byte lines count for more
    local   all bytes of the stage over what one SM takes in, whoever else they are shared with

plus the cost of passing a stage on. A cooperative tile then shows its whole epilogue, a ping-pong CTA
only the last one. Device memory bounds the launch from below, with imperfect overlap.

The constants were fitted to about 6,000 timings of 180 random shapes on an H200 (docs/performance-log.md).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from cutegemm.config import GemmConfig, Schedule
from cutegemm.errors import ConfigError
from cutegemm.hardware import Gpu
from cutegemm.hopper.plan import HopperPlan, StorePath, plan
from cutegemm.problem import GemmProblem, dtype_bytes

SMEM_BYTES_PER_CYCLE = 128  # of one SM, read by WGMMA
FULL_RATE_MACS = 2048  # 16-bit MACs an uncut SM does in a cycle
LINE_BYTES = 128

# Fitted.
LAUNCH_CYCLES = 2110  # launch, set-up, the first load and the last store
CLUSTER_LAUNCH_CYCLES = 123
TILE_CYCLES = 293  # scheduling a tile and refilling the consumers' view of the pipeline
STAGE_CYCLES = 41  # passing a stage between producer and consumers
CLUSTER_STAGE_CYCLES = 7
STORE_CYCLES = 980
STORE_BYTES_PER_CYCLE = 15
L2_BYTES_PER_CYCLE = 49  # for one SM when all ask
L2_BYTES_PER_CYCLE_ALONE = 53
LOCAL_BYTES_PER_CYCLE = 177
MULTICAST_SHARE = 0.582
COINCIDENCE_SHARE = 0.79
OFF_LINE = 1.27
HIDDEN_SHARE = 0.105  # of the shorter of mma and fill that shows all the same: shared memory and power
OVERLAP_LOSS = 0.55  # of the shorter of SM work and device memory that shows all the same

UNKNOWN_SIZE = 4096  # stands for a size known only at the call
MIN_STAGES = 3  # a shallower pipeline does not hide the latency of a load
TILES_N = (*range(8, 121, 8), *range(128, 257, 16))


@dataclass(frozen=True)
class Estimate:
    """The model's account of one configuration; all times in SM cycles.

    tiles           output tiles, those beyond the edge of the last clusters included
    waves           tiles of the busiest SM
    mma, fill       the main loop of one tile if only that mattered
    store           exposed epilogue of one tile
    dram            device memory alone, for the whole problem
    total           predicted length of the launch
    """

    config: GemmConfig
    tiles: int
    waves: int
    mma: float
    fill: float
    store: float
    dram: float
    total: float


def choose(problem: GemmProblem, gpu: Gpu, store: StorePath = "tma") -> GemmConfig:
    """The configuration with the lowest predicted cost. Unknown sizes count as 4096."""
    return ranked(problem, gpu, 1, store)[0].config


@functools.lru_cache(maxsize=4096)
def ranked(problem: GemmProblem, gpu: Gpu, count: int, store: StorePath = "tma") -> tuple[Estimate, ...]:
    """The ``count`` cheapest configurations that are legal with this store, best first."""
    table = _candidates(problem.kind(), store)
    terms = _cost(table, problem, gpu)
    order = np.argsort(terms["total"], kind="stable")[:count]
    return tuple(
        Estimate(
            table.plans[i].config,
            int(terms["tiles"][i]),
            int(terms["waves"][i]),
            *(float(terms[name][i]) for name in ("mma", "fill", "store", "dram", "total")),
        )
        for i in order
    )


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
    pingpong: np.ndarray
    swapped: np.ndarray


@functools.lru_cache(maxsize=64)
def _candidates(kind: GemmProblem, store: StorePath) -> _Table:
    plans = []
    for config in _space():
        try:
            worked_out = plan(config, kind.swapped() if config.swap_ab else kind, store)
        except ConfigError:
            continue
        if worked_out.stages >= MIN_STAGES:
            plans.append(worked_out)
    configs = [p.config for p in plans]

    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    return _Table(
        tuple(plans),
        column([c.tile_m for c in configs]),
        column([c.tile_n for c in configs]),
        column([c.tile_k for c in configs]),
        column([c.cluster_m for c in configs]),
        column([c.cluster_n for c in configs]),
        column([p.warpgroup_n for p in plans]),
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


def _cost(table: _Table, problem: GemmProblem, gpu: Gpu) -> dict[str, np.ndarray]:
    m_asked, n_asked, k, batch = (
        UNKNOWN_SIZE if size is None else size for size in (problem.m, problem.n, problem.k, problem.l)
    )
    a_bytes, d_bytes = dtype_bytes(problem.a_dtype), dtype_bytes(problem.out_dtype)
    m = np.where(table.swapped, n_asked, m_asked)
    n = np.where(table.swapped, m_asked, n_asked)

    cluster = table.cluster_m * table.cluster_n
    along_m = np.ceil(m / (table.tile_m * table.cluster_m))
    along_n = np.ceil(n / (table.tile_n * table.cluster_n))
    clusters = along_m * along_n * batch
    workers = gpu.sms // cluster
    waves = np.ceil(clusters / workers)
    busy = np.minimum(clusters, workers) * cluster
    k_tiles = np.ceil(k / table.tile_k)

    per_mma = np.maximum(
        64 * table.warpgroup_n * 16 / _macs_per_cycle(gpu),
        (64 + table.warpgroup_n) * 16 * a_bytes / SMEM_BYTES_PER_CYCLE,
    )
    mma = table.tile_m / 64 * (table.tile_n / table.warpgroup_n) * per_mma * (table.tile_k / 16)

    share_a = np.where(table.cluster_n > 1, MULTICAST_SHARE, np.where(along_n > 1, COINCIDENCE_SHARE, 1.0))
    share_b = np.where(table.cluster_m > 1, MULTICAST_SHARE, np.where(along_m > 1, COINCIDENCE_SHARE, 1.0))
    line_a, line_b = _line_factors(table, problem, m, n, k)
    rate = np.minimum(L2_BYTES_PER_CYCLE * gpu.sms / np.maximum(busy, 1), L2_BYTES_PER_CYCLE_ALONE)
    row_bytes = table.tile_k * a_bytes
    fill = (table.tile_m * share_a * line_a + table.tile_n * share_b * line_b) * row_bytes / rate
    local = (table.tile_m + table.tile_n) * row_bytes / LOCAL_BYTES_PER_CYCLE

    stage = STAGE_CYCLES + CLUSTER_STAGE_CYCLES * (cluster > 1)
    longest = np.maximum(np.maximum(mma, fill), local)
    loop = k_tiles * (longest + HIDDEN_SHARE * np.minimum(mma, fill) + stage)
    store = STORE_CYCLES + table.tile_m * table.tile_n * d_bytes / STORE_BYTES_PER_CYCLE
    exposed = np.where(table.pingpong, 0.0, store)
    body = waves * (loop + TILE_CYCLES + exposed) + np.where(table.pingpong, store, 0.0)
    dram_bytes = (
        float(m_asked * k + k * n_asked) * batch * a_bytes + float(m_asked * n_asked) * batch * d_bytes
    )
    dram = dram_bytes / (gpu.memory_bytes_per_s / gpu.sm_clock_hz)
    total = (
        LAUNCH_CYCLES
        + CLUSTER_LAUNCH_CYCLES * (cluster > 1)
        + np.maximum(body, dram)
        + OVERLAP_LOSS * np.minimum(body, dram)
    )
    return {
        "tiles": clusters * cluster, "waves": waves, "mma": mma * k_tiles, "fill": fill * k_tiles,
        "store": exposed, "dram": np.full_like(mma, dram), "total": total,
    }  # fmt: skip


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
