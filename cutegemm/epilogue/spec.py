"""An epilogue as a part of the question: what is computed, and of what operands. Hashable, and printable."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cutegemm.epilogue.graph import DOUBLE, FULL, Graph, Output

Access = Literal["direct", "staged"]


@dataclass(frozen=True)
class Operand:
    """One operand of an epilogue.

    name, modes, width, type   see ``kinds.Kind``
    dtype    of a tensor, by name; None while it is not known
    batched  whether the tensor has a leading L
    access   "staged": through shared memory by TMA, which wants lines as D has and 16-byte units; or "direct"
    """

    name: str
    modes: str
    width: int = FULL
    type: str = "float"
    dtype: str | None = None
    batched: bool = False
    access: Access = "direct"

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number."""
        return not self.modes


@dataclass(frozen=True)
class Epilogue:
    """What is fused behind a product.

    name      of the function; no part of what is compiled
    swapped   whether the kernel sees rows as columns: it computes D^T
    direct    names of further outputs that TMA cannot store
    """

    name: str = field(repr=False, compare=False)
    graph: Graph
    operands: tuple[Operand, ...] = ()
    swapped: bool = False
    direct: tuple[str, ...] = ()

    def bound(self, operands: tuple[Operand, ...], direct: tuple[str, ...] = ()) -> "Epilogue":
        """The same with operands whose dtypes are known, and with further outputs that TMA cannot store."""
        return replace(self, operands=operands, direct=direct)

    def swap(self) -> "Epilogue":
        """The same for a kernel that computes D^T."""
        return replace(self, swapped=not self.swapped)

    @property
    def width(self) -> int:
        """Columns of the main output for each of the product's, as a Node's width."""
        return self.graph.width(self.graph.main)

    @property
    def is_wide(self) -> bool:
        """Whether operands or outputs have two columns for each of the product's."""
        widths = [operand.width for operand in self.operands]
        widths += [self.graph.width(output) for output in self.graph.outputs]
        return DOUBLE in widths

    @property
    def further(self) -> tuple[Output, ...]:
        """Outputs beside the main one."""
        return self.graph.outputs[1:]

    @property
    def reductions(self) -> tuple[Output, ...]:
        """Outputs that are reductions."""
        return tuple(output for output in self.further if output.reduction)

    @property
    def pairs(self) -> bool:
        """Whether neighbouring columns meet in it."""
        return any(self.graph.uses(op) for op in ("even", "odd", "interleave")) or any(
            operand.width != FULL for operand in self.operands
        )

    @property
    def scalars(self) -> tuple[Operand, ...]:
        """Operands that are numbers."""
        return tuple(operand for operand in self.operands if operand.is_scalar)

    @property
    def staged(self) -> tuple[Operand, ...]:
        """Operands that come through shared memory."""
        return tuple(operand for operand in self.operands if operand.access == "staged")

    def guard_of(self, operand: Operand) -> int | None:
        """The node that says whether an operand is read at all: it is not where that is 0. None: always."""
        uses = {
            node.guard for node in self.graph.nodes if node.op == "operand" and node.detail == operand.name
        }
        return next(iter(uses)) if len(uses) == 1 else None

    @property
    def columns(self) -> tuple[Operand, ...]:
        """Operands by column."""
        return tuple(operand for operand in self.operands if self.by_column(operand))

    @property
    def stored(self) -> tuple[Output, ...]:
        """Outputs that are matrices, the main one first."""
        return tuple(output for output in self.graph.outputs if output.reduction is None)

    def by_column(self, operand: Operand) -> bool:
        """Whether an operand has one value for each of the kernel's columns, FULL width."""
        return operand.modes == ("m" if self.swapped else "n") and operand.width == FULL

    def by_row(self, operand: Operand) -> bool:
        """Whether an operand has one value for each of the kernel's rows."""
        return operand.modes == ("n" if self.swapped else "m") and operand.width == FULL

    def __str__(self) -> str:
        return self.name


def scaled_size(size: Any, width: int) -> Any:
    """Columns of a matrix of a width beside ``size`` of the product's, a number of Python's or a kernel's."""
    return size >> 1 if width < 0 else size << width
