"""Which configuration for which problem: candidates -> legality -> cost in cycles -> the cheapest.

The model adds up what one SM does for the tiles it gets, in SM cycles, from facts of the GPU and of
the problem; it knows no shapes. Its terms, for one tile:

    mma    WGMMA issue: m64nNk16 takes the longer of N / 2 cycles (2048 MACs a cycle) and the time to
           read its operands from shared memory, (64 + N) x 32 bytes at 128 bytes a cycle
    fill   bytes of A and B a CTA asks of L2 for one stage (shared ones once), over its share of L2's rate
    store  the epilogue, where nothing hides it (cooperative); ping-pong shows only the last one

A launch costs its latency, then the busiest SM's tiles; device memory bounds the whole from below.
"""

import functools
from dataclasses import dataclass

import numpy as np

from cutegemm.config import GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.hardware import Gpu
from cutegemm.hopper.plan import HopperPlan, plan
from cutegemm.problem import GemmProblem, dtype_bytes

MMA_MACS_PER_CYCLE = 2048  # of one SM, dense 16-bit
SMEM_BYTES_PER_CYCLE = 128
L2_BYTES_PER_CYCLE = 46  # of one SM while all ask
LAUNCH_CYCLES = 3500  # launch, barrier set-up, first loads; the same for every configuration
STORE_CYCLES = 700  # fixed part of an exposed epilogue
STORE_BYTES_PER_CYCLE = 64
TILE_CYCLES = 250  # per tile: scheduler, pipeline refill seen by the consumers
DRAM_SHARE = 0.86  # of the peak rate that a copy reaches
UNKNOWN_SIZE = 4096  # stands for a size known only at the call

TILES_N = (*range(16, 256, 8), 256)


@dataclass(frozen=True)
class Estimate:
    """The model's account of one configuration; all times in SM cycles.

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


def choose(problem: GemmProblem, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest predicted cost. Unknown sizes count as 4096."""
    return ranked(problem, gpu, 1)[0].config


@functools.lru_cache(maxsize=4096)
def ranked(problem: GemmProblem, gpu: Gpu, count: int) -> tuple[Estimate, ...]:
    """The ``count`` cheapest configurations, best first."""
    table = _candidates(
        (problem.a_dtype, problem.out_dtype, problem.a_major, problem.b_major, problem.out_major)
    )
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
    """Every candidate's plan and its fields as arrays, for one class of problems."""

    plans: tuple[HopperPlan, ...]
    tile_m: np.ndarray
    tile_n: np.ndarray
    cluster_m: np.ndarray
    cluster_n: np.ndarray
    warpgroup_n: np.ndarray
    pingpong: np.ndarray


@functools.lru_cache(maxsize=64)
def _candidates(kind: tuple[str, str, str, str, str]) -> _Table:
    a_dtype, out_dtype, a_major, b_major, out_major = kind
    problem = GemmProblem(None, None, None, 1, a_dtype, a_dtype, out_dtype, a_major, b_major, out_major)
    plans = []
    for config in _space():
        try:
            worked_out = plan(config, problem)
        except ConfigError:
            continue
        # A pipeline this shallow cannot hide the latency of a load.
        if worked_out.stages >= 3:
            plans.append(worked_out)
    configs = [p.config for p in plans]

    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    return _Table(
        tuple(plans),
        column([c.tile_m for c in configs]),
        column([c.tile_n for c in configs]),
        column([c.cluster_m for c in configs]),
        column([c.cluster_n for c in configs]),
        column([p.warpgroup_n for p in plans]),
        np.array([p.teams == 2 for p in plans]),
    )


def _space() -> list[GemmConfig]:
    found = []
    for tile_m in (64, 128, 192, 256):
        for tile_n in TILES_N:
            for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2)):
                cluster = {"cluster_m": cluster_m, "cluster_n": cluster_n}
                found.append(GemmConfig(tile_m, tile_n, **cluster, schedule="pingpong"))
                if tile_m * tile_n >= 128 * 128:
                    found.append(GemmConfig(tile_m, tile_n, **cluster))
                if tile_m == 64:
                    found.append(GemmConfig(tile_m, tile_n, **cluster, consumers=1))
    return found


def _cost(table: _Table, problem: GemmProblem, gpu: Gpu) -> dict[str, np.ndarray]:
    m, n, k, batch = (UNKNOWN_SIZE if s is None else s for s in (problem.m, problem.n, problem.k, problem.l))
    a_bytes, d_bytes = dtype_bytes(problem.a_dtype), dtype_bytes(problem.out_dtype)
    cluster = table.cluster_m * table.cluster_n
    clusters = (
        np.ceil(m / (table.tile_m * table.cluster_m)) * np.ceil(n / (table.tile_n * table.cluster_n)) * batch
    )
    workers = gpu.sms // cluster
    waves = np.ceil(clusters / workers)
    busy = np.minimum(clusters * cluster, gpu.sms)

    per_mma = np.maximum(
        64 * table.warpgroup_n * 16 / MMA_MACS_PER_CYCLE,
        (64 + table.warpgroup_n) * 16 * a_bytes / SMEM_BYTES_PER_CYCLE,
    )
    mma = table.tile_m / 64 * (table.tile_n / table.warpgroup_n) * per_mma * (k / 16)
    rows, columns = np.minimum(table.tile_m, m), np.minimum(table.tile_n, n)
    fill_bytes = (rows / table.cluster_n + columns / table.cluster_m) * k * a_bytes
    # Fewer SMs at work share more of L2 each, up to what one SM takes.
    fill = fill_bytes / np.minimum(L2_BYTES_PER_CYCLE * gpu.sms / busy, 64)
    store = STORE_CYCLES + table.tile_m * table.tile_n * d_bytes / STORE_BYTES_PER_CYCLE
    exposed = np.where(table.pingpong, 0.0, store)
    dram = (
        (m * k * a_bytes + k * n * a_bytes + m * n * d_bytes)
        * batch
        / (gpu.memory_bytes_per_s * DRAM_SHARE / gpu.sm_clock_hz)
    )
    tiles = waves * (np.maximum(mma, fill) + TILE_CYCLES + exposed) + np.where(table.pingpong, store, 0.0)
    total = LAUNCH_CYCLES + np.maximum(tiles, dram)
    return {
        "tiles": clusters * cluster, "waves": waves, "mma": mma, "fill": fill,
        "store": exposed, "dram": np.full_like(mma, dram), "total": total,
    }  # fmt: skip
