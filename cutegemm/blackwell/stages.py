"""The operand stages of a CTA: their ring where a pair fills them, and as movers see them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.parts.grid import Place
from cutegemm.parts.meeting import wait_acquiring
from cutegemm.parts.ring import StageCursor, StageRing

CLUSTER = cutlass._mlir.dialects.nvvm.MemScopeKind.CLUSTER


@dataclass(frozen=True)
class PairRing(StageRing):
    """The ring of a pair whose CTAs move lines: the movers of both arrive at the leader, where MMAs wait.

    leader   its rank in the cluster
    """

    leader: Int32

    def arrive(self, cursor: StageCursor) -> None:
        """See StageRing.arrive."""
        cute.arch.mbarrier_arrive(self.inputs_arrived + cursor.stage, self.leader, scope=CLUSTER)

    def wait_arrived(self, cursor: StageCursor) -> None:
        """See StageRing.wait_arrived; what threads of the other CTA wrote there is seen as well."""
        wait_acquiring(self.inputs_arrived + cursor.stage, cursor.parity)


def make_ring(barriers: cute.Pointer, plan: BlackwellPlan, place: Place) -> StageRing:
    """Device side: the ring of operand stages. barriers: two for each stage"""
    stages, mma_ctas = plan.stages, plan.config.mma_ctas
    if mma_ctas == 1 or not plan.moving_warps:
        return StageRing(barriers, barriers + stages, stages, plan.readers)
    leader = place.cta_m // mma_ctas * mma_ctas + place.cta_n * plan.config.cluster_m
    return PairRing(barriers, barriers + stages, stages, plan.readers, leader)


def as_lines(sX: cute.Tensor) -> cute.Tensor:
    """(rows, K, stage): stages that MMAs see as (mma, 1, mma_k, stage)."""
    shape, stride = sX.layout.shape, sX.layout.stride
    layout = cute.make_layout(
        (shape[0][0], (shape[0][1], shape[2]), shape[3]),
        stride=(stride[0][0], (stride[0][1], stride[2]), stride[3]),
    )
    return cute.make_tensor(sX.iterator, layout)
