"""Stores that go from registers to global memory, each element under its own bounds check.

For outputs TMA cannot store: it writes whole 16-byte units, so a line that ends inside one would spill
over its end, and it needs addresses and pitches of such units.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.hopper.layouts import chunk_mma
from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.hopper.store import origin_of
from cutegemm.hopper.teams import Member
from cutegemm.parts.squares import SquareWriter
from cutegemm.parts.tensors import CUTE_DTYPES
from cutegemm.problem import GemmProblem


@dataclass(frozen=True)
class PlainSquares:
    """Makes the writers of a store that stores the sums themselves."""

    def writer(
        self, mD_mnl: cute.Tensor, plan: HopperPlan, problem: GemmProblem, thread: Int32, origin: tuple
    ) -> SquareWriter:
        """The writer of a thread whose warpgroup's part of the tile begins at ``origin`` (row, column, l)."""
        row, column, batch = origin
        coordinates = chunk_mma(problem, plan.warpgroup_n).get_slice(thread)
        r, c = coordinates.partition_C(cute.make_identity_tensor((MMA_M, plan.warpgroup_n)))[0]
        return SquareWriter(mD_mnl, row + r, column + c, batch, CUTE_DTYPES[problem.out_dtype])


@dataclass(frozen=True)
class DirectStore:
    """A whole tile from one warpgroup's accumulators. mD_mnl is the output itself, (M, N, L)."""

    mD_mnl: cute.Tensor
    plan: cutlass.Constexpr[HopperPlan]
    problem: cutlass.Constexpr[GemmProblem]

    @property
    def barriers(self) -> int:
        """See TmaStore.barriers."""
        return 0

    def prefetch(self) -> None:
        """See TmaStore.prefetch: nothing to fetch."""

    def init(self, buffers: None) -> None:
        """See TmaStore.init."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> None:
        """See TmaStore.allocate: no buffers."""

    def buffers_of(self, consumer: Int32, buffers: None) -> None:
        """See TmaStore.buffers_of."""

    def ahead(self, buffers: None, member: Member, tile: tuple, corner: tuple) -> None:
        """See TmaStore.ahead: nothing."""

    def store(
        self,
        accumulators: cute.Tensor,
        buffers: Any,
        ahead: None,
        member: Member,
        where: tuple,
        turn: Int32,
    ) -> None:
        """See TmaStore.store; no buffers are used."""
        plan = self.plan
        writer = PlainSquares().writer(self.mD_mnl, plan, self.problem, member.thread, origin_of(plan, where))
        _, column_stride, _ = self.mD_mnl.stride
        squares = plan.warpgroup_n // 8
        for mma in range(plan.warpgroup_m // MMA_M):
            rows_down = mma * plan.warpgroups_m * MMA_M
            corner = writer.pointer(Int32(rows_down), Int32(0))
            for square in range(squares):
                first = (mma * squares + square) * 4
                values = tuple(accumulators[first + i] for i in range(4))
                writer.write(corner, Int32(rows_down), Int32(8 * square), values)
                # One pointer walks along the row: as many as there are columns would not fit the registers.
                corner = corner + 8 * Int64(column_stride)

    def drain(self, buffers: Any, member: Member, turn: Int32) -> None:
        """See TmaStore.drain: nothing is in flight."""
