"""Which output tile next: an order F(i) -> (m, n) and an assignment worker -> i, freely combined.

arithmetic.py   integer arithmetic shared by host and device
order.py        RowMajor, ColumnMajor, GroupedM, GroupedN
assignment.py   Persistent, Static
"""

from dataclasses import dataclass, field

from cutegemm.errors import OperandTypeError
from cutegemm.scheduler.assignment import Assignment, Persistent, Static
from cutegemm.scheduler.order import ColumnMajor, GroupedM, GroupedN, RowMajor, TileOrder

__all__ = [
    "Assignment",
    "ColumnMajor",
    "GroupedM",
    "GroupedN",
    "Persistent",
    "RowMajor",
    "Static",
    "TileOrder",
    "TileScheduler",
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

    def __str__(self) -> str:
        return f"{self.order!r} x {self.assignment!r}"
