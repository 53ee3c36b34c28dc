"""Which store a plan asks for. Each is a part with the same verbs (see TmaStore)."""

from typing import TypeAlias

import cutlass.cute as cute

from cutegemm.hopper.direct import DirectStore
from cutegemm.hopper.plan import HopperPlan
from cutegemm.hopper.split import SplitStore
from cutegemm.hopper.store import TmaStore, make_tma_store
from cutegemm.problem import GemmProblem

STORE_BARRIERS = 2  # mbarriers a store may use

Store: TypeAlias = TmaStore | DirectStore | SplitStore


def make_store(mD_mnl: cute.Tensor, plan: HopperPlan, problem: GemmProblem) -> Store:
    """Host side: the store of a plan."""
    if plan.splits > 1:
        return SplitStore(mD_mnl, plan, problem)
    if plan.store == "direct":
        return DirectStore(mD_mnl, plan, problem)
    return make_tma_store(mD_mnl, plan, problem)
