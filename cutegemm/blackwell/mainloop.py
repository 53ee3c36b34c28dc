"""The main loop: the MMAs over the stages of one output tile, all issued by one thread of one warp."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import tcgen05

from cutegemm.blackwell.fences import fence_after_wait
from cutegemm.blackwell.layouts import cta_group
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.parts.ring import StageCursor, StageRing


@dataclass(frozen=True)
class Tcgen05Mainloop:
    """The MMAs of a CTA, or of a pair in its leader.

    tCrA (mma, mma_m, mma_k, stage), tCrB (mma, mma_n, mma_k, stage): shared-memory descriptors.
    loaders: bits of the CTAs that load into the stages these MMAs read; they are told when one is free.
    """

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor
    tCrB: cute.Tensor
    ring: StageRing
    loaders: Int16
    plan: cutlass.Constexpr[BlackwellPlan]

    @cute.jit
    def compute(self, accumulator: cute.Tensor, cursor: StageCursor, k_tiles: Int32) -> StageCursor:
        """accumulator = sum over ``k_tiles`` stages from ``cursor`` on; k_tiles >= 1.

        MMAs are only issued here: a stage is free, and the sum complete, when what was issued has been done,
        which tcgen05.commit signals.
        """
        self._issue(accumulator, cursor, True)
        cursor = self.ring.advanced(cursor)
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            self._issue(accumulator, cursor, False)
            cursor = self.ring.advanced(cursor)
        return cursor

    def _issue(self, accumulator: cute.Tensor, cursor: StageCursor, first: bool) -> None:
        self.ring.wait_arrived(cursor)
        fence_after_wait()
        for k_block in range(cute.size(self.tCrA, mode=[2])):
            # The very first MMA overwrites the accumulator, which saves clearing it.
            self.tiled_mma.set(tcgen05.Field.ACCUMULATE, not (first and k_block == 0))
            cute.gemm(
                self.tiled_mma,
                accumulator,
                self.tCrA[None, None, k_block, cursor.stage],
                self.tCrB[None, None, k_block, cursor.stage],
                accumulator,
            )
        with cute.arch.elect_one():
            mask = self.loaders if self.plan.config.cluster_size > 1 else None
            tcgen05.commit(self.ring.inputs_consumed + cursor.stage, mask, cta_group(self.plan))
