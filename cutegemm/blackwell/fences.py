"""Fences between tensor-memory instructions, which run asynchronously, and waits among threads."""

from typing import Any

from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def fence_before_signal(*, loc: Any = None, ip: Any = None) -> None:
    """What this thread did to tensor memory happens before what others do after its next signal."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_wait(*, loc: Any = None, ip: Any = None) -> None:
    """What this thread does to tensor memory from now on happens after what its wait was for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
