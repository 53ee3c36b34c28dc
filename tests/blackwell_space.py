"""sm_100a kernels of the legal space: drawn at random, and what a case may look like for one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from gpu_checks import Case

from cutegemm import GemmConfig, GemmProblem
from cutegemm.blackwell.plan import CLUSTER_M, CLUSTER_N, TILE_K, TILE_M, BlackwellPlan, plan
from cutegemm.errors import ConfigError
from cutegemm.parts.paths import Paths
from cutegemm.scheduler import (
    Blocked,
    ColumnMajor,
    Dynamic,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    Persistent,
    RowMajor,
    SplitK,
    Static,
    StreamK,
    TileScheduler,
)

TARGET = "sm_100a"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bfloat16", F16: "float16", F32: "float32"}
MOST_ELEMENTS = 300  # along M or N, about; at least one whole cluster tile
LONG_STREAM = 24  # stages of K at most, with StreamK: of much fewer nothing is spared
ORDERS = (RowMajor(), ColumnMajor(), GroupedM(2), GroupedN(3), Blocked(2, 2), Morton(), Hilbert())
SHIFTS = (*((0, 0),) * 5, (1, 0), (0, 3), (5, 2))  # of A and B, from 16 bytes
ASSIGNMENTS = (
    Persistent(), Persistent(), Static(), Dynamic(), Dynamic(2), SplitK(2), SplitK(4), SplitK(8),
    StreamK(), StreamK(ordered=False),
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kernel: configuration, a case whose sizes are yet to be drawn, scheduler."""

    config: GemmConfig
    case: Case = Case(0, 0, 0)  # noqa: RUF009 - frozen
    scheduler: TileScheduler = TileScheduler()  # noqa: RUF009 - frozen

    @property
    def seen(self) -> GemmProblem:
        """The problem as the kernel sees it."""
        case = self.case
        problem = GemmProblem(
            None, None, None, 1, NAMES[case.dtype], NAMES[case.dtype], NAMES[case.out_dtype],
            case.a_major, case.b_major, case.out_major,
        )  # fmt: skip
        return problem.swapped() if self.config.swap_ab else problem

    @property
    def paths(self) -> Paths:
        """The ways of the case's operands."""
        a, b = ("realigned" if shift else "tma" for shift in self.case.shifts)
        return Paths(a, b, "direct" if self.case.out_shift else "tma")  # type: ignore[arg-type]

    @property
    def plan(self) -> BlackwellPlan:
        """Its plan; raises ConfigError if the configuration is not legal."""
        paths = self.paths.swapped() if self.config.swap_ab else self.paths
        return plan(self.config, self.seen, paths, self.scheduler.splits, self.scheduler.streamed)

    def is_legal(self) -> bool:
        """Whether there is a plan."""
        try:
            return self.plan is not None
        except ConfigError:
            return False


def pair(tile_m: int, tile_n: int, **fields: object) -> GemmConfig:
    """A configuration with MMAs of two CTAs."""
    return GemmConfig(tile_m, tile_n, **{"cluster_m": 2, "mma_ctas": 2, **fields})  # type: ignore[arg-type]


def drawn_kind(chance: random.Random) -> Kind:
    """A legal kernel: tile, cluster, MMAs of one or two CTAs, majors, dtypes, loads, order, assignment."""
    while True:
        mma_ctas = chance.choice((1, 2))
        config = GemmConfig(
            chance.choice(TILE_M[mma_ctas]),
            8 * chance.randint(1, 32),
            chance.choice(TILE_K),
            chance.choice(CLUSTER_M),
            chance.choice(CLUSTER_N),
            chance.choice((1, 2)),
            swap_ab=chance.random() < 0.2,
            mma_ctas=mma_ctas,
        )
        shifts = chance.choice(SHIFTS)
        if any(shifts):
            config = config.with_(tile_k=64, cluster_m=mma_ctas, cluster_n=1)
        dtype = chance.choice((BF16, F16))
        majors = {"a_major": chance.choice("km"), "b_major": chance.choice("kn")}
        case = Case(
            0, 0, 0, chance.choice((None, None, 0)), dtype, chance.choice((dtype, F32)),
            **majors, out_major=chance.choice("nm"), out_shift=chance.choice((0, 0, 0, 1)), shifts=shifts,
        )  # fmt: skip
        scheduler = TileScheduler(chance.choice(ORDERS), chance.choice(ASSIGNMENTS))
        kind = Kind(config, case, scheduler)
        if kind.is_legal():
            return kind


def longest(kind: Kind) -> tuple[int, int, int]:
    """Largest M, N and K drawn: three cluster tiles, or fewer if those are large.

    Workers share tiles only where it spares them stages: there are fewer tiles then, and longer ones.
    """
    config, streamed = kind.config, kind.scheduler.streamed
    m = config.tile_m * config.cluster_m // config.mma_ctas
    n = config.tile_n * config.cluster_n
    tiles, stages = (2, LONG_STREAM) if streamed else (3, 4)
    m, n = (max(size, min(tiles * size, MOST_ELEMENTS // (2 if streamed else 1))) for size in (m, n))
    k = stages * config.tile_k
    return (n, m, k) if config.swap_ab else (m, n, k)


def units(case: Case) -> tuple[int, int]:
    """What M and N must be multiples of so that lines of D end on 16 bytes, where TMA stores them."""
    unit = 16 // case.out_dtype.itemsize if case.out_shift == 0 else 1
    return (unit, 1) if case.out_major == "m" else (1, unit)


def judgeable(case: Case) -> Case:
    """The case, or one of more rows: of few elements a sum may cancel, and no bound of their norm is fair."""
    fewest = 64
    if case.m * case.n >= fewest:
        return case
    return replace(case, m=fewest)


@dataclass(frozen=True)
class Trial:
    """A case, and how it is emulated: see Circumstances."""

    case: Case
    seed: int | None
    resident: int


def drawn_trials(kind: Kind, chance: random.Random, count: int) -> Iterator[Trial]:
    """Sizes of single elements, about a cluster tile, as large as they come, and anything in between."""
    tile = longest(replace(kind, scheduler=TileScheduler()))
    for _ in range(count):
        sizes = []
        for mode, unit in enumerate((*units(kind.case), 1)):
            most, once = longest(kind)[mode], min(tile[mode], longest(kind)[mode]) // 3
            size = chance.choice(
                (1, most, chance.randint(1, most), chance.randint(1, most), once - 1, once + 1)
            )
            if mode == 2 and kind.scheduler.streamed:
                size = chance.randint(most * 3 // 4, most)
            sizes.append(max(1, min(size, most) // unit) * unit)
        batch = None if kind.case.l is None else chance.randint(1, 2)
        case = judgeable(replace(kind.case, m=sizes[0], n=sizes[1], k=sizes[2], l=batch))
        resident = chance.randint(1, 7 if kind.scheduler.streamed else 4)
        yield Trial(case, chance.choice((None, chance.randrange(2**31))), resident)
