"""Output pieces that the threads of a warpgroup write themselves, for outputs TMA cannot store.

From registers to shared memory as for a TMA store, and from there element by element, each under its own
bounds check: neighbouring threads write neighbouring elements, whatever the strides.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.epilogue.device import element, offset_of
from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.hopper.store import TmaStore
from cutegemm.parts.limits import WARPGROUP_THREADS
from cutegemm.problem import GemmProblem


@dataclass(frozen=True)
class CopiedStore:
    """Pieces of one output. mD_mnl is the output itself, (M, N, L); buffers are TmaStore's."""

    mD_mnl: cute.Tensor
    plan: cutlass.Constexpr[HopperPlan]
    problem: cutlass.Constexpr[GemmProblem]

    @property
    def _buffers(self) -> TmaStore:
        return TmaStore((), (), self.plan, self.problem)

    def prefetch(self) -> None:
        """See TmaStore.prefetch: there is no descriptor."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> cute.Pointer:
        """See TmaStore.allocate."""
        return self._buffers.allocate(smem, barriers)

    def buffers_of(self, consumer: Int32, buffers: cute.Pointer) -> cute.Pointer:
        """See TmaStore.buffers_of."""
        return self._buffers.buffers_of(consumer, buffers)

    def put(self, values: Any, buffers: cute.Pointer, thread: Int32, width: int, buffer: int) -> None:
        """See TmaStore.put."""
        self._buffers.put(values, buffers, thread, width, buffer)

    def pieces(self, buffers: cute.Pointer, width: int) -> cute.Tensor:
        """See TmaStore.pieces."""
        return self._buffers.pieces(buffers, width)

    @cute.jit
    def start(
        self,
        buffers: cute.Pointer,
        thread: Int32,
        width: cutlass.Constexpr[int],
        buffer: cutlass.Constexpr[int],
        position: tuple,
    ) -> None:
        """See TmaStore.start: done on return, the buffer may be filled once the warpgroup has met again."""
        sD = self.pieces(buffers, width)
        rows, columns, _ = self.mD_mnl.shape
        first_row, first_column, batch = position
        n_major = self.problem.out_major == "n"
        for i in cutlass.range(MMA_M * width // WARPGROUP_THREADS, unroll=4):
            place = thread + i * WARPGROUP_THREADS
            r = place // width if n_major else place % MMA_M
            c = place % width if n_major else place // MMA_M
            row, column = first_row + r, first_column + c
            if (row < rows) & (column < columns):
                element(self.mD_mnl, offset_of(self.mD_mnl, row, column, batch))[0] = sD[r, c, buffer]
