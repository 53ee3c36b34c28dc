"""Elements as threads hold them of accumulators, 2 x 2 at a time, to global memory under a bounds check."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

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
from cutegemm.epilogue.spec import Epilogue
from cutegemm.problem import GemmProblem


@dataclass(frozen=True)
class SquareWriter:
    """Writes the 2 x 2 elements that one thread holds of each 8 columns of an MMA's 64 rows.

    A WGMMA gives a thread the columns c, c + 1, c + 8, c + 9, ... of its rows r and r + 8; registers
    4j .. 4j + 3 are (r, c + 8j), (r, c + 8j + 1), (r + 8, c + 8j), (r + 8, c + 8j + 1).

    mD_mnl is the output, (M, N, L); row, column the thread's first element in it.
    """

    mD_mnl: cute.Tensor
    row: Int32
    column: Int32
    batch: Int32
    dtype: cutlass.Constexpr[Any]

    def pointer(self, rows_down: Int32, columns_right: Int32) -> cute.Pointer:
        """Address of the element that many rows and columns from the thread's first."""
        row_stride, column_stride, batch_stride = self.mD_mnl.stride
        offset = Int64(self.row + rows_down) * Int64(row_stride)
        offset = offset + Int64(self.column + columns_right) * Int64(column_stride)
        return self.mD_mnl.iterator + (offset + Int64(self.batch) * Int64(batch_stride))

    @cute.jit
    def write(
        self, corner: cute.Pointer, rows_down: Int32, columns_right: Int32, values: tuple[Float32, ...]
    ) -> None:
        """Stores four registers at ``corner``, which is ``pointer(rows_down, columns_right)``."""
        rows, columns, _ = self.mD_mnl.shape
        row_stride, column_stride, _ = self.mD_mnl.stride
        layout = cute.make_layout((2, 2), stride=(8 * Int64(row_stride), Int64(column_stride)))
        square = cute.make_tensor(corner, layout)
        for i in cutlass.range_constexpr(4):
            low, right = i // 2, i % 2
            row = self.row + rows_down + 8 * low
            column = self.column + columns_right + right
            if (row < rows) & (column < columns):
                square[low, right] = values[i].to(self.dtype)


@dataclass(frozen=True)
class FusedSquareWriter:
    """Applies an epilogue to four accumulators and writes what comes out; verbs as SquareWriter's."""

    mD_mnl: cute.Tensor
    matrices: Matrices
    row: Int32
    column: Int32
    batch: Int32
    epilogue: cutlass.Constexpr[Epilogue]
    problem: cutlass.Constexpr[GemmProblem]

    def pointer(self, rows_down: Int32, columns_right: Int32) -> cute.Pointer:
        """See SquareWriter.pointer; this writer finds its places by itself."""
        return self.mD_mnl.iterator

    def write(
        self, corner: cute.Pointer, rows_down: Int32, columns_right: Int32, values: tuple[Float32, ...]
    ) -> None:
        """See SquareWriter.write."""
        row, column = self.row + rows_down, self.column + columns_right
        below, right = row + 8, column + 1
        rows, columns = (row, row, below, below), (column, right, column, right)
        places = user_places(self.epilogue, 4, self.batch, lambda: (rows, columns))
        source = DirectSource(self.epilogue, self.matrices)
        evaluation = Evaluation(
            self.epilogue.graph, self.epilogue.operands, vector(values, Float32), places, source
        )
        tensors = (user_matrix(self.epilogue, self.mD_mnl), *self.matrices.outputs)
        for output, tensor in zip(self.epilogue.graph.outputs, tensors, strict=True):
            dtype = DTYPES[output.dtype or self.problem.out_dtype]
            at = evaluation.places_at(self.epilogue.graph.width(output))
            store_directly(tensor, at, evaluation.output(output), dtype)
