"""Which output tile next: an order F(i) -> (m, n) and an assignment worker -> i, freely combined.

arithmetic.py   integer arithmetic shared by host and device
order.py        RowMajor, ColumnMajor, GroupedM, GroupedN, Blocked, Morton, Hilbert
assignment.py   Persistent, Static, Dynamic, SplitK
stream.py       StreamK
default.py      the order chosen when none is given
checker.py      is an order a bijection?
trial.py        parts from outside the package, tried out
identity.py     what a scheduler is called in the cache
analysis.py     waves: which tiles run together, and what they read
report.py       the same as a table, for the command line
plot.py         the same as a picture
notation.py     schedulers as text, for the command line
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from cutegemm.errors import OperandTypeError
from cutegemm.scheduler.analysis import Grid, Summary, Tile, Wave, summarise, waves
from cutegemm.scheduler.assignment import Assignment, Dynamic, Persistent, SplitK, Static
from cutegemm.scheduler.checker import check_bijection
from cutegemm.scheduler.default import default_order
from cutegemm.scheduler.order import (
    Blocked,
    ColumnMajor,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    RowMajor,
    TileOrder,
)
from cutegemm.scheduler.stream import StreamK

__all__ = [
    "Assignment",
    "Blocked",
    "ColumnMajor",
    "Dynamic",
    "GroupedM",
    "GroupedN",
    "Hilbert",
    "Morton",
    "Persistent",
    "RowMajor",
    "SplitK",
    "Static",
    "StreamK",
    "Summary",
    "Tile",
    "TileOrder",
    "TileScheduler",
    "Wave",
    "check_bijection",
    "default_order",
    "summarise",
]

_ORDER_METHODS = {"tile": ("i", "tiles_m", "tiles_n")}
_ASSIGNMENT_METHODS = {"workers": ("tasks", "resident"), "first": ("worker",), "next": ("task", "workers")}


@dataclass(frozen=True)
class TileScheduler:
    """An order of tiles and an assignment of tasks to workers.

    ``order`` is any object with ``tile(i, tiles_m, tiles_n) -> (m, n)``, ``assignment`` one with
    ``workers``, ``first`` and ``next``; see the protocols TileOrder and Assignment.

    Raises OperandTypeError when a part lacks its methods. What parts from outside the package do is tried out
    when a kernel is made of them, see trial.py.
    """

    order: TileOrder = field(default_factory=GroupedM)
    assignment: Assignment = field(default_factory=Persistent)

    def __post_init__(self) -> None:
        _check_methods("order", self.order, _ORDER_METHODS, "GroupedM(8)")
        _check_methods("assignment", self.assignment, _ASSIGNMENT_METHODS, "Persistent()")

    @classmethod
    def splitting(cls, splits: int) -> "TileScheduler":
        """What a kernel gets when nobody asks for a scheduler; ``splits`` CTAs share a tile's K."""
        return cls(assignment=SplitK(splits)) if splits > 1 else cls()

    @property
    def splits(self) -> int:
        """CTAs that share one tile's K."""
        return getattr(self.assignment, "splits", 1)

    @property
    def queued(self) -> bool:
        """Whether workers fetch their tasks from a counter on the GPU."""
        return isinstance(self.assignment, Dynamic)

    @property
    def streamed(self) -> bool:
        """Whether workers share tiles along K through global memory."""
        return isinstance(self.assignment, StreamK)

    def waves(
        self,
        tiles_m: int,
        tiles_n: int,
        workers: int,
        *,
        tile_m: int,
        tile_n: int,
        k: int,
        dtype: object,
        cluster: tuple[int, int] = (1, 1),
        batch: int = 1,
    ) -> list[Wave]:
        """The waves in which a grid of tiles_m x tiles_n output tiles is done.

        workers         clusters the GPU runs at one time
        tile_m, tile_n  elements of a tile
        k, dtype        depth of the product, and the dtype of A and B (name or torch dtype)
        cluster         CTAs of a cluster along M and N, each with a tile; the order walks clusters
        batch           independent products, one after another

        ``summarise(waves, workers * CTAs of a cluster)`` has efficiency and working set of the whole.
        Raises ConfigError, OperandTypeError.
        """
        grid = Grid(tiles_m, tiles_n, tile_m, tile_n, k, dtype, cluster, batch)
        return waves(self.order, self.assignment, grid, workers)

    def __str__(self) -> str:
        return f"{self.order!r} x {self.assignment!r}"


def _check_methods(role: str, part: object, methods: Mapping[str, tuple[str, ...]], example: str) -> None:
    """Raises OperandTypeError unless ``part`` is an object with these methods of so many arguments."""
    if isinstance(part, type):
        raise OperandTypeError(f"{role}={part!r} is a class; pass an object of it, such as {example}")
    for name, arguments in methods.items():
        wanted = f"{name}({', '.join(arguments)})"
        method = getattr(part, name, None)
        if not callable(method):
            raise OperandTypeError(
                f"{role}={part!r} has no method {wanted}; pass one such as {example}, or any object with "
                + " and ".join(f"{key}({', '.join(needed)})" for key, needed in methods.items())
            )
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise OperandTypeError(
                f"{role}={part!r}: {name} is called as {wanted}, which it does not take: {error}"
            ) from error
        except ValueError:  # a built-in without a signature: the trial will tell
            continue
