"""What becomes of results on their way to global memory: nothing, or what an epilogue makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.blackwell.chunks import Member, RolledStore
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.blackwell.results import Result, first_place, piece_squares
from cutegemm.blackwell.store import TmaStore
from cutegemm.epilogue.device import (
    DTYPES,
    DirectSource,
    Evaluation,
    Matrices,
    store_directly,
    user_matrix,
    user_places,
    vector,
)
from cutegemm.epilogue.graph import Output
from cutegemm.epilogue.spec import Epilogue, scaled_size
from cutegemm.epilogue.totals import Totals
from cutegemm.parts.limits import WARPGROUP_THREADS
from cutegemm.parts.ring import StageCursor
from cutegemm.parts.squares import FusedSquareWriter, SquareWriter
from cutegemm.parts.tensors import CUTE_DTYPES
from cutegemm.problem import GemmProblem

AT_ONCE = 4  # squares whose values pass through an epilogue together: more do not fit the registers


@dataclass(frozen=True)
class PlainSquares:
    """Makes the writers of a store that stores the sums themselves."""

    def writer(
        self, mD_mnl: cute.Tensor, problem: GemmProblem, row: Int32, column: Int32, batch: Int32
    ) -> SquareWriter:
        """The writer of a thread whose first element lies at (row, column, batch)."""
        return SquareWriter(mD_mnl, row, column, batch, CUTE_DTYPES[problem.out_dtype])


@dataclass(frozen=True)
class FusedSquares:
    """Makes the writers of a store whose values pass through an epilogue."""

    matrices: Matrices

    def writer(
        self, mD_mnl: cute.Tensor, problem: GemmProblem, row: Int32, column: Int32, batch: Int32
    ) -> FusedSquareWriter:
        """See PlainSquares.writer."""
        return FusedSquareWriter(mD_mnl, self.matrices, row, column, batch, problem.epilogue, problem)


@dataclass(frozen=True)
class Fusion:
    """An epilogue on one thread's part of a tile, whatever becomes of its main output.

    Operands are read where they are needed, from global memory; further outputs are written there element by
    element.
    """

    matrices: Matrices
    plan: cutlass.Constexpr[BlackwellPlan]
    problem: cutlass.Constexpr[GemmProblem]

    @property
    def epilogue(self) -> Epilogue:
        """Of the problem as the kernel sees it."""
        return self.problem.epilogue

    def totals(self, mD_mnl: cute.Tensor, member: Member) -> Totals:
        """Those of a tile that begins. mD_mnl: the main output, for its sizes."""
        rows, columns, _ = mD_mnl.shape
        if self.epilogue.swapped:
            rows, columns = columns, rows
        sizes = rows, scaled_size(columns, -self.epilogue.width)
        totals = Totals(self.epilogue, self.matrices.outputs, self.plan.windows, member.thread, sizes)
        totals.begin()
        return totals

    def dtype(self, output: Output) -> Any:
        """What an output is stored as."""
        return DTYPES[output.dtype or self.problem.out_dtype]

    def evaluated(
        self, values: cute.Tensor, totals: Totals, result: Result, member: Member, piece: tuple
    ) -> Iterator[tuple[list[int], Evaluation]]:
        """A chunk's values some squares at a time: their numbers in it, and what the epilogue makes of them.

        Further outputs are stored and reductions taken into ``totals``; the main output is the caller's.
        """
        epilogue, (row, _, batch) = self.epilogue, piece[0]
        source = DirectSource(epilogue, self.matrices)
        squares = list(piece_squares(self.plan, piece[2]))
        for start in range(0, len(squares), AT_ONCE):
            part = squares[start : start + AT_ONCE]
            numbers = [number + i for number, _, _ in part for i in range(4)]
            sums = vector([values[number] for number in numbers], Float32)
            find = partial(self._places, result, member, piece, part)
            places = user_places(epilogue, len(numbers), piece[0][2], find)
            evaluation = Evaluation(epilogue.graph, epilogue.operands, sums, places, source)
            for output, tensor in zip(epilogue.further, self.matrices.outputs, strict=True):
                if output.reduction is None:
                    at = evaluation.places_at(epilogue.graph.width(output))
                    store_directly(tensor, at, evaluation.output(output), self.dtype(output))
            totals.add(evaluation, self._part_of_column(row, member), batch)
            yield numbers, evaluation

    def finish(self, totals: Totals, result: Result, member: Member, origin: tuple) -> None:
        """Writes what was found in the rows of a tile; origin: see ChunkedStore.leave."""
        (row, column, batch), plan = origin, self.plan
        own, _ = first_place(result, plan.chunks[0][1], member.thread)
        rows = [row + own + 16 * window + low for window in range(plan.windows) for low in (0, 8)]
        half = member.thread // (WARPGROUP_THREADS // plan.halves)
        share = half * plan.config.consumers + member.consumer
        totals.finish(rows, column // plan.config.tile_n * plan.parts_of_tile + share, batch)

    def _part_of_column(self, row: Int32, member: Member) -> Int32:
        """Which part of its columns a warp has, of all in the product; row: of the CTA's first element."""
        rows = self.plan.rows_of_a_part
        return row // rows + member.thread // 32 % (self.plan.cta_m // rows)

    def _places(
        self, result: Result, member: Member, piece: tuple, squares: list[tuple[int, int, int]]
    ) -> tuple[list, list]:
        """Rows and columns of squares' elements in the kernel's result; equal ones are one and the same."""
        (row, column, _), first, width, *_ = piece
        r, c = first_place(result, width, member.thread)
        down = {below: row + r + below for _, low, _ in squares for below in (low, low + 8)}
        right = {beside: column + first + c + beside for *_, near in squares for beside in (near, near + 1)}
        rows = [down[low + 8 * (i // 2)] for _, low, _ in squares for i in range(4)]
        columns = [right[near + i % 2] for *_, near in squares for i in range(4)]
        return rows, columns


@dataclass(frozen=True)
class OfTile:
    """What an epilogue's store keeps for one tile: output buffers, if it has any, and running totals."""

    buffers: Any
    totals: Totals


@dataclass(frozen=True)
class FusedTmaStore(RolledStore, TmaStore):
    """TmaStore behind an epilogue whose main output has the product's columns."""

    fusion: Fusion

    def store(self, result: Result, buffers: cute.Pointer, member: Member, origin: tuple) -> None:
        """See ChunkedStore.store."""
        totals = self.fusion.totals(self.tensors[0], member)
        self.leave(result, OfTile(buffers, totals), member, origin)
        self.fusion.finish(totals, result, member, origin)

    def _pending_stores(self, step: Any) -> int:
        """See TmaStore._pending_stores: as many in each step of a loop."""
        return self.plan.fewest_pending_stores

    def _chunk(self, result: Result, buffers: OfTile, member: Member, piece: tuple) -> None:
        """See ChunkedStore._chunk."""
        values = self._read(result, piece)
        finished = cute.make_rmem_tensor(values.shape, Float32)
        for numbers, evaluation in self.fusion.evaluated(values, buffers.totals, result, member, piece):
            main = evaluation.output(self.fusion.epilogue.graph.main)
            for i, number in enumerate(numbers):
                finished[number] = main[i]
        self._put(finished, result, buffers.buffers, member, piece)


@dataclass(frozen=True)
class FusedDirectStore(RolledStore):
    """An epilogue's main output element by element. mD_mnl is that output, (M, N, L)."""

    mD_mnl: cute.Tensor
    fusion: Fusion

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

    def store(self, result: Result, buffers: None, member: Member, origin: tuple) -> None:
        """See ChunkedStore.store."""
        totals = self.fusion.totals(self.mD_mnl, member)
        self.leave(result, OfTile(buffers, totals), member, origin)
        self.fusion.finish(totals, result, member, origin)

    def _chunk(self, result: Result, buffers: OfTile, member: Member, piece: tuple) -> None:
        """See ChunkedStore._chunk."""
        values = self._read(result, piece)
        epilogue = self.fusion.epilogue
        matrix, main = user_matrix(epilogue, self.mD_mnl), epilogue.graph.main
        for _, evaluation in self.fusion.evaluated(values, buffers.totals, result, member, piece):
            at = evaluation.places_at(epilogue.width)
            store_directly(matrix, at, evaluation.output(main), self.fusion.dtype(main))
