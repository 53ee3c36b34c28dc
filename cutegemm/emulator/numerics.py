"""Sums of 16-bit products as a Hopper tensor core makes them, bit by bit.

One WGMMA adds, for each element of D, its 16 products along K and the accumulator in one go:

    e       the largest exponent among them; that of a product is the sum of its factors' exponents
    align   every product and the accumulator is cut off (towards zero) 25 bits below e
    add     without rounding
    D       the sum, cut off (towards zero) to the 24 bits of a float32

Not documented; found on an H200 (2026-11) with inputs of widely spread exponents, for bfloat16 and float16.
All of 524,288 sums of 16 to 192 products are the same bit by bit, and so are 2.3 million elements of 100
products by kernels of this package. With one fraction bit more or less, or with rounding in place of either
cut, a tenth to a half of the sums differ.

Not measured: subnormal factors and sums, which are kept, as on tensor cores before Hopper (Fasi and others,
2021), and sums beyond the range of float32, which become infinite.
"""

import numpy as np

from cutegemm.emulator.values import Lanes

FRACTION_BITS = 25
FLOAT32_FRACTION_BITS = 23
NO_EXPONENT = -(10**6)  # of a zero: below every other
LEAST_EXPONENT = -126  # of a float32 that is not subnormal
PRODUCTS = 16  # of one instruction, for 16-bit operands


def added(a: Lanes, b: Lanes, before: Lanes | None) -> Lanes:
    """before + a @ b.T of one instruction: a (M, 16), b (N, 16), before and result (M, N) float32."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    sums = np.zeros((len(a), len(b))) if before is None else before.astype(np.float64)
    with np.errstate(all="ignore"):
        plain = wide_a @ wide_b.T + sums
    finite = np.isfinite(plain)
    if not finite.all():  # NaN and infinity come out as in any other order; the rest must not see them
        wide_a, wide_b, sums = (np.where(np.isfinite(x), x, 0.0) for x in (wide_a, wide_b, sums))
    products = wide_a[:, None, :] * wide_b[None, :, :]
    exponents = _exponents(wide_a)[:, None, :] + _exponents(wide_b)[None, :, :]
    largest = np.maximum(exponents.max(axis=-1), _exponents(sums))
    shift = np.where(largest > NO_EXPONENT, FRACTION_BITS - largest, 0)
    aligned = np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(sums, shift))
    result = _cut_to_float32(np.ldexp(aligned, -shift))
    return result if finite.all() else np.where(finite, result, plain.astype(np.float32))


def _exponents(x: Lanes) -> Lanes:
    """Binary exponents, such that 1 <= |x| / 2^e < 2."""
    return np.where(x == 0, NO_EXPONENT, np.frexp(x)[1].astype(np.int64) - 1)


def _cut_to_float32(x: Lanes) -> Lanes:
    """Rounded towards zero; beyond the range infinite."""
    shift = FLOAT32_FRACTION_BITS - np.maximum(_exponents(x), LEAST_EXPONENT)
    with np.errstate(over="ignore"):
        result: Lanes = np.ldexp(np.trunc(np.ldexp(x, shift)), -shift).astype(np.float32)
    return result
