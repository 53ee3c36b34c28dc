"""Reductions over rows and columns of a tile: what one warp holds, reduced in a fixed order and written.

What the warps that store a tile's columns together hold of one of the kernel's rows, or a warp of one of its
columns, is reduced and goes to a place of its own in a matrix of parts, which are put together after the
kernel: no atomics, the same bits in every run. Knows a fragment; no architecture.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.epilogue.device import Evaluation, larger, store_checked, vector
from cutegemm.epilogue.graph import FULL, Output
from cutegemm.epilogue.spec import Epilogue, scaled_size

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
    """The reductions of what a thread stores of a tile; fed fragment by fragment.

    A fragment is made of squares, rows r and r + 8 of columns c and c + 1, one for each of ``windows`` of 16
    rows before the next columns. Between ``begin`` and ``finish`` all have the same 2 * windows rows.

    thread   0..127 in its warpgroup
    sizes    (M, N) of the product, the user's
    """

    def __init__(
        self, epilogue: Epilogue, outputs: Sequence[Any], windows: int, thread: Int32, sizes: tuple
    ) -> None:
        self.epilogue, self.windows, self.thread, self.sizes = epilogue, windows, thread, sizes
        self._parts = {
            output: tensor
            for output, tensor in zip(epilogue.further, outputs, strict=True)
            if output.reduction is not None
        }
        self._rows = {
            output: cute.make_rmem_tensor(2 * windows, Float32)
            for output in self._parts
            if self._is_along_rows(output)
        }

    def begin(self) -> None:
        """Nothing is found yet in the rows that follow."""
        for output, rows in self._rows.items():
            rows.fill(_NEUTRAL[str(output.reduction)])

    def add(self, evaluation: Evaluation, part: Int32, batch: Int32) -> None:
        """Takes in one fragment; part: which part of its columns the warp has, in all of the product."""
        if not self._parts:
            return
        # Worked out once: what a warp's threads agree on is kept, and not found anew for each value written.
        part = cute.arch.make_warp_uniform(part)
        for output in self._parts:
            terms = self._terms(output, evaluation)
            if self._is_along_rows(output):
                self._add_rows(output, terms)
            else:
                self._write_columns(output, terms, evaluation, (part, batch))

    def finish(self, rows: Sequence[Int32], part: Int32, batch: Int32) -> None:
        """Writes what was found in each row.

        rows   in the product as the kernel sees it, by window and then r, r + 8
        part   which part of these rows the warp has
        """
        for output, found in self._rows.items():
            for i, row in enumerate(rows):
                total = _over_lanes(str(output.reduction), found[i], QUAD)
                self._write(output, (row, part), batch, total, self.thread % 4 == 0)

    def _is_along_rows(self, output: Output) -> bool:
        """Whether there is one value for each of the kernel's rows."""
        return (output.axis == "row") != self.epilogue.swapped

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

    def _square(self, output: Output) -> int:
        """Elements of a square: two of each row, or one where pairs of columns have become one."""
        return 4 if self.epilogue.graph.width(output) == FULL else 2

    def _add_rows(self, output: Output, terms: Any) -> None:
        size, rows = self._square(output), self._rows[output]
        for i in range(cute.size(terms.shape)):
            place = 2 * (i // size % self.windows) + i % size // (size // 2)
            rows[place] = _combined(str(output.reduction), rows[place], terms[i])

    def _write_columns(self, output: Output, terms: Any, evaluation: Evaluation, where: tuple) -> None:
        """One value for each column of the fragment, of the rows that the warp has of it."""
        part, batch = where
        size, reduction = self._square(output), str(output.reduction)
        places = evaluation.places_at(self.epilogue.graph.width(output))
        columns = places.rows if self.epilogue.swapped else places.columns
        for group in range(0, cute.size(terms.shape), size * self.windows):
            for right in range(size // 2):
                own = [group + right + i * size // 2 for i in range(2 * self.windows)]
                total = terms[own[0]]
                for i in own[1:]:
                    total = _combined(reduction, total, terms[i])
                total = _over_lanes(reduction, total, COLUMN_OF_LANES)
                self._write(output, (part, columns[own[0]]), batch, total, self.thread % 32 < 4)

    def _write(self, output: Output, place: tuple, batch: Int32, total: Float32, mine: Any) -> None:
        """place: (row, column) as the kernel sees the parts."""
        row, column = (place[1], place[0]) if self.epilogue.swapped else place
        _write_if(mine, self._parts[output], row, column, batch, total)


@cute.jit
def _write_if(mine: Any, parts: cute.Tensor, row: Int32, column: Int32, batch: Int32, total: Float32) -> None:
    if mine:
        store_checked(parts, row, column, batch, total, Float32)


def _over_lanes(reduction: str, value: Float32, distances: tuple[int, ...]) -> Float32:
    """Combined over lanes at these distances; every lane gets the same bits."""
    for distance in distances:
        value = _combined(reduction, value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value
