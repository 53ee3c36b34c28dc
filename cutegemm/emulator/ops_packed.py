"""Arithmetic on pairs of float32 and on bytes of one register, and reductions over the lanes of a warp."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.ops_float import fused_multiply_add
from cutegemm.emulator.ops_integer import type_of
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import Lanes, lanes

_PAIRS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": fused_multiply_add,
}


@opcode(*(f"{name}{flags}.f32x2" for name in _PAIRS for flags in ("", ".rn", ".ftz", ".rn.ftz")))
def _pairs(statement: Statement, decoder: Decoder) -> Op:
    """The same operation on both halves."""
    name, *flags = statement.opcode.split(".")
    function, flush = _PAIRS[name], "ftz" in flags
    d = decoder.result(statement.operands[0], statement)
    sources = [decoder.source(text, statement, 64) for text in statement.operands[1:]]
    tiny = np.finfo(np.float32).tiny

    def flushed(numbers: Lanes) -> Lanes:
        return np.where(np.abs(numbers) < tiny, numbers * 0, numbers) if flush else numbers

    def op(warp: Any) -> None:
        with np.errstate(all="ignore"):
            numbers = [flushed(lanes(warp.r[slot], 64).view(np.float32)) for slot in sources]
            result = flushed(np.asarray(function(*numbers), dtype=np.float32))
        warp.r[d] = np.ascontiguousarray(result).view(np.uint64)

    return op


@opcode(*(f"dp4a.{a}.{b}" for a in ("s32", "u32") for b in ("s32", "u32")))
def _dot_product_of_bytes(statement: Statement, decoder: Decoder) -> Op:
    """c + the sum of a's bytes times b's."""
    kinds = [np.int8 if part == "s32" else np.uint8 for part in statement.opcode.split(".")[1:]]
    d = decoder.result(statement.operands[0], statement)
    a, b, c = (decoder.source(text, statement, 32) for text in statement.operands[1:])

    def op(warp: Any) -> None:
        one, two = (
            np.ascontiguousarray(lanes(warp.r[slot], 32)).view(kind).reshape(-1, 4).astype(np.int64)
            for slot, kind in zip((a, b), kinds, strict=True)
        )
        total = lanes(warp.r[c], 32) + (one * two).sum(axis=1)
        warp.r[d] = (total & 0xFFFFFFFF).astype(np.uint32)

    return op


_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": np.sum,
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@opcode("redux.sync")
def _redux(statement: Statement, decoder: Decoder) -> Op:
    """One value of all lanes; float32 minimum and maximum ignore NaN unless they are told not to."""
    parts = statement.opcode.split(".")
    kind, bits = type_of(statement)
    name = parts[2]
    d = decoder.result(statement.operands[0], statement)
    x = decoder.source(statement.operands[1], statement, 32)
    if bits != 32 or name not in _REDUCTIONS or set(parts[3:-1]) - {"abs", "NaN"}:
        raise decoder.unknown(statement)
    function = _REDUCTIONS[name]

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        values = lanes(warp.r[x], 32)[warp.active()]
        if kind == "f":
            numbers = values.view(np.float32)
            numbers = np.abs(numbers) if "abs" in parts else numbers
            known = numbers[~np.isnan(numbers)]
            if ("NaN" in parts and len(known) < len(numbers)) or not len(known):
                warp.r[d] = 0x7FFFFFFF
            else:
                warp.r[d] = int(np.asarray(function(known), dtype=np.float32).view(np.uint32))
        else:
            result = int(function(values.view(np.int32) if kind == "s" else values.astype(np.uint64)))
            warp.r[d] = result & 0xFFFFFFFF
        return None

    return op
