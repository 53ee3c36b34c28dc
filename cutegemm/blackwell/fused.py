"""What becomes of results on their way to global memory: nothing, or what an epilogue makes of them."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.blackwell.chunks import Member
from cutegemm.blackwell.results import Result, first_place, piece_squares
from cutegemm.blackwell.store import TmaStore
from cutegemm.epilogue.device import (
    DTYPES,
    DirectSource,
    Evaluation,
    Matrices,
    Places,
    store_directly,
    user_places,
    vector,
)
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
class FusedTmaStore(TmaStore):
    """TmaStore behind an epilogue whose main output has the product's columns.

    Operands are read where they are needed, from global memory; further outputs are written there element by
    element.
    """

    matrices: Matrices

    def _finished(self, values: cute.Tensor, result: Result, member: Member, piece: tuple) -> cute.Tensor:
        """See TmaStore._finished: the main output's values in the same places."""
        epilogue = self.problem.epilogue
        source = DirectSource(epilogue, self.matrices)
        finished = cute.make_rmem_tensor(values.shape, Float32)
        squares = list(piece_squares(self.plan, piece[2]))
        for start in range(0, len(squares), AT_ONCE):
            part = squares[start : start + AT_ONCE]
            numbers = [number + i for number, _, _ in part for i in range(4)]
            sums = vector([values[number] for number in numbers], Float32)
            places = user_places(epilogue, *self._places(result, member, piece, part))
            evaluation = Evaluation(epilogue.graph, epilogue.operands, sums, places, source)
            for output, tensor in zip(epilogue.further, self.matrices.outputs, strict=True):
                at: Places = evaluation.places_at(epilogue.graph.width(output))
                dtype = DTYPES[output.dtype or self.problem.out_dtype]
                store_directly(tensor, at, evaluation.output(output), dtype)
            main = evaluation.output(epilogue.graph.main)
            for i, number in enumerate(numbers):
                finished[number] = main[i]
        return finished

    def _places(
        self, result: Result, member: Member, piece: tuple, squares: list[tuple[int, int, int]]
    ) -> tuple[list, list, Int32]:
        """Rows and columns of squares' elements in the kernel's result; equal ones are one and the same."""
        (row, column, batch), first, width, *_ = piece
        r, c = first_place(result, width, member.thread)
        down = {below: row + r + below for _, low, _ in squares for below in (low, low + 8)}
        right = {beside: column + first + c + beside for *_, near in squares for beside in (near, near + 1)}
        rows = [down[low + 8 * (i // 2)] for _, low, _ in squares for i in range(4)]
        columns = [right[near + i % 2] for *_, near in squares for i in range(4)]
        return rows, columns, batch
