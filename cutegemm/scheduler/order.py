"""Tile orders: which output tile the i-th task is, F(i) -> (m, n).

Every order is a bijection from range(tiles_m * tiles_n) onto the grid, for every grid; the last
strip or box is simply narrower. An order is any object with the one method ``tile``; nothing is
registered. Inside a kernel with clusters the order walks clusters, and a CTA's rank adds its offset.

    strips      GroupedM, GroupedN
    boxes       Blocked; Morton and Hilbert walk each box along a space-filling curve

A strip, box or curve that is larger than the grid ends at the grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cutegemm.errors import ConfigError
from cutegemm.scheduler.arithmetic import Condition, Index, divisor, divmod_, minimum, select


@runtime_checkable
class TileOrder(Protocol):
    """What the kernel needs of an order. Equal orders must compare equal: they share a kernel."""

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """The tile (m, n) of task i, 0 <= i < tiles_m * tiles_n.

        Runs on Python ints and on device integers alike: use + - * and the functions of
        ``cutegemm.scheduler.arithmetic`` for anything else.
        """
        ...


# Tiles along one side of a strip or box; two such sides multiply within 32 bits.
MAX_EXTENT = 2**15


def _check_extent(given: str, value: int, meaning: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_EXTENT:
        raise ConfigError(
            f"{given}: {meaning} must be an integer of at least 1, such as 8, and at most {MAX_EXTENT}"
        )


@dataclass(frozen=True)
class RowMajor:
    """N fastest: (0, 0), (0, 1), ..., (1, 0), ..."""

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        return divmod_(i, divisor(tiles_n))


@dataclass(frozen=True)
class ColumnMajor:
    """M fastest: (0, 0), (1, 0), ..., (0, 1), ..."""

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        n, m = divmod_(i, divisor(tiles_m))
        return m, n


@dataclass(frozen=True)
class GroupedM:
    """Strips of ``group`` tile rows, M fastest inside a strip; the last strip may be narrower.

    A wave of W workers then touches about ``group`` bands of A and W / group bands of B, so that
    both stay in L2 together. One row makes it RowMajor, all rows or more ColumnMajor.

    Raises ConfigError for a group that is no integer of at least 1.
    """

    group: int = 8

    def __post_init__(self) -> None:
        _check_extent(f"GroupedM({self.group!r})", self.group, "the strip width")

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        return _tile_in_strips(i, tiles_m, tiles_n, self.group)


@dataclass(frozen=True)
class GroupedN:
    """Strips of ``group`` tile columns, N fastest inside a strip; the last strip may be narrower.

    The mirror image of GroupedM. Raises ConfigError for a group that is no integer of at least 1.
    """

    group: int = 8

    def __post_init__(self) -> None:
        _check_extent(f"GroupedN({self.group!r})", self.group, "the strip width")

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        n, m = _tile_in_strips(i, tiles_n, tiles_m, self.group)
        return m, n


@dataclass(frozen=True)
class Blocked:
    """Boxes of ``rows`` x ``cols`` tiles, box by box along N, N fastest inside a box too.

    A wave that is as large as a box touches ``rows`` bands of A and ``cols`` bands of B. (With M fastest
    inside, boxes that follow each other along N would be the strips of GroupedM(rows) exactly.) Boxes at
    the lower and right edge are cut off by the grid.

    Raises ConfigError for a side that is no integer of at least 1.
    """

    rows: int = 8
    cols: int = 16

    def __post_init__(self) -> None:
        given = f"Blocked({self.rows!r}, {self.cols!r})"
        _check_extent(given, self.rows, "the rows of a box")
        _check_extent(given, self.cols, "the columns of a box")

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        box = _box_of(i, tiles_m, tiles_n, self.rows, self.cols)
        m, n = divmod_(box.task, box.width)
        return box.first_m + m, box.first_n + n


def _check_side(name: str, side: int) -> None:
    is_integer = isinstance(side, int) and not isinstance(side, bool)
    if not is_integer or not 1 <= side <= MAX_EXTENT or side & (side - 1):
        raise ConfigError(
            f"{name}({side!r}): the side of a box must be a power of two from 1 to {MAX_EXTENT}, such as 8"
        )


@dataclass(frozen=True)
class Morton:
    """The Z curve through boxes of ``side`` x ``side`` tiles, box by box along N.

    A Z curve visits the four quadrants of a square one after another, each in the same way: any run of
    consecutive tasks is a few compact patches, whatever the number of workers. Where the grid cuts a
    box off, the curve skips what is outside: the tiles inside keep the order they have on the whole
    curve. Task i is found without visiting the others, by descending through the quadrants and counting
    how many tiles of each are inside: log2(side) steps of additions and comparisons, whose cost is why
    the curve ends at boxes. Beyond a few times the tiles of a wave it does not matter in which order
    patches follow each other.

    A side at least as long as the grid makes it one Z curve through the whole grid.
    Raises ConfigError for a side that is no power of two up to 2^15.
    """

    side: int = 8

    def __post_init__(self) -> None:
        _check_side("Morton", self.side)

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        box = _box_of(i, tiles_m, tiles_n, self.side, self.side)
        m, n, task = box.first_m, box.first_n, box.task
        height, width = box.height, box.width
        for half in _halves(self.side):
            upper, height, task = _cut(task, height, width, half, False)
            left, width, task = _cut(task, width, height, half, False)
            m = m + select(upper, 0, half)
            n = n + select(left, 0, half)
        return m, n


@dataclass(frozen=True)
class Hilbert:
    """The Hilbert curve through boxes of ``side`` x ``side`` tiles, boxes there and back along N.

    As Morton, but each quadrant is turned so that the curve never jumps: every step goes to a neighbouring
    tile, from box to box along a strip too, except at the end of a strip and where the grid cuts a box off
    (tiles outside are skipped). Odd strips run backwards.

    A side at least as long as the grid makes it one Hilbert curve through the whole grid.
    Raises ConfigError for a side that is no power of two up to 2^15.
    """

    side: int = 8

    def __post_init__(self) -> None:
        _check_side("Hilbert", self.side)

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        box = _box_of(i, tiles_m, tiles_n, self.side, self.side)
        m, n = _on_hilbert_curve(box.task, box.height, box.width, self.side)
        n = box.first_n + n
        _, odd = divmod_(box.strip, 2)
        return box.first_m + m, select(odd == 1, tiles_n - 1 - n, n)


def _halves(side: int) -> Iterator[int]:
    """side / 2, side / 4, ..., 1"""
    while side > 1:
        side //= 2
        yield side


def _cut(
    task: Index, length: Index, other: Index, half: int, far_first: Condition
) -> tuple[Condition, Index, Index]:
    """Cuts a ``length`` x ``other`` rectangle at ``half`` of its length and finds the part a task is in.

    The far part is what the rectangle has beyond ``half``: often less than the near one, or nothing.
    Returns whether the task is in the part visited first, that part's length, and its number within it.
    """
    near = minimum(length, half)
    far = length - near
    before_cut = select(far_first, far, near)
    tasks = before_cut * other
    first = task < tasks
    return first, select(first, before_cut, length - before_cut), task - select(first, 0, tasks)


def _on_hilbert_curve(task: Index, height: Index, width: Index, side: int) -> tuple[Index, Index]:
    """(m, n) of a task on the curve from the top left to the top right of a square, cut to height x width.

    The curve gets ahead along one axis, N at first, and goes out and back across the other: four quadrants.
    In the first and the last of them the axes change places, and the last one runs backwards on both.
    """
    along, across = 0, 0
    length, breadth = width, height
    turned: Condition = False  # along is M
    backwards: Condition = False
    for half in _halves(side):
        first, length, task = _cut(task, length, breadth, half, backwards)
        far = first ^ backwards ^ True
        out, breadth, task = _cut(task, breadth, length, half, far)
        along = along + select(far, half, 0)
        across = across + select(out ^ far, 0, half)
        turn = first ^ out ^ True
        along, across = select(turn, across, along), select(turn, along, across)
        length, breadth = select(turn, breadth, length), select(turn, length, breadth)
        turned = turned ^ turn
        backwards = backwards ^ (turn & (first ^ True))
    return select(turned, along, across), select(turned, across, along)


@dataclass(frozen=True)
class _Box:
    """The box a task is in: its strip, corner and sides, cut to the grid, and the task's number in it."""

    strip: Index
    first_m: Index
    first_n: Index
    height: Index
    width: Index
    task: Index


def _box_of(i: Index, tiles_m: Index, tiles_n: Index, rows: int, cols: int) -> _Box:
    strip, within = divmod_(i, divisor(minimum(rows, tiles_m) * tiles_n))
    first_m = strip * rows
    height = minimum(tiles_m - first_m, rows)
    box, task = divmod_(within, height * cols)
    first_n = box * cols
    return _Box(strip, first_m, first_n, height, minimum(tiles_n - first_n, cols), task)


def _tile_in_strips(i: Index, strip_axis: Index, long_axis: Index, group: int) -> tuple[Index, Index]:
    """Coordinates (along the strips' axis, along the long axis) of task i.

    Only the strip is found with a prepared divisor. Widths could be prepared too, of all strips and of the
    last; but where accumulators leave a kernel few registers, those would make it spill.
    """
    strip, within = divmod_(i, divisor(minimum(group, strip_axis) * long_axis))
    first = strip * group
    far, near = divmod_(within, minimum(strip_axis - first, group))
    return first + near, far
