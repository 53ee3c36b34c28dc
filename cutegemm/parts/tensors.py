"""The operands: dtypes, the symbolic ones a kernel is traced with, how the kernel sees them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutegemm.epilogue.arguments import fake_arguments
from cutegemm.epilogue.graph import FULL
from cutegemm.parts.limits import TMA_ALIGNMENT, StorePath
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


def fake_operands(problem: GemmProblem, store: StorePath) -> tuple[Any, ...]:
    """Symbolic A, B, D, the addresses of the call record and the outcome, the caller's current stream.

    Behind them an epilogue's own, see ``epilogue.arguments``.
    """
    m, n, k = (cute.sym_int() for _ in range(3))
    batch = (cute.sym_int(),) if problem.batched else ()

    def operand(dtype_name: str, rows: Any, columns: Any, rows_contiguous: bool, tma: bool = True) -> Any:
        dtype = CUTE_DTYPES[dtype_name]
        alignment = TMA_ALIGNMENT if tma else dtype.width // 8
        divisibility = alignment * 8 // dtype.width

        def stride() -> Any:
            return cute.sym_int64(divisibility=divisibility)

        strides = (1, stride()) if rows_contiguous else (stride(), 1)
        return make_fake_tensor(
            dtype,
            (*batch, rows, columns),
            (*(stride() for _ in batch), *strides),
            assumed_align=alignment,
        )

    epilogue = problem.epilogue
    extras = () if epilogue is None else fake_arguments(problem, epilogue, (batch, m, n))
    out_n = n if epilogue is None or epilogue.width == FULL else cute.sym_int()
    return (
        operand(problem.a_dtype, m, k, problem.a_major == "m"),
        operand(problem.b_dtype, k, n, problem.b_major == "k"),
        operand(problem.out_dtype, m, out_n, problem.out_major == "m", tma=store == "tma"),
        cutlass.Int64(0),
        cutlass.Int64(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *extras,
    )
