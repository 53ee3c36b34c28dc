"""Integer arithmetic that reads the same for Python ints, for numpy arrays and for device integers.

A tile order is written once and runs on the host (analysis, tests, plots) and in the kernel. The
few operations whose host and device spelling differ live here. Operands are never negative and below
2^31: device ``//`` and ``%`` disagree with Python's below zero.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

# An index: a Python int or an array of them on the host, a device Int32 while a kernel is traced.
Index = Any
# The result of a comparison of indices.
Condition = Any

_HOST = (int, np.integer, np.bool_, np.ndarray)
_WORD = 2**32


def _on_host(*values: Index) -> bool:
    return all(isinstance(value, _HOST) for value in values)


def minimum(a: Index, b: Index) -> Index:
    """The smaller of two indices."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if _on_host(a, b):
        return np.minimum(a, b)
    import cutlass

    return cutlass.min(a, b)


def maximum(a: Index, b: Index) -> Index:
    """The larger of two indices."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if _on_host(a, b):
        return np.maximum(a, b)
    import cutlass

    return cutlass.max(a, b)


def select(condition: Condition, a: Index, b: Index) -> Index:
    """``a`` where the condition holds, else ``b``; both are evaluated. Conditions combine with & | ^."""
    if isinstance(condition, bool | np.bool_):
        return a if condition else b
    if _on_host(condition, a, b):
        return np.where(condition, a, b)
    import cutlass

    return cutlass.select_(condition, cutlass.Int32(a), cutlass.Int32(b))


def ceil_div(a: Index, b: Index) -> Index:
    """a / b rounded up, for a >= 0 and b > 0."""
    return divmod_(a + b - 1, b)[0]


@dataclass(frozen=True)
class Divisor:
    """A divisor of at least 1 that is the same for every task, prepared before a kernel's loop over them.

    It takes two registers all through the loop and makes a division a multiplication and a correction.
    """

    value: Index
    reciprocal: Index = None  # on the device: floor((2^32 - 1) / value), a Uint32


def divisor(value: Index) -> Divisor:
    """Prepares a divisor; for one that depends on the grid alone, such as ``tiles_n``."""
    if _on_host(value):
        return Divisor(value)
    import cutlass

    return Divisor(value, cutlass.Uint32(_WORD - 1) // cutlass.Uint32(value))


def divmod_(a: Index, b: Index | Divisor) -> tuple[Index, Index]:
    """Quotient and remainder of two non-negative indices, b > 0."""
    by = b if isinstance(b, Divisor) else Divisor(b)
    if _on_host(a, by.value):
        quotient = a // by.value
        return quotient, a - quotient * by.value
    import cutlass

    if by.reciprocal is None:  # unsigned: a signed division on the device first looks after the signs
        quotient = cutlass.Int32(cutlass.Uint32(a) // cutlass.Uint32(by.value))
        return quotient, a - quotient * by.value
    # a * reciprocal / 2^32 falls short of a / b by less than 1 for a < 2^31, so its floor is the
    # quotient or one less.
    product = cutlass.Uint64(cutlass.Uint32(a)) * cutlass.Uint64(by.reciprocal)
    quotient = cutlass.Int32(product >> cutlass.Uint64(32))
    remainder = a - quotient * by.value
    short = remainder >= by.value
    return quotient + short.to(cutlass.Int32), remainder - select(short, by.value, 0)
