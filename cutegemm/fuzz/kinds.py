"""What kernels are compiled for: configuration, scheduler, dtypes, majors, drawn from a seed.

Cases of one kind share a few kernels, so that many cases cost few compilations.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from cutegemm.config import SCHEDULES, GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.hopper.plan import CLUSTER, TILE_K, TILE_M, StorePath
from cutegemm.kernels import Choice
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
DEFAULT_SCHEDULER = 0.3  # leave the scheduler to it
ATTEMPTS = 2000  # to find a legal configuration: there are some thousand for every kind


@dataclass(frozen=True)
class Kind:
    """What a gemm is compiled for; the fields are those of a Case. batched: whether there is a batch mode."""

    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    majors: str = "kkn"
    batched: bool = False
    config: GemmConfig | None = None
    scheduler: TileScheduler | None = None

    @property
    def problem(self) -> GemmProblem:
        """The problem of any size."""
        l = None if self.batched else 1  # noqa: E741 - the field's own name for the batch mode
        a, b, out = tuple(self.majors)
        return GemmProblem(
            None, None, None, l, self.dtype, self.dtype, self.out_dtype, a, b, out, self.batched
        )


def random_kind(seed: int) -> Kind:
    """The kind of a seed, legal however its operands are aligned."""
    chance = random.Random(seed)
    kind = Kind(
        chance.choice(INPUT_DTYPES),
        chance.choice(OUTPUT_DTYPES),
        chance.choice("km") + chance.choice("kn") + chance.choice("nm"),
        chance.random() < 0.35,
        scheduler=None if chance.random() < DEFAULT_SCHEDULER else _random_scheduler(chance),
    )
    if chance.random() < HEURISTIC:
        return kind
    for _ in range(ATTEMPTS):
        config = _random_config(chance)
        if config is not None and is_legal(config, kind):
            return Kind(kind.dtype, kind.out_dtype, kind.majors, kind.batched, config, kind.scheduler)
    return kind


def is_legal(config: GemmConfig, kind: Kind) -> bool:
    """Whether there is a kernel of a configuration for every way to store D."""
    scheduler = kind.scheduler or TileScheduler()
    return all(
        Choice(config, scheduler, store, "sm_90a").is_legal(kind.problem) for store in get_args(StorePath)
    )


def _random_config(chance: random.Random) -> GemmConfig | None:
    try:
        return GemmConfig(
            chance.choice(TILE_M),
            chance.choice((8, 16, 24, 32, 40, 64, 72, 96, 128, 176, 192, 256, 8 * chance.randint(1, 32))),
            chance.choice(TILE_K),
            chance.choice(CLUSTER),
            chance.choice(CLUSTER),
            chance.choice((1, 2)),
            chance.choice(SCHEDULES),
            chance.choice((None, None, None, 2, 3, 4)),
            chance.choice((None, None, None, 1, 2)),
            chance.random() < 0.25,
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
