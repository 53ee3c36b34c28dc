"""The main loop of a consumer warpgroup: WGMMAs over the stages of one output tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cutegemm.parts.ring import StageCursor, StageRing


@dataclass(frozen=True)
class WgmmaMainloop:
    """One warpgroup's share of the MMAs.

    tCrA (mma, mma_m, mma_k, stage), tCrB (mma, mma_n, mma_k, stage): shared-memory descriptors.
    peer_rank: in lane i < ring.readers, the i-th CTA that loads into this CTA's stages; those lanes tell
    it when their warp no longer reads a stage.
    """

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor
    tCrB: cute.Tensor
    ring: StageRing
    peer_rank: Int32

    @cute.jit
    def compute(self, accumulators: cute.Tensor, cursor: StageCursor, k_tiles: Int32) -> StageCursor:
        """accumulators = sum over ``k_tiles`` stages from ``cursor`` on; k_tiles >= 1.

        One group of WGMMAs stays in flight: stage s is released once the MMAs of stage s + 1 are
        issued and those of s are known to be done.
        """
        self.ring.wait_arrived(cursor)
        self._issue(accumulators, cursor.stage, True)
        previous = cursor.stage
        cursor = self.ring.advanced(cursor)
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            self.ring.wait_arrived(cursor)
            self._issue(accumulators, cursor.stage, False)
            warpgroup.wait_group(1)
            self._release(previous)
            previous = cursor.stage
            cursor = self.ring.advanced(cursor)
        warpgroup.wait_group(0)
        self._release(previous)
        return cursor

    def _issue(self, accumulators: cute.Tensor, stage: Int32, first: bool) -> None:
        warpgroup.fence()
        for k_block in range(cute.size(self.tCrA, mode=[2])):
            # The very first MMA overwrites the accumulators, which saves clearing them.
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, not (first and k_block == 0))
            cute.gemm(
                self.tiled_mma,
                accumulators,
                self.tCrA[None, None, k_block, stage],
                self.tCrB[None, None, k_block, stage],
                accumulators,
            )
        warpgroup.commit_group()

    @cute.jit
    def _release(self, stage: Int32) -> None:
        barrier = self.ring.inputs_consumed + stage
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.ring.readers == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier)
        else:
            if lane < self.ring.readers:
                cute.arch.mbarrier_arrive(barrier, self.peer_rank)
