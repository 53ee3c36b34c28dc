"""Which store a plan asks for."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import cutlass.cute as cute

from cutegemm.blackwell.direct import DirectStore
from cutegemm.blackwell.fused import (
    FusedDirectStore,
    FusedSquares,
    FusedTmaStore,
    Fusion,
    PlainSquares,
)
from cutegemm.blackwell.plan import BlackwellPlan, stores_by_tma
from cutegemm.blackwell.split import SplitStore
from cutegemm.blackwell.store import TmaStore, make_tma_store
from cutegemm.epilogue.arguments import read_matrices
from cutegemm.problem import GemmProblem

STORE_BARRIERS = 2  # mbarriers a store may use

Store: TypeAlias = TmaStore | FusedTmaStore | DirectStore | FusedDirectStore | SplitStore


def make_store(
    mD_mnl: cute.Tensor, plan: BlackwellPlan, problem: GemmProblem, extras: Sequence[Any]
) -> Store:
    """Host side: the store of a plan. extras: an epilogue's arguments, see ``read_matrices``."""
    matrices = None if problem.epilogue is None else read_matrices(problem.epilogue, extras, problem.batched)
    if plan.splits > 1:
        squares = PlainSquares() if matrices is None else FusedSquares(matrices)
        return SplitStore(plan, problem, mD_mnl, squares)
    by_tma = stores_by_tma(plan.paths.store, problem)
    if matrices is None:
        return make_tma_store(mD_mnl, plan, problem) if by_tma else DirectStore(plan, problem, mD_mnl)
    fusion = Fusion(matrices, plan, problem)
    if not by_tma:
        return FusedDirectStore(plan, problem, mD_mnl, fusion)
    store = make_tma_store(mD_mnl, plan, problem)
    return FusedTmaStore(plan, problem, store.atoms, store.tensors, fusion)
