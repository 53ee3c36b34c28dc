"""Reductions over rows and columns of a tile: what one warp holds, reduced in a fixed order and written.

What a warpgroup holds of one of the kernel's rows, or a warp of one of its columns, is reduced and goes to a
place of its own in a matrix of parts, which are put together after the kernel: no atomics, the same bits in
every run.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.epilogue.device import Evaluation, larger, store_checked, vector
from cutegemm.epilogue.graph import FULL, Output
from cutegemm.epilogue.spec import Epilogue, scaled_size
from cutegemm.hopper.plan import MMA_M, HopperPlan

ROWS_OF_A_WARP = 16  # of an MMA
QUAD = (1, 2)  # lanes that hold other columns of the same rows, by their distance
COLUMN_OF_LANES = (4, 8, 16)  # lanes that hold other rows of the same columns

_NEUTRAL = {"sum": 0.0, "sum_of_squares": 0.0, "amax": 0.0, "max": float("-inf")}
_TERM: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x,
    "max": lambda x: x,
    "amax": cute.math.abs,
    "sum_of_squares": lambda x: x * x,
}


def _combined(reduction: str, one: Float32, two: Float32) -> Float32:
    if "sum" in reduction:
        return one + two
    return larger(one, two)


class Totals:
    """The reductions of one warpgroup's share of a tile; fed piece by piece in the order of the store.

    sizes   (M, N) of the product, the user's
    """

    def __init__(
        self, epilogue: Epilogue, outputs: tuple, plan: HopperPlan, thread: Int32, sizes: tuple[Int32, Int32]
    ) -> None:
        self.epilogue, self.plan, self.thread, self.sizes = epilogue, plan, thread, sizes
        self._parts = {
            output: tensor
            for output, tensor in zip(epilogue.further, outputs, strict=True)
            if output.reduction is not None
        }
        self._rows: dict[Output, list[Any]] = {}

    def add(self, evaluation: Evaluation, origin: tuple, step: int) -> None:
        """Takes in one piece; origin: (row, column, l) of the warpgroup's part, as the kernel sees it."""
        for output, parts in self._parts.items():
            terms = self._terms(output, evaluation)
            if (output.axis == "row") != self.epilogue.swapped:
                self._along_rows(output, parts, terms, evaluation, (origin, step))
            else:
                self._along_columns(output, parts, terms, evaluation, (origin, step))

    def _terms(self, output: Output, evaluation: Evaluation) -> Any:
        """What is summed, or compared, with nothing in the places beyond the edge."""
        values = _TERM[str(output.reduction)](evaluation.output(output))
        width = self.epilogue.graph.width(output)
        places = evaluation.places_at(width)
        m, n = self.sizes
        if output.axis == "row":
            inside = vector(places.columns, Int32) < scaled_size(n, width)
        else:
            inside = vector(places.rows, Int32) < m
        return cute.where(inside, values, cute.full_like(values, _NEUTRAL[str(output.reduction)]))

    def _row_of(self, width: int, element: int) -> int:
        """Whether an element of a thread lies in the first or the second of its rows."""
        return element // 2 % 2 if width == FULL else element % 2

    def _along_rows(
        self, output: Output, parts: cute.Tensor, terms: Any, evaluation: Evaluation, where: tuple
    ) -> None:
        """One value for each of the kernel's rows: complete after an MMA's last piece."""
        origin, step = where
        chunks, reduction = len(self.plan.chunks), str(output.reduction)
        width = self.epilogue.graph.width(output)
        if step % chunks == 0:
            self._rows[output] = [Float32(_NEUTRAL[reduction]) for _ in range(2)]
        rows = self._rows[output]
        for i in range(cute.size(terms.shape)):
            low = self._row_of(width, i)
            rows[low] = _combined(reduction, rows[low], terms[i])
        if step % chunks == chunks - 1:
            row, column, batch = origin
            own = self.thread // 32 * ROWS_OF_A_WARP + self.thread % 32 // 4
            first = row + step // chunks * self.plan.warpgroups_m * MMA_M + own
            for low in range(2):
                total = _over_lanes(reduction, rows[low], QUAD)
                place = first + 8 * low, column // self.plan.warpgroup_n
                self._write(parts, place, batch, total, self.thread % 4 == 0)

    def _along_columns(
        self, output: Output, parts: cute.Tensor, terms: Any, evaluation: Evaluation, where: tuple
    ) -> None:
        """One value for each of the kernel's columns, of the 16 rows a warp has of an MMA."""
        (row, _, batch), step = where
        reduction, width = str(output.reduction), self.epilogue.graph.width(output)
        places = evaluation.places_at(width)
        columns = places.rows if self.epilogue.swapped else places.columns
        first = row + step // len(self.plan.chunks) * self.plan.warpgroups_m * MMA_M
        slot = first // ROWS_OF_A_WARP + self.thread // 32
        for i in range(cute.size(terms.shape)):
            if self._row_of(width, i) == 1:
                continue
            below = i + (2 if width == FULL else 1)
            total = _over_lanes(reduction, _combined(reduction, terms[i], terms[below]), COLUMN_OF_LANES)
            self._write(parts, (slot, columns[i]), batch, total, self.thread % 32 < 4)

    def _write(self, parts: cute.Tensor, place: tuple, batch: Int32, total: Float32, mine: Any) -> None:
        """place: (row, column) as the kernel sees the parts."""
        row, column = (place[1], place[0]) if self.epilogue.swapped else place
        _write_if(mine, parts, row, column, batch, total)


@cute.jit
def _write_if(mine: Any, parts: cute.Tensor, row: Int32, column: Int32, batch: Int32, total: Float32) -> None:
    if mine:
        store_checked(parts, row, column, batch, total, Float32)


def _over_lanes(reduction: str, value: Float32, distances: tuple[int, ...]) -> Float32:
    """Combined over lanes at these distances; every lane gets the same bits."""
    for distance in distances:
        value = _combined(reduction, value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value
