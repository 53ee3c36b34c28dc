"""The operands: dtypes, the symbolic ones a kernel is traced with, how the kernel sees them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutegemm.epilogue.arguments import fake_arguments
from cutegemm.epilogue.graph import FULL
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.parts.paths import Paths
from cutegemm.problem import GemmProblem

CUTE_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


def kernel_modes(
    a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, swapped: bool
) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """(M, K, L), (N, K, L), (M, N, L) views of the user's tensors; M and N exchanged when swapped."""
    if swapped:
        a, b = b, a
        return _view(a, -1, -2), _view(b, -2, -1), _view(d, -1, -2)
    return _view(a, -2, -1), _view(b, -1, -2), _view(d, -2, -1)


def _view(tensor: cute.Tensor, first: int, second: int) -> cute.Tensor:
    shape, stride = tensor.shape, tensor.stride
    batch, batch_stride = (shape[0], stride[0]) if len(shape) == 3 else (1, 0)
    layout = cute.make_layout(
        (shape[first], shape[second], batch), stride=(stride[first], stride[second], batch_stride)
    )
    return cute.make_tensor(tensor.iterator, layout)


# What is known of an operand on each path: whether its address, its pitch and its batch stride are multiples
# of TMA's unit.
_KNOWN = {
    "tma": (True, True, True),
    "realigned": (False, False, True),
    "direct": (False, False, False),
}


def fake_operands(problem: GemmProblem, paths: Paths) -> tuple[Any, ...]:
    """Symbolic A, B, D, the addresses of the call record and the outcome, the caller's current stream.

    Behind them an epilogue's own, see ``epilogue.arguments``. paths: those of the user's operands.
    """
    m, n, k = (cute.sym_int() for _ in range(3))
    batch = (cute.sym_int(),) if problem.batched else ()

    def operand(dtype_name: str, rows: Any, columns: Any, rows_contiguous: bool, path: str) -> Any:
        dtype = CUTE_DTYPES[dtype_name]
        start, pitch, matrix = _KNOWN[path]
        unit = TMA_ALIGNMENT * 8 // dtype.width

        def stride(known: bool) -> Any:
            return cute.sym_int64(divisibility=unit if known else 1)

        strides = (1, stride(pitch)) if rows_contiguous else (stride(pitch), 1)
        return make_fake_tensor(
            dtype,
            (*batch, rows, columns),
            (*(stride(matrix) for _ in batch), *strides),
            assumed_align=TMA_ALIGNMENT if start else dtype.width // 8,
        )

    epilogue = problem.epilogue
    extras = () if epilogue is None else fake_arguments(problem, epilogue, (batch, m, n))
    out_n = n if epilogue is None or epilogue.width == FULL else cute.sym_int()
    return (
        operand(problem.a_dtype, m, k, problem.a_major == "m", paths.a),
        operand(problem.b_dtype, k, n, problem.b_major == "k", paths.b),
        operand(problem.out_dtype, m, out_n, problem.out_major == "m", paths.store),
        cutlass.Int64(0),
        cutlass.Int64(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *extras,
    )
