"""Where a worker's work comes from: worked out from its number, fetched from a queue, or a piece of a stream.

A feed is asked for the first position and the next one by the producer warp and by every consumer warp,
each for itself; all of them see the same work in the same order. A position's ``task`` is at or beyond the
number of tasks when there is no more.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.parts.plan import KernelPlan
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.stream import Span, Stream, make_stream

CLUSTER = cutlass._mlir.dialects.nvvm.MemScopeKind.CLUSTER
# A slot is free once all have read it: while a team stores its tile, the other has the next in the tensor
# cores, the producer loads the one after that, and another is on its way.
SLOTS = 4
SLOT_BYTES = 4
SLOT_WORDS = 4  # each slot has 16 bytes to itself: what is written at one time is not near what is read
QUEUE_BARRIERS = 2 * SLOTS + 1


@dataclass
class CountedPosition:
    """A task in the sequence that follows from the worker's number."""

    task: Int32


@dataclass
class QueuePosition:
    """A task, and the slot of the queue that has the one after it."""

    task: Int32
    slot: Int32
    parity: Int32


@dataclass
class StreamPosition:
    """Some stages of a task."""

    task: Int32
    k_first: Int32
    k_count: Int32


class Position(Protocol):
    """What the kernel itself reads of a position; the rest is its feed's own."""

    task: Int32


class Feed(Protocol):
    """What the kernel asks of a feed."""

    def init(self) -> None:
        """Initialises the feed's barriers; one thread of the CTA calls this before anyone waits."""

    def first(self) -> Any:
        """The position where the worker begins."""

    def next(self, position: Any) -> Any:
        """The worker's position after this one."""

    def span(self, position: Any) -> Span:
        """The stages of the position's task that are this CTA's."""

    def begin(self) -> None:
        """The producer warp says that it begins with a position."""

    def fetch(self) -> None:
        """The fetching warp's part, until the work runs out."""


@dataclass(frozen=True)
class CountedFeed:
    """Tasks that follow from the worker's number (Static, Persistent, SplitK).

    k_first, k_count   the stages of every task that are this CTA's
    """

    scheduler: cutlass.Constexpr[TileScheduler]
    worker: Int32
    workers: Int32
    k_first: Int32
    k_count: Int32

    def init(self) -> None:
        """See Feed.init: there are none."""

    def first(self) -> CountedPosition:
        """See Feed.first."""
        return CountedPosition(self.scheduler.assignment.first(self.worker))

    def next(self, position: CountedPosition) -> CountedPosition:
        """See Feed.next."""
        return CountedPosition(self.scheduler.assignment.next(position.task, self.workers))

    def span(self, position: CountedPosition) -> Span:
        """See Feed.span."""
        return Span(position.task, self.k_first, self.k_count)

    def begin(self) -> None:
        """See Feed.begin: nobody wants to know."""

    def fetch(self) -> None:
        """See Feed.fetch: there is nothing to fetch."""


@dataclass(frozen=True)
class StreamFeed:
    """Whole tiles, then a piece of the stages that all workers share (StreamK)."""

    stream: Stream
    worker: Int32

    def init(self) -> None:
        """See Feed.init."""

    def first(self) -> StreamPosition:
        """See Feed.first."""
        return _position(self.stream.first(self.worker))

    def next(self, position: StreamPosition) -> StreamPosition:
        """See Feed.next."""
        return _position(self.stream.next(self.span(position), self.worker))

    def span(self, position: StreamPosition) -> Span:
        """See Feed.span."""
        return Span(position.task, position.k_first, position.k_count)

    def begin(self) -> None:
        """See Feed.begin."""

    def fetch(self) -> None:
        """See Feed.fetch."""


def _position(span: Span) -> StreamPosition:
    return StreamPosition(Int32(span.task), Int32(span.k_first), Int32(span.k_count))


@dataclass(frozen=True)
class QueueFeed:
    """Tasks fetched from a counter in global memory by one warp of the worker's first CTA (Dynamic).

    The first task of worker w is w; the counter hands out the others. What is fetched goes into a ring of
    SLOTS in every CTA of the cluster:

        task_arrived[s]   completes when the fetching warp has written slot s
        task_taken[s]     in the first CTA: completes when every reading warp of every CTA has read it
        task_begun        in the first CTA: completes each time its producer begins with a task

    A task is fetched when the producer begins with the one before it: early enough to be there in time, and
    no earlier, since a worker that holds several when the tasks run out ends later than the others.
    The sequence ends with one task beyond the last, which every reader takes as well.

    counter   address of two int32 in global memory, both 0 before and after a launch: tasks handed out,
              workers that are done
    """

    slots: cute.Pointer
    task_arrived: cute.Pointer
    task_taken: cute.Pointer
    task_begun: cute.Pointer
    counter: Int64
    worker: Int32
    workers: Int32
    tasks: Int32
    k_tiles: Int32
    ctas: cutlass.Constexpr[int]
    readers: cutlass.Constexpr[int]  # warps of a CTA that take every task

    def init(self) -> None:
        """See Feed.init."""
        for slot in range(SLOTS):
            cute.arch.mbarrier_init(self.task_arrived + slot, 1)
            cute.arch.mbarrier_init(self.task_taken + slot, self.readers * self.ctas)
        cute.arch.mbarrier_init(self.task_begun, 1)

    def first(self) -> QueuePosition:
        """See Feed.first."""
        return QueuePosition(self.worker, Int32(0), Int32(0))

    @cute.jit
    def next(self, position: QueuePosition) -> QueuePosition:
        """See Feed.next; beyond the last task nothing more is taken."""
        following = position
        if position.task < self.tasks:
            slot = position.slot
            cute.arch.mbarrier_wait(self.task_arrived + slot, position.parity)
            task = _slots(self.slots)[slot]
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                first_cta = Int32(0) if cutlass.const_expr(self.ctas > 1) else None
                cute.arch.mbarrier_arrive(self.task_taken + slot, first_cta)
            following = self._advanced(task, position)
        return following

    def span(self, position: QueuePosition) -> Span:
        """See Feed.span."""
        return Span(position.task, Int32(0), self.k_tiles)

    @cute.jit
    def begin(self) -> None:
        """See Feed.begin."""
        first = cutlass.Boolean(True)
        if cutlass.const_expr(self.ctas > 1):
            first = cute.arch.block_idx_in_cluster() == 0
        if (cute.arch.lane_idx() == 0) & first:
            cute.arch.mbarrier_arrive(self.task_begun)

    @cute.jit
    def fetch(self) -> None:
        """See Feed.fetch: one task ahead of the producer; leaves the counter at 0."""
        lane = cute.arch.lane_idx()
        handed_out = cute.make_ptr(Int32, self.counter, cute.AddressSpace.gmem, assumed_align=8)
        position = QueuePosition(Int32(0), Int32(0), Int32(0))
        begun = Int32(0)
        while position.task < self.tasks:
            cute.arch.mbarrier_wait(self.task_begun, begun)
            begun = begun ^ 1
            cute.arch.mbarrier_wait(self.task_taken + position.slot, position.parity ^ 1)
            fetched = Int32(0)
            if lane == 0:
                fetched = cute.arch.atomic_add(handed_out, Int32(1), sem="relaxed", scope="gpu")
            task = self.workers + cute.arch.shuffle_sync(fetched, 0)
            if lane < self.ctas:
                self._hand_to(lane, position.slot, task)
            position = self._advanced(task, position)
        # Nobody arrives here any more once the last task is taken: only then may this CTA end.
        for _ in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_wait(self.task_taken + position.slot, position.parity ^ 1)
            position = self._advanced(position.task, position)
        if lane == 0:
            done = cute.arch.atomic_add(handed_out + 1, Int32(1), sem="relaxed", scope="gpu")
            if done == self.workers - 1:
                # Every worker has fetched its last: ready for the next launch without another kernel.
                counters = cute.make_tensor(handed_out, cute.make_layout(2))
                counters[0] = Int32(0)
                counters[1] = Int32(0)

    def _hand_to(self, cta: Int32, slot: Int32, task: Int32) -> None:
        if self.ctas == 1:
            _slots(self.slots)[slot] = task
            cute.arch.mbarrier_arrive(self.task_arrived + slot)
            return
        # The word tells the barrier itself when it has arrived: an ordinary store would need fences of the
        # cluster, which wait for everything a thread has under way, the output of its last tile included.
        cute.arch.mbarrier_arrive_and_expect_tx(
            self.task_arrived + slot, SLOT_BYTES, cta, relaxed=True, scope=CLUSTER
        )
        cute.arch.store_async_dsmem(self.slots + SLOT_WORDS * slot, task, self.task_arrived + slot, cta)

    def _advanced(self, task: Int32, position: QueuePosition) -> QueuePosition:
        following = position.slot + 1
        wrapped = following == SLOTS
        slot = cutlass.select_(wrapped, Int32(0), following)
        return QueuePosition(task, slot, cutlass.select_(wrapped, position.parity ^ 1, position.parity))


def _slots(tasks: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(tasks, cute.make_layout(SLOTS, stride=SLOT_WORDS))


def divided(scheduler: TileScheduler, tasks: Int32, workers: Int32, k_tiles: Int32) -> Stream:
    """Host side: the division of a launch's work that StreamK needs, as numbers of the machine."""
    if not scheduler.streamed:
        return Stream(*(Int32(0) for _ in range(6)))
    stream = make_stream(tasks, workers, k_tiles)
    return Stream(
        Int32(tasks), Int32(workers), Int32(k_tiles),
        Int32(stream.whole), Int32(stream.each), Int32(stream.longer),
    )  # fmt: skip


def make_feed(scheduler: TileScheduler, plan: KernelPlan, smem: Any, grid: Any, place: Any) -> Feed:
    """Device side: the feed of a scheduler, with its slots and barriers in shared memory if it has any.

    grid, place   the kernel's TaskGrid and Place
    """
    if scheduler.streamed:
        return StreamFeed(grid.stream, place.worker)
    if not scheduler.queued:
        return CountedFeed(scheduler, place.worker, grid.workers, place.k_first, place.k_count)
    barriers = smem.allocate_array(cutlass.Int64, QUEUE_BARRIERS)
    slots = smem.allocate_array(Int32, SLOTS * SLOT_WORDS, byte_alignment=16)
    return QueueFeed(
        slots,
        barriers,
        barriers + SLOTS,
        barriers + 2 * SLOTS,
        grid.counters,
        place.worker,
        grid.workers,
        grid.tasks(),
        grid.k_tiles,
        plan.cluster_ctas,
        plan.reading_warps,
    )
