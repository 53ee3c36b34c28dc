"""Which configuration for which problem: candidates -> legality -> cost in cycles -> the cheapest.

What a configuration costs is the affair of an architecture's cost model: costmodel.py for sm_90a,
blackwell/costmodel.py for sm_100a. So are the candidates for sm_100a; those for sm_90a are this module's.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutegemm.blackwell import costmodel as blackwell
from cutegemm.config import GemmConfig, Schedule
from cutegemm.costmodel import Table, cost
from cutegemm.errors import ConfigError
from cutegemm.hardware import Gpu
from cutegemm.hopper.plan import SPLITS, plan
from cutegemm.parts.paths import ALIGNED, Paths
from cutegemm.parts.plan import KernelPlan
from cutegemm.problem import GemmProblem
from cutegemm.work import Cost, Work

MIN_STAGES = 3  # a shallower pipeline does not hide the latency of a load
TILES_N = (*range(8, 121, 8), *range(128, 257, 16))


@dataclass(frozen=True)
class Estimate:
    """The model's account of one configuration; all times in SM cycles.

    splits          CTAs that share a tile's K
    tiles           output tiles, those beyond the edge of the last clusters included
    waves           tiles of the busiest SM
    mma, fill       the main loop of one tile if only MMAs or only loads mattered
    store           exposed epilogue of one tile
    dram            device memory alone, for the whole problem
    reduce          adding up the sums of a tile whose K is split
    total           predicted length of the launch; with K split, times a margin
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
    problem: GemmProblem, gpu: Gpu, paths: Paths = ALIGNED, splits: tuple[int, ...] = SPLITS
) -> Estimate:
    """The configuration with the lowest predicted cost. Unknown M, N, K count as 4096, an unknown L as 1.

    splits: the numbers of CTAs that may share a tile's K.
    """
    return ranked(problem, gpu, 1, paths, splits)[0]


@functools.lru_cache(maxsize=4096)
def ranked(
    problem: GemmProblem,
    gpu: Gpu,
    count: int,
    paths: Paths = ALIGNED,
    splits: tuple[int, ...] = SPLITS,
) -> tuple[Estimate, ...]:
    """The ``count`` cheapest configurations that are legal with these paths, best first."""
    model = _model(gpu)
    table = model.candidates(problem.kind(), paths, splits)
    return _cheapest(table, model.cost(table, Work.of(problem), gpu), count)


def estimate(worked_out: KernelPlan, problem: GemmProblem, gpu: Gpu) -> Estimate:
    """The model's account of one configuration, be it among the candidates or not."""
    model = _model(gpu)
    table = model.table([worked_out], problem.kind())
    (found,) = _cheapest(table, model.cost(table, Work.of(problem), gpu), 1)
    return found


@dataclass(frozen=True)
class _Model:
    """An architecture's cost model: tables of all candidates and of given plans; what each row costs."""

    candidates: Callable[[GemmProblem, Paths, tuple[int, ...]], Any]
    table: Callable[[Any, GemmProblem], Any]
    cost: Callable[[Any, Work, Gpu], Cost]


def _model(gpu: Gpu) -> _Model:
    return {
        "sm_90a": _Model(candidates, Table.of, cost),
        "sm_100a": _Model(blackwell.candidates, blackwell.Table.of, blackwell.cost),
    }[gpu.target]


def _cheapest(table: Any, costs: Cost, count: int) -> tuple[Estimate, ...]:
    return tuple(
        Estimate(
            table.plans[i].config,
            table.plans[i].splits,
            int(costs.tiles[i]),
            int(costs.waves[i]),
            *(float(getattr(costs, name)[i]) for name in _CYCLES),
        )
        for i in np.argsort(costs.total, kind="stable")[:count]
    )


_CYCLES = ("mma", "fill", "store", "dram", "reduce", "total")


@functools.lru_cache(maxsize=64)
def candidates(kind: GemmProblem, paths: Paths, splits: tuple[int, ...]) -> Table:
    """Every sm_90a kernel considered for a kind of problem."""
    plans = []
    for ways in splits:
        for config in _space() if kind.epilogue is None else _fused_space():
            try:
                seen, ways_in = (kind.swapped(), paths.swapped()) if config.swap_ab else (kind, paths)
                worked_out = plan(config, seen, ways_in, ways)
            except ConfigError:
                continue
            if worked_out.stages_ahead >= MIN_STAGES:
                plans.append(worked_out)
    return Table.of(plans, kind)


def _fused_space() -> list[GemmConfig]:
    """The same with small tiles shared by two warpgroups, for epilogues that nothing hides."""
    return [
        *_space(),
        *(
            GemmConfig(64, tile_n, tile_k, cluster_m, 1, 2)
            for tile_n in range(64, 129, 16)
            for tile_k in (64, 128)
            for cluster_m in (1, 2)
        ),
    ]


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
