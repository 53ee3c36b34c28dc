"""The functions an epilogue is written with. Each works on traced values, on torch tensors, and on numbers.

On tensors they say what the fused code computes, in float32, which makes every epilogue its own reference.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cutegemm.epilogue.graph import Node
from cutegemm.epilogue.trace import Reduced, Trace, Value, halves, interleaved, read_dtype
from cutegemm.problem import DtypeLike, dtype_name

SQRT_HALF = math.sqrt(0.5)
GELU_SCALE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715

# Of the hash behind random(): the odd constants of murmur3's finaliser and of the golden ratio.
MIX_1, MIX_2, GOLDEN = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B1
UNIT = 2.0**-24  # random() has 24 bits


def _trace_of(*given: Any) -> Trace | None:
    return next((one.trace for one in given if isinstance(one, Value)), None)


def _apply(op: str, compute: Callable[..., Any], *given: Any) -> Any:
    """An operation on values of a trace, or computed by torch; on numbers alone the result is a number."""
    trace = _trace_of(*given)
    if trace is not None:
        return trace.apply(op, *given)
    like = next((one for one in given if isinstance(one, torch.Tensor)), None)
    device = "cpu" if like is None else like.device
    tensors = (one if isinstance(one, torch.Tensor) else torch.tensor(one, device=device) for one in given)
    result = compute(*tensors)
    return result if like is not None else result.item()


def where(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, ``no`` elsewhere; both are computed."""
    return _apply("where", torch.where, condition, yes, no)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two; NaN if one is NaN."""
    return _apply("minimum", torch.minimum, *_alike(x, y))


def maximum(x: Any, y: Any) -> Any:
    """The larger of two; NaN if one is NaN."""
    return _apply("maximum", torch.maximum, *_alike(x, y))


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    """A whole number beside a tensor of floats as a float, which torch's minimum does not do by itself."""
    for one, other in ((x, y), (y, x)):
        if isinstance(one, torch.Tensor) and one.is_floating_point() and not isinstance(other, Value):
            return (x, torch.as_tensor(y, dtype=one.dtype, device=one.device)) if one is x else (
                torch.as_tensor(x, dtype=one.dtype, device=one.device), y)  # fmt: skip
    return x, y


def exp(x: Any) -> Any:
    """e to the x."""
    return _apply("exp", torch.exp, x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _apply("log", torch.log, x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return _apply("sqrt", torch.sqrt, x)


def rsqrt(x: Any) -> Any:
    """One over the square root."""
    return _apply("rsqrt", torch.rsqrt, x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _apply("tanh", torch.tanh, x)


def erf(x: Any) -> Any:
    """The error function."""
    return _apply("erf", torch.erf, x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return _apply("sigmoid", torch.sigmoid, x)


def square(x: Any) -> Any:
    """x * x."""
    return x * x


def relu(x: Any) -> Any:
    """x where it is not negative, 0 elsewhere; NaN stays."""
    return where(x < 0, 0.0, x)


def silu(x: Any) -> Any:
    """x sigmoid(x), also called swish."""
    return x * sigmoid(x)


def gelu(x: Any) -> Any:
    """x Phi(x) with the normal distribution's Phi: the exact GELU."""
    # Not torch's own gelu: on a CPU that one makes NaN of infinity.
    return _apply("gelu", lambda y: 0.5 * y * (1.0 + torch.erf(y * SQRT_HALF)), x)


def gelu_tanh(x: Any) -> Any:
    """GELU by its approximation with a hyperbolic tangent."""
    # 0.5 (1 + tanh(u)) is sigmoid(2 u).
    return x * sigmoid(x * (x * x * (2 * GELU_SCALE * GELU_CUBIC) + 2 * GELU_SCALE))


def cast(x: Any, dtype: DtypeLike) -> Any:
    """x rounded to bfloat16, float16 or float32 and taken on in float32.

    As a further output, ``{"name": epi.cast(x, dtype)}``, it is stored in that dtype.
    """
    trace = _trace_of(x)
    if trace is not None:
        return trace.apply("cast", x, detail=read_dtype(trace, dtype))
    rounded: torch.Tensor = torch.as_tensor(x).to(getattr(torch, dtype_name(dtype, "dtype"))).float()
    return rounded if isinstance(x, torch.Tensor) else rounded.item()


def row_index(x: Any) -> Any:
    """The number of each element's row, from 0; x says of what: ``epi.row_index(acc)``."""
    trace = _trace_of(x)
    if trace is not None:
        return trace.add(Node("row_index", (), "int", None))
    return torch.arange(x.shape[-2], dtype=torch.int32, device=x.device).unsqueeze(-1)


def col_index(x: Any) -> Any:
    """The number of each element's column in x, from 0."""
    trace = _trace_of(x)
    if trace is not None:
        if x.node.width is None:
            trace.fail("a value that is the same along a row has no columns to count; pass acc")
        return trace.add(Node("column_index", (), "int", x.node.width))
    return torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)


def batch_index(x: Any) -> Any:
    """The number of each element's product in the batch; 0 where there is no batch."""
    trace = _trace_of(x)
    if trace is not None:
        return trace.add(Node("batch_index", (), "int", None))
    count = x.shape[0] if x.dim() == 3 else 1
    numbers = torch.arange(count, dtype=torch.int32, device=x.device)
    return numbers.view(-1, 1, 1) if x.dim() == 3 else numbers


def random(x: Any, seed: Any, stream: int = 0) -> Any:
    """A number in [0, 1) for each element of x, the same in every run with the same seed.

    seed    an epi.Integer, or a constant
    stream  a constant: different ones give independent numbers in one epilogue

    It depends on seed, stream, batch, row and column alone: not on the kernel, the tiles or the GPU.
    """
    trace = _trace_of(x, seed)
    if trace is not None:
        of, number = trace.value(x), trace.value(seed)
        if number.node.type != "int" or number.node.width is not None:
            trace.fail("the seed of epi.random is a whole number: annotate it epi.Integer")
        column, row, batch = col_index(of), row_index(of), batch_index(of)
        key = number.number, batch.number, row.number, column.number
        return trace.add(Node("random", key, "float", column.node.width, stream))
    places = batch_index(x), row_index(x), col_index(x)
    return random_at(torch.as_tensor(seed, device=x.device), stream, places)


def random_at(seed: torch.Tensor, stream: int, places: Iterable[torch.Tensor]) -> torch.Tensor:
    """``random`` by torch. places: numbers of batch, row and column, which broadcast against each other."""
    key = hashed(seed.long() ^ (GOLDEN * (stream + 1) & 0xFFFFFFFF))
    for index in places:
        key = hashed(key + index.long() * GOLDEN)
    return (key >> 8).float() * UNIT


def hashed(key: torch.Tensor) -> torch.Tensor:
    """32 bits mixed so that each depends on all (int64 in and out)."""
    key = key & 0xFFFFFFFF
    key = ((key ^ (key >> 16)) * MIX_1) & 0xFFFFFFFF
    key = ((key ^ (key >> 13)) * MIX_2) & 0xFFFFFFFF
    return key ^ (key >> 16)


def pairs(x: Any) -> tuple[Any, Any]:
    """The values of the even and of the odd columns, each half as wide: ``gate, up = epi.pairs(acc)``."""
    if isinstance(x, Value):
        return halves(x)
    if x.shape[-1] == 1:
        return x, x  # the same along a row
    return x[..., 0::2], x[..., 1::2]


def interleave(even: Any, odd: Any) -> Any:
    """A value of twice the columns from those of the even and of the odd ones."""
    if _trace_of(even, odd) is not None:
        return interleaved(even, odd)
    return torch.stack(torch.broadcast_tensors(even, odd), -1).flatten(-2)


def scaled(factor: Any, tile: Any) -> Any:
    """factor * tile, and 0 where the factor is 0: the tile is not even read then, NaN in it does not matter.

    factor  of scalars only; tile an operand itself
    """
    trace = _trace_of(factor, tile)
    if trace is None:
        return torch.where(torch.as_tensor(factor, device=tile.device) == 0, 0.0, factor * tile)
    number, operand = trace.as_float(trace.value(factor)), trace.value(tile).node
    if operand.op != "operand":
        trace.fail("epi.scaled takes an operand as it is, before anything was done to it")
    pending = [number.number]
    while pending:
        node = trace.nodes[pending.pop()]
        per_element = node.op in ("acc", "row_index", "column_index", "batch_index", "random")
        if per_element or (node.op == "operand" and node.detail not in trace.scalars):
            trace.fail("the factor of epi.scaled is one number for all elements: made of scalars only")
        pending += node.inputs
    guarded = trace.add(Node("operand", (), operand.type, operand.width, operand.detail, number.number))
    return number * guarded


def _reduction(name: str, axis: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    along = {"row": -1, "col": -2}[axis]
    words = {"sum": "sum", "max": "largest value", "amax": "largest absolute value"}.get(
        name, "sum of squares"
    )

    def reduce(x: Any) -> Any:
        if isinstance(x, Value):
            return Reduced(x, name, axis)
        terms = compute(x)
        return terms.sum(along) if "sum" in name else terms.amax(along)

    reduce.__name__ = reduce.__qualname__ = f"{axis}_{name}"
    shape = {"row": "(M,)", "col": "(N,)"}[axis]
    reduce.__doc__ = (
        f"The {words} of each {axis}, float32 {shape}: a further output, the same bits in every run."
    )
    return reduce


row_sum = _reduction("sum", "row", lambda x: x)
row_max = _reduction("max", "row", lambda x: x)
row_amax = _reduction("amax", "row", torch.abs)
row_sum_of_squares = _reduction("sum_of_squares", "row", torch.square)
col_sum = _reduction("sum", "col", lambda x: x)
col_max = _reduction("max", "col", lambda x: x)
col_amax = _reduction("amax", "col", torch.abs)
col_sum_of_squares = _reduction("sum_of_squares", "col", torch.square)
