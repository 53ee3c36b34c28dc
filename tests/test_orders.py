"""Every order visits every tile of every grid exactly once, on the host and in the code of a kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cutegemm.errors import ConfigError, OperandTypeError
from cutegemm.scheduler import (
    Blocked,
    ColumnMajor,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    RowMajor,
    TileOrder,
    check_bijection,
)
from cutegemm.scheduler.arithmetic import ceil_div, divisor, divmod_, minimum, select
from cutegemm.scheduler.checker import tiles_of
from cutegemm.scheduler.order import MAX_EXTENT

EXTENTS = st.one_of(st.integers(1, 40), st.integers(1, 250), st.integers(1, MAX_EXTENT))
CURVE_SIDES = st.integers(0, 15).map(lambda bits: 2**bits)
SIDES = st.one_of(st.integers(1, 4), st.integers(1, 200))
ORDERS = st.one_of(
    st.just(RowMajor()),
    st.just(ColumnMajor()),
    st.builds(GroupedM, EXTENTS),
    st.builds(GroupedN, EXTENTS),
    st.builds(Blocked, EXTENTS, EXTENTS),
    st.builds(Morton, CURVE_SIDES),
    st.builds(Hilbert, CURVE_SIDES),
)
ONE_OF_EACH = (
    RowMajor(),
    ColumnMajor(),
    GroupedM(8),
    GroupedM(6),
    GroupedN(5),
    Blocked(8, 16),
    Blocked(6, 7),
    Morton(8),
    Morton(64),
    Hilbert(8),
    Hilbert(64),
)


def path(order: TileOrder, tiles_m: int, tiles_n: int) -> list[tuple[int, int]]:
    """The tiles in order."""
    m, n = tiles_of(order, tiles_m, tiles_n)
    return list(zip(m.tolist(), n.tolist(), strict=True))


def steps(order: TileOrder, tiles_m: int, tiles_n: int) -> np.ndarray:
    """How far, in rows plus columns, each tile is from the one before it."""
    m, n = tiles_of(order, tiles_m, tiles_n)
    return np.abs(np.diff(m)) + np.abs(np.diff(n))


# --- bijections --------------------------------------------------------------------------------------------


@given(ORDERS, SIDES, SIDES)
@example(Hilbert(8), 1, 200)
@example(Hilbert(8), 200, 1)
@example(Morton(MAX_EXTENT), 129, 127)
@settings(max_examples=300, deadline=None)
def test_every_order_is_a_bijection(order: TileOrder, tiles_m: int, tiles_n: int) -> None:
    check_bijection(order, tiles_m, tiles_n)


@pytest.mark.parametrize("order", ONE_OF_EACH, ids=repr)
def test_every_order_is_a_bijection_on_every_small_grid(order: TileOrder) -> None:
    for tiles_m in range(1, 20):
        for tiles_n in range(1, 20):
            check_bijection(order, tiles_m, tiles_n)


@pytest.mark.parametrize("grid", [(1000, 1000), (1, 1_000_000), (1_000_000, 1), (1009, 991)], ids=str)
@pytest.mark.parametrize("order", ONE_OF_EACH[2:], ids=repr)
def test_large_grids(order: TileOrder, grid: tuple[int, int]) -> None:
    check_bijection(order, *grid)


@given(ORDERS, st.integers(1, 30), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_arrays_and_single_numbers_agree(order: TileOrder, tiles_m: int, tiles_n: int) -> None:
    one_by_one = [order.tile(i, tiles_m, tiles_n) for i in range(tiles_m * tiles_n)]
    assert path(order, tiles_m, tiles_n) == one_by_one
    assert all(type(m) is int and type(n) is int for m, n in one_by_one)


@given(ORDERS, SIDES, SIDES, st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]))
@settings(max_examples=60, deadline=None)
def test_tiles_are_visited_once_with_clusters_too(
    order: TileOrder, tiles_m: int, tiles_n: int, cluster: tuple[int, int]
) -> None:
    """Clusters round the grid up; each output tile is in one of them, those beyond the edge are nobody's."""
    rows, columns = cluster
    m, n = tiles_of(order, ceil_div(tiles_m, rows), ceil_div(tiles_n, columns))
    visits = np.zeros((tiles_m + rows, tiles_n + columns), dtype=int)
    for row in range(rows):
        for column in range(columns):
            np.add.at(visits, (m * rows + row, n * columns + column), 1)
    assert (visits[:tiles_m, :tiles_n] == 1).all()


# --- the shape of each order -------------------------------------------------------------------------------


def test_boxes_are_visited_one_after_another() -> None:
    assert path(Blocked(2, 2), 3, 3) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_each_box_of_a_grid_of_whole_boxes_is_a_run_of_tasks(
    rows: int, cols: int, boxes_m: int, boxes_n: int
) -> None:
    tiles = path(Blocked(rows, cols), rows * boxes_m, cols * boxes_n)
    for start in range(0, len(tiles), rows * cols):
        box = tiles[start : start + rows * cols]
        assert len({m for m, _ in box}) == rows
        assert len({n for _, n in box}) == cols


@given(SIDES, SIDES, st.integers(1, 250))
@settings(max_examples=40, deadline=None)
def test_boxes_as_wide_as_the_grid_are_row_major_and_boxes_of_one_column_are_strips(
    tiles_m: int, tiles_n: int, rows: int
) -> None:
    assert path(Blocked(rows, tiles_n), tiles_m, tiles_n) == path(RowMajor(), tiles_m, tiles_n)
    assert path(Blocked(rows, 1), tiles_m, tiles_n) == path(GroupedM(rows), tiles_m, tiles_n)


@given(st.integers(0, 6), st.integers(0, 2**12 - 1))
def test_morton_interleaves_the_bits_of_row_and_column(bits: int, i: int) -> None:
    i %= 4**bits
    digits = f"{i:0{2 * bits}b}" if bits else ""
    expected = int(digits[::2] or "0", 2), int(digits[1::2] or "0", 2)
    assert Morton(2**bits).tile(i, 2**bits, 2**bits) == expected


@pytest.mark.parametrize("curve", [Morton, Hilbert])
@given(tiles_m=st.integers(1, 60), tiles_n=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_a_cut_curve_keeps_the_order_of_the_whole_curve(curve: type[Any], tiles_m: int, tiles_n: int) -> None:
    whole = path(curve(64), 64, 64)
    assert path(curve(64), tiles_m, tiles_n) == [(m, n) for m, n in whole if m < tiles_m and n < tiles_n]


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 32, 64])
def test_hilbert_never_jumps(side: int) -> None:
    """Within a square, and from square to square of a strip, every step goes to a neighbour."""
    assert path(Hilbert(side), side, side)[-1] == (0, side - 1)
    assert (steps(Hilbert(side), side, 5 * side) == 1).all()
    several = steps(Hilbert(side), 4 * side, 3 * side)
    assert np.count_nonzero(several != 1) <= 3  # at the ends of the strips
    assert several.max() <= side


def test_hilbert_s_first_square() -> None:
    assert path(Hilbert(4), 4, 4) == [
        (0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1),
        (2, 2), (3, 2), (3, 3), (2, 3), (1, 3), (1, 2), (0, 2), (0, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("order", [GroupedM(8), GroupedN(8), Hilbert(8), Hilbert(16), Morton(8)], ids=repr)
def test_a_wave_of_a_good_order_reads_few_bands(order: TileOrder) -> None:
    """A wave of 132 tiles needs 23 bands at the very least; row by row it needs 67 on this grid."""
    m, n = tiles_of(order, 128, 64)
    read = [
        len(np.unique(m[start : start + 132])) + len(np.unique(n[start : start + 132]))
        for start in range(0, 128 * 64, 132)
    ]
    assert np.mean(read) <= 32
    assert max(read) <= 41


# --- what is refused ---------------------------------------------------------------------------------------

BAD_EXTENTS = (0, -8, 2.0, True, "8", None, MAX_EXTENT + 1)


@pytest.mark.parametrize("value", BAD_EXTENTS)
def test_extents_are_positive_integers(value: Any) -> None:
    for make in (
        GroupedM,
        GroupedN,
        lambda rows: Blocked(rows, 4),
        lambda cols: Blocked(4, cols),
    ):
        with pytest.raises(
            ConfigError, match=r"must be an integer of at least 1, such as 8, and at most 32768"
        ):
            make(value)
    with pytest.raises(ConfigError) as caught:
        Blocked(4, value)
    assert str(caught.value).startswith(f"Blocked(4, {value!r}): the columns of a box must")


@pytest.mark.parametrize("curve", [Morton, Hilbert])
@pytest.mark.parametrize("value", [*BAD_EXTENTS, 3, 12, 2**16])
def test_curves_go_through_squares_of_a_power_of_two(curve: type[Any], value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        curve(value)
    assert str(caught.value).startswith(
        f"{curve.__name__}({value!r}): the side of a box must be a power of two"
    )


@given(SIDES, SIDES)
@settings(max_examples=20, deadline=None)
def test_pieces_larger_than_the_grid_end_at_the_grid(tiles_m: int, tiles_n: int) -> None:
    largest = MAX_EXTENT
    row_major, column_major = (path(order, tiles_m, tiles_n) for order in (RowMajor(), ColumnMajor()))
    assert path(GroupedM(largest), tiles_m, tiles_n) == column_major
    assert path(GroupedN(largest), tiles_m, tiles_n) == row_major
    assert path(Blocked(largest, largest), tiles_m, tiles_n) == row_major
    for curve in (Morton, Hilbert):  # sides of 2^15 and 2^9: a Hilbert curve is turned from power to power
        assert path(curve(largest), tiles_m, tiles_n) == path(curve(512), tiles_m, tiles_n)


# --- the checker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """An order that is wrong in a way of one's choice."""

    change: Callable[[int, int, int], Any]

    def tile(self, i: int, tiles_m: int, tiles_n: int) -> Any:
        m, n = divmod_(i, tiles_n)
        return self.change(i, m, n)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda i, m, n: (m * (i != 5), n), r"task 5 is tile \(0, 1\), as task 1 was; 1 of 12 .* \(1, 1\)"),
        (lambda i, m, n: (m + (i > 10), n), r"task 11 is tile \(3, 3\), outside the grid; 1 of .* \(2, 3\)"),
        (lambda i, m, n: (m, n - 2 * (i == 4)), r"task 4 is tile \(1, -2\), outside the grid"),
        (lambda i, m, n: (n, m), r"task 3 is tile \(3, 0\), outside the grid; 3 of 12 .* \(0, 3\)"),
        (lambda i, m, n: (0, 0), r"task 1 is tile \(0, 0\), as task 0 was; 11 of 12 .* \(0, 1\)"),
        (lambda i, m, n: (m if m < 1 else 0, n), r"task 4 is tile \(0, 0\), as task 0 was"),  # no arrays
    ],
)  # fmt: skip
def test_the_checker_names_what_is_wrong(change: Callable[[int, int, int], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_bijection(Wrong(change), 3, 4)


@pytest.mark.parametrize("result", [None, 3, (1, 2, 3), (0.0, 1), ("0", 0)])
def test_a_tile_is_a_pair_of_integers(result: Any) -> None:
    with pytest.raises(
        OperandTypeError, match=r"\.tile\(0, 2, 2\) gave .*; a tile is a pair \(m, n\) of integers"
    ):
        check_bijection(Wrong(lambda i, m, n: result), 2, 2)


def test_the_checker_s_arguments() -> None:
    with pytest.raises(OperandTypeError, match="no method tile"):
        check_bijection(8, 2, 2)  # type: ignore[arg-type]
    for sides in ((0, 3), (3, -1), (2.0, 2), (True, 2)):
        with pytest.raises(ConfigError, match="the tiles of a grid are an integer of at least 1"):
            check_bijection(RowMajor(), *sides)  # type: ignore[arg-type]


@dataclass
class DifferentOnArrays:
    """Right for single tasks; on arrays it answers something else that looks right too."""

    def tile(self, i: Any, tiles_m: int, tiles_n: int) -> Any:
        if isinstance(i, np.ndarray):
            return np.zeros_like(i), np.zeros_like(i)
        return divmod(i, tiles_n)


def test_an_order_is_judged_by_its_single_tasks() -> None:
    check_bijection(DifferentOnArrays(), 9, 7)


# --- arithmetic on the host --------------------------------------------------------------------------------

WORDS = st.integers(0, 2**31 - 1)


@given(WORDS, st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1), st.booleans())
def test_arithmetic_on_single_numbers_and_on_arrays(a: int, b: int, c: int, first: bool) -> None:
    assert divmod_(a, b) == divmod(a, b) == divmod_(a, divisor(b))
    assert select(first, a, b) == (a if first else b)
    arrays = np.array([a, a]), np.array([b, c])
    assert [x.tolist() for x in divmod_(*arrays)] == [[a // b, a // c], [a % b, a % c]]
    assert minimum(*arrays).tolist() == [min(a, b), min(a, c)]
    assert select(np.array([first, not first]), *arrays).tolist() == [a if first else b, c if first else a]
