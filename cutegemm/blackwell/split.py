"""The store of a tile whose K is split among the CTAs of a cluster.

Each CTA leaves its partial sums in its own shared memory; then every CTA adds up its share of the tile,
reading the others' sums through distributed shared memory in the order of their ranks, and writes it. The
order is fixed, so the same input gives the same bits, and no partial sum leaves the chip or float32.

    partials_written   completes when every epilogue warp of every CTA of the cluster has left its sums
    partials_read      completes when every epilogue warp of every CTA has read what it needed: only then may
                       a CTA overwrite its sums, or end

Both complete once for each tile, as often as the accumulators take turns: a result's cursor has their parity.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.blackwell.chunks import Member, RolledStore
from cutegemm.blackwell.fused import FusedSquares, PlainSquares
from cutegemm.blackwell.results import Result, first_place, piece_squares
from cutegemm.parts.limits import ALIGNMENT, WARPGROUP_THREADS
from cutegemm.parts.meeting import announce, wait_for_all
from cutegemm.parts.ring import StageCursor

SQUARE = 4  # elements


@dataclass(frozen=True)
class SplitBuffers:
    """A CTA's shared memory for the reduction: partial sums of all warpgroups, and the two barriers."""

    partials: cute.Pointer
    partials_written: cute.Pointer
    partials_read: cute.Pointer


@dataclass(frozen=True)
class SplitStore(RolledStore):
    """Reduces and stores; see the module. mD_mnl is the output itself, (M, N, L); squares: see fused.py."""

    mD_mnl: cute.Tensor
    squares: PlainSquares | FusedSquares

    def prefetch(self) -> None:
        """See TmaStore.prefetch: nothing to fetch."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> SplitBuffers:
        """See TmaStore.allocate."""
        count = SQUARE * WARPGROUP_THREADS * self.plan.squares(0) * self.plan.config.consumers
        partials = smem.allocate_array(Float32, count, byte_alignment=ALIGNMENT)
        return SplitBuffers(partials, barriers, barriers + 1)

    def init(self, buffers: SplitBuffers) -> None:
        """See TmaStore.init: every epilogue warp of every CTA arrives at every CTA's two barriers."""
        arrivals = 4 * self.plan.config.consumers * self.plan.splits
        cute.arch.mbarrier_init(buffers.partials_written, arrivals)
        cute.arch.mbarrier_init(buffers.partials_read, arrivals)

    def buffers_of(self, consumer: Int32, buffers: SplitBuffers) -> SplitBuffers:
        """See TmaStore.buffers_of: all share the barriers; the sums are told apart by address."""
        return buffers

    @cute.jit
    def store(self, result: Result, buffers: SplitBuffers, member: Member, origin: tuple) -> None:
        """See ChunkedStore.store."""
        parity = result.cursor.stage
        wait_for_all(buffers.partials_read, parity ^ 1)
        self.leave(result, buffers, member, origin)
        announce(buffers.partials_written, self.plan.splits)
        wait_for_all(buffers.partials_written, parity)
        self._reduce(result, buffers, member, origin)
        announce(buffers.partials_read, self.plan.splits)

    @cute.jit
    def drain(self, buffers: SplitBuffers, member: Member, cursor: StageCursor) -> None:
        """Until no peer reads this CTA's sums any more; before the CTA may exit."""
        wait_for_all(buffers.partials_read, cursor.stage ^ 1)

    def _sums(self, pointer: cute.Pointer) -> cute.Tensor:
        """(4, thread, square, warpgroup): a square lies together, neighbouring threads side by side."""
        shape = (SQUARE, WARPGROUP_THREADS, self.plan.squares(0), self.plan.config.consumers)
        return cute.make_tensor(pointer, cute.make_layout(shape))

    def _chunk(self, result: Result, buffers: SplitBuffers, member: Member, piece: tuple) -> None:
        """See ChunkedStore._chunk: leaves its sums."""
        _, _, width, step, _ = piece
        values = self._read(result, piece)
        own = self._sums(buffers.partials)
        before = self.plan.squares_before(step)
        for i, (number, _, _) in enumerate(piece_squares(self.plan, width)):
            square = cute.make_rmem_tensor(SQUARE, Float32)
            for j in range(SQUARE):
                square[j] = values[number + j]
            cute.autovec_copy(square, own[None, member.thread, before + i, member.consumer])

    @cute.jit
    def _reduce(self, result: Result, buffers: SplitBuffers, member: Member, origin: tuple) -> None:
        """Adds and writes this CTA's share of the squares of its threads."""
        plan = self.plan
        row, column, batch = origin
        widest = plan.chunks[0][1]
        r, c = first_place(result, widest, member.thread)
        writer: Any = self.squares.writer(self.mD_mnl, self.problem, row + r, column + c, batch)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        last_consumer = plan.config.consumers - 1
        count = cutlass.select_(
            member.consumer == last_consumer, Int32(plan.squares(last_consumer)), Int32(plan.squares(0))
        )
        share = -(-plan.squares(0) // plan.splits)
        for i in cutlass.range_constexpr(share):
            square = rank * share + i
            if square < count:
                total = cute.make_rmem_tensor(SQUARE, Float32)
                total.fill(0.0)
                for peer in cutlass.range_constexpr(plan.splits):
                    theirs = self._sums(cute.arch.map_dsmem_ptr(buffers.partials, Int32(peer)))
                    values = cute.make_rmem_tensor(SQUARE, Float32)
                    cute.autovec_copy(theirs[None, member.thread, square, member.consumer], values)
                    for j in cutlass.range_constexpr(SQUARE):
                        total[j] = total[j] + values[j]
                # Squares lie chunk by chunk, in each column group by column group, in each the windows.
                group, window = square // plan.windows, square % plan.windows
                chunk = group // (widest // 8)
                columns_right = (chunk * plan.config.consumers + member.consumer) * widest
                columns_right = columns_right + 8 * (group - chunk * (widest // 8))
                corner = writer.pointer(16 * window, columns_right)
                writer.write(corner, 16 * window, columns_right, (total[0], total[1], total[2], total[3]))
