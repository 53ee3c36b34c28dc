"""Ready epilogues, each a plain function as a user would write it.

Operands are passed by the parameter's name: ``gemm(a, b, bias=bias)``. Gated ones take neighbouring columns
as (gate, up) and give half as many: ``interleaved`` lays out a weight that way. Their backward reads the
interleaved result that went into the gate, and gives its gradient, interleaved too.
"""

import math
from typing import Any

import torch

from cutegemm.epilogue import functions as f
from cutegemm.epilogue.functions import (
    SQRT_HALF,
    erf,
    exp,
    interleave,
    pairs,
    random,
    row_amax,
    row_sum_of_squares,
    scaled,
    sigmoid,
    tanh,
    where,
)
from cutegemm.epilogue.fuse import Fused, fuse
from cutegemm.epilogue.kinds import Col, Integer, PairTile, Row, Scalar, Tile
from cutegemm.errors import ProblemError

INVERSE_ROOT_2_PI = 1 / math.sqrt(2 * math.pi)


@fuse
def bias(acc: Any, bias: Row) -> Any:
    """acc + bias."""
    return acc + bias


@fuse
def bias_relu(acc: Any, bias: Row) -> Any:
    """relu(acc + bias)."""
    return f.relu(acc + bias)


@fuse
def bias_gelu(acc: Any, bias: Row) -> Any:
    """gelu(acc + bias), exact."""
    return f.gelu(acc + bias)


@fuse
def bias_gelu_tanh(acc: Any, bias: Row) -> Any:
    """gelu(acc + bias) by its approximation with a hyperbolic tangent."""
    return f.gelu_tanh(acc + bias)


@fuse
def bias_silu(acc: Any, bias: Row) -> Any:
    """silu(acc + bias)."""
    return f.silu(acc + bias)


@fuse
def bias_sigmoid(acc: Any, bias: Row) -> Any:
    """sigmoid(acc + bias)."""
    return sigmoid(acc + bias)


@fuse
def bias_tanh(acc: Any, bias: Row) -> Any:
    """tanh(acc + bias)."""
    return tanh(acc + bias)


@fuse
def relu(acc: Any) -> Any:
    """relu(acc)."""
    return f.relu(acc)


@fuse
def gelu(acc: Any) -> Any:
    """gelu(acc), exact."""
    return f.gelu(acc)


@fuse
def silu(acc: Any) -> Any:
    """silu(acc)."""
    return f.silu(acc)


@fuse
def residual(acc: Any, residual: Tile) -> Any:
    """acc + residual."""
    return acc + residual


@fuse
def bias_residual(acc: Any, bias: Row, residual: Tile) -> Any:
    """acc + bias + residual."""
    return acc + bias + residual


@fuse
def bias_dropout_residual(acc: Any, bias: Row, residual: Tile, seed: Integer, p: Scalar = 0.1) -> Any:
    """dropout(acc + bias) + residual: dropped with probability p, the rest divided by 1 - p."""
    kept = where(random(acc, seed) >= p, (acc + bias) * (1.0 / (1.0 - p)), 0.0)
    return kept + residual


@fuse
def scale_rows_and_columns(acc: Any, rows: Col, columns: Row) -> Any:
    """acc * rows * columns: undoes the scales of quantised operands."""
    return acc * rows * columns


@fuse
def alpha_beta(acc: Any, c: Tile, alpha: Scalar = 1.0, beta: Scalar = 1.0) -> Any:
    """alpha * acc + beta * c. c may be the output itself; with beta = 0 it is not read."""
    return alpha * acc + scaled(beta, c)


@fuse
def swiglu(acc: Any) -> Any:
    """silu(gate) * up of neighbouring columns."""
    gate, up = pairs(acc)
    return f.silu(gate) * up


@fuse
def geglu(acc: Any) -> Any:
    """gelu(gate) * up of neighbouring columns."""
    gate, up = pairs(acc)
    return f.gelu(gate) * up


@fuse
def reglu(acc: Any) -> Any:
    """relu(gate) * up of neighbouring columns."""
    gate, up = pairs(acc)
    return f.relu(gate) * up


@fuse
def swiglu_keeping(acc: Any) -> Any:
    """swiglu, and what went into it as ``preact``, for its backward."""
    gate, up = pairs(acc)
    return f.silu(gate) * up, {"preact": acc}


@fuse
def geglu_keeping(acc: Any) -> Any:
    """geglu, and what went into it as ``preact``, for its backward."""
    gate, up = pairs(acc)
    return f.gelu(gate) * up, {"preact": acc}


@fuse
def reglu_keeping(acc: Any) -> Any:
    """reglu, and what went into it as ``preact``, for its backward."""
    gate, up = pairs(acc)
    return f.relu(gate) * up, {"preact": acc}


@fuse
def swiglu_backward(acc: Any, preact: PairTile) -> Any:
    """The gradient of swiglu's (gate, up), interleaved, from acc, that of its result."""
    gate, up = pairs(preact)
    s = sigmoid(gate)
    return interleave(acc * up * s * (1.0 + gate * (1.0 - s)), acc * gate * s)


@fuse
def geglu_backward(acc: Any, preact: PairTile) -> Any:
    """The gradient of geglu's (gate, up), interleaved, from acc, that of its result."""
    gate, up = pairs(preact)
    below = 0.5 * (1.0 + erf(gate * SQRT_HALF))
    density = exp(-0.5 * gate * gate) * INVERSE_ROOT_2_PI
    return interleave(acc * up * (below + gate * density), acc * gate * below)


@fuse
def reglu_backward(acc: Any, preact: PairTile) -> Any:
    """The gradient of reglu's (gate, up), interleaved, from acc, that of its result."""
    gate, up = pairs(preact)
    return interleave(where(gate > 0, acc * up, 0.0), where(gate > 0, acc * gate, 0.0))


@fuse
def residual_rms(acc: Any, residual: Tile) -> Any:
    """acc + residual, and of each row the sum of squares that an RMS norm after it needs, as ``squares``."""
    x = acc + residual
    return x, {"squares": row_sum_of_squares(x)}


@fuse
def with_row_amax(acc: Any) -> Any:
    """acc, and the largest absolute value of each row, as ``amax``: the scale of the next quantisation."""
    return acc, {"amax": row_amax(acc)}


def interleaved(gate: torch.Tensor, up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """One weight whose columns are (gate, up) in turn: column 2 i is gate's i, column 2 i + 1 up's i.

    gate, up   of one shape and dtype, such as (K, F)
    dim        along which output features lie: -1 for weights (K, F), 0 for weights (F, K)
    Raises ProblemError if their shapes differ.
    """
    if gate.shape != up.shape:
        raise ProblemError(f"gate is {tuple(gate.shape)} and up is {tuple(up.shape)}; both need one shape")
    where_ = dim % gate.dim()
    return torch.stack((gate, up), where_ + 1).flatten(where_, where_ + 1)


def every() -> dict[str, Fused]:
    """All epilogues of this module by name."""
    return {name: value for name, value in globals().items() if isinstance(value, Fused)}
