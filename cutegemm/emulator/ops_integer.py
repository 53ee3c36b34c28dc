"""Integer and logic instructions, moves, conversions between integers, comparisons, selection."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import (
    SIGNED,
    UNSIGNED,
    Lanes,
    Value,
    as_bits,
    beside_lanes,
    floats,
    lanes,
    mask_of,
    signed,
)

Binary = Callable[[Any, Any], Any]


def type_of(statement: Statement) -> tuple[str, int]:
    """Kind ("s", "u", "b", "f") and bits of the last type in an opcode."""
    for part in reversed(statement.opcode.split(".")):
        if part[:1] in "subf" and part[1:].isdigit():
            return part[0], int(part[1:])
    return ("p", 1) if statement.opcode.endswith(".pred") else ("b", 32)


def _binary(statement: Statement, decoder: Decoder, bits: int, scalar: Binary, vector: Binary) -> Op:
    d = decoder.result(statement.operands[0], statement)
    x, y = (decoder.source(text, statement, bits) for text in statement.operands[1:3])

    def op(warp: Any) -> None:
        r = warp.r
        a, b = r[x], r[y]
        r[d] = scalar(a, b) if type(a) is int and type(b) is int else vector(a, b)

    return op


def _both(bits: int, function: Binary) -> Binary:
    """An operation on unsigned values of a width, at least one of them an array."""
    return lambda a, b: function(beside_lanes(a, bits), beside_lanes(b, bits))


def _both_signed(bits: int, function: Binary) -> Binary:
    return lambda a, b: function(signed(lanes(a, bits), bits), signed(lanes(b, bits), bits)).view(
        UNSIGNED[bits]
    )


@opcode("add", "sub", "mul.lo", "mul24.lo", "and", "or", "xor")
def _arithmetic(statement: Statement, decoder: Decoder) -> Op:
    name = statement.opcode.split(".")[0]
    kind, bits = type_of(statement)
    if kind == "f":
        raise decoder.unknown(statement)
    if kind == "p":
        return _predicate(statement, decoder, name)
    mask = mask_of(bits)
    function = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }[name]
    return _binary(statement, decoder, bits, lambda a, b: function(a, b) & mask, _both(bits, function))


def _predicate(statement: Statement, decoder: Decoder, name: str) -> Op:
    d = decoder.result(statement.operands[0], statement)
    x, y = (decoder.source(text, statement, 1) for text in statement.operands[1:3])
    function: Binary = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }[name]

    def op(warp: Any) -> None:
        r = warp.r
        value = function(r[x], r[y])
        r[d] = value if isinstance(value, np.ndarray) else bool(value)

    return op


@opcode("mul.wide", "mul.hi")
def _wide(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    high = statement.opcode.startswith("mul.hi")
    table = SIGNED if kind == "s" else UNSIGNED
    wide = mask_of(2 * bits)

    def scalar(a: int, b: int) -> int:
        product = (signed(a, bits) * signed(b, bits) if kind == "s" else a * b) & wide
        return product >> bits if high else product

    def vector(a: Value, b: Value) -> Any:
        if bits == 64:
            raise decoder.unknown(statement, "64-bit high products of lanes")
        one: Lanes = lanes(a, bits).view(table[bits]).astype(table[2 * bits])
        two: Lanes = lanes(b, bits).view(table[bits]).astype(table[2 * bits])
        product: Lanes = (one * two).view(UNSIGNED[2 * bits])
        return (product >> np.array(bits, product.dtype)).astype(UNSIGNED[bits]) if high else product

    return _binary(statement, decoder, bits, scalar, vector)


@opcode("mad.lo", "mad.wide")
def _mad(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    wide = ".wide" in statement.opcode
    out = 2 * bits if wide else bits
    d = decoder.result(statement.operands[0], statement)
    x, y = (decoder.source(text, statement, bits) for text in statement.operands[1:3])
    z = decoder.source(statement.operands[3], statement, out)

    def extend(value: Value) -> Any:
        if isinstance(value, int):
            return signed(value, bits) if kind == "s" and wide else value
        value = as_bits(value, bits)
        if wide:
            return (value.view(SIGNED[bits]).astype(SIGNED[out]) if kind == "s" else value).astype(
                UNSIGNED[out]
            )
        return value

    def op(warp: Any) -> None:
        a, b, c = extend(warp.r[x]), extend(warp.r[y]), warp.r[z]
        if all(isinstance(v, int) for v in (a, b, c)):
            warp.r[d] = (a * b + c) & mask_of(out)
        else:
            one, two, three = (lanes(v, out) for v in (a, b, c))
            warp.r[d] = one * two + three

    return op


@opcode("div", "rem")
def _divide(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    if kind == "f":
        raise decoder.unknown(statement)
    remainder = statement.opcode.startswith("rem")

    def scalar(a: int, b: int) -> int:
        if b == 0:
            return a if remainder else mask_of(bits)
        if kind == "s":
            a, b = signed(a, bits), signed(b, bits)
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return ((a - quotient * b) if remainder else quotient) & mask_of(bits)

    def vector(a: Value, b: Value) -> Any:
        pairs = zip(lanes(a, bits).tolist(), lanes(b, bits).tolist(), strict=True)
        return np.array([scalar(x, y) for x, y in pairs], dtype=UNSIGNED[bits])

    return _binary(statement, decoder, bits, scalar, vector)


@opcode("min", "max")
def _extreme(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    if kind == "f":
        raise decoder.unknown(statement)
    least = statement.opcode.startswith("min")
    pick, array = (min, np.minimum) if least else (max, np.maximum)
    if kind == "s":
        return _binary(
            statement,
            decoder,
            bits,
            lambda a, b: pick(signed(a, bits), signed(b, bits)) & mask_of(bits),
            _both_signed(bits, array),
        )
    return _binary(statement, decoder, bits, pick, _both(bits, array))


@opcode("shl", "shr")
def _shift(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    left = statement.opcode.startswith("shl")
    d = decoder.result(statement.operands[0], statement)
    x = decoder.source(statement.operands[1], statement, bits)
    y = decoder.source(statement.operands[2], statement, 32)
    mask = mask_of(bits)

    def scalar(a: int, by: int) -> int:
        if left:
            return (a << by) & mask if by < bits else 0
        return (signed(a, bits) >> min(by, bits)) & mask if kind == "s" else a >> by

    def vector(a: Value, by: Value) -> Any:
        value = lanes(a, bits)
        if type(by) is int and by < bits and (left or kind != "s"):
            return value << by if left else value >> by
        amount = lanes(by, 32)
        small = np.minimum(amount, bits - 1).astype(value.dtype)
        if left or kind != "s":
            shifted = value << small if left else value >> small
            return np.where(amount < bits, shifted, np.zeros_like(value))
        return (value.view(SIGNED[bits]) >> small.view(SIGNED[bits])).view(UNSIGNED[bits])

    def op(warp: Any) -> None:
        a, by = warp.r[x], warp.r[y]
        warp.r[d] = scalar(a, by) if type(a) is int and type(by) is int else vector(a, by)

    return op


@opcode("neg", "not", "abs", "popc", "clz", "brev")
def _unary(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    name = statement.opcode.split(".")[0]
    if kind == "f":
        raise decoder.unknown(statement)
    d = decoder.result(statement.operands[0], statement)
    x = decoder.source(statement.operands[1], statement, bits)
    if kind == "p":

        def negate(warp: Any) -> None:
            value = warp.r[x]
            warp.r[d] = (not value) if isinstance(value, bool) else ~value

        return negate
    mask = mask_of(bits)
    scalar = {
        "neg": lambda a: -a & mask,
        "not": lambda a: ~a & mask,
        "abs": lambda a: abs(signed(a, bits)) & mask,
        "popc": lambda a: a.bit_count(),
        "clz": lambda a: bits - a.bit_length(),
        "brev": lambda a: int(f"{a:0{bits}b}"[::-1], 2),
    }[name]
    out = 32 if name in ("popc", "clz") else bits

    def op(warp: Any) -> None:
        a = warp.r[x]
        if type(a) is int:
            warp.r[d] = scalar(a)
        else:
            warp.r[d] = np.array([scalar(v) for v in lanes(a, bits).tolist()], dtype=UNSIGNED[out])

    return op


_COMPARE: dict[str, Binary] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def comparison(statement: Statement, decoder: Decoder, relation: str) -> Binary:
    """The test of a setp, on register values."""
    kind, bits = type_of(statement)
    if kind == "f":
        if relation in ("num", "nan"):
            return lambda a, b: (np.isnan(floats(a, bits)) | np.isnan(floats(b, bits))) == (relation == "nan")
        ordered = _COMPARE[_UNORDERED.get(relation, relation)]

        def compare(a: Value, b: Value) -> Any:
            x, y = floats(a, bits), floats(b, bits)
            nan = np.isnan(x) | np.isnan(y)
            return ordered(x, y) | nan if relation in _UNORDERED else ordered(x, y) & ~nan

        return compare
    test = _COMPARE.get(relation)
    if test is None:
        raise decoder.unknown(statement, f"the comparison {relation!r}")
    if kind == "s":
        return lambda a, b: test(signed(a, bits), signed(b, bits))

    def compare_unsigned(a: Value, b: Value) -> Any:
        if type(a) is int and type(b) is int:
            return test(a, b)
        return test(beside_lanes(a, bits), beside_lanes(b, bits))

    return compare_unsigned


@opcode("setp")
def _setp(statement: Statement, decoder: Decoder) -> Op:
    parts = statement.opcode.split(".")
    _, bits = type_of(statement)
    compare = comparison(statement, decoder, parts[1])
    combine = next((part for part in parts[2:] if part in ("and", "or", "xor")), None)
    results = [decoder.result(text.strip(), statement) for text in statement.operands[0].split("|")]
    x, y = (decoder.source(text, statement, bits) for text in statement.operands[1:3])
    other = decoder.source(statement.operands[3], statement, 1) if combine else None

    def as_predicate(value: Any) -> Any:
        return value if isinstance(value, np.ndarray) and value.ndim else bool(value)

    def op(warp: Any) -> None:
        value = as_predicate(compare(warp.r[x], warp.r[y]))
        outcomes = [value, np.logical_not(value)]
        for slot, outcome in zip(results, outcomes, strict=False):
            if other is not None:
                with_ = warp.r[other]
                outcome = {
                    "and": np.logical_and,
                    "or": np.logical_or,
                    "xor": np.logical_xor,
                }[combine or "and"](outcome, with_)
            warp.r[slot] = as_predicate(outcome)

    if len(results) > 1 or other is not None:
        return op
    d = results[0]

    def plain(warp: Any) -> None:
        r = warp.r
        value = compare(r[x], r[y])
        r[d] = value if type(value) is bool else as_predicate(value)

    return plain


@opcode("selp")
def _select(statement: Statement, decoder: Decoder) -> Op:
    _, bits = type_of(statement)
    d = decoder.result(statement.operands[0], statement)
    x, y = (decoder.source(text, statement, bits) for text in statement.operands[1:3])
    p = decoder.source(statement.operands[3], statement, 1)

    def op(warp: Any) -> None:
        r = warp.r
        chosen = r[p]
        if isinstance(chosen, bool):
            r[d] = r[x] if chosen else r[y]
        else:
            r[d] = np.where(chosen, beside_lanes(r[x], bits), beside_lanes(r[y], bits))

    return op


@opcode("mov")
def _move(statement: Statement, decoder: Decoder) -> Op:
    kind, bits = type_of(statement)
    target, origin = statement.operands
    if target.startswith("{"):
        return _unpack(statement, decoder, bits)
    if origin.startswith("{"):
        return _pack(statement, decoder, bits)
    d = decoder.result(target, statement)
    if kind == "p":
        literal = {"0": False, "1": True, "-1": True}.get(origin)
        s = decoder.source(origin, statement, 1) if literal is None else decoder.literal(literal)
    else:
        s = decoder.source(origin, statement, bits)

    def op(warp: Any) -> None:
        warp.r[d] = warp.r[s]

    return op


def _pack(statement: Statement, decoder: Decoder, bits: int) -> Op:
    members = decoder.vector(statement.operands[1])
    each = bits // len(members)
    d = decoder.result(statement.operands[0], statement)
    slots = [decoder.source(text, statement, each) for text in members]
    if bits == 128:
        return _pack_wide(d, slots, each)
    if len(slots) == 2:
        return _pack_two(d, (slots[0], slots[1]), each)

    def op(warp: Any) -> None:
        values = [warp.r[slot] for slot in slots]
        if all(type(value) is int for value in values):
            warp.r[d] = sum((value & mask_of(each)) << (i * each) for i, value in enumerate(values))
        else:
            columns = np.stack([lanes(value, each) for value in values], axis=1)
            warp.r[d] = np.ascontiguousarray(columns).view(UNSIGNED[bits])[:, 0]

    return op


def _pack_wide(d: int, slots: list[int], each: int) -> Op:
    """128 bits are always kept as lanes."""

    def op(warp: Any) -> None:
        columns = np.stack([lanes(warp.r[slot], each) for slot in slots], axis=1)
        warp.r[d] = np.ascontiguousarray(columns).view(UNSIGNED[128])[:, 0]

    return op


def _pack_two(d: int, slots: tuple[int, int], each: int) -> Op:
    low, high = slots
    mask = mask_of(each)
    wide = UNSIGNED[2 * each]

    def op(warp: Any) -> None:
        r = warp.r
        a, b = r[low], r[high]
        if type(a) is int and type(b) is int:
            r[d] = a & mask | (b & mask) << each
        else:
            r[d] = beside_lanes(a, each).astype(wide) | beside_lanes(b, each).astype(wide) << wide(each)

    return op


def _unpack(statement: Statement, decoder: Decoder, bits: int) -> Op:
    members = decoder.vector(statement.operands[0])
    each = bits // len(members)
    slots = [decoder.result(text, statement) for text in members]
    s = decoder.source(statement.operands[1], statement, bits)

    def op(warp: Any) -> None:
        value = warp.r[s]
        if type(value) is int:
            for i, slot in enumerate(slots):
                warp.r[slot] = value >> (i * each) & mask_of(each)
        else:
            parts: Lanes = np.ascontiguousarray(lanes(value, bits)).view(UNSIGNED[each])
            parts = parts.reshape(32, len(slots))
            for i, slot in enumerate(slots):
                warp.r[slot] = parts[:, i].copy()

    return op


@opcode("prmt.b32")
def _permute_bytes(statement: Statement, decoder: Decoder) -> Op:
    d = decoder.result(statement.operands[0], statement)
    x, y, s = (decoder.source(text, statement, 32) for text in statement.operands[1:4])

    def scalar(a: int, b: int, selector: int) -> int:
        pool = a | b << 32
        out = 0
        for i in range(4):
            nibble = selector >> (4 * i) & 0xF
            byte = pool >> (8 * (nibble & 7)) & 0xFF
            if nibble & 8:
                byte = 0xFF if byte & 0x80 else 0
            out |= byte << (8 * i)
        return out

    def op(warp: Any) -> None:
        values = [warp.r[slot] for slot in (x, y, s)]
        if all(type(value) is int for value in values):
            warp.r[d] = scalar(*values)
        else:
            columns = [lanes(value, 32).tolist() for value in values]
            warp.r[d] = np.array([scalar(*each) for each in zip(*columns, strict=True)], dtype=np.uint32)

    return op


@opcode("shf.l.wrap.b32", "shf.r.wrap.b32")
def _funnel_shift(statement: Statement, decoder: Decoder) -> Op:
    """32 bits of the 64 that two registers make, the low ones first; the distance counts modulo 32."""
    leftwards = ".l." in statement.opcode
    d = decoder.result(statement.operands[0], statement)
    low, high, by = (decoder.source(text, statement, 32) for text in statement.operands[1:4])

    def op(warp: Any) -> None:
        a, b, c = (lanes(warp.r[slot], 32).astype(np.uint64) for slot in (low, high, by))
        distance = 32 - (c & 31) if leftwards else c & 31
        warp.r[d] = ((a | b << 32) >> distance).astype(np.uint32)

    return op
