"""Epilogues of the stores from registers to global memory: squares of four values on their way out."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

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
from cutegemm.hopper.layouts import chunk_mma
from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.problem import GemmProblem


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
        places = user_places(self.epilogue, rows, columns, self.batch)
        source = DirectSource(self.epilogue, self.matrices)
        evaluation = Evaluation(
            self.epilogue.graph, self.epilogue.operands, vector(values, Float32), places, source
        )
        tensors = (user_matrix(self.epilogue, self.mD_mnl), *self.matrices.outputs)
        for output, tensor in zip(self.epilogue.graph.outputs, tensors, strict=True):
            dtype = DTYPES[output.dtype or self.problem.out_dtype]
            at = evaluation.places_at(self.epilogue.graph.width(output))
            store_directly(tensor, at, evaluation.output(output), dtype)


@dataclass(frozen=True)
class FusedSquares:
    """Makes the writers of a store whose values pass through an epilogue."""

    matrices: Matrices

    def writer(
        self, mD_mnl: cute.Tensor, plan: HopperPlan, problem: GemmProblem, thread: Int32, origin: tuple
    ) -> FusedSquareWriter:
        """See PlainSquares.writer."""
        row, column, batch = origin
        coordinates = chunk_mma(problem, plan.warpgroup_n).get_slice(thread)
        r, c = coordinates.partition_C(cute.make_identity_tensor((MMA_M, plan.warpgroup_n)))[0]
        return FusedSquareWriter(mD_mnl, self.matrices, row + r, column + c, batch, problem.epilogue, problem)
