"""What kernels are compiled for: configuration, scheduler, dtypes, majors, drawn from a seed.

Cases of one kind share a few kernels, so that many cases cost few compilations.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from cutegemm.config import SCHEDULES, GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.kernels import Choice
from cutegemm.parts.paths import LoadPath, Paths, StorePath
from cutegemm.problem import INPUT_DTYPES, OUTPUT_DTYPES, GemmProblem
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

HEURISTIC = 0.25  # of the kinds leave the configuration to the library
ANYWHERE = 0.6  # of the configurations have kernels for A and B wherever they lie
DEFAULT_SCHEDULER = 0.3  # leave the scheduler to it
ATTEMPTS = 2000  # to find a legal configuration: there are some thousand for every kind

# Of every target's kernels; what one of them does not have is not legal there.
TILES_M = (64, 128, 192, 256)
TILES_N = (8, 16, 24, 32, 40, 64, 72, 96, 128, 176, 192, 256)
TILES_K = (64, 128)
CLUSTERS_M, CLUSTERS_N = (1, 1, 2, 4), (1, 1, 2)
ALIGNED_LOADS: tuple[LoadPath, ...] = ("tma",)
ALL_LOADS: tuple[LoadPath, ...] = get_args(LoadPath)


@dataclass(frozen=True)
class Kind:
    """What a gemm is compiled for; the fields are those of a Case, and two more.

    batched   whether there is a batch mode
    target    of the kernels
    """

    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    majors: str = "kkn"
    batched: bool = False
    config: GemmConfig | None = None
    scheduler: TileScheduler | None = None
    target: str = "sm_90a"

    @property
    def problem(self) -> GemmProblem:
        """The problem of any size."""
        l = None if self.batched else 1  # noqa: E741 - the field's own name for the batch mode
        a, b, out = tuple(self.majors)
        return GemmProblem(
            None, None, None, l, self.dtype, self.dtype, self.out_dtype, a, b, out, self.batched
        )


def random_kind(seed: int, target: str) -> Kind:
    """The kind of a seed, legal however D lies; see takes_any_alignment for A and B."""
    chance = random.Random(seed)
    kind = Kind(
        chance.choice(INPUT_DTYPES),
        chance.choice(OUTPUT_DTYPES),
        chance.choice("km") + chance.choice("kn") + chance.choice("nm"),
        chance.random() < 0.35,
        scheduler=None if chance.random() < DEFAULT_SCHEDULER else _random_scheduler(chance),
        target=target,
    )
    if chance.random() < HEURISTIC:
        return kind
    anywhere = chance.random() < ANYWHERE
    for _ in range(ATTEMPTS):
        configured = replace(kind, config=_random_config(chance, target))
        if configured.config is not None and is_legal(configured, ALL_LOADS if anywhere else ALIGNED_LOADS):
            return configured
    return kind


def has_kernel(kind: Kind, paths: Paths) -> bool:
    """Whether the kind's configuration has a kernel for these paths; the heuristic has one for all."""
    if kind.config is None:
        return True
    choice = Choice(kind.config, kind.scheduler or TileScheduler(), paths, kind.target)
    return choice.is_legal(kind.problem)


def is_legal(kind: Kind, loads: tuple[LoadPath, ...] = ALIGNED_LOADS) -> bool:
    """Whether there are kernels of a kind for every way to store D and these to load A and B."""
    return all(
        has_kernel(kind, Paths(*ways)) for ways in itertools.product(loads, loads, get_args(StorePath))
    )


def takes_any_alignment(kind: Kind) -> bool:
    """Whether there are kernels of a kind for A and B wherever they lie."""
    return is_legal(kind, ALL_LOADS)


def _random_config(chance: random.Random, target: str) -> GemmConfig | None:
    on_hopper = target == "sm_90a"
    try:
        return GemmConfig(
            chance.choice(TILES_M),
            chance.choice((*TILES_N, 8 * chance.randint(1, 32))),
            chance.choice(TILES_K),
            chance.choice(CLUSTERS_M),
            chance.choice(CLUSTERS_N),
            chance.choice((1, 2)),
            chance.choice(SCHEDULES if on_hopper else SCHEDULES[:1]),
            chance.choice((None, None, None, 2, 3, 4)),
            chance.choice((None, None, None, 1, 2)),
            chance.random() < 0.25,
            1 if on_hopper else chance.choice((1, 2)),
        )
    except ConfigError:
        return None


def _random_scheduler(chance: random.Random) -> TileScheduler:
    workers = chance.choice((None, None, None, 1, 2, 3, 7, 50))
    order: Callable[[], object] = chance.choice(
        (
            RowMajor,
            ColumnMajor,
            Morton,
            Hilbert,
            lambda: GroupedM(chance.randint(1, 9)),
            lambda: GroupedN(chance.randint(1, 9)),
            lambda: Blocked(chance.randint(1, 5), chance.randint(1, 5)),
        )
    )
    assignment: Callable[[], object] = chance.choice(
        (
            Static,
            lambda: Persistent(workers),
            lambda: Dynamic(workers),
            lambda: SplitK(chance.choice((2, 4, 8)), workers),
            lambda: StreamK(workers),
            lambda: StreamK(workers, ordered=False),
        )
    )
    return TileScheduler(order(), assignment())  # type: ignore[arg-type]
