"""What an epilogue computes, as a small graph of operations: the form that is keyed, checked and lowered.

A node has a type ("float", "int", "bool") and a width: how many columns it has for each column of the
accumulator. FULL is one for one, HALF one for every pair of columns, DOUBLE a pair for every column; None is
what is the same along a row, and fits each of them.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Number = float | int | bool

FULL, HALF, DOUBLE = 0, -1, 1
WIDTHS = {FULL: "N", HALF: "N / 2", DOUBLE: "2 N", None: "any"}

# Operations by name: how many inputs they have. What each means is in functions.py, in torch's terms, and in
# device.py, in the machine's.
ELEMENTWISE = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floordiv": 2, "mod": 2, "neg": 1, "abs": 1,
    "lt": 2, "le": 2, "gt": 2, "ge": 2, "eq": 2, "ne": 2, "and": 2, "or": 2, "not": 1,
    "where": 3, "minimum": 2, "maximum": 2, "exp": 1, "log": 1, "sqrt": 1, "rsqrt": 1, "tanh": 1,
    "sigmoid": 1, "erf": 1, "gelu": 1, "cast": 1, "float": 1,
}  # fmt: skip
# Those that Python's own operators are, for tensors and for a fragment alike.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "neg": operator.neg, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
LEAVES = ("acc", "operand", "constant", "row_index", "column_index", "batch_index")
REDUCTIONS = ("sum", "max", "amax", "sum_of_squares")


@dataclass(frozen=True)
class Node:
    """One value for each element.

    op       a name of ELEMENTWISE or LEAVES; "even", "odd" (of pairs of columns), "interleave"; or "random"
             of seed, batch, row and column
    inputs   numbers of nodes
    type     "float" (float32), "int" (int32) or "bool"
    width    FULL, HALF, DOUBLE, or None
    detail   of "constant" the number, of "operand" its name, of "cast" the dtype's, of "random" the stream
    guard    of "operand": node of a scalar; where that is 0, the operand is not read and counts as 0
    """

    op: str
    inputs: tuple[int, ...] = ()
    type: str = "float"
    width: int | None = FULL
    detail: Number | str | None = None
    guard: int | None = None

    def __str__(self) -> str:
        detail = "" if self.detail is None else f" {self.detail!r}"
        guard = "" if self.guard is None else f" unless %{self.guard} is 0"
        inputs = "".join(f" %{number}" for number in self.inputs)
        return f"{self.op}{detail}{inputs}{guard}: {self.type} {WIDTHS[self.width]}"


@dataclass(frozen=True)
class Output:
    """One result.

    name       None for the main one
    node       what is stored, or reduced
    dtype      name of a torch dtype; None: that of the problem's output
    reduction  None, or a name of REDUCTIONS
    axis       of a reduction: "row" gives one value for each row, "col" one for each column
    """

    name: str | None
    node: int
    dtype: str | None = None
    reduction: str | None = None
    axis: str | None = None


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which each comes after its inputs, and what is returned of them."""

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    @property
    def main(self) -> Output:
        """The output without a name."""
        return self.outputs[0]

    def width(self, output: Output) -> int:
        """Columns of an output for each column of the accumulator; never None."""
        return self.nodes[output.node].width or FULL

    def uses(self, op: str) -> bool:
        """Whether some node is of an operation."""
        return any(node.op == op for node in self.nodes)

    def pruned(self) -> "Graph":
        """Without nodes that no output depends on."""
        wanted: set[int] = set()
        pending = [output.node for output in self.outputs]
        while pending:
            number = pending.pop()
            if number not in wanted:
                wanted.add(number)
                node = self.nodes[number]
                pending += [*node.inputs, *(() if node.guard is None else (node.guard,))]
        kept = sorted(wanted)
        place = {old: new for new, old in enumerate(kept)}
        nodes = tuple(
            replace(
                self.nodes[old],
                inputs=tuple(place[i] for i in self.nodes[old].inputs),
                guard=None if self.nodes[old].guard is None else place[self.nodes[old].guard],  # type: ignore[index]
            )
            for old in kept
        )
        return Graph(nodes, tuple(replace(output, node=place[output.node]) for output in self.outputs))

    def __str__(self) -> str:
        lines = [f"%{number} = {node}" for number, node in enumerate(self.nodes)]
        for output in self.outputs:
            how = f"{output.reduction} by {output.axis} of " if output.reduction else ""
            dtype = "" if output.dtype is None else f" as {output.dtype}"
            lines.append(f"{output.name or 'main'} = {how}%{output.node}{dtype}")
        return "\n".join(lines)
