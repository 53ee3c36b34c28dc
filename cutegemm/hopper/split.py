"""The store of a tile whose K is split among the CTAs of a cluster.

Each CTA leaves its partial sums in its own shared memory; then every CTA adds up its share of the tile,
reading the others' sums through distributed shared memory in the order of their ranks, and writes it. The
order is fixed, so the same input gives the same bits, and no partial sum leaves the chip or float32.

    partials_written   completes when every consumer warp of every CTA of the cluster has left its sums
    partials_read      completes when every consumer warp of every CTA has read what it needed: only then
                       may a CTA overwrite its sums, or end
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.hopper.direct import PlainSquares
from cutegemm.hopper.fused import FusedSquares
from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.hopper.store import origin_of
from cutegemm.hopper.teams import Member
from cutegemm.parts.limits import ALIGNMENT, WARPGROUP_THREADS
from cutegemm.parts.meeting import announce, wait_for_all
from cutegemm.problem import GemmProblem


@dataclass(frozen=True)
class SplitBuffers:
    """A CTA's shared memory for the reduction: partial sums of all consumers, and the two barriers."""

    partials: cute.Pointer
    partials_written: cute.Pointer
    partials_read: cute.Pointer


@dataclass(frozen=True)
class SplitStore:
    """Reduces and stores; see the module. mD_mnl is the output itself, (M, N, L).

    squares: what becomes of the sums on their way
    """

    mD_mnl: cute.Tensor
    squares: PlainSquares | FusedSquares
    plan: cutlass.Constexpr[HopperPlan]
    problem: cutlass.Constexpr[GemmProblem]

    @property
    def barriers(self) -> int:
        """See TmaStore.barriers."""
        return 2

    def prefetch(self) -> None:
        """See TmaStore.prefetch: nothing to fetch."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> SplitBuffers:
        """See TmaStore.allocate."""
        count = self.plan.config.tile_m * self.plan.config.tile_n
        return SplitBuffers(
            smem.allocate_array(Float32, count, byte_alignment=ALIGNMENT), barriers, barriers + 1
        )

    def init(self, buffers: SplitBuffers) -> None:
        """See TmaStore.init: every consumer warp of every CTA arrives at every CTA's two barriers."""
        arrivals = self.plan.consumer_warps_per_tile * self.plan.splits
        cute.arch.mbarrier_init(buffers.partials_written, arrivals)
        cute.arch.mbarrier_init(buffers.partials_read, arrivals)

    def buffers_of(self, consumer: Int32, buffers: SplitBuffers) -> SplitBuffers:
        """See TmaStore.buffers_of: all consumers share the barriers; the sums are told apart by address."""
        return buffers

    def ahead(self, buffers: SplitBuffers, member: Member, tile: tuple, corner: tuple) -> None:
        """See TmaStore.ahead: nothing."""

    @cute.jit
    def store(
        self,
        accumulators: cute.Tensor,
        buffers: SplitBuffers,
        ahead: None,
        member: Member,
        where: tuple,
        turn: Int32,
    ) -> None:
        """See TmaStore.store."""
        if turn > 0:
            wait_for_all(buffers.partials_read, (turn - 1) & 1)
        self._leave(accumulators, buffers, member)
        announce(buffers.partials_written, self.plan.splits)
        wait_for_all(buffers.partials_written, turn & 1)
        self._reduce(buffers, member, origin_of(self.plan, where))
        announce(buffers.partials_read, self.plan.splits)

    @cute.jit
    def drain(self, buffers: SplitBuffers, member: Member, turn: Int32) -> None:
        """Until no peer reads this CTA's sums any more; before the CTA may exit."""
        if turn > 0:
            wait_for_all(buffers.partials_read, (turn - 1) & 1)

    def _squares(self) -> int:
        """2 x 2 squares of accumulators a thread holds; the unit in which the tile is shared out."""
        return self.plan.accumulator_registers // 4

    def _sums(self, pointer: cute.Pointer) -> cute.Tensor:
        """(4, thread, square, consumer): a square lies together, neighbouring threads side by side."""
        shape = (4, WARPGROUP_THREADS, self._squares(), self.plan.config.consumers)
        return cute.make_tensor(pointer, cute.make_layout(shape))

    def _leave(self, accumulators: cute.Tensor, buffers: SplitBuffers, member: Member) -> None:
        own = self._sums(buffers.partials)
        for square in range(self._squares()):
            values = cute.make_rmem_tensor(4, Float32)
            for i in range(4):
                values[i] = accumulators[4 * square + i]
            cute.autovec_copy(values, own[None, member.thread, square, member.consumer])

    @cute.jit
    def _reduce(self, buffers: SplitBuffers, member: Member, origin: tuple) -> None:
        """Adds and writes this CTA's share of the squares of its threads."""
        plan = self.plan
        writer = self.squares.writer(self.mD_mnl, plan, self.problem, member.thread, origin)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        squares = self._squares()
        per_row = plan.warpgroup_n // 8
        share = -(-squares // plan.splits)
        for i in cutlass.range_constexpr(share):
            square = rank * share + i
            if square < squares:
                total = cute.make_rmem_tensor(4, Float32)
                total.fill(0.0)
                for peer in cutlass.range_constexpr(plan.splits):
                    theirs = self._sums(cute.arch.map_dsmem_ptr(buffers.partials, Int32(peer)))
                    values = cute.make_rmem_tensor(4, Float32)
                    cute.autovec_copy(theirs[None, member.thread, square, member.consumer], values)
                    for j in cutlass.range_constexpr(4):
                        total[j] = total[j] + values[j]
                mma = square // per_row
                rows_down = mma * (plan.warpgroups_m * MMA_M)
                columns_right = 8 * (square - mma * per_row)
                corner = writer.pointer(rows_down, columns_right)
                writer.write(corner, rows_down, columns_right, (total[0], total[1], total[2], total[3]))
