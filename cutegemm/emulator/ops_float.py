"""Conversions between types, and float32 arithmetic."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.elements import float8_bits, widen
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import (
    UNSIGNED,
    Value,
    bfloat16_bits,
    float16_bits,
    float_bits,
    floats,
    lanes,
    mask_of,
    signed,
)

_NARROW: dict[str, Callable[[Any], Any]] = {"bf16": bfloat16_bits, "f16": float16_bits}
_LARGEST = {"bf16": np.float32(2.0**128 - 2.0**120), "f16": np.float32(65504)}
FLOAT8 = ("e4m3x2", "e5m2x2")
_INTEGER = {f"{kind}{bits}": (kind, bits) for kind in "sub" for bits in (8, 16, 32, 64)}


@opcode("cvt")
def _convert(statement: Statement, decoder: Decoder) -> Op:
    parts = statement.opcode.split(".")[1:]
    to, origin = parts[-2:]
    flags = set(parts[:-2])
    if to in _INTEGER and origin in _INTEGER:
        return _integer_to_integer(statement, decoder, _INTEGER[to], _INTEGER[origin])
    if to in FLOAT8 and origin == "f32" and flags - {"relu"} == {"rn", "satfinite"}:
        return _to_float8_pair(statement, decoder, to[:-2], "relu" in flags)
    if to == "f16x2" and origin in FLOAT8 and flags - {"relu"} == {"rn"}:
        return _from_float8_pair(statement, decoder, origin[:-2], "relu" in flags)
    if flags - {"rn", "rna"} and not (flags == {"rn", "satfinite"} and origin == "f32"):
        raise decoder.unknown(statement, f"the rounding {'.'.join(sorted(flags))}")
    if to in ("bf16x2", "f16x2") and origin == "f32":
        return _to_pair(statement, decoder, _narrow(to[:-2], flags))
    if to in _NARROW and origin == "f32":
        narrow = _narrow(to, flags)
        return _unary(statement, decoder, 32, lambda value: narrow(floats(lanes(value, 32))))
    if to == "f32" and origin == "bf16":
        return _unary(statement, decoder, 16, lambda value: lanes(value, 16).astype(np.uint32) << 16)
    if to == "f32" and origin == "f16":
        return _unary(statement, decoder, 16, lambda value: float_bits(floats(lanes(value, 16), 16)))
    if to == "f32" and origin in _INTEGER:
        kind, bits = _INTEGER[origin]
        return _unary(
            statement,
            decoder,
            bits,
            lambda value: float_bits(
                np.asarray(signed(value, bits) if kind == "s" else value).astype(np.float32)
            ),
        )
    raise decoder.unknown(statement)


def _narrow(to: str, flags: set[str]) -> Callable[[Any], Any]:
    """The conversion of float32 numbers; with satfinite the largest finite number takes infinity's place."""
    narrow, largest = _NARROW[to], _LARGEST[to]
    if "satfinite" not in flags:
        return narrow
    return lambda numbers: narrow(np.clip(numbers, -largest, largest))


def _unary(
    statement: Statement, decoder: Decoder, bits: int, function: Callable[[Value], Any], index: int = 1
) -> Op:
    d = decoder.result(statement.operands[0], statement)
    x = decoder.source(statement.operands[index], statement, bits)

    def op(warp: Any) -> None:
        warp.r[d] = function(warp.r[x])

    return op


def _integer_to_integer(
    statement: Statement, decoder: Decoder, to: tuple[str, int], origin: tuple[str, int]
) -> Op:
    (_, wide), (kind, bits) = to, origin
    mask = mask_of(wide)

    def convert(value: Value) -> Any:
        if isinstance(value, int):
            value &= mask_of(bits)
            return (signed(value, bits) if kind == "s" else value) & mask
        cut = lanes(value, bits)
        return (signed(cut, bits) if kind == "s" else cut).astype(UNSIGNED[wide])

    return _unary(statement, decoder, bits, convert)


def _to_pair(statement: Statement, decoder: Decoder, narrow: Callable[[Any], Any]) -> Op:
    """Two floats to one register: the first operand goes into the upper half."""
    d = decoder.result(statement.operands[0], statement)
    high, low = (decoder.source(text, statement, 32) for text in statement.operands[1:3])

    def op(warp: Any) -> None:
        pair = np.empty((32, 2), dtype=np.float32)
        pair[:, 0] = floats(lanes(warp.r[low], 32))
        pair[:, 1] = floats(lanes(warp.r[high], 32))
        warp.r[d] = narrow(pair).view(np.uint32)[:, 0]

    return op


def _to_float8_pair(statement: Statement, decoder: Decoder, name: str, relu: bool) -> Op:
    """Two floats to one register: the first operand goes into the upper half."""
    d = decoder.result(statement.operands[0], statement)
    sources = [decoder.source(text, statement, 32) for text in statement.operands[1:3]]

    def op(warp: Any) -> None:
        high, low = (float8_bits(_positive(floats(lanes(warp.r[s], 32)), relu), name) for s in sources)
        warp.r[d] = low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)

    return op


def _from_float8_pair(statement: Statement, decoder: Decoder, name: str, relu: bool) -> Op:
    def convert(value: Value) -> Any:
        halves = _positive(widen(lanes(value, 16).view(np.uint8), name), relu).astype(np.float16)
        return halves.view(np.uint32)

    return _unary(statement, decoder, 16, convert)


def _positive(numbers: Any, relu: bool) -> Any:
    """With ``relu``, zero in place of negative numbers; NaN stays."""
    return np.where(numbers < 0, np.float32(0), numbers) if relu else numbers


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 numbers with a single rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it again to float32
    gives what one rounding of the exact sum would.
    """
    product = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = np.atleast_1d(total).view(np.int64)
        even = (bits & 1) == 0
        inexact = np.isfinite(np.atleast_1d(total)) & (np.atleast_1d(error) != 0) & even
        toward = np.where((np.atleast_1d(error) > 0) == (np.atleast_1d(total) > 0), 1, -1)
        odd = np.where(inexact, bits + toward, bits).view(np.float64)
        return odd.astype(np.float32).reshape(np.shape(total))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "min": np.fmin,
    "max": np.fmax,
    "fma": fused_multiply_add,
    "mad": fused_multiply_add,
    "copysign": lambda sign, a: np.copysign(a, sign),
    "neg": lambda a: -a,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rcp": lambda a: np.float32(1) / a,
    "rsqrt": lambda a: np.float32(1) / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}
# Instructions the hardware approximates; here they are exact to float32.
_KNOWN_FLAGS = {"rn", "ftz", "approx", "full", "f32", "NaN"}
# With the flag, where one number is NaN.
_OF_NAN = {"min": np.minimum, "max": np.maximum}


@opcode(
    *(f"{name}{flags}.f32" for name in _ARITHMETIC for flags in ("", ".rn", ".ftz", ".rn.ftz", ".approx")),
    *(f"{name}.approx.ftz.f32" for name in _ARITHMETIC),
    *(f"{name}.NaN{flags}.f32" for name in ("min", "max") for flags in ("", ".ftz")),
    "div.full.f32",
    "div.full.ftz.f32",
)
def _float(statement: Statement, decoder: Decoder) -> Op:
    name, *flags = statement.opcode.split(".")
    if set(flags) - _KNOWN_FLAGS:
        raise decoder.unknown(statement)
    function = _OF_NAN[name] if "NaN" in flags else _ARITHMETIC[name]
    flush = "ftz" in flags
    d = decoder.result(statement.operands[0], statement)
    sources = [decoder.source(text, statement, 32) for text in statement.operands[1:]]

    def numbers(value: Value) -> Any:
        number = floats(value)
        return np.where(np.abs(number) < np.finfo(np.float32).tiny, number * 0, number) if flush else number

    def op(warp: Any) -> None:
        with np.errstate(all="ignore"):
            outcome = np.asarray(function(*(numbers(warp.r[slot]) for slot in sources)), dtype=np.float32)
            if flush:
                outcome = np.where(np.abs(outcome) < np.finfo(np.float32).tiny, outcome * 0, outcome)
        warp.r[d] = float_bits(outcome)

    return op
