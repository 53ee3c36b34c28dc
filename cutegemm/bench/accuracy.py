"""Whether a result is right: every element finite, and as close to float32 truth as torch comes.

The bound is not picked by hand. It is twice the error torch.mm makes in the same dtypes on the same
inputs, or twice that of rounding the truth to the output's dtype where that is more. Two errors are held
against it: the Frobenius norm of the difference sees many small errors, the largest difference
of one element sees a single wrong one among millions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cutegemm.bench.inputs import Operands
from cutegemm.errors import CutegemmError

# What the float32 truth itself is uncertain by; matters only where the output is float32 as well.
TRUTH_ERROR = 2.0**-16
MARGIN = 2.0


class WrongResultError(CutegemmError, ArithmeticError):
    """An implementation computed something else than A @ B."""


@dataclass(frozen=True)
class Errors:
    """Distance from the truth: ``relative`` in the Frobenius norm, ``largest`` of one element in units of
    the truth's root mean square."""

    relative: float
    largest: float

    def worst(self, other: "Errors") -> "Errors":
        """The larger of each."""
        return Errors(max(self.relative, other.relative), max(self.largest, other.largest))


@contextmanager
def _full_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def truth_of(operands: Operands) -> torch.Tensor:
    """A @ B in float32, TF32 off."""
    with _full_float32():
        return torch.matmul(operands.a.float(), operands.b.float())


def torch_product(operands: Operands) -> torch.Tensor:
    """torch.mm or torch.bmm in the problem's own dtypes (cuBLAS on a GPU), written to ``operands.out``."""
    a, b, out = operands.a, operands.b, operands.out
    product = torch.bmm if a.dim() == 3 else torch.mm
    if out.dtype == a.dtype:
        return product(a, b, out=out)
    if not out.is_contiguous():  # not every product with another dtype writes these
        return out.copy_(product(a, b, out_dtype=out.dtype))
    return product(a, b, out_dtype=out.dtype, out=out)


def check_finite(out: torch.Tensor) -> None:
    """WrongResultError if an element is NaN or infinite: poison left over, or worse."""
    bad = int((~torch.isfinite(out)).sum())
    if bad:
        raise WrongResultError(
            f"{bad} of {out.numel()} elements are NaN or infinite: not written, or computed from what was not"
        )


def errors_of(out: torch.Tensor, truth: torch.Tensor) -> Errors:
    """How far ``out`` is from ``truth``; WrongResultError if an element is NaN or infinite."""
    check_finite(out)
    difference = out.float() - truth
    norm = float(torch.linalg.vector_norm(truth))
    rms = norm / truth.numel() ** 0.5
    if rms == 0.0:
        raise WrongResultError("the truth is all zero: these inputs can tell nothing")
    relative = float(torch.linalg.vector_norm(difference)) / norm
    return Errors(relative, float(difference.abs().max()) / rms)


def allowed_errors(operands: Operands, truth: torch.Tensor) -> Errors:
    """The bound for these inputs; see the module's first lines."""
    rounded = errors_of(truth.to(operands.out.dtype), truth)
    try:
        by_torch = errors_of(torch_product(operands), truth)
    except RuntimeError:
        # torch has no product of these dtypes on this device: rounding alone sets the bound.
        by_torch = rounded
    worst = by_torch.worst(rounded)
    return Errors(MARGIN * worst.relative + TRUTH_ERROR, MARGIN * worst.largest + TRUTH_ERROR)


def check(out: torch.Tensor, truth: torch.Tensor, allowed: Errors) -> Errors:
    """The errors of ``out``; WrongResultError if they exceed what is allowed."""
    errors = errors_of(out, truth)
    if errors.relative > allowed.relative:
        raise WrongResultError(
            f"wrong result: relative error {errors.relative:.2e}, twice torch's is {allowed.relative:.2e}"
        )
    if errors.largest > allowed.largest:
        raise WrongResultError(
            f"wrong result: one element is off by {errors.largest:.2e} of the root mean square, "
            f"twice torch's largest is {allowed.largest:.2e}"
        )
    return errors
