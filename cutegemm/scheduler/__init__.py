"""Which output tile next: an order F(i) -> (m, n) and an assignment worker -> i, freely combined.

arithmetic.py   integer arithmetic shared by host and device
order.py        RowMajor, ColumnMajor, GroupedM, GroupedN, Blocked, Morton, Hilbert
assignment.py   Persistent, Static, SplitK
default.py      the order chosen when none is given
checker.py      is an order a bijection?
analysis.py     waves: which tiles run together, and what they read
report.py       the same as a table, for the command line
plot.py         the same as a picture
notation.py     schedulers as text, for the command line
"""

from dataclasses import dataclass, field

from cutegemm.errors import OperandTypeError
from cutegemm.scheduler.analysis import Grid, Summary, Tile, Wave, summarise, waves
from cutegemm.scheduler.assignment import Assignment, Persistent, SplitK, Static
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

__all__ = [
    "Assignment",
    "Blocked",
    "ColumnMajor",
    "GroupedM",
    "GroupedN",
    "Hilbert",
    "Morton",
    "Persistent",
    "RowMajor",
    "SplitK",
    "Static",
    "Summary",
    "Tile",
    "TileOrder",
    "TileScheduler",
    "Wave",
    "check_bijection",
    "default_order",
    "summarise",
]


@dataclass(frozen=True)
class TileScheduler:
    """An order of tiles and an assignment of tasks to workers.

    ``order`` is any object with ``tile(i, tiles_m, tiles_n) -> (m, n)``, ``assignment`` one with
    ``workers``, ``first`` and ``next``; see the protocols TileOrder and Assignment.

    Raises OperandTypeError when a part lacks its methods.
    """

    order: TileOrder = field(default_factory=GroupedM)
    assignment: Assignment = field(default_factory=Persistent)

    def __post_init__(self) -> None:
        if not isinstance(self.order, TileOrder):
            raise OperandTypeError(
                f"order={self.order!r} has no method tile(i, tiles_m, tiles_n); "
                "pass an order such as GroupedM(8), or any object with that method"
            )
        if not isinstance(self.assignment, Assignment):
            raise OperandTypeError(
                f"assignment={self.assignment!r} lacks workers(), first() or next(); "
                "pass an assignment such as Persistent()"
            )

    @property
    def splits(self) -> int:
        """CTAs that share one tile's K."""
        return getattr(self.assignment, "splits", 1)

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
