"""What happens to a product before it is stored, written as a plain Python function.

    kinds.py       the kinds of operands: Scalar, Integer, Row, Col, Tile, and those of pairs of columns
    graph.py       what an epilogue computes, as a graph
    trace.py       from a function to a graph, with errors that name the line
    functions.py   what the function may call; each runs on torch tensors too
    fuse.py        the decorator, and the reference
    spec.py        an epilogue as a part of a problem
    device.py      a graph evaluated on a fragment of float32 values; imports the compiler
    library.py     ready ones

from cutegemm import epilogue as epi

@epi.fuse
def scaled_bias_gelu(acc, scale: epi.Scalar, bias: epi.Row):
    return epi.gelu(acc * scale + bias)
"""

from cutegemm.epilogue import library
from cutegemm.epilogue.functions import (
    batch_index,
    cast,
    col_amax,
    col_index,
    col_max,
    col_sum,
    col_sum_of_squares,
    erf,
    exp,
    gelu,
    gelu_tanh,
    interleave,
    log,
    maximum,
    minimum,
    pairs,
    random,
    relu,
    row_amax,
    row_index,
    row_max,
    row_sum,
    row_sum_of_squares,
    rsqrt,
    scaled,
    sigmoid,
    silu,
    sqrt,
    square,
    tanh,
    where,
)
from cutegemm.epilogue.fuse import Fused, fuse
from cutegemm.epilogue.kinds import Col, HalfRow, HalfTile, Integer, PairTile, Row, Scalar, Tile

__all__ = [
    "Col",
    "Fused",
    "HalfRow",
    "HalfTile",
    "Integer",
    "PairTile",
    "Row",
    "Scalar",
    "Tile",
    "batch_index",
    "cast",
    "col_amax",
    "col_index",
    "col_max",
    "col_sum",
    "col_sum_of_squares",
    "erf",
    "exp",
    "fuse",
    "gelu",
    "gelu_tanh",
    "interleave",
    "library",
    "log",
    "maximum",
    "minimum",
    "pairs",
    "random",
    "relu",
    "row_amax",
    "row_index",
    "row_max",
    "row_sum",
    "row_sum_of_squares",
    "rsqrt",
    "scaled",
    "sigmoid",
    "silu",
    "sqrt",
    "square",
    "tanh",
    "where",
]
