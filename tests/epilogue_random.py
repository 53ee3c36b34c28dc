"""Random epilogues: hypothesis picks operations and operands, the function runs them on whatever it is given.

The same plan runs on symbols when it is fused and on torch tensors as the reference.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from cutegemm import epilogue as epi

KINDS = {"scalar": epi.Scalar, "row": epi.Row, "col": epi.Col, "tile": epi.Tile, "seed": epi.Integer}

# Each keeps values of about 1 at about 1, so that no error is blown up on the way to the result.
UNARY: dict[str, Callable[[Any], Any]] = {
    "negated": lambda x: -x,
    "absolute": abs,
    "exp": lambda x: epi.exp(-abs(x)),
    "log": lambda x: epi.log(1.0 + abs(x)),
    "sqrt": lambda x: epi.sqrt(abs(x) + 0.25),
    "rsqrt": lambda x: epi.rsqrt(1.0 + abs(x)),
    "tanh": epi.tanh,
    "sigmoid": epi.sigmoid,
    "erf": epi.erf,
    "relu": epi.relu,
    "gelu": epi.gelu,
    "gelu_tanh": epi.gelu_tanh,
    "silu": epi.silu,
    "square": lambda x: epi.square(epi.tanh(x)),
    "affine": lambda x: 0.75 * x - 0.5,
    "below the diagonal": lambda x: epi.where(epi.row_index(x) >= epi.col_index(x), x, 0.5),
    "every third column": lambda x: epi.where(epi.col_index(x) % 3 == 1, -x, x),
    "batch": lambda x: x + epi.batch_index(x) * 0.25,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * epi.tanh(y),
    "quotient": lambda x, y: x / (1.0 + abs(y)),
    "minimum": epi.minimum,
    "maximum": epi.maximum,
    "smooth choice": lambda x, y: epi.sigmoid(x) * x + (1.0 - epi.sigmoid(x)) * y,
}


@dataclass(frozen=True)
class Step:
    """One operation on values made before, by their numbers; the last in line where there are fewer."""

    op: str
    first: int
    second: int


@dataclass(frozen=True)
class Plan:
    """A random epilogue.

    operands    kinds, in order
    steps       what is done
    outputs     how many of the last values are further outputs: float32, or a reduction of this name
    gated       whether the result is the product of its pairs of columns
    dropout     whether a seed comes in, and drops some elements
    """

    operands: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    gated: bool
    dropout: bool

    def compute(self, acc: Any, *operands: Any) -> Any:
        """What the function does: every value is used, so that nothing is refused as dead."""
        values = [acc, *operands[: len(self.operands)]]
        for step in self.steps:
            first, second = (values[min(i, len(values) - 1)] for i in (step.first, step.second))
            if step.op in UNARY:
                values.append(UNARY[step.op](first + 0.0 * acc))
            else:
                values.append(BINARY[step.op](first, second))
        result = acc
        for value in values[1:]:
            result = 0.5 * result + value
        if self.dropout:
            result = epi.where(epi.random(acc, operands[-1]) < 0.25, 0.0, result)
        further = {}
        for i, name in enumerate(self.outputs):
            value = values[-1 - i % len(values)] + 0.0 * acc
            further[f"o{i}"] = epi.cast(value, "float32") if name == "matrix" else getattr(epi, name)(value)
        if self.gated:
            gate, up = epi.pairs(result)
            result = epi.sigmoid(gate) * up
        return (result, further) if further else result

    def fused(self) -> epi.Fused:
        """The epilogue, with as many operands as the plan has."""
        names = [f"x{i}" for i in range(len(self.operands))] + ["seed"] * self.dropout
        kinds = [KINDS[kind] for kind in self.operands] + [epi.Integer] * self.dropout
        source = f"def drawn(acc, {', '.join(names)}):\n    return compute(acc, {', '.join(names)})\n"
        space: dict[str, Any] = {"compute": self.compute}
        exec(compile(source, "<drawn>", "exec"), space)  # a function with these parameters
        function: types.FunctionType = space["drawn"]
        function.__annotations__ = dict(zip(names, kinds, strict=True))
        return epi.fuse(function)


NUMBERS = st.integers(0, 12)
STEPS = st.builds(Step, st.sampled_from([*UNARY, *BINARY]), NUMBERS, NUMBERS)
OUTPUTS = ["matrix", "row_sum", "row_amax", "row_max", "row_sum_of_squares", "col_sum", "col_amax", "col_max"]
PLANS = st.builds(
    Plan,
    st.lists(st.sampled_from(["scalar", "row", "col", "tile"]), max_size=4).map(tuple),
    st.lists(STEPS, min_size=1, max_size=8).map(tuple),
    st.lists(st.sampled_from(OUTPUTS), max_size=2).map(tuple),
    st.booleans(),
    st.booleans(),
)
