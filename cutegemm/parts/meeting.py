"""Where the warps of a cluster wait for each other's accesses to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

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
