"""Kinds of operands an epilogue may have beside the accumulator, to annotate its parameters with.

For a result of M rows and N columns, with a leading L where the product is batched; an operand without the
L serves every batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from cutegemm.epilogue.graph import DOUBLE, FULL, HALF
from cutegemm.problem import OUTPUT_DTYPES, DtypeLike, dtype_name

OPERAND_DTYPES = OUTPUT_DTYPES  # of tensors; scalars have their own


@dataclass(frozen=True)
class Kind:
    """How an operand's shape follows from the result's.

    name    as it is written in an annotation
    modes   of the matrix it has one value for: "" for a scalar, "n" (a row), "m" (a column), "mn"
    width   columns for each column of the accumulator: FULL, HALF (pairs share one) or DOUBLE
    type    "float", or "int" for a whole number
    dtype   of the tensor, by name; None: whatever it has when it is passed
    """

    name: str
    modes: str
    width: int = FULL
    type: str = "float"
    dtype: str | None = None

    def __call__(self, dtype: DtypeLike) -> "Kind":
        """The kind for tensors of one dtype only: ``bias: epi.Row(torch.float32)``."""
        if not self.modes:
            raise TypeError(f"epi.{self.name} takes no dtype: scalars are numbers")
        return Kind(self.name, self.modes, self.width, self.type, dtype_name(dtype, "dtype", OPERAND_DTYPES))

    def shape_words(self) -> str:
        """Its shape in the letters of the problem."""
        columns = {FULL: "N", HALF: "N / 2", DOUBLE: "2 N"}[self.width]
        return {"": "a number", "n": f"({columns},)", "m": "(M,)", "mn": f"(M, {columns})"}[self.modes]

    def __repr__(self) -> str:
        return f"epi.{self.name}" + (f"({self.dtype})" if self.dtype else "")


if TYPE_CHECKING:  # to a type checker an operand is whatever the function is called with
    Scalar: TypeAlias = Any
    Integer: TypeAlias = Any
    Row: TypeAlias = Any
    Col: TypeAlias = Any
    Tile: TypeAlias = Any
    HalfRow: TypeAlias = Any
    HalfTile: TypeAlias = Any
    PairTile: TypeAlias = Any
else:
    Scalar = Kind("Scalar", "")
    """A number, or a tensor without dimensions. Its value is read when the kernel runs."""
    Integer = Kind("Integer", "", type="int")
    """A whole number of 32 bits, or an integer tensor without dimensions, such as the seed of a dropout."""
    Row = Kind("Row", "n")
    """One value for each column n: shape (N,), as a bias has."""
    Col = Kind("Col", "m")
    """One value for each row m: shape (M,)."""
    Tile = Kind("Tile", "mn")
    """One value for each element: shape (M, N), any strides."""
    HalfRow = Kind("HalfRow", "n", HALF)
    """One value for each pair of columns: shape (N / 2,)."""
    HalfTile = Kind("HalfTile", "mn", HALF)
    """One value for each pair of columns of each row: shape (M, N / 2)."""
    PairTile = Kind("PairTile", "mn", DOUBLE)
    """Two neighbouring values for each element: shape (M, 2 N). ``epi.pairs`` takes it apart."""

KINDS: tuple[Kind, ...] = (Scalar, Integer, Row, Col, Tile, HalfRow, HalfTile, PairTile)
