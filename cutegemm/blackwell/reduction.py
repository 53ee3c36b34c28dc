"""What becomes of a tile's sum when workers share its K: the parts are added through global memory.

Each epilogue warpgroup decides for its own chunks of a tile: it leaves its part and goes on, or is the last,
and then stores the sum of all parts.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.blackwell.chunks import Member, RolledStore
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.blackwell.results import Result, piece_squares
from cutegemm.blackwell.store import STORE_BARRIER
from cutegemm.blackwell.stores import Store
from cutegemm.parts.feed import Feed, StreamFeed
from cutegemm.parts.sharing import SQUARE, Sharing, make_sharing
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.stream import Span, StreamK

AT_ONCE = 4  # squares of another worker's part that are loaded together


@dataclass(frozen=True)
class WholeTiles:
    """Every result is the sum of a whole tile."""

    def store(
        self, store: Store, result: Result, span: Span, buffers: Any, member: Member, origin: tuple
    ) -> None:
        """Stores a result, or sees to it that another does.

        span                      whose sum it is
        buffers, member, origin   as ChunkedStore.store has them
        """
        store.store(result, buffers, member, origin)


@dataclass(frozen=True)
class SharedResult(Result):
    """The sum of a tile of which others have parts in global memory; read like any other.

    first, parts   the workers that have one; with a single part there is nothing to add
    """

    sharing: Sharing
    consumer: Int32
    first: Int32
    parts: Int32
    ordered: cutlass.Constexpr[bool]

    def read(self, first: Int32, width: int, step: Any) -> cute.Tensor:
        """See Result.read."""
        if not self.ordered:
            values = Result.read(self, first, width, step)
            self._add_others(values, width, step)
            return values
        values = self.registers(width)
        values.fill(0.0)
        self._add_all(values, first, width, step)
        return values

    @cute.jit
    def _add_others(self, values: cute.Tensor, width: cutlass.Constexpr[int], step: Any) -> None:
        for part in cutlass.range(self.parts, unroll=1):
            if self.first + part != self.sharing.worker:
                self._add_part(values, part, width, step)

    @cute.jit
    def _add_all(
        self,
        values: cute.Tensor,
        first: Int32,
        width: cutlass.Constexpr[int],
        step: Any,
    ) -> None:
        """The own part in its turn: so the sum has the same bits whoever is last."""
        for part in cutlass.range(self.parts, unroll=1):
            if self.first + part != self.sharing.worker:
                self._add_part(values, part, width, step)
            else:
                values.store(values.load() + Result.read(self, first, width, step).load())

    def _add_part(self, values: cute.Tensor, part: Int32, width: int, step: Any) -> None:
        place = self.sharing.place(self.first + part, part == 0, self.consumer)
        before = self.ring.plan.squares_before(step)
        numbers = [number for number, _, _ in piece_squares(self.ring.plan, width)]
        for base in range(0, len(numbers), AT_ONCE):
            some = numbers[base : base + AT_ONCE]
            theirs = cute.make_rmem_tensor((SQUARE, len(some)), Float32)
            for i in range(len(some)):
                cute.autovec_copy(place[None, self.thread, before + base + i], theirs[None, i])
            for i, number in enumerate(some):
                for j in range(SQUARE):
                    values[number + j] = values[number + j] + theirs[j, i]


@dataclass(frozen=True)
class PartStore(RolledStore):
    """Leaves a part of a tile's sum in global memory; as buffers it takes the place, see Sharing.place."""

    def _chunk(self, result: Result, buffers: cute.Tensor, member: Member, piece: tuple) -> None:
        """See ChunkedStore._chunk."""
        _, _, width, step, _ = piece
        values = self._read(result, piece)
        before = self.plan.squares_before(step)
        for i, (number, _, _) in enumerate(piece_squares(self.plan, width)):
            square = cute.make_rmem_tensor(SQUARE, Float32)
            for j in range(SQUARE):
                square[j] = values[number + j]
            cute.autovec_copy(square, buffers[None, member.thread, before + i])


@dataclass(frozen=True)
class SharedTiles:
    """StreamK: the last warpgroup to have its part of a tile adds the parts of the others, and stores."""

    sharing: Sharing
    plan: cutlass.Constexpr[BlackwellPlan]
    problem: cutlass.Constexpr[GemmProblem]
    ordered: cutlass.Constexpr[bool]

    @cute.jit
    def store(
        self, store: Store, result: Result, span: Span, buffers: Any, member: Member, origin: tuple
    ) -> None:
        """See WholeTiles.store."""
        sharing = self.sharing
        counters = sharing.counters_of(span.task, member.consumer)
        first, parts = sharing.worker, Int32(1)
        last = span.k_count == sharing.stream.k_tiles
        if span.k_count < sharing.stream.k_tiles:
            first, parts = sharing.sharers(span.task)
            last = sharing.take_ticket(counters, member) == parts - 1
            if last:
                sharing.wait_for_others(counters, parts, member)
        if last:
            of_tile = sharing, member.consumer, first, parts, self.ordered
            whole = SharedResult(result.ring, result.cursor, result.thread, *of_tile)
            store.store(whole, buffers, member, origin)
        else:
            place = sharing.place(sharing.worker, span.k_first == 0, member.consumer)
            PartStore(self.plan, self.problem).leave(result, place, member, origin)
            sharing.announce(counters, member)


Reduction: TypeAlias = WholeTiles | SharedTiles


def make_reduction(
    scheduler: TileScheduler,
    plan: BlackwellPlan,
    problem: GemmProblem,
    feed: Feed,
    where: tuple[Any, Any, Any],
) -> Reduction:
    """Device side: the reduction of a scheduler; where: shared memory, the kernel's TaskGrid and Place."""
    assignment = scheduler.assignment
    if not (isinstance(feed, StreamFeed) and isinstance(assignment, StreamK)):
        return WholeTiles()
    sharing = make_sharing(feed.stream, plan, where, STORE_BARRIER)
    return SharedTiles(sharing, plan, problem, assignment.ordered)
