"""An epilogue's operands and further outputs on their way into a kernel: symbols, arguments, matrices."""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cutegemm.epilogue.device import DTYPES, Matrices
from cutegemm.epilogue.graph import FULL
from cutegemm.epilogue.spec import Access, Epilogue
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.problem import GemmProblem


def fake_arguments(problem: GemmProblem, epilogue: Epilogue, sizes: tuple) -> tuple[Any, ...]:
    """Symbolic arguments behind the stream: for each operand a tensor, or value and address of a scalar; then
    a tensor for each further output.

    problem: the user's (not swapped); sizes: symbols of (L,) or (), of M and N
    """
    batch, m, n = sizes
    found: list[Any] = []

    def tensor(dtype_name: str, shape: tuple[Any, ...], access: Access = "direct") -> Any:
        dtype = DTYPES[dtype_name]
        alignment = TMA_ALIGNMENT if access == "staged" else dtype.width // 8
        strides: list[Any] = [cute.sym_int64(divisibility=alignment * 8 // dtype.width) for _ in shape]
        if access == "staged":
            strides[-1 if problem.out_major == "n" else -2] = 1
        return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=alignment)

    for operand in epilogue.operands:
        if operand.is_scalar:
            found += [cutlass.Float32(0) if operand.type == "float" else cutlass.Int32(0), cutlass.Int64(0)]
            continue
        columns = n if operand.width == FULL else cute.sym_int()
        modes = {"m": (m,), "n": (columns,), "mn": (m, columns)}[operand.modes]
        lead = batch if operand.batched else ()
        found.append(tensor(str(operand.dtype), (*lead, *modes), operand.access))
    for output in epilogue.further:
        columns = n if epilogue.graph.width(output) == FULL else cute.sym_int()
        shape = (m, columns)
        if output.reduction:
            # Parts of it, to be put together later.
            shape = (m, cute.sym_int()) if output.axis == "row" else (cute.sym_int(), columns)
        by_tma = output.reduction is None and output.name not in epilogue.direct
        access: Access = "staged" if by_tma else "direct"
        found.append(tensor(output.dtype or problem.out_dtype, (*batch, *shape), access))
    return tuple(found)


def read_matrices(epilogue: Epilogue, extras: Sequence[Any], batched: bool) -> Matrices:
    """Host side: the arguments behind the stream, in the order of ``fake_arguments``."""
    given = iter(extras)
    operands = tuple(
        (next(given), next(given))
        if operand.is_scalar
        else _matrix(next(given), operand.modes, operand.batched)
        for operand in epilogue.operands
    )
    return Matrices(operands, tuple(_matrix(next(given), "mn", batched) for _ in epilogue.further))


def _matrix(tensor: cute.Tensor, modes: str, batched: bool) -> cute.Tensor:
    """(row, column, batch) of a tensor that has some of these modes; a stride of 0 for one it has not."""
    shape, stride = tensor.shape, tensor.stride
    rows = (shape[-len(modes)], stride[-len(modes)]) if "m" in modes else (1, 0)
    columns = (shape[-1], stride[-1]) if "n" in modes else (1, 0)
    batches = (shape[0], stride[0]) if batched else (1, 0)
    layout = cute.make_layout((rows[0], columns[0], batches[0]), stride=(rows[1], columns[1], batches[1]))
    return cute.make_tensor(tensor.iterator, layout)
