"""Epilogues of the stores from registers to global memory: squares of four values on their way out."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cutegemm.epilogue.device import Matrices
from cutegemm.hopper.layouts import chunk_mma
from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.parts.squares import FusedSquareWriter
from cutegemm.problem import GemmProblem


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
