"""Accumulators in tensor memory: whose turn it is to use them, and how the epilogue reads them.

There are two. The MMA warp fills them in turn; while it fills one, the epilogue reads the other.

    result_ready[i]   completes when all MMAs of accumulator i are done: tcgen05.commit arrives, in a pair at
                      both CTAs
    result_taken[i]   completes when every epilogue warp has read accumulator i; in a pair those of both CTAs
                      arrive, at the leader
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import tcgen05

from cutegemm.blackwell.fences import fence_after_wait, fence_before_signal
from cutegemm.blackwell.layouts import cta_group
from cutegemm.blackwell.plan import ACCUMULATORS, BlackwellPlan
from cutegemm.parts.grid import Place
from cutegemm.parts.ring import StageCursor, advanced

CLUSTER = cutlass._mlir.dialects.nvvm.MemScopeKind.CLUSTER
RESULT_BARRIERS = 2 * ACCUMULATORS

# tcgen05.ld.16x256b reads 8 columns of 16 lanes, once or this many times.
_REPETITIONS = {
    1: tcgen05.Repetition.x1,
    2: tcgen05.Repetition.x2,
    4: tcgen05.Repetition.x4,
    8: tcgen05.Repetition.x8,
}


@dataclass(frozen=True)
class ResultRing:
    """The accumulators and their barriers.

    tensors    (mma, 1, 1, accumulator) in tensor memory
    leader     rank in the cluster of the CTA whose MMA warp fills this CTA's accumulators
    """

    result_ready: cute.Pointer
    result_taken: cute.Pointer
    tensors: cute.Tensor
    leader: Int32
    plan: cutlass.Constexpr[BlackwellPlan]

    def start(self) -> StageCursor:
        """The cursor every role begins with."""
        return StageCursor(Int32(0), Int32(0))

    def advanced(self, cursor: StageCursor) -> StageCursor:
        """The cursor one accumulator on."""
        return advanced(cursor, ACCUMULATORS)

    def accumulator(self, cursor: StageCursor) -> cute.Tensor:
        """(mma, 1, 1): the accumulator whose turn it is."""
        return self.tensors[None, None, None, cursor.stage]

    def wait_taken(self, cursor: StageCursor) -> None:
        """MMA warp: until nobody reads the accumulator any more."""
        cute.arch.mbarrier_wait(self.result_taken + cursor.stage, cursor.parity ^ 1)
        if self.plan.config.mma_ctas > 1:
            cute.arch.fence_acq_rel_cluster()
        fence_after_wait()

    def announce(self, cursor: StageCursor) -> None:
        """MMA warp: the sum is complete once the MMAs issued so far are done."""
        mask = None
        if self.plan.config.mma_ctas == 2:
            mask = Int16(Int32(3) << self.leader)
        with cute.arch.elect_one():
            tcgen05.commit(self.result_ready + cursor.stage, mask, cta_group(self.plan))

    def wait_ready(self, cursor: StageCursor) -> None:
        """Epilogue: until the sum is complete."""
        cute.arch.mbarrier_wait(self.result_ready + cursor.stage, cursor.parity)
        fence_after_wait()

    def release(self, cursor: StageCursor) -> None:
        """Epilogue warp: everything it reads of the accumulator is in its registers."""
        fence_before_signal()
        barrier = self.result_taken + cursor.stage
        with cute.arch.elect_one():
            if self.plan.config.mma_ctas == 1:
                cute.arch.mbarrier_arrive(barrier)
            else:
                cute.arch.mbarrier_arrive(barrier, self.leader, scope=CLUSTER)


def init_result_barriers(barriers: cute.Pointer, plan: BlackwellPlan) -> None:
    """Sets the arrival counts; one thread of the CTA calls this before anyone waits."""
    for i in range(ACCUMULATORS):
        cute.arch.mbarrier_init(barriers + i, 1)
        cute.arch.mbarrier_init(barriers + ACCUMULATORS + i, 4 * plan.config.consumers * plan.config.mma_ctas)


def make_results(
    barriers: cute.Pointer, address: cute.Pointer, tiled_mma: Any, plan: BlackwellPlan, place: Place
) -> ResultRing:
    """The accumulators of a CTA, from where its tensor memory begins; their barriers are initialised."""
    config = plan.config
    shape = cute.append(tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), ACCUMULATORS)
    start = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
    tensors = cute.make_tensor(start, tiled_mma.make_fragment_C(shape).layout)
    leader = place.cta_m // config.mma_ctas * config.mma_ctas + place.cta_n * config.cluster_m
    return ResultRing(barriers, barriers + ACCUMULATORS, tensors, leader, plan)


@dataclass(frozen=True)
class Result:
    """One tile's sum, as a thread of an epilogue warpgroup reads it.

    A thread holds squares of 2 x 2 elements: rows r and r + 8, columns c and c + 1, of every 8 columns of
    every 16 rows that its warp reads.
    """

    ring: ResultRing
    cursor: StageCursor
    thread: Int32

    def read(self, first: Int32, width: int, step: Any) -> cute.Tensor:
        """Columns first .. first + width - 1 of the accumulator, float32 in registers; complete on return.

        step: the warpgroup's how manieth chunk of the tile it is
        (square, 16-row window, 8-column group), in the order of the coordinates of ``piece_copy``.
        """
        piece = self._piece(first, width)
        thread_copy = piece_copy(self.ring, width).get_slice(self.thread)
        values = self.registers(width)
        cute.copy(piece_copy(self.ring, width), thread_copy.partition_S(piece), values)
        cute.arch.fence_view_async_tmem_load()
        return values

    def registers(self, width: int) -> cute.Tensor:
        """Room for what ``read`` returns."""
        thread_copy = piece_copy(self.ring, width).get_slice(self.thread)
        shape = thread_copy.partition_D(piece_coordinates(self.ring.plan, width)).shape
        return cute.make_rmem_tensor(shape, cutlass.Float32)

    def release(self) -> None:
        """See ResultRing.release."""
        self.ring.release(self.cursor)

    def _piece(self, first: Int32, width: int) -> cute.Tensor:
        start = self.ring.accumulator(self.cursor).iterator + first
        # The sum loses the alignment that loads are checked for: 8 columns.
        pointer = cute.make_ptr(cutlass.Float32, start.toint(), cute.AddressSpace.tmem, assumed_align=32)
        return cute.make_tensor(pointer, _piece_layout(self.ring, width))


def _piece_layout(ring: ResultRing, width: int) -> Any:
    """(row, column) of ``width`` columns of tensor memory; a folded tile's two halves follow each other."""
    rows, columns = ring.tensors.layout.shape[0], ring.tensors.layout.stride[0]
    if ring.plan.halves == 1:
        return cute.make_layout((rows[0], width), stride=(columns[0], columns[1]))
    return cute.make_layout((rows[0], (width, 2)), stride=(columns[0], columns[1]))


def piece_copy(ring: ResultRing, width: int) -> Any:
    """The copy of a piece from tensor memory to the registers of one warpgroup."""
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(_REPETITIONS[_repetition(width)]), cutlass.Float32)
    pointer = ring.accumulator(ring.start()).iterator
    return tcgen05.make_tmem_copy(atom, cute.make_tensor(pointer, _piece_layout(ring, width)))


def _repetition(width: int) -> int:
    """Groups of 8 columns that one load reads."""
    return next(count for count in (8, 4, 2, 1) if width // 8 % count == 0)


def piece_squares(plan: BlackwellPlan, width: int) -> Iterator[tuple[int, int, int]]:
    """(first value, rows down, columns right) of each square of a piece, from a thread's first element."""
    windows = plan.windows
    repetition = _repetition(width)
    for group in range(width // 8):
        outer, inner = divmod(group, repetition)
        for window in range(windows):
            yield 4 * (inner + repetition * (window + windows * outer)), 16 * window, 8 * group


def first_place(result: "Result", width: int, thread: Int32) -> tuple[Int32, Int32]:
    """Row and column of a thread's first value of a piece, from those of the accumulator's first."""
    plan = result.ring.plan
    thread_copy = piece_copy(result.ring, width).get_slice(thread)
    row, column = thread_copy.partition_D(piece_coordinates(plan, width))[0]
    if plan.halves == 2:
        # The upper lanes hold the right half, which the piece has beside the left one.
        column = column + thread // 64 * (plan.accumulator_columns - width)
    return row, column


def piece_coordinates(plan: BlackwellPlan, width: int) -> Any:
    """(row, column) of a piece's elements within the piece, halves beside each other."""
    return cute.make_identity_tensor((plan.cta_m, width * plan.halves))
