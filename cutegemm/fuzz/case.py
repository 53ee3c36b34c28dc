"""One product to try, and the text that repeats it."""

import ast
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from cutegemm import scheduler as schedulers
from cutegemm.config import GemmConfig
from cutegemm.errors import CutegemmError, OperandTypeError, ProblemError
from cutegemm.problem import INPUT_DTYPES, MAJORS, OUTPUT_DTYPES
from cutegemm.scheduler import TileScheduler

Call = Literal["open", "known", "matmul"]
CALLS: tuple[Call, ...] = ("open", "known", "matmul")
OPERANDS = ("a", "b", "out")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Strided:
    """Where a matrix lies in a larger buffer.

    strides   in elements, one for each mode, the batch's first
    offset    elements from a 16-byte boundary to the first element of the matrix
    """

    strides: tuple[int, ...]
    offset: int = 0

    def __repr__(self) -> str:
        return written(self)


@dataclass(frozen=True)
class Case:
    """D = A @ B once, with everything that may matter to it.

    m, n, k      sizes; l: products in a batch, None for tensors without a batch mode
    dtype        of A and B; out_dtype: of D
    majors       the contiguous modes of A, B and D that the gemm is compiled for, such as "kkn"
    a, b         where the operands lie; None: dense, in their majors
    out          where D lies; None: as the library allocates it
    config       None: the heuristic's; scheduler: None: chosen with it
    call         sizes left open in ``compile``, known to it, or ``matmul``, which has neither config nor
                 scheduler
    planted      elements of each operand that are NaN or infinite
    seed         of the contents
    adverse      of the order in which the emulator runs things; None: its regular one
    resident     clusters that the emulator runs at once; None: as many as the GPU

    The memory around A and B is always NaN and Inf, that around D is checked, D itself is NaN beforehand.
    Raises ProblemError, OperandTypeError for what is no case.
    """

    m: int
    n: int
    k: int
    l: int | None = None  # noqa: E741 - the field's own name for the batch mode
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    majors: str = "kkn"
    a: Strided | None = None
    b: Strided | None = None
    out: Strided | None = None
    config: GemmConfig | None = None
    scheduler: TileScheduler | None = None
    call: Call = "open"
    planted: int = 0
    seed: int = 0
    adverse: int | None = None
    resident: int | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) and size >= 0 for size in (self.m, self.n, self.k, self.l or 0)):
            raise ProblemError(f"{self!r}: sizes are whole numbers of at least 0")
        if self.dtype not in INPUT_DTYPES or self.out_dtype not in OUTPUT_DTYPES:
            raise OperandTypeError(
                f"{self!r}: dtype is one of {', '.join(INPUT_DTYPES)}, "
                f"out_dtype one of {', '.join(OUTPUT_DTYPES)}"
            )
        legal = [major in allowed for major, allowed in zip(self.majors, MAJORS.values(), strict=False)]
        if len(self.majors) != len(MAJORS) or not all(legal):
            raise ProblemError(f'{self!r}: majors are three letters, "k" or "m", "k" or "n", "n" or "m"')
        kinds = {"config": GemmConfig, "scheduler": TileScheduler} | dict.fromkeys(OPERANDS, Strided)
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind | None):
                raise OperandTypeError(f"{self!r}: {name} is a {kind.__name__} or None")
        for name in OPERANDS:
            where = getattr(self, name)
            if where is not None and len(where.strides) != len(self.shape(name)):
                raise ProblemError(f"{self!r}: {name} has {len(self.shape(name))} modes, one stride for each")
        if self.call not in CALLS:
            raise ProblemError(f"{self!r}: call is one of {', '.join(CALLS)}")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(L, M, N, K), L being 1 without a batch mode."""
        return (1 if self.l is None else self.l), self.m, self.n, self.k

    def shape(self, name: str) -> Shape:
        """Of "a", "b" or "out"."""
        matrix = {"a": (self.m, self.k), "b": (self.k, self.n), "out": (self.m, self.n)}[name]
        return matrix if self.l is None else (self.l, *matrix)

    def last_contiguous(self, name: str) -> bool:
        """Whether it is the last mode of "a", "b" or "out" that its major calls contiguous."""
        return self.majors[OPERANDS.index(name)] == {"a": "k", "b": "n", "out": "n"}[name]

    def placed(self, name: str) -> Strided:
        """Where "a", "b" or "out" lies: as the case says, else dense in its major."""
        where: Strided | None = getattr(self, name)
        return where or Strided(dense_strides(self.shape(name), self.last_contiguous(name)))

    @property
    def is_repeatable(self) -> bool:
        """Whether the same inputs must give the same bits every time: so does every assignment but one."""
        assignment = None if self.scheduler is None else self.scheduler.assignment
        return getattr(assignment, "ordered", True)

    def __repr__(self) -> str:
        return written(self)


def dense_strides(shape: Shape, last_contiguous: bool) -> tuple[int, ...]:
    """Strides of a dense tensor whose last mode, or last but one, is contiguous."""
    rows, columns = shape[-2:]
    matrix = (max(1, columns), 1) if last_contiguous else (1, max(1, rows))
    return matrix if len(shape) == 2 else (max(1, rows) * max(1, columns), *matrix)


# --- as text -----------------------------------------------------------------------------------------------

_SCHEDULER_PARTS = {
    name: getattr(schedulers, name)
    for name in schedulers.__all__
    if dataclasses.is_dataclass(getattr(schedulers, name))
}
_CLASSES = {kind.__name__: kind for kind in (Case, Strided, GemmConfig)} | _SCHEDULER_PARTS


def written(value: Any) -> str:
    """A frozen dataclass as a call that makes it: fields without a default first, of the others those that
    differ from it. Strings have double quotes, so that a shell's single quotes hold the whole."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(written, value))}{',' * (len(value) == 1)})"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    words = []
    for field in dataclasses.fields(value):
        mine = getattr(value, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if mine != default:
            words.append(f"{field.name}={written(mine)}")
    return f"{type(value).__name__}({', '.join(words)})"


def parse_case(text: str) -> Case:
    """The case a text names; only the package's own classes and literals are understood, nothing is run.

    Raises ProblemError for a text that names no case, and what the classes raise for wrong values.
    """
    try:
        case = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        if isinstance(error, CutegemmError):
            raise
        raise ProblemError(f"{text!r} is no case: {error}; write one such as Case(m=8, n=8, k=8)") from error
    if not isinstance(case, Case):
        raise ProblemError(f"{text!r} is no case; write one such as Case(m=8, n=8, k=8)")
    return case


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _CLASSES.get(node.func.id)
        if kind is None:
            raise ValueError(f"{node.func.id} is not one of {', '.join(_CLASSES)}")
        named = {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
        return kind(*map(_value, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)
