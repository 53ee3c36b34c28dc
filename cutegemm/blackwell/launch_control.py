"""Cluster launch control: asking for a cluster that waits to be launched, to do its work instead."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int128
from cutlass._mlir.dialects import nvvm, vector
from cutlass.cutlass_dsl import dsl_user_op

ANSWER_BYTES = 16


@dsl_user_op
def ask(
    answer: cute.Pointer, barrier: cute.Pointer, everywhere: bool, *, loc: Any = None, ip: Any = None
) -> None:
    """Asks for a waiting cluster; the answer arrives at ``barrier`` as that many bytes.

    everywhere: in every CTA of the cluster, at the same places. One thread calls this.
    """
    nvvm.clusterlaunchcontrol_try_cancel(
        smem_address=answer.llvm_ptr,
        mbarrier=barrier.llvm_ptr,
        **({"multicast": "multicast"} if everywhere else {}),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def is_granted(answer: cute.Pointer, *, loc: Any = None, ip: Any = None) -> Boolean:
    """Whether a cluster was granted; it will then not be launched any more."""
    return Boolean(_query("is_canceled", answer, loc, ip))


@dsl_user_op
def first_cta(answer: cute.Pointer, *, loc: Any = None, ip: Any = None) -> Int32:
    """Number of the granted cluster's first CTA in a one-dimensional grid; undefined if there is none."""
    return Int32(_query("get_first_cta_id_x", answer, loc, ip))


def _query(what: str, answer: cute.Pointer, loc: Any, ip: Any) -> Any:
    words = cute.make_tensor(cute.recast_ptr(answer, dtype=Int128, loc=loc, ip=ip), cute.make_layout(1))
    whole = vector.extract(words.load(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), [], [0])
    return nvvm.clusterlaunchcontrol_query_cancel(query_type=what, try_cancel_response=whole, loc=loc, ip=ip)
