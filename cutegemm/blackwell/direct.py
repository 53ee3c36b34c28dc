"""Stores that go from registers to global memory, each element under its own bounds check.

For outputs TMA cannot store: it writes whole 16-byte units, so a line that ends inside one would spill
over its end, and it needs addresses and pitches of such units.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutegemm.blackwell.chunks import Member, RolledStore
from cutegemm.blackwell.fused import PlainSquares
from cutegemm.blackwell.results import Result, first_place, piece_squares
from cutegemm.parts.ring import StageCursor


@dataclass(frozen=True)
class DirectStore(RolledStore):
    """Chunks straight from registers. mD_mnl is the output itself, (M, N, L)."""

    mD_mnl: cute.Tensor

    def prefetch(self) -> None:
        """See TmaStore.prefetch: nothing to fetch."""

    def init(self, buffers: None) -> None:
        """See TmaStore.init."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> None:
        """See TmaStore.allocate: no buffers."""

    def buffers_of(self, consumer: Int32, buffers: None) -> None:
        """See TmaStore.buffers_of."""

    def drain(self, buffers: None, member: Member, cursor: StageCursor) -> None:
        """See TmaStore.drain: nothing is in flight."""

    def _chunk(self, result: Result, buffers: None, member: Member, piece: tuple) -> None:
        """See ChunkedStore._chunk."""
        (row, column, batch), first, width, *_ = piece
        r, c = first_place(result, width, member.thread)
        values = self._read(result, piece)
        writer = PlainSquares().writer(self.mD_mnl, self.problem, row + r, column + first + c, batch)
        for number, down, right in piece_squares(self.plan, width):
            corner = writer.pointer(Int32(down), Int32(right))
            square = tuple(values[number + i] for i in range(4))
            writer.write(corner, Int32(down), Int32(right), square)
