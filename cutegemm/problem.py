"""GemmProblem: the question a user asks, D = A @ B, and every check of it.

A (M, K), B (K, N), D (M, N), or with a leading batch mode L. Sizes may be None: known at the call.
Majors name the contiguous mode: A "k" or "m", B "k" or "n", D "n" or "m".
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, Union

from cutegemm.errors import OperandTypeError, ProblemError

if TYPE_CHECKING:
    import torch

    from cutegemm.epilogue.spec import Epilogue

INPUT_DTYPES = ("bfloat16", "float16")
OUTPUT_DTYPES = ("bfloat16", "float16", "float32")
MAJORS = {"a_major": ("k", "m"), "b_major": ("k", "n"), "out_major": ("n", "m")}
# Sizes are 32-bit coordinates in the kernel and in a TMA descriptor, with room to round up to a tile.
MAX_SIZE = 2**31 - 1024

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}

DtypeLike: TypeAlias = Union["torch.dtype", str]


@dataclass(frozen=True)
class GemmProblem:
    """D = A @ B, ``l`` times if ``l`` is a number (or None with ``batched``).

    m, n, k, l                    sizes in elements; None = known only at the call
    a_dtype, b_dtype, out_dtype   names such as "bfloat16"; accumulation is float32
    a_major, b_major, out_major   the contiguous mode of each operand
    batched                       whether the tensors carry a leading L mode
    epilogue                      what is done to the product before it is stored; None: nothing
    """

    m: int | None
    n: int | None
    k: int | None
    l: int | None = 1  # noqa: E741 - the field's own name for the batch mode
    a_dtype: str = "bfloat16"
    b_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    a_major: str = "k"
    b_major: str = "k"
    out_major: str = "n"
    batched: bool = False
    epilogue: "Epilogue | None" = None

    @classmethod
    def from_user(
        cls,
        shape: Sequence[int | None],
        dtype: DtypeLike | Sequence[DtypeLike],
        *,
        out_dtype: DtypeLike | None = None,
        a_major: str = "k",
        b_major: str = "k",
        out_major: str = "n",
    ) -> "GemmProblem":
        """Reads and checks what a user passed to ``compile``.

        Raises ProblemError for sizes and majors, OperandTypeError for dtypes.
        """
        sizes = _read_shape(shape)
        a_dtype, b_dtype = _read_input_dtypes(dtype)
        out = a_dtype if out_dtype is None else dtype_name(out_dtype, "out_dtype", OUTPUT_DTYPES)
        for name, value in (("a_major", a_major), ("b_major", b_major), ("out_major", out_major)):
            if not isinstance(value, str) or value not in MAJORS[name]:
                first, second = MAJORS[name]
                raise ProblemError(
                    f'{name}={value!r} is unknown; use "{first}" or "{second}", the contiguous mode'
                )
        batched = len(sizes) == 4
        l, m, n, k = sizes if batched else (1, *sizes)  # noqa: E741
        return cls(m, n, k, l, a_dtype, b_dtype, out, a_major, b_major, out_major, batched)

    @property
    def a_torch(self) -> "torch.dtype":
        """torch dtype of A."""
        return _torch_dtype(self.a_dtype)

    @property
    def b_torch(self) -> "torch.dtype":
        """torch dtype of B."""
        return _torch_dtype(self.b_dtype)

    @property
    def out_torch(self) -> "torch.dtype":
        """torch dtype of D."""
        return _torch_dtype(self.out_dtype)

    @property
    def is_static(self) -> bool:
        """Whether every size is known."""
        return None not in (self.l, self.m, self.n, self.k)

    def with_sizes(self, l: int, m: int, n: int, k: int) -> "GemmProblem":  # noqa: E741
        """The same question with all sizes known."""
        return replace(self, l=l, m=m, n=n, k=k)

    def kind(self) -> "GemmProblem":
        """Dtypes, majors and rank without sizes: what a kernel is compiled for."""
        return replace(self, m=None, n=None, k=None, l=None)

    def swapped(self) -> "GemmProblem":
        """D^T = B^T A^T: the same numbers, M and N exchanged, majors renamed accordingly."""
        return replace(
            self,
            m=self.n,
            n=self.m,
            a_dtype=self.b_dtype,
            b_dtype=self.a_dtype,
            a_major="k" if self.b_major == "k" else "m",
            b_major="k" if self.a_major == "k" else "n",
            out_major="m" if self.out_major == "n" else "n",
            epilogue=None if self.epilogue is None else self.epilogue.swap(),
        )

    def __str__(self) -> str:
        def size(value: int | None) -> str:
            return "?" if value is None else str(value)

        batch = f"{size(self.l)} x " if self.batched else ""
        return (
            f"{batch}{size(self.m)}x{size(self.n)}x{size(self.k)} {self.a_dtype} -> {self.out_dtype}, "
            f"A {self.a_major}-major, B {self.b_major}-major, D {self.out_major}-major"
            + (f", then {self.epilogue}" if self.epilogue else "")
        )


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a dtype given by name."""
    return _BYTES[name]


def full_dtype_name(written: str) -> str:
    """ "bfloat16" for "bf16" or "torch.BFloat16"; a name that is not known is returned in lower case."""
    name = written.strip().lower().removeprefix("torch.")
    return _SHORT_NAMES.get(name, name)


def dtype_name(dtype: object, argument: str, allowed: tuple[str, ...] = OUTPUT_DTYPES) -> str:
    """The full name of a dtype, if it is among ``allowed``: of a torch dtype, or of a name such as "bf16".

    Names are read in any case, with or without "torch."; bf16, fp16, f16, half, fp32, f32 and float are
    names too. Raises OperandTypeError naming ``argument``, what was given and what is allowed.
    """
    # A torch dtype reads as its name; asking for its class would import torch.
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        name = full_dtype_name(str(dtype))
        if name in allowed:
            return name
    raise OperandTypeError(
        f"{argument}={dtype!r} is not supported; use one of {', '.join(allowed)} (a torch dtype or its name)"
    )


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _read_input_dtypes(dtype: object) -> tuple[str, str]:
    if isinstance(dtype, (tuple, list)):
        if len(dtype) != 2:
            raise OperandTypeError(f"dtype={dtype!r}: give one dtype, or a pair (a, b)")
        a, b = (dtype_name(one, "dtype", INPUT_DTYPES) for one in dtype)
    else:
        a = b = dtype_name(dtype, "dtype", INPUT_DTYPES)
    if a != b:
        raise OperandTypeError(
            f"A is {a} and B is {b}: the tensor core multiplies operands of one dtype; convert one of them"
        )
    return a, b


def as_integer(value: object) -> int | None:
    """``value`` as a Python int if it is an integer, NumPy's included; None for anything else, a bool too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def _read_shape(shape: object) -> tuple[int | None, ...]:
    wanted = "give (M, N, K), or (L, M, N, K) for L independent products"
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise OperandTypeError(f"shape={shape!r} is no sequence of sizes; {wanted}")
    sizes = tuple(shape)
    if len(sizes) not in (3, 4):
        raise ProblemError(f"shape={sizes!r} has {len(sizes)} entries; {wanted}")
    names = ("L", "M", "N", "K")[-len(sizes) :]
    for name, size in zip(names, sizes, strict=True):
        if size is None:
            continue
        number = as_integer(size)
        if number is None:
            raise OperandTypeError(
                f"{name}={size!r} in shape={sizes!r} must be an integer, or None if known at the call"
            )
        if not 0 <= number <= MAX_SIZE:
            raise ProblemError(f"{name}={size} in shape={sizes!r} must lie in 0..{MAX_SIZE}")
    return tuple(None if size is None else int(size) for size in sizes)
