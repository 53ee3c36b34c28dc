"""What becomes of a tile's sum when workers share its K: the parts are added through global memory.

Asked after every main loop, by each consumer warpgroup for its own share of the tile, whether the sum in its
registers is now that of the whole tile and its own to store.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutegemm.hopper.plan import HopperPlan
from cutegemm.hopper.teams import Member, NamedBarrier
from cutegemm.parts.feed import Feed, StreamFeed
from cutegemm.parts.sharing import SQUARE, Sharing, make_sharing
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.stream import Span, StreamK

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
    """StreamK: the last warpgroup to finish its part of a tile adds the parts of the others."""

    sharing: Sharing
    plan: cutlass.Constexpr[HopperPlan]
    ordered: cutlass.Constexpr[bool]

    @cute.jit
    def complete(self, accumulators: cute.Tensor, span: Span, member: Member, share: Int32) -> Boolean:
        """See WholeTiles.complete."""
        complete = span.k_count == self.sharing.stream.k_tiles
        if span.k_count < self.sharing.stream.k_tiles:
            complete = self._combine(accumulators, span, member, share)
        return complete

    @cute.jit
    def _combine(self, accumulators: cute.Tensor, span: Span, member: Member, share: Int32) -> Boolean:
        """Adds or leaves this part; whether it was added."""
        sharing = self.sharing
        first, parts = sharing.sharers(span.task)
        counters = sharing.counters_of(span.task, share)
        last = sharing.take_ticket(counters, member) == parts - 1
        if last:
            self._collect(accumulators, counters, (first, parts), member, share)
        else:
            self._leave(accumulators, sharing.place(sharing.worker, span.k_first == 0, share), member)
            sharing.announce(counters, member)
        return last

    @cute.jit
    def _collect(
        self, accumulators: cute.Tensor, counters: cute.Tensor, sharers: tuple, member: Member, share: Int32
    ) -> None:
        """accumulators = the sum of all parts, once the others have left theirs; counters back to 0."""
        first, parts = sharers
        sharing = self.sharing
        sharing.wait_for_others(counters, parts, member)
        own = sharing.worker - first
        skipped = own
        if cutlass.const_expr(self.ordered):  # noqa: SIM102 - at trace time, and at run time
            # Two parts give the same sum either way round; with more, the own one takes its place in the row.
            if parts > 2:
                self._leave(accumulators, sharing.place(sharing.worker, own == 0, share), member)
                accumulators.fill(0.0)
                skipped = Int32(-1)
        for part in cutlass.range(parts, unroll=1):
            if part != skipped:
                self._add(accumulators, sharing.place(first + part, part == 0, share), member)

    def _leave(self, accumulators: cute.Tensor, place: cute.Tensor, member: Member) -> None:
        for square in range(self.plan.thread_squares):
            values = cute.make_rmem_tensor(SQUARE, Float32)
            for i in range(SQUARE):
                values[i] = accumulators[SQUARE * square + i]
            cute.autovec_copy(values, place[None, member.thread, square])

    def _add(self, accumulators: cute.Tensor, place: cute.Tensor, member: Member) -> None:
        at_once = next(count for most, count in AT_ONCE if self.plan.accumulator_registers <= most)
        for base in range(0, self.plan.thread_squares, at_once):
            count = min(at_once, self.plan.thread_squares - base)
            values = cute.make_rmem_tensor((SQUARE, count), Float32)
            for i in range(count):
                cute.autovec_copy(place[None, member.thread, base + i], values[None, i])
            for i in range(SQUARE * count):
                accumulators[SQUARE * base + i] = accumulators[SQUARE * base + i] + values[i]


Reduction: TypeAlias = WholeTiles | SharedTiles


def make_reduction(
    scheduler: TileScheduler, plan: HopperPlan, feed: Feed, smem: Any, grid: Any, place: Any
) -> Reduction:
    """Device side: the reduction of a scheduler; grid, place as for ``make_feed``."""
    assignment = scheduler.assignment
    if not (isinstance(feed, StreamFeed) and isinstance(assignment, StreamK)):
        return WholeTiles()
    sharing = make_sharing(feed.stream, plan, (smem, grid, place), NamedBarrier.STORE)
    return SharedTiles(sharing, plan, assignment.ordered)
