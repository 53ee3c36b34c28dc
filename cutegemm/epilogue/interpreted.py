"""An epilogue of which only the graph is known: in another process, which need not have its function."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from cutegemm.epilogue import functions
from cutegemm.epilogue.fuse import Fused
from cutegemm.epilogue.graph import FULL, OPERATORS, Node
from cutegemm.epilogue.kinds import KINDS, Kind
from cutegemm.epilogue.spec import Epilogue, Operand, scaled_size

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    "div": operator.truediv,
    "mod": operator.mod,
    "abs": abs,
    "not": operator.invert,
    "float": lambda x: x.float(),
}


class Interpreted(Fused):
    """A graph, evaluated on tensors node by node; can be fused as the function it was made of. Picklable."""

    def __init__(self, epilogue: Epilogue) -> None:
        self.epilogue, self.graph = epilogue, epilogue.graph
        self.__name__, self.__doc__ = epilogue.name, None
        self.kinds = {operand.name: _kind_of(operand) for operand in epilogue.operands}
        self.defaults = {}
        self.function = self._computed

    def __reduce__(self) -> tuple[Any, ...]:
        return Interpreted, (self.epilogue,)

    def _computed(self, acc: torch.Tensor, **operands: torch.Tensor) -> Any:
        """What the function would return."""
        values: list[Any] = []
        for node in self.graph.nodes:
            values.append(_value(node, values, acc, operands))
        found = []
        for output in self.graph.outputs:
            value = values[output.node]
            columns = scaled_size(acc.shape[-1], self.graph.width(output))
            value = torch.as_tensor(value, device=acc.device).float().expand(*acc.shape[:-1], columns)
            if output.reduction is not None:
                value = getattr(functions, f"{output.axis}_{output.reduction}")(value)
            found.append(value)
        if len(found) == 1:
            return found[0]
        return found[0], {str(o.name): v for o, v in zip(self.graph.outputs[1:], found[1:], strict=True)}


def _kind_of(operand: Operand) -> Kind:
    """The kind an operand was annotated with."""
    same = (operand.modes, operand.width, operand.type)
    kind = next(kind for kind in KINDS if (kind.modes, kind.width, kind.type) == same)
    return kind if operand.dtype is None else kind(operand.dtype)


def _value(node: Node, values: list[Any], acc: torch.Tensor, operands: dict[str, torch.Tensor]) -> Any:
    """One node's value: a tensor that broadcasts against acc or what has its width."""
    inputs = [values[number] for number in node.inputs]
    if node.op == "acc":
        return acc
    if node.op == "operand":
        operand = operands[str(node.detail)]
        if node.guard is None:
            return operand
        return torch.where(torch.as_tensor(values[node.guard], device=acc.device) == 0, 0.0, operand)
    if node.op == "constant":
        dtype = {"float": torch.float32, "int": torch.int32, "bool": torch.bool}[node.type]
        return torch.tensor(node.detail, dtype=dtype, device=acc.device)
    if node.op in ("row_index", "batch_index"):
        return getattr(functions, node.op)(acc)
    if node.op == "column_index":
        columns = scaled_size(acc.shape[-1], FULL if node.width is None else node.width)
        return torch.arange(columns, dtype=torch.int32, device=acc.device)
    if node.op in ("even", "odd"):
        return functions.pairs(inputs[0])[int(node.op == "odd")]
    if node.op == "random":
        return functions.random_at(inputs[0], int(node.detail or 0), inputs[1:])
    if node.op == "cast":
        return functions.cast(inputs[0], str(node.detail))
    return (_OPERATIONS.get(node.op) or getattr(functions, node.op))(*inputs)
