"""Which store a plan asks for."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import cutlass.cute as cute

from cutegemm.blackwell.direct import DirectStore
from cutegemm.blackwell.fused import FusedSquares, FusedTmaStore, PlainSquares
from cutegemm.blackwell.plan import BlackwellPlan, stores_by_tma
from cutegemm.blackwell.split import SplitStore
from cutegemm.blackwell.store import TmaStore, make_tma_store
from cutegemm.epilogue.arguments import read_matrices
from cutegemm.problem import GemmProblem

STORE_BARRIERS = 2  # mbarriers a store may use

Store: TypeAlias = TmaStore | FusedTmaStore | DirectStore | SplitStore


def make_store(
    mD_mnl: cute.Tensor, plan: BlackwellPlan, problem: GemmProblem, extras: Sequence[Any]
) -> Store:
    """Host side: the store of a plan. extras: an epilogue's arguments, see ``read_matrices``."""
    matrices = None if problem.epilogue is None else read_matrices(problem.epilogue, extras, problem.batched)
    squares = PlainSquares() if matrices is None else FusedSquares(matrices)
    if plan.splits > 1:
        return SplitStore(plan, problem, mD_mnl, squares)
    if not stores_by_tma(plan.paths.store, problem):
        return DirectStore(plan, problem, mD_mnl, squares)
    store = make_tma_store(mD_mnl, plan, problem)
    if matrices is None:
        return store
    return FusedTmaStore(plan, problem, store.atoms, store.tensors, matrices)
