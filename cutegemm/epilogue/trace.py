"""Runs an epilogue's function once on symbols, and keeps what it did as a graph."""

import dis
import linecache
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

from cutegemm.epilogue.graph import DOUBLE, ELEMENTWISE, FULL, HALF, WIDTHS, Graph, Node, Output
from cutegemm.epilogue.kinds import OPERAND_DTYPES, Kind
from cutegemm.errors import EpilogueError, OperandTypeError
from cutegemm.problem import dtype_name

_HERE = str(Path(__file__).parent)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_LOGIC = ("and", "or", "not")
_WHOLE = ("floordiv", "mod")
_EITHER = ("add", "sub", "mul", "neg", "abs", "minimum", "maximum")  # whole numbers stay whole
INT32 = range(-(2**31), 2**31)


class Trace:
    """The nodes made so far by one run of one function."""

    def __init__(self, name: str, code: CodeType) -> None:
        self.name = name
        self.code = code
        self.nodes: list[Node] = []
        self.lines: list[int] = []
        self.scalars: set[str] = set()
        self._numbers: dict[Node, int] = {}

    def add(self, node: Node) -> "Value":
        """The value of a node; the same one if there is such a node already."""
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            self.lines.append(self.line())
        return Value(self, number)

    def line(self) -> int:
        """Line of the user's function that is running, or the last on which it returns."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is self.code:
                return frame.f_lineno
            frame = frame.f_back
        # The function has returned: what is wrong is what it returned.
        returns = [at for at in dis.get_instructions(self.code) if at.opname.startswith("RETURN_")]
        line = returns[-1].positions.lineno if returns and returns[-1].positions else None
        return line or self.code.co_firstlineno

    def fail(self, complaint: str, line: int | None = None) -> NoReturn:
        """Raises EpilogueError, with the line that is running or a given one."""
        number = line or self.line()
        text = linecache.getline(self.code.co_filename, number).strip()
        place = f"\n  {self.code.co_filename}, line {number}, in {self.name}" + (
            f"\n    {text}" if text else ""
        )
        raise EpilogueError(complaint + place) from None

    def value(self, given: Any) -> "Value":
        """A value of this trace, from itself or a number."""
        if isinstance(given, Value):
            if given.trace is not self:
                self.fail("a value of another epilogue's function is used here: pass it as an operand")
            return given
        if isinstance(given, bool):
            return self.add(Node("constant", (), "bool", None, given))
        if isinstance(given, int):
            if given not in INT32:
                self.fail(f"{given} does not fit 32 bits; write it as a float")
            return self.add(Node("constant", (), "int", None, given))
        if isinstance(given, float):
            return self.add(Node("constant", (), "float", None, given))
        hint = ""
        if type(given).__module__.startswith("torch"):
            hint = ": tensors come in as operands, annotated epi.Row, epi.Col or epi.Tile"
        return self.fail(f"{type(given).__name__} is neither a number nor a value of the epilogue{hint}")

    def as_float(self, value: "Value") -> "Value":
        """The value as float32."""
        node = value.node
        if node.type == "float":
            return value
        if node.op == "constant":
            return self.add(Node("constant", (), "float", None, float(node.detail)))  # type: ignore[arg-type]
        return self.add(Node("float", (value.number,), "float", node.width))

    def width_of(self, values: Iterable["Value"]) -> int | None:
        """The width of values that are combined; EpilogueError if they have several."""
        widths = {value.node.width for value in values} - {None}
        if len(widths) > 1:
            listed = " and ".join(sorted(WIDTHS[width] for width in widths))
            self.fail(
                f"values of {listed} columns meet here; epi.pairs halves the columns and epi.interleave "
                "doubles them, operands that belong to pairs are epi.HalfRow, epi.HalfTile and epi.PairTile"
            )
        return next(iter(widths), None)

    def apply(self, op: str, *given: Any, detail: str | None = None) -> "Value":
        """An elementwise operation on values and numbers."""
        values = [self.value(one) for one in given]
        types = {value.node.type for value in values}
        result = "float"
        if op in _LOGIC:
            if types != {"bool"}:
                self.fail("& | ~ combine conditions; compare first, as in (x > 0) & (y > 0)")
            result = "bool"
        elif op == "where":
            values, result = self._chosen(values)
        elif op == "random":
            result = "float"
        elif types == {"bool"} and op not in ("eq", "ne"):
            self.fail("a condition is no number; use epi.where(condition, 1.0, 0.0)")
        elif op in _WHOLE and types != {"int"}:
            self.fail("// and % are for whole numbers such as epi.row_index(acc)")
        elif types == {"int"} and op in (*_EITHER, *_WHOLE):
            result = "int"
        elif types not in ({"int"}, {"bool"}) or op not in _COMPARISONS:
            values = [self.as_float(value) for value in values]
        if op in _COMPARISONS:
            result = "bool"
        width = self.width_of(values)
        return self.add(Node(op, tuple(value.number for value in values), result, width, detail))

    def _chosen(self, values: list["Value"]) -> tuple[list["Value"], str]:
        condition, yes, no = values
        if condition.node.type != "bool":
            self.fail("epi.where chooses by a condition; compare first, as in epi.where(x > 0, x, 0.0)")
        if yes.node.type != no.node.type:
            yes, no = self.as_float(yes), self.as_float(no)
        return [condition, yes, no], yes.node.type


class Reduced:
    """A reduction of a value over rows or columns: nothing but an output can be made of it."""

    def __init__(self, value: "Value", reduction: str, axis: str) -> None:
        self.value, self.reduction, self.axis = value, reduction, axis

    def __getattr__(self, name: str) -> NoReturn:
        self.value.trace.fail(
            "a reduction is finished after the kernel; return it as a further output, and go on from there"
        )

    def _used(self, *others: Any) -> NoReturn:
        self.__getattr__("")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __bool__ = __float__ = _used


class Value:
    """What a function's parameters and intermediate results are while it is traced."""

    __slots__ = ("number", "trace")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy hands binary operations to us

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number

    @property
    def node(self) -> Node:
        """The node it stands for."""
        return self.trace.nodes[self.number]

    def __add__(self, other: Any) -> "Value":
        return self.trace.apply("add", self, other)

    def __radd__(self, other: Any) -> "Value":
        return self.trace.apply("add", other, self)

    def __sub__(self, other: Any) -> "Value":
        return self.trace.apply("sub", self, other)

    def __rsub__(self, other: Any) -> "Value":
        return self.trace.apply("sub", other, self)

    def __mul__(self, other: Any) -> "Value":
        return self.trace.apply("mul", self, other)

    def __rmul__(self, other: Any) -> "Value":
        return self.trace.apply("mul", other, self)

    def __truediv__(self, other: Any) -> "Value":
        return self.trace.apply("div", self, other)

    def __rtruediv__(self, other: Any) -> "Value":
        return self.trace.apply("div", other, self)

    def __floordiv__(self, other: Any) -> "Value":
        return self.trace.apply("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> "Value":
        return self.trace.apply("floordiv", other, self)

    def __mod__(self, other: Any) -> "Value":
        return self.trace.apply("mod", self, other)

    def __rmod__(self, other: Any) -> "Value":
        return self.trace.apply("mod", other, self)

    def __pow__(self, exponent: Any) -> "Value":
        if exponent == 2 and not isinstance(exponent, Value):
            return self * self
        return self.trace.fail("** is known with the exponent 2 only; write out the product, or use epi.exp")

    def __neg__(self) -> "Value":
        return self.trace.apply("neg", self)

    def __pos__(self) -> "Value":
        return self

    def __abs__(self) -> "Value":
        return self.trace.apply("abs", self)

    def __lt__(self, other: Any) -> "Value":
        return self.trace.apply("lt", self, other)

    def __le__(self, other: Any) -> "Value":
        return self.trace.apply("le", self, other)

    def __gt__(self, other: Any) -> "Value":
        return self.trace.apply("gt", self, other)

    def __ge__(self, other: Any) -> "Value":
        return self.trace.apply("ge", self, other)

    def __eq__(self, other: Any) -> "Value":  # type: ignore[override]
        return self.trace.apply("eq", self, other)

    def __ne__(self, other: Any) -> "Value":  # type: ignore[override]
        return self.trace.apply("ne", self, other)

    def __and__(self, other: Any) -> "Value":
        return self.trace.apply("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> "Value":
        return self.trace.apply("or", self, other)

    __ror__ = __or__

    def __invert__(self) -> "Value":
        return self.trace.apply("not", self)

    def __bool__(self) -> NoReturn:
        self.trace.fail(
            "a Python if, while, and, or, not, or a chain of comparisons asks for one truth value, and there "
            "is one for each element: use epi.where(condition, a, b) and & | ~"
        )

    def _no_number(self) -> NoReturn:
        self.trace.fail(
            "this asks for a Python number, and there is one for each element: use the functions of "
            "cutegemm.epilogue, such as epi.exp, in place of those of math"
        )

    __float__ = __int__ = __index__ = __complex__ = __len__ = __round__ = _no_number

    def __iter__(self) -> NoReturn:
        self.trace.fail("an epilogue sees one element: it cannot be taken apart or indexed; see epi.pairs")

    def __getitem__(self, index: Any) -> NoReturn:
        self.__iter__()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols that ask whether we follow them
        self.trace.fail(f"values of an epilogue have no .{name}; {suggestion(name)}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        values = [one for one in args if isinstance(one, Value)]
        name = getattr(function, "__name__", str(function))
        found = values[0] if values else next(v for v in (kwargs or {}).values() if isinstance(v, Value))
        found.trace.fail(f"torch.{name} is no operation of an epilogue; {suggestion(name)}")


def suggestion(name: str) -> str:
    """What to use instead of an operation that is not known."""
    plain = name.strip("_")
    known = sorted({*ELEMENTWISE} - {"add", "sub", "mul", "div", "neg", "not", "and", "or", "float", "mod"})
    if plain in known or plain in ("relu", "silu", "square"):
        return f"use epi.{plain}"
    if plain in ("to", "float", "half", "bfloat16", "type"):
        return "use epi.cast(x, dtype)"
    if plain in ("max", "min", "clamp", "clip"):
        return "use epi.maximum and epi.minimum"
    return "the operations are + - * /, comparisons, and the functions of cutegemm.epilogue"


def traced(function: Any, code: CodeType, kinds: dict[str, Kind]) -> Graph:
    """The graph of a function of an accumulator and operands of these kinds. Raises EpilogueError."""
    trace = Trace(function.__name__, code)
    accumulator = trace.add(Node("acc"))
    operands = {}
    for name, kind in kinds.items():
        width = kind.width if "n" in kind.modes else None
        operands[name] = trace.add(Node("operand", (), kind.type, width, name))
        if not kind.modes:
            trace.scalars.add(name)
    result = function(accumulator, **operands)
    outputs = tuple(_outputs(trace, result))
    graph = Graph(tuple(trace.nodes), outputs)
    _refuse_what_is_unused(trace, graph)
    return graph.pruned()


def _outputs(trace: Trace, result: Any) -> Iterable[Output]:
    further: Any = {}
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], dict):
            trace.fail('return one value, or (value, {"name": further value})')
        result, further = result
    if result is None:
        trace.fail("the function returns nothing; return the value to store")
    yield _output(trace, None, result)
    for name, value in further.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("out", "a", "b", "stream"):
            trace.fail(f"{name!r} is no name for an output; give an identifier other than out, a, b, stream")
        yield _output(trace, name, value)


def _output(trace: Trace, name: str | None, returned: Any) -> Output:
    if isinstance(returned, Reduced):
        if name is None:
            trace.fail("the main output is a matrix; return a reduction as a further output")
        value = trace.as_float(returned.value)
        if value.node.width == DOUBLE:
            trace.fail("a reduction is over N or N / 2 columns; reduce the values before interleaving them")
        return Output(name, value.number, "float32", returned.reduction, returned.axis)
    value = trace.value(returned)
    if value.node.type == "bool":
        trace.fail("a condition cannot be stored; use epi.where(condition, 1.0, 0.0)")
    value = trace.as_float(value)
    dtype = str(value.node.detail) if value.node.op == "cast" and name is not None else None
    return Output(name, value.number, dtype)


def _refuse_what_is_unused(trace: Trace, graph: Graph) -> None:
    used: set[int] = {output.node for output in graph.outputs}
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if number in used:
            used.update(node.inputs if node.guard is None else (*node.inputs, node.guard))
    read = {graph.nodes[number].detail for number in used if graph.nodes[number].op == "operand"}
    for number, node in enumerate(graph.nodes):
        if number in used or node.op in ("constant", "even", "odd", "float"):
            continue
        if node.op == "operand":
            if node.detail in read:
                continue  # by its guarded form
            trace.fail(f"the operand {node.detail} is never used; use it or remove the parameter",
                       trace.code.co_firstlineno)  # fmt: skip
        if node.op == "acc":
            trace.fail(
                "the accumulator is never used: the product would not matter", trace.code.co_firstlineno
            )
        trace.fail("what is computed here is neither used nor returned", trace.lines[number])


def read_dtype(trace: Trace, dtype: Any) -> str:
    """The name of a dtype that values can be rounded to. Raises EpilogueError."""
    try:
        return dtype_name(dtype, "dtype", OPERAND_DTYPES)
    except OperandTypeError as error:
        return trace.fail(str(error))


def halves(value: Value) -> tuple[Value, Value]:
    """The values of even and of odd columns."""
    trace, node = value.trace, value.node
    if node.width is None:
        return value, value
    if node.width == HALF:
        trace.fail("epi.pairs takes N or 2 N columns; these are already pairs' values")
    width = node.width - 1
    return tuple(trace.add(Node(op, (value.number,), node.type, width)) for op in ("even", "odd"))  # type: ignore[return-value]


def interleaved(even: Any, odd: Any) -> Value:
    """Values of even and of odd columns, put side by side."""
    trace = (even if isinstance(even, Value) else odd).trace
    values = [trace.as_float(trace.value(one)) for one in (even, odd)]
    width = trace.width_of(values)
    if width == DOUBLE:
        trace.fail("epi.interleave takes N / 2 or N columns; these are interleaved already")
    width = FULL if width is None else width
    return trace.add(Node("interleave", tuple(value.number for value in values), "float", width + 1))
