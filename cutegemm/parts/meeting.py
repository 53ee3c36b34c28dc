"""Where the warps of a cluster wait for each other's accesses to shared memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

TRY_NANOSECONDS = 10_000_000  # that a thread may sleep before it looks at its barrier again
CLUSTER = cutlass._mlir.dialects.nvvm.MemScopeKind.CLUSTER


@cute.jit
def announce(barrier: cute.Pointer, ctas: cutlass.Constexpr[int]) -> None:
    """This warp's accesses so far happen before what any CTA of ``ctas`` does after its wait."""
    cute.arch.fence_acq_rel_cluster()
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < ctas:
        cute.arch.mbarrier_arrive(barrier, lane, scope=CLUSTER)


def wait_for_all(barrier: cute.Pointer, parity: Int32) -> None:
    """Until everybody has announced."""
    cute.arch.mbarrier_wait(barrier, parity)
    cute.arch.fence_acq_rel_cluster()


@cute.jit
def wait_acquiring(barrier: cute.Pointer, parity: Int32) -> None:
    """Until a phase is over; what arrivals from other CTAs released is then seen, without a fence."""
    over = Boolean(False)
    while not over:
        over = _try_wait_acquiring(barrier, parity)


@dsl_user_op
def _try_wait_acquiring(barrier: cute.Pointer, parity: Int32, *, loc: Any = None, ip: Any = None) -> Boolean:
    over = nvvm.mbarrier_try_wait_parity_timelimit(
        barrier.to_llvm_ptr(loc=loc, ip=ip),
        parity.ir_value(loc=loc, ip=ip),
        Int32(TRY_NANOSECONDS).ir_value(loc=loc, ip=ip),
        scope=CLUSTER,
        order=nvvm.MemOrderKind.ACQUIRE,
        results=[ir.IntegerType.get_signless(1)],
        loc=loc,
        ip=ip,
    )
    return Boolean(over)
