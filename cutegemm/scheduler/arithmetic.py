"""Integer arithmetic that reads the same for Python ints and for device integers.

A tile order is written once and runs on the host (analysis, tests, plots) and in the kernel. The
few operations whose host and device spelling differ live here. Operands are never negative: device
``//`` and ``%`` disagree with Python's below zero.
"""

from typing import Any

# An index: a Python int on the host, a device Int32 while a kernel is traced.
Index = Any


def _on_host(*values: Index) -> bool:
    return all(isinstance(value, (bool, int)) for value in values)


def minimum(a: Index, b: Index) -> Index:
    """The smaller of two indices."""
    if _on_host(a, b):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def ceil_div(a: Index, b: Index) -> Index:
    """a / b rounded up, for a >= 0 and b > 0."""
    return (a + b - 1) // b


def divmod_(a: Index, b: Index) -> tuple[Index, Index]:
    """Quotient and remainder of two non-negative indices, with one division."""
    quotient = a // b
    return quotient, a - quotient * b
