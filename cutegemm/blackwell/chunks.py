"""How the epilogue warpgroups of a CTA share a tile: chunk by chunk, in turn."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.blackwell.results import Result
from cutegemm.problem import GemmProblem


@dataclass(frozen=True)
class Member:
    """An epilogue thread: which warpgroup it is in, and 0..127 within that."""

    consumer: Int32
    thread: Int32


@dataclass(frozen=True)
class ChunkedStore:
    """A store that takes a tile's chunks in turn; what becomes of one is the subclass's affair."""

    plan: cutlass.Constexpr[BlackwellPlan]
    problem: cutlass.Constexpr[GemmProblem]

    def store(self, result: Result, buffers: Any, member: Member, origin: tuple) -> None:
        """Writes this warpgroup's chunks of one CTA's part of a tile; see ``leave``."""
        self.leave(result, buffers, member, origin)

    @cute.jit
    def leave(self, result: Result, buffers: Any, member: Member, origin: tuple) -> None:
        """Takes this warpgroup's chunks of one CTA's part of a tile where they belong.

        result    the tile's sum; released as soon as this warpgroup has read its last chunk
        buffers   what the store keeps for a tile: this warpgroup's output buffers in shared memory
        member    the calling thread
        origin    (row, column, l) of the CTA's first element in D

        Warpgroups take chunks in turn; stores may still be in flight on return.
        """
        plan = self.plan
        consumers, (_, widest) = plan.config.consumers, plan.chunks[0]
        for step in cutlass.range_constexpr(plan.store_steps):
            turn = plan.chunks[step * consumers : (step + 1) * consumers]
            last = step == plan.store_steps - 1
            if cutlass.const_expr(turn == self._full_turn(step)):
                first = (step * consumers + member.consumer) * widest
                self._chunk(result, buffers, member, (origin, first, widest, step, last))
            else:
                for consumer in cutlass.range_constexpr(consumers):
                    if member.consumer == consumer:
                        if cutlass.const_expr(consumer < len(turn)):
                            piece = (origin, *turn[consumer], step, last)
                            self._chunk(result, buffers, member, piece)
                        elif cutlass.const_expr(last):
                            result.release()
            self._end_step(member)

    def _full_turn(self, step: int) -> tuple:
        """The chunks of a step in which every warpgroup has one of full width."""
        consumers, (_, widest) = self.plan.config.consumers, self.plan.chunks[0]
        return tuple(((step * consumers + i) * widest, widest) for i in range(consumers))

    def _read(self, result: Result, piece: tuple) -> cute.Tensor:
        """A chunk in registers; with the warpgroup's last one the accumulator is given back."""
        _, first, width, step, last = piece
        values = result.read(first, width, step)
        _release_if(last, result)
        return values

    def _chunk(self, result: Result, buffers: Any, member: Member, piece: tuple) -> None:
        """Reads and stores one chunk: (origin, first column, width, step, whether it is the tile's last)."""
        raise NotImplementedError

    def _end_step(self, member: Member) -> None:
        """Called after every step, whether this warpgroup had a chunk in it or not."""


@dataclass(frozen=True)
class RolledStore(ChunkedStore):
    """The same as a loop of the machine's: the number of a step may be one of the machine's too.

    Unrolled, the assembler begins with later chunks while it has the registers, and with more than it has.
    """

    @cute.jit
    def leave(self, result: Result, buffers: Any, member: Member, origin: tuple) -> None:
        """See ChunkedStore.leave."""
        plan = self.plan
        consumers, (_, widest) = plan.config.consumers, plan.chunks[0]
        for step in cutlass.range(plan.full_steps, unroll=1):
            first = (step * consumers + member.consumer) * widest
            self._chunk(result, buffers, member, (origin, first, widest, step, step == plan.store_steps - 1))
            self._end_step(member)
        if cutlass.const_expr(plan.full_steps < plan.store_steps):
            turn = plan.chunks[plan.full_steps * consumers :]
            for consumer in cutlass.range_constexpr(consumers):
                if member.consumer == consumer:
                    if cutlass.const_expr(consumer < len(turn)):
                        piece = (origin, *turn[consumer], plan.full_steps, True)
                        self._chunk(result, buffers, member, piece)
                    else:
                        result.release()
            self._end_step(member)


@cute.jit
def _release_if(last: Any, result: Result) -> None:
    if last:
        result.release()
