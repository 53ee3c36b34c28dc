"""What each target's kernels are: who says whether a configuration is legal, and who compiles it."""

import importlib
from collections.abc import Callable

from cutegemm.blackwell import plan as blackwell
from cutegemm.config import GemmConfig
from cutegemm.dependencies import missing_dependency
from cutegemm.hopper import plan as hopper
from cutegemm.parts.paths import ALIGNED, Paths
from cutegemm.parts.plan import KernelPlan
from cutegemm.problem import GemmProblem

_PLANS: dict[str, Callable[..., KernelPlan]] = {"sm_90a": hopper.plan, "sm_100a": blackwell.plan}
_PACKAGES = {"sm_90a": "cutegemm.hopper", "sm_100a": "cutegemm.blackwell"}


def plan(
    target: str,
    config: GemmConfig,
    problem: GemmProblem,
    paths: Paths = ALIGNED,
    splits: int = 1,
    streamed: bool = False,
) -> KernelPlan:
    """Checks ``config`` for ``problem`` (as the kernel sees it: already swapped) and works it out.

    paths     how A and B, as the kernel sees them, are loaded and D is stored
    splits    CTAs of a cluster that share one tile's K
    streamed  whether workers add parts of tiles through global memory (StreamK)
    Raises ConfigError naming the limit and the nearest legal value.
    """
    return _PLANS[target](config, problem, paths, splits, streamed)


def builder(target: str) -> Callable[..., dict[str, bytes]]:
    """What compiles a plan. Raises MissingDependencyError if a package it needs cannot be imported."""
    try:
        module = importlib.import_module(f"{_PACKAGES[target]}.build")
    except ModuleNotFoundError as error:
        raise missing_dependency(error) from error
    build: Callable[..., dict[str, bytes]] = module.build
    return build
