"""What becomes of a tile's sum when workers share its K: the parts are added through global memory.

Asked after every main loop, by each consumer warpgroup for its own share of the tile, whether the sum in its
registers is now that of the whole tile and its own to store.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cutegemm.hopper.plan import HopperPlan
from cutegemm.hopper.teams import Member, NamedBarrier
from cutegemm.parts.feed import Feed, StreamFeed
from cutegemm.parts.limits import WARPGROUP_THREADS
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.stream import Span, Stream, StreamK

SQUARE = 4  # accumulators that a thread holds side by side
TICKET_WORDS = 4  # 16 bytes for each ticket: what one warpgroup writes is not near what another reads
# Squares loaded at one time beside so many accumulator registers, that is, until they would spill.
AT_ONCE = ((64, 16), (128, 8), (256, 2))


@dataclass(frozen=True)
class WholeTiles:
    """Every main loop sums a whole tile."""

    def complete(self, accumulators: cute.Tensor, span: Span, member: Member, share: Int32) -> Boolean:
        """Whether ``accumulators`` now hold the whole sum of the span's tile, to be stored by the caller.

        accumulators   of the span's stages on entry
        member, share  the calling thread; which share of its team's tile its warpgroup has
        """
        return Boolean(True)


@dataclass(frozen=True)
class SharedTiles:
    """StreamK: the last warpgroup to finish its part of a tile adds the parts of the others.

    For each warpgroup's share of each shared tile there are two counters in global memory, both 0 before and
    after a launch:

        taken      warpgroups that have finished their part; who finds all others counted is the last
        left       parts that lie in global memory, to be added by the last

    The last waits only for warpgroups that are already writing. A worker has at most two parts of shared
    tiles: one that does not begin its tile, and one that begins it; each has a place of its own.

    partials   float32, (4, thread, square) for each (share, CTA of the cluster, part, worker)
    tickets    shared memory, a word for each consumer: what thread 0 found, for the others to read
    """

    stream: Stream
    counters: Int64
    partials: Int64
    tickets: cute.Pointer
    worker: Int32
    rank: Int32
    plan: cutlass.Constexpr[HopperPlan]
    ordered: cutlass.Constexpr[bool]

    @cute.jit
    def complete(self, accumulators: cute.Tensor, span: Span, member: Member, share: Int32) -> Boolean:
        """See WholeTiles.complete."""
        complete = span.k_count == self.stream.k_tiles
        if span.k_count < self.stream.k_tiles:
            complete = self._combine(accumulators, span, member, share)
        return complete

    @cute.jit
    def _combine(self, accumulators: cute.Tensor, span: Span, member: Member, share: Int32) -> Boolean:
        """Adds or leaves this part; whether it was added."""
        begin = (span.task - self.stream.whole) * self.stream.k_tiles
        first = self.stream.worker_at(begin)
        parts = self.stream.worker_at(begin + self.stream.k_tiles - 1) - first + 1
        counters = self._counters(span.task, share)
        if member.thread == 0:
            ticket = cute.arch.atomic_add(counters.iterator, Int32(1), sem="relaxed", scope="gpu")
            self._ticket(member)[0] = ticket
        self._sync(member)
        last = self._ticket(member)[0] == parts - 1
        if last:
            self._collect(accumulators, counters, (first, parts), member, share)
        else:
            self._leave(accumulators, self._place(self.worker, span.k_first == 0, share), member)
            cute.arch.fence_acq_rel_gpu()
            self._sync(member)
            if member.thread == 0:
                cute.arch.atomic_add(counters.iterator + 1, Int32(1), sem="release", scope="gpu")
        return last

    @cute.jit
    def _collect(
        self, accumulators: cute.Tensor, counters: cute.Tensor, sharers: tuple, member: Member, share: Int32
    ) -> None:
        """accumulators = the sum of all parts, once the others have left theirs; counters back to 0."""
        first, parts = sharers
        if member.thread == 0:
            left = Int32(0)
            while left < parts - 1:
                left = cute.arch.atomic_add(counters.iterator + 1, Int32(0), sem="acquire", scope="gpu")
            counters[0] = Int32(0)
            counters[1] = Int32(0)
        self._sync(member)
        cute.arch.fence_acq_rel_gpu()
        own = self.worker - first
        skipped = own
        if cutlass.const_expr(self.ordered):  # noqa: SIM102 - at trace time, and at run time
            # Two parts give the same sum either way round; with more, the own one takes its place in the row.
            if parts > 2:
                self._leave(accumulators, self._place(self.worker, own == 0, share), member)
                accumulators.fill(0.0)
                skipped = Int32(-1)
        for part in cutlass.range(parts, unroll=1):
            if part != skipped:
                self._add(accumulators, self._place(first + part, part == 0, share), member)

    def _counters(self, task: Int32, share: Int32) -> cute.Tensor:
        """The two counters of a share of this CTA's tile in a task."""
        tile = (task - self.stream.whole) * self.plan.cluster_ctas + self.rank
        index = tile * self.plan.warpgroups_per_tile + share
        pointer = cute.make_ptr(Int32, self.counters, cute.AddressSpace.gmem, assumed_align=8)
        return cute.make_tensor(pointer + 2 * index, cute.make_layout(2))

    def _place(self, worker: Int32, begins_tile: Boolean, share: Int32) -> cute.Tensor:
        """(4, thread, square): where a worker's part lies; a square together, threads side by side."""
        plan = self.plan
        squares = plan.accumulator_registers // SQUARE
        index = (worker * 2 + begins_tile.to(Int32)) * plan.cluster_ctas + self.rank
        index = index * plan.warpgroups_per_tile + share
        pointer = cute.make_ptr(Float32, self.partials, cute.AddressSpace.gmem, assumed_align=16)
        pointer = pointer + Int64(index) * (SQUARE * WARPGROUP_THREADS * squares)
        pointer = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((SQUARE, WARPGROUP_THREADS, squares)))

    def _leave(self, accumulators: cute.Tensor, place: cute.Tensor, member: Member) -> None:
        for square in range(self.plan.accumulator_registers // SQUARE):
            values = cute.make_rmem_tensor(SQUARE, Float32)
            for i in range(SQUARE):
                values[i] = accumulators[SQUARE * square + i]
            cute.autovec_copy(values, place[None, member.thread, square])

    def _add(self, accumulators: cute.Tensor, place: cute.Tensor, member: Member) -> None:
        registers = self.plan.accumulator_registers
        at_once = next(count for most, count in AT_ONCE if registers <= most)
        for base in range(0, registers // SQUARE, at_once):
            count = min(at_once, registers // SQUARE - base)
            values = cute.make_rmem_tensor((SQUARE, count), Float32)
            for i in range(count):
                cute.autovec_copy(place[None, member.thread, base + i], values[None, i])
            for i in range(SQUARE * count):
                accumulators[SQUARE * base + i] = accumulators[SQUARE * base + i] + values[i]

    def _ticket(self, member: Member) -> cute.Tensor:
        return cute.make_tensor(self.tickets + TICKET_WORDS * member.consumer, cute.make_layout(1))

    def _sync(self, member: Member) -> None:
        """The warpgroup's threads meet; what they wrote before is seen by all of them."""
        barrier = NamedBarrier.STORE + member.consumer
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)


Reduction: TypeAlias = WholeTiles | SharedTiles


def make_reduction(
    scheduler: TileScheduler, plan: HopperPlan, feed: Feed, smem: Any, grid: Any, place: Any
) -> Reduction:
    """Device side: the reduction of a scheduler; grid, place as for ``make_feed``."""
    assignment = scheduler.assignment
    if not (isinstance(feed, StreamFeed) and isinstance(assignment, StreamK)):
        return WholeTiles()
    tickets = smem.allocate_array(Int32, TICKET_WORDS * plan.config.consumers, byte_alignment=16)
    rank = place.cta_m + place.cta_n * plan.config.cluster_m
    return SharedTiles(
        feed.stream,
        grid.counters,
        grid.partials,
        tickets,
        place.worker,
        rank,
        plan,
        assignment.ordered,
    )
