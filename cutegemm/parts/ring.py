"""The ring of operand stages between the producer and the consumers, and its two kinds of barriers.

    inputs_arrived[s]    completes when every byte of stage s has landed: one arrival (the producer's,
                         announcing the bytes) plus the bytes themselves; where movers fill it (realign.py),
                         also an arrival of each of their warps
    inputs_consumed[s]   completes when every warp that reads stage s is done with it, in this CTA and,
                         with multicast, in each CTA this CTA's loads also feed

A cursor names the stage whose turn it is and the parity of its current round. Consumers start at
parity 0; the producer waits for the opposite parity, so that its first round finds every stage free.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass
class StageCursor:
    """Position in the ring: stage index and the parity of the round it is in."""

    stage: Int32
    parity: Int32


def advanced(cursor: StageCursor, count: int) -> StageCursor:
    """The cursor one place on in a ring of ``count``; the parity flips where the ring wraps."""
    following = cursor.stage + 1
    wrapped = following == count
    stage = cutlass.select_(wrapped, Int32(0), following)
    parity = cutlass.select_(wrapped, cursor.parity ^ 1, cursor.parity)
    return StageCursor(stage, parity)


@dataclass(frozen=True)
class StageRing:
    """The barriers of the operand ring; pointers into shared memory, one 8-byte barrier a stage."""

    inputs_arrived: cute.Pointer
    inputs_consumed: cute.Pointer
    stages: cutlass.Constexpr[int]
    # CTAs whose consumers read what this CTA loads, itself included: arrivals come from all of them.
    readers: cutlass.Constexpr[int]

    def init(self, consumer_warps: int, arrivals: int = 1) -> None:
        """Sets the arrival counts; one thread of the CTA calls this before anyone waits.

        arrivals: what fills a stage arrives so often, beside the bytes that TMA counts
        """
        for stage in range(self.stages):  # unrolled: not a traced function
            cute.arch.mbarrier_init(self.inputs_arrived + stage, arrivals)
            cute.arch.mbarrier_init(self.inputs_consumed + stage, consumer_warps * self.readers)

    def start(self) -> StageCursor:
        """The cursor every role begins with."""
        return StageCursor(Int32(0), Int32(0))

    def advanced(self, cursor: StageCursor) -> StageCursor:
        """The cursor one stage on; the parity flips where the ring wraps."""
        return advanced(cursor, self.stages)

    def skipped(self, cursor: StageCursor, count: Int32) -> StageCursor:
        """The cursor ``count`` stages on, past stages another team consumes."""
        position = cursor.stage + count
        rounds = position // self.stages
        return StageCursor(position - rounds * self.stages, cursor.parity ^ (rounds & 1))

    def wait_consumed(self, cursor: StageCursor) -> None:
        """Producer: until the stage's previous contents are no longer read by anyone."""
        cute.arch.mbarrier_wait(self.inputs_consumed + cursor.stage, cursor.parity ^ 1)

    def arrive(self, cursor: StageCursor) -> None:
        """A thread of those that fill a stage: its share is in place."""
        cute.arch.mbarrier_arrive(self.inputs_arrived + cursor.stage)

    def wait_arrived(self, cursor: StageCursor) -> None:
        """Consumer: until the stage's bytes are in shared memory."""
        cute.arch.mbarrier_wait(self.inputs_arrived + cursor.stage, cursor.parity)
