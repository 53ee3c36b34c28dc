"""Which store a plan asks for. Each is a part with the same verbs (see TmaStore)."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import cutlass.cute as cute

from cutegemm.epilogue.arguments import read_matrices
from cutegemm.hopper.direct import DirectStore, PlainSquares
from cutegemm.hopper.fused import FusedSquares
from cutegemm.hopper.plan import HopperPlan
from cutegemm.hopper.split import SplitStore
from cutegemm.hopper.staged import StagedStore, make_staged_store
from cutegemm.hopper.store import TmaStore, make_tma_store
from cutegemm.problem import GemmProblem

STORE_BARRIERS = 2  # mbarriers a store may use

Store: TypeAlias = TmaStore | StagedStore | DirectStore | SplitStore


def make_store(mD_mnl: cute.Tensor, plan: HopperPlan, problem: GemmProblem, extras: Sequence[Any]) -> Store:
    """Host side: the store of a plan. extras: an epilogue's arguments, see ``read_matrices``."""
    matrices = None if problem.epilogue is None else read_matrices(problem.epilogue, extras, problem.batched)
    if plan.splits > 1:
        squares = PlainSquares() if matrices is None else FusedSquares(matrices)
        return SplitStore(mD_mnl, squares, plan, problem)
    if matrices is not None:
        return make_staged_store(mD_mnl, plan, problem, matrices)
    return (
        DirectStore(mD_mnl, plan, problem)
        if plan.paths.store == "direct"
        else make_tma_store(mD_mnl, plan, problem)
    )
