"""Tile orders: which output tile the i-th task is, F(i) -> (m, n).

Every order is a bijection from range(tiles_m * tiles_n) onto the grid, for every grid; the last
strip is simply narrower. An order is any object with the one method ``tile``; nothing is registered.
Inside a kernel with clusters the order walks clusters, and a CTA's rank adds its offset.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cutegemm.errors import ConfigError
from cutegemm.scheduler.arithmetic import Index, divmod_, minimum


@runtime_checkable
class TileOrder(Protocol):
    """What the kernel needs of an order. Equal orders must compare equal: they share a kernel."""

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """The tile (m, n) of task i, 0 <= i < tiles_m * tiles_n.

        Runs on Python ints and on device integers alike: use + - * //, and the functions of
        ``cutegemm.scheduler.arithmetic`` for anything else.
        """
        ...


def _check_group(name: str, group: int) -> None:
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise ConfigError(f"{name}({group!r}): the strip width must be an integer of at least 1, such as 8")


@dataclass(frozen=True)
class RowMajor:
    """N fastest: (0, 0), (0, 1), ..., (1, 0), ..."""

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        return divmod_(i, tiles_n)


@dataclass(frozen=True)
class ColumnMajor:
    """M fastest: (0, 0), (1, 0), ..., (0, 1), ..."""

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        n, m = divmod_(i, tiles_m)
        return m, n


@dataclass(frozen=True)
class GroupedM:
    """Strips of ``group`` tile rows, M fastest inside a strip; the last strip may be narrower.

    A wave of W workers then touches about ``group`` bands of A and W / group bands of B, so that
    both stay in L2 together.
    """

    group: int = 8

    def __post_init__(self) -> None:
        _check_group("GroupedM", self.group)

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        return _tile_in_strips(i, tiles_m, tiles_n, self.group)


@dataclass(frozen=True)
class GroupedN:
    """Strips of ``group`` tile columns, N fastest inside a strip; the last strip may be narrower."""

    group: int = 8

    def __post_init__(self) -> None:
        _check_group("GroupedN", self.group)

    def tile(self, i: Index, tiles_m: Index, tiles_n: Index) -> tuple[Index, Index]:
        """See TileOrder.tile."""
        n, m = _tile_in_strips(i, tiles_n, tiles_m, self.group)
        return m, n


def _tile_in_strips(i: Index, strip_axis: Index, long_axis: Index, group: int) -> tuple[Index, Index]:
    """Coordinates (along the strips' axis, along the long axis) of task i."""
    strip, within = divmod_(i, long_axis * group)
    first = strip * group
    width = minimum(strip_axis - first, group)
    far, near = divmod_(within, width)
    return first + near, far
