"""Which store a plan asks for."""

from typing import TypeAlias

import cutlass.cute as cute

from cutegemm.blackwell.direct import DirectStore
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.blackwell.split import SplitStore
from cutegemm.blackwell.store import TmaStore, make_tma_store
from cutegemm.problem import GemmProblem

STORE_BARRIERS = 2  # mbarriers a store may use

Store: TypeAlias = TmaStore | DirectStore | SplitStore


def make_store(mD_mnl: cute.Tensor, plan: BlackwellPlan, problem: GemmProblem) -> Store:
    """Host side: the store of a plan."""
    if plan.splits > 1:
        return SplitStore(plan, problem, mD_mnl)
    if plan.paths.store == "direct":
        return DirectStore(plan, problem, mD_mnl)
    return make_tma_store(mD_mnl, plan, problem)
