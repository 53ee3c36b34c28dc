"""Whether a product is right: NaN and Inf where arithmetic puts them, and as near the truth as torch comes.

The truth is a float64 product. Two bounds hold for every element that is a number: twice the largest error
that torch's own product of the same inputs in the same dtypes makes; and, of that element alone, one
rounding to D's dtype and what a float32 sum of so many products can lose. The first sees a kernel that is
worse than it has to be, the second a single element that lacks a product where torch is coarse.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

MARGIN = 2.0  # times torch's error
WIDTH = 4.0  # times the root of the sum of squares: what a sum of products of random sign stays below
ADDED_AT_ONCE = 16  # products that a tensor core adds in one step


@dataclass(frozen=True)
class Expected:
    """What a product should be. All are (..., M, N).

    truth      float64, where it is a number
    nan, positive, negative   where it is NaN or infinite
    wander     root of the sum of squared products: how far from 0 the sum wanders
    k          products in a sum
    """

    truth: torch.Tensor
    nan: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    wander: torch.Tensor
    k: int

    @property
    def numbers(self) -> torch.Tensor:
        """Where the result is a number."""
        return ~(self.nan | self.positive | self.negative)

    @property
    def sum_loss(self) -> torch.Tensor:
        """What a float32 sum may lose.

        Of products of random sign: a tensor core adds 16 at a time and cuts the sum off at 24 bits; in how
        many such steps a kernel goes along K is its own affair. Of products that are all alike, as those of
        expanded operands: each addition may round the same way.
        """
        random = WIDTH * self.wander * (2.0**-22 + self.k / ADDED_AT_ONCE * 2.0**-24)
        return random + self.truth.abs() * (self.k * 2.0**-24)

    def loss(self, out_dtype: torch.dtype) -> torch.Tensor:
        """What that and one rounding to ``out_dtype`` may lose."""
        info = torch.finfo(out_dtype)
        half_unit = info.eps / 2 * self.truth.abs() + info.smallest_normal * info.eps / 2
        return half_unit * (1 + info.eps) + self.sum_loss


def expected(a: torch.Tensor, b: torch.Tensor) -> Expected:
    """What a (..., M, K) @ b (..., K, N) is by IEEE arithmetic."""
    a_finite, b_finite = (torch.nan_to_num(one.double(), 0.0, 0.0, 0.0) for one in (a, b))
    truth = torch.matmul(a_finite, b_finite)
    wander = torch.matmul(a_finite.square(), b_finite.square()).sqrt()
    if bool(a.isfinite().all()) and bool(b.isfinite().all()):
        none = torch.zeros_like(truth, dtype=torch.bool)
        return Expected(truth, none, none, none, wander, a.shape[-1])
    plus, minus = _infinite_products(a, b), _infinite_products(-a, b)
    zero_times_infinity = _meet(a == 0, b.isinf()) | _meet(a.isinf(), b == 0)
    poisoned = _meet(a.isnan(), torch.ones_like(b, dtype=torch.bool))
    poisoned = poisoned | _meet(torch.ones_like(a, dtype=torch.bool), b.isnan())
    nan = poisoned | zero_times_infinity | (plus & minus)
    return Expected(truth, nan, plus & ~nan, minus & ~nan, wander, a.shape[-1])


def _meet(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where row m of one and column n of the other are both set for some k."""
    return torch.matmul(a.float(), b.float()) > 0


def _infinite_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where some product is +Inf."""
    inf = float("inf")
    found = _meet(a == inf, b > 0) | _meet(a == -inf, b < 0)
    return found | _meet(a > 0, b == inf) | _meet(a < 0, b == -inf)


def complaints(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for everything wrong with out = a @ b; nothing if all is well."""
    if out.numel() == 0:
        return
    right = expected(a, b)
    yield from _misplaced(out, right)
    numbers = right.numbers & out.isfinite()
    errors = torch.where(numbers, (out.double() - right.truth).abs(), 0.0)
    yield from _too_large(errors, right, torch_error(out, a, b, right), out)


def _misplaced(out: torch.Tensor, right: Expected) -> Iterator[tuple[str, str]]:
    """NaN and Inf where they do not belong, or none where they do."""
    for name, found, wanted in (
        ("NaN", out.isnan(), right.nan),
        ("+Inf", out == float("inf"), right.positive),
        ("-Inf", out == float("-inf"), right.negative),
    ):
        for what, where in (
            (f"wrongly {name}", found & ~wanted),
            (f"not {name} as they should be", wanted & ~found),
        ):
            count = int(where.sum())
            if count:
                at = _first(where)
                yield (
                    "special values",
                    f"{count} of {out.numel()} elements are {what}, such as {at}: {float(out[at])}",
                )


def _too_large(
    errors: torch.Tensor, right: Expected, theirs: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[str, str]]:
    loss = right.loss(out.dtype)
    wrong = errors > loss
    if count := int(wrong.sum()):
        at = _first(errors - loss == (errors - loss).max())
        yield (
            "wrong numbers",
            f"{count} of {out.numel()} elements are further off than rounding explains, worst is {at}: "
            f"{float(out[at]):.6g} instead of {float(right.truth[at]):.6g}, allowed +-{float(loss[at]):.2e}",
        )
    for name, mine, limit, floor in (
        ("the largest error", errors.max(), theirs.max(), right.sum_loss.max()),
        ("the norm of the errors", errors.norm(), theirs.norm(), right.sum_loss.norm()),
    ):
        bound = MARGIN * float(limit) + float(floor)
        if not float(mine) <= bound:
            yield (
                "wrong numbers",
                f"{name} is {float(mine):.3e}, allowed {bound:.3e}, torch's {float(limit):.3e}",
            )


def _first(where: torch.Tensor) -> tuple[int, ...]:
    """Index of the first element that is set."""
    return tuple(int(i) for i in where.nonzero()[0])


def torch_error(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, right: Expected) -> torch.Tensor:
    """How far torch's product is from the truth; 0 where that is no number, or torch's wrongly is none (on
    a CPU its bfloat16 product of an odd K lets a NaN of the next row in)."""
    with torch_sums_in_float32():
        theirs = torch_product(a.contiguous(), b.contiguous(), out.dtype)
    return torch.where(right.numbers & theirs.isfinite(), (theirs.double() - right.truth).abs(), 0.0)


def torch_product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """torch.mm of the same inputs in the same dtypes: on a GPU with its tensor cores and a float32 sum."""
    if out_dtype == a.dtype:
        return torch.matmul(a, b)
    if a.is_cuda and 0 not in (*a.shape, *b.shape):
        product = torch.bmm if a.dim() == 3 else torch.mm
        return product(a, b, out_dtype=torch.float32).to(out_dtype)
    return torch.matmul(a.float(), b.float()).to(out_dtype)


@contextmanager
def torch_sums_in_float32() -> Iterator[None]:
    """torch may not sum in 16 bits meanwhile, nor cut float32 short: the bound would be loose."""
    flags = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(flags, name) for name in names}
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)
