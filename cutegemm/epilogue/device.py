"""A graph evaluated on values in registers. Knows a fragment and where its elements belong; no architecture.

A store hands over float32 values of one thread with their rows and columns in the user's result, two
neighbouring columns side by side, and a source that says where operands come from. What it gets back are
the values of every output, to be stored as it sees fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32

from cutegemm.epilogue.functions import GOLDEN, MIX_1, MIX_2, UNIT
from cutegemm.epilogue.graph import FULL, HALF, OPERATORS, Graph, Node, Output
from cutegemm.epilogue.spec import Epilogue, Operand

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}

# Of erfc(|x|) = t p(t) exp(-x^2) with t = 1 / (1 + ERF_SLOPE |x|), to 1.5e-7: Abramowitz and Stegun 7.1.26.
ERF_SLOPE = 0.3275911
GELU_TAIL = 32.0  # from where on Phi(-x) is 0 in float32
# Of log2 Phi(-x) in powers of x, with the normal distribution's Phi: the error of x Phi(x) is below three
# units of the last place for positive x, below 1e-5 of it down to -5, and absolutely below 1e-10 beyond.
LOG2_PHI = (
    -1.0, -1.1511136, -0.45912008, -0.05278922, 0.0075000393, -0.00046756174, -5.4500121e-05, 1.3149009e-05,
    -7.7845658e-07,
)  # fmt: skip
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


class Places:
    """Rows and columns of a fragment's elements in the user's result, and the batch they belong to.

    count   elements
    find    gives rows and columns; called once, when they are first asked for, which most epilogues never do
    """

    def __init__(
        self, count: int, batch: Int32, find: Callable[[], tuple[Sequence[Int32], Sequence[Int32]]]
    ) -> None:
        self._count, self.batch, self._find = count, batch, find

    @cached_property
    def _found(self) -> tuple[tuple[Int32, ...], tuple[Int32, ...]]:
        rows, columns = self._find()
        return tuple(rows), tuple(columns)

    @property
    def rows(self) -> tuple[Int32, ...]:
        """Of each element; those that share one share the object."""
        return self._found[0]

    @property
    def columns(self) -> tuple[Int32, ...]:
        """See rows."""
        return self._found[1]

    def at(self, width: int) -> "Places":
        """Those of the elements of a matrix of a width that belong to the fragment's."""
        if width == FULL:
            return self
        if width == HALF:
            # Pairs lie side by side, and begin with an even column.
            return Places(
                len(self) // 2,
                self.batch,
                lambda: (self.rows[::2], [column >> 1 for column in self.columns[::2]]),
            )
        return Places(2 * len(self), self.batch, self._doubled)

    def _doubled(self) -> tuple[list[Int32], list[Int32]]:
        rows = [row for row in self.rows for _ in range(2)]
        return rows, [2 * column + odd for column in self.columns for odd in range(2)]

    def __len__(self) -> int:
        return self._count


class Source(Protocol):
    """Where the values of operands come from."""

    def read(self, operand: Operand, places: Places, guard: Any) -> Any:
        """A vector of float32 (int32 for whole numbers), one for each place.

        guard   None, or a number: where it is 0, nothing is read and the values are 0
        """


def vector(values: Sequence[Any], dtype: Any) -> Any:
    """A vector of scalars."""
    fragment = cute.make_rmem_tensor(len(values), dtype)
    for i, value in enumerate(values):
        fragment[i] = value
    return fragment.load()


class Evaluation:
    """The values of one graph on one fragment, each computed once.

    values   the accumulators, a float32 vector
    """

    def __init__(
        self, graph: Graph, operands: Sequence[Operand], values: Any, places: Places, source: Source
    ) -> None:
        self.graph = graph
        self.operands = {operand.name: operand for operand in operands}
        self.values, self.places, self.source = values, places, source
        self._known: dict[tuple[int, int], Any] = {}
        self._places: dict[int, Places] = {}

    def output(self, output: Output) -> Any:
        """An output's values, at the places of its width; of a reduction those to be reduced."""
        return self.value(output.node, self.graph.width(output))

    def places_at(self, width: int) -> Places:
        """Where values of a width belong."""
        if width not in self._places:
            self._places[width] = self.places.at(width)
        return self._places[width]

    def value(self, number: int, width: int) -> Any:
        """A node's values. A node of no width of its own takes the one it is asked for."""
        node = self.graph.nodes[number]
        width = width if node.width is None else node.width
        known = self._known.get((number, width))
        if known is None:
            known = self._known[number, width] = self._computed(node, width)
        return known

    def _computed(self, node: Node, width: int) -> Any:
        places = self.places_at(width)
        if node.op == "acc":
            return self.values
        if node.op == "operand":
            guard = None if node.guard is None else self.value(node.guard, width)[0]
            return self.source.read(self.operands[str(node.detail)], places, guard)
        if node.op == "constant":
            dtype = {"float": Float32, "int": Int32, "bool": Boolean}[node.type]
            return cute.full(len(places), node.detail, dtype)
        if node.op == "row_index":
            return vector(places.rows, Int32)
        if node.op == "column_index":
            return vector(places.columns, Int32)
        if node.op == "batch_index":
            return cute.full(len(places), places.batch, Int32)
        if node.op in ("even", "odd"):
            both = self.value(node.inputs[0], width + 1)
            return both.reshape((2, len(places)))[int(node.op == "odd"), None]
        if node.op == "interleave":
            even, odd = (self.value(number, width - 1) for number in node.inputs)
            dtype = Float32
            return vector([one[i] for i in range(len(places) // 2) for one in (even, odd)], dtype)
        inputs = [self.value(number, width) for number in node.inputs]
        if node.op == "random":
            return _random(int(node.detail), *inputs)  # type: ignore[arg-type]
        if node.op == "cast":
            return inputs[0].to(DTYPES[str(node.detail)]).to(Float32)
        return _OPERATIONS[node.op](*inputs)


def each(function: Callable[..., Any], *vectors: Any) -> Any:
    """A function of scalars on each element: for instructions that have no form for vectors."""
    count = cute.size(vectors[0].shape)
    return vector([function(*(one[i] for one in vectors)) for i in range(count)], Float32)


def _divided(x: Any, y: Any) -> Any:
    return each(lambda a, b: cute.math.div(a, b, full=True), x, y)


def _reciprocal(x: Any) -> Any:
    return cute.math.rcp(x, approx=True, ftz=True)


def _remainder(x: Any, y: Any) -> Any:
    # The language's own % goes towards 0; // goes down, as Python's and torch's do.
    return x - (x // y) * y


def _minimum(x: Any, y: Any) -> Any:
    return cute.math.min(x, y, propagate_nan=True)


def _maximum(x: Any, y: Any) -> Any:
    return cute.math.max(x, y, propagate_nan=True)


def larger(a: Float32, b: Float32) -> Float32:
    """The larger of two numbers; NaN if one is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def _chosen(condition: Any, yes: Any, no: Any) -> Any:
    return cute.where(condition, yes, no)


def _not(condition: Any) -> Any:
    return condition ^ cute.full_like(condition, True)


def _exp(x: Any) -> Any:
    return cute.math.exp(x, fastmath=True)


def _sigmoid(x: Any) -> Any:
    return _reciprocal(_exp(-x) + 1.0)


def _erf(x: Any) -> Any:
    t = _reciprocal(cute.math.abs(x) * ERF_SLOPE + 1.0)
    polynomial = t * ERF[-1] + ERF[-2]
    for coefficient in reversed(ERF[:-2]):
        polynomial = polynomial * t + coefficient
    value = 1.0 - polynomial * t * _exp(-(x * x))
    return cute.where(x < 0.0, -value, value)


def _gelu(x: Any) -> Any:
    # x Phi(x) = max(x, 0) - |x| Phi(-|x|), where nothing cancels far from 0. Phi's logarithm is nearly a
    # parabola, so that one exponential is the only special function. At infinity the second term is 0: its
    # factor is held below what would make it NaN.
    size = cute.math.abs(x)
    exponent = size * LOG2_PHI[-1] + LOG2_PHI[-2]
    for coefficient in reversed(LOG2_PHI[:-2]):
        exponent = exponent * size + coefficient
    held = cute.math.min(size, cute.full_like(size, GELU_TAIL), propagate_nan=True)
    positive = cute.math.max(x, cute.full_like(x, 0.0), propagate_nan=True)
    return positive - held * cute.math.exp2(exponent, fastmath=True)


def _absolute(x: Any) -> Any:
    return cute.math.abs(x) if x.dtype is Float32 else cute.where(x < 0, -x, x)


def _random(stream: int, seed: Any, batch: Any, row: Any, column: Any) -> Any:
    key = _hashed(_unsigned(seed) ^ Uint32(GOLDEN * (stream + 1) & 0xFFFFFFFF))
    for index in (batch, row, column):
        key = _hashed(key + _unsigned(index) * Uint32(GOLDEN))
    # Below 2^24 now, which is a float32 without rounding, signed or not.
    return (key // Uint32(256)).bitcast(Int32).to(Float32) * UNIT


def _unsigned(x: Any) -> Any:
    return x.bitcast(Uint32)


def _hashed(key: Any) -> Any:
    key = (key ^ (key // Uint32(1 << 16))) * Uint32(MIX_1)
    key = (key ^ (key // Uint32(1 << 13))) * Uint32(MIX_2)
    return key ^ (key // Uint32(1 << 16))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    "div": _divided,
    "mod": _remainder,
    "abs": _absolute,
    "not": _not,
    "where": _chosen,
    "minimum": _minimum,
    "maximum": _maximum,
    "exp": _exp,
    "log": lambda x: cute.math.log(x, fastmath=True),
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, fastmath=True),
    "tanh": cute.math.tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "gelu": _gelu,
    "float": lambda x: x.to(Float32),
}


@dataclass(frozen=True)
class Matrices:
    """An epilogue's tensors and scalars as the kernel gets them.

    operands   for each operand a tensor (row, column, batch) in the user's modes, with strides of 0 along
               modes it does not have; or (value, address) of a scalar; the address of a number is 0
    outputs    for each further output a tensor (row, column, batch)
    """

    operands: tuple
    outputs: tuple

    @cute.jit
    def scalar(self, index: cutlass.Constexpr[int]) -> Any:
        """A scalar's value."""
        value, address = self.operands[index]
        if address != 0:
            dtype = Float32 if cutlass.const_expr(value.dtype is Float32) else Int32
            value = cute.make_tensor(
                cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(1)
            )[0]
        return value


def offset_of(tensor: cute.Tensor, row: Int32, column: Int32, batch: Int32) -> Int64:
    """Elements from the start of a (row, column, batch) tensor."""
    rows, columns, batches = tensor.stride
    return Int64(row) * Int64(rows) + Int64(column) * Int64(columns) + Int64(batch) * Int64(batches)


def element(tensor: cute.Tensor, offset: Int64) -> cute.Tensor:
    """One element of a tensor."""
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout(1))


class NumbersSource:
    """Scalars alone, by name: for what is decided before there is a fragment."""

    def __init__(self, numbers: dict[str, Any]) -> None:
        self.numbers = numbers

    def read(self, operand: Operand, places: Places, guard: Any) -> Any:
        """See Source.read."""
        dtype = Float32 if operand.type == "float" else Int32
        return cute.full(len(places), self.numbers[operand.name], dtype)


def number_of(epilogue: Epilogue, node: int, numbers: dict[str, Any]) -> Float32:
    """The value of a node that is made of scalars only."""
    places = Places(1, Int32(0), lambda: ([Int32(0)], [Int32(0)]))
    evaluation = Evaluation(epilogue.graph, epilogue.operands, None, places, NumbersSource(numbers))
    return evaluation.value(node, FULL)[0]


class DirectSource:
    """Operands read from global memory where they are needed; places beyond the edge read the edge's."""

    def __init__(self, epilogue: Epilogue, matrices: Matrices) -> None:
        self.indices = {operand.name: i for i, operand in enumerate(epilogue.operands)}
        self.matrices = matrices

    def read(self, operand: Operand, places: Places, guard: Any) -> Any:
        """See Source.read."""
        index = self.indices[operand.name]
        if operand.is_scalar:
            value = self.matrices.scalar(index)
            return cute.full(len(places), value, Float32 if operand.type == "float" else Int32)
        tensor = self.matrices.operands[index]
        values = cute.make_rmem_tensor(len(places), Float32)
        where = places.rows, places.columns  # found before a branch that may not be taken
        if guard is None:
            _gather(tensor, where, places.batch, operand.modes, values)
        else:
            values.fill(0.0)
            _gather_unless_zero(guard, tensor, where, places.batch, operand.modes, values)
        return values.load()


@cute.jit
def _gather_unless_zero(
    guard: Float32,
    tensor: cute.Tensor,
    where: Any,
    batch: Int32,
    modes: cutlass.Constexpr[str],
    values: cute.Tensor,
) -> None:
    if guard != 0.0:
        _gather(tensor, where, batch, modes, values)


def _gather(tensor: cute.Tensor, where: Any, batch: Int32, modes: str, values: cute.Tensor) -> None:
    """where: rows and columns of the values."""
    rows, columns, _ = tensor.shape
    known: dict[tuple[int, int], Any] = {}
    for i, (row, column) in enumerate(zip(*where, strict=True)):
        # Elements that share a value are told by the identity of their coordinates.
        key = id(row) if "m" in modes else 0, id(column) if "n" in modes else 0
        if key not in known:
            row = cutlass.min(row, rows - 1) if "m" in modes else Int32(0)
            column = cutlass.min(column, columns - 1) if "n" in modes else Int32(0)
            known[key] = element(tensor, offset_of(tensor, row, column, batch))[0].to(Float32)
        values[i] = known[key]


def user_places(
    epilogue: Epilogue,
    count: int,
    batch: Int32,
    find: Callable[[], tuple[Sequence[Int32], Sequence[Int32]]],
) -> Places:
    """Places in the user's result of so many elements; find: gives their rows and columns as the kernel's."""
    if not epilogue.swapped:
        return Places(count, batch, find)

    def swapped() -> tuple[Sequence[Int32], Sequence[Int32]]:
        rows, columns = find()
        return columns, rows

    return Places(count, batch, swapped)


def user_matrix(epilogue: Epilogue, mD_mnl: cute.Tensor) -> cute.Tensor:
    """The output in the user's modes."""
    if not epilogue.swapped:
        return mD_mnl
    (rows, columns, batch), (down, right, on) = mD_mnl.shape, mD_mnl.stride
    layout = cute.make_layout((columns, rows, batch), stride=(right, down, on))
    return cute.make_tensor(mD_mnl.iterator, layout)


@cute.jit
def store_checked(
    tensor: cute.Tensor,
    row: Int32,
    column: Int32,
    batch: Int32,
    value: Float32,
    dtype: cutlass.Constexpr[Any],
) -> None:
    """Writes one element of (row, column, batch) unless it lies beyond the edge."""
    rows, columns, _ = tensor.shape
    if (row < rows) & (column < columns):
        element(tensor, offset_of(tensor, row, column, batch))[0] = value.to(dtype)


def store_directly(tensor: cute.Tensor, places: Places, values: Any, dtype: Any) -> None:
    """Writes a vector of values, each under its own bounds check."""
    for i, (row, column) in enumerate(zip(places.rows, places.columns, strict=True)):
        store_checked(tensor, row, column, places.batch, values[i], dtype)
