"""``@epi.fuse``: a plain function becomes something a kernel can end with."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from cutegemm.epilogue.graph import Graph
from cutegemm.epilogue.kinds import KINDS, Kind
from cutegemm.epilogue.spec import Epilogue, Operand, scaled_size
from cutegemm.epilogue.trace import Trace, traced
from cutegemm.errors import EpilogueError, OperandTypeError, ProblemError

RESERVED = ("a", "b", "out", "outputs", "stream", "epilogue")


class Fused:
    """A function that can be fused: what ``@epi.fuse`` makes of it. Calling it calls the function.

    graph      what it computes
    kinds      of its operands, by name
    defaults   of scalars that may be left out
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        code = getattr(function, "__code__", None)
        if code is None or not inspect.isfunction(function):
            raise EpilogueError(f"{function!r} is no plain Python function; decorate a def with @epi.fuse")
        self.function: Any = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.kinds, self.defaults = _read_signature(function)
        self.graph: Graph = traced(function, code, self.kinds)
        operands = tuple(
            Operand(name, kind.modes, kind.width, kind.type, kind.dtype) for name, kind in self.kinds.items()
        )
        self.epilogue = Epilogue(self.__name__, self.graph, operands)

    def __call__(self, *arguments: Any, **operands: Any) -> Any:
        """The function itself: on tensors, or inside of another epilogue."""
        return self.function(*arguments, **operands)

    def reference(self, a: torch.Tensor, b: torch.Tensor, **operands: Any) -> Any:
        """What the fused kernel computes, in float32 by torch: the function's result for a @ b.

        a (M, K) or (L, M, K), b (K, N) or (L, K, N); operands as the fused call takes them, on one device.
        Returns the main output, or (main, {"name": further}). Raises OperandTypeError, ProblemError.
        """
        return self.applied(torch.matmul(a.float(), b.float()), **operands)

    def applied(self, accumulator: torch.Tensor, **operands: Any) -> Any:
        """What the function makes of a product, float32 (M, N) or (L, M, N); otherwise as ``reference``."""
        prepared = {}
        for name, kind in self.kinds.items():
            if name not in operands and name not in self.defaults:
                raise OperandTypeError(f"{self.__name__} needs {name}, {kind.shape_words()}")
            prepared[name] = _for_torch(operands.get(name, self.defaults.get(name)), kind, accumulator, name)
        unknown = set(operands) - set(self.kinds)
        if unknown:
            raise OperandTypeError(f"{self.__name__} has no operand {', '.join(sorted(unknown))}")
        result = self.function(accumulator, **prepared)
        main, further = result if isinstance(result, tuple) else (result, {})
        found = []
        for output, value in zip(self.graph.outputs, (main, *further.values()), strict=True):
            columns = scaled_size(accumulator.shape[-1], self.graph.width(output))
            shape = (*accumulator.shape[:-1], columns)
            found.append(value if output.reduction else value.float().expand(shape))
        if not further:
            return found[0]
        return found[0], dict(zip(further, found[1:], strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        """How pickle finds it again: by the name it has in its module."""
        return _found, (self.function.__module__, self.function.__qualname__)

    def __copy__(self) -> "Fused":
        return self

    def __deepcopy__(self, memo: object) -> "Fused":
        return self

    def __repr__(self) -> str:
        listed = "".join(f", {name}: {kind!r}" for name, kind in self.kinds.items())
        return f"{self.__name__}(acc{listed})"


def _found(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def fuse(function: Callable[..., Any]) -> Fused:
    """Decorator: makes an epilogue of a function of the accumulator and of operands.

        @epi.fuse
        def scaled_bias_gelu(acc, scale: epi.Scalar, bias: epi.Row):
            return epi.gelu(acc * scale + bias)

    The first parameter is the product, float32; each further one is annotated with its kind. The function
    runs once, now, on symbols: what it does with them is what the kernel does with each element. It returns
    the value to store, or (value, {"name": further value}). Raises EpilogueError with the line at fault.
    """
    return Fused(function)


def _read_signature(function: Callable[..., Any]) -> tuple[dict[str, Kind], dict[str, float | int]]:
    code = function.__code__
    trace = Trace(function.__name__, code)

    def refuse(complaint: str) -> None:
        trace.fail(complaint, code.co_firstlineno)

    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    if not parameters:
        refuse("an epilogue takes the accumulator as its first parameter")
    kinds: dict[str, Kind] = {}
    defaults: dict[str, float | int] = {}
    for parameter in parameters:
        name, kind = parameter.name, parameter.annotation
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            refuse(f"*{name}: an epilogue's operands are named one by one")
        if parameter is parameters[0]:
            continue
        if not isinstance(kind, Kind):
            listed = ", ".join(f"epi.{known.name}" for known in KINDS)
            refuse(f"the operand {name} is not annotated with its kind, one of {listed}")
        if name in RESERVED:
            refuse(f"the operand {name} has the name of an argument of the call; give it another")
        kinds[name] = kind
        if parameter.default is not parameter.empty:
            if (
                kind.modes
                or isinstance(parameter.default, bool)
                or not isinstance(parameter.default, int | float)
            ):
                refuse(f"{name} has a default; only scalars may, and theirs are numbers")
            defaults[name] = parameter.default
    return kinds, defaults


def _for_torch(given: Any, kind: Kind, accumulator: torch.Tensor, name: str) -> torch.Tensor:
    """An operand as the function takes it: float32, broadcast against the product."""
    if not kind.modes:
        dtype = torch.int32 if kind.type == "int" else torch.float32
        return torch.as_tensor(given, device=accumulator.device).to(dtype)
    if not isinstance(given, torch.Tensor):
        raise OperandTypeError(f"{name} is {type(given).__name__}; pass a tensor, {kind.shape_words()}")
    if given.dim() not in (len(kind.modes), len(kind.modes) + 1):
        raise ProblemError(f"{name} has shape {tuple(given.shape)}; {kind!r} is {kind.shape_words()}")
    values = given.float()
    if kind.modes == "n":
        return values.unsqueeze(-2)
    return values.unsqueeze(-1) if kind.modes == "m" else values
