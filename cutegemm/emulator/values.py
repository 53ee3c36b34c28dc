"""What a register holds: one Python int for the whole warp, or an array of 32 lanes.

Integers are unsigned and cut to their width, predicates are bool, float registers hold their bits. Arrays
are never changed in place: an instruction makes a new one, so registers may share them.
"""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Lanes: TypeAlias = NDArray[Any]
Value: TypeAlias = int | Lanes

LANES = 32
# 128 bits are only moved, never computed with.
UNSIGNED: dict[int, Any] = {
    1: np.bool_,
    8: np.uint8,
    16: np.uint16,
    32: np.uint32,
    64: np.uint64,
    128: np.dtype("V16"),
}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
LANE_NUMBERS = np.arange(LANES, dtype=np.uint32)
ALL_LANES = np.ones(LANES, dtype=bool)
ALL_BITS = (1 << LANES) - 1


def mask_of(bits: int) -> int:
    """The largest unsigned number of a width."""
    return (1 << bits) - 1


def signed(value: Value, bits: int) -> Any:
    """The same bits as a signed number or array."""
    if isinstance(value, int):
        return value - (1 << bits) if value >> (bits - 1) & 1 else value
    return as_bits(value, bits).view(SIGNED[bits])


def as_bits(lanes: Lanes, bits: int) -> Lanes:
    """An array with elements of this width: cut, or extended with zeros."""
    dtype = UNSIGNED[bits]
    return lanes if lanes.dtype == dtype else lanes.astype(dtype)


def lanes(value: Value, bits: int) -> Lanes:
    """The value in every lane, as an array of this width."""
    if isinstance(value, int):
        return np.full(LANES, value & mask_of(bits), dtype=UNSIGNED[bits])
    return as_bits(value, bits)


def bits_of(flags: Lanes) -> int:
    """A set of lanes as a number with one bit for each."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


@lru_cache(maxsize=4096)
def lanes_of(bits: int) -> Lanes:
    """The set of lanes as an array of bool; not to be written to."""
    flags = bits >> np.arange(LANES, dtype=np.uint64) & np.uint64(1) != 0
    flags.setflags(write=False)
    return flags


def beside_lanes(value: Value, bits: int) -> Any:
    """The value for arithmetic with an array of this width: an array too, or one numpy number."""
    if isinstance(value, int):
        return UNSIGNED[bits](value & mask_of(bits))
    return as_bits(value, bits)


def predicate_lanes(value: bool | Lanes) -> Lanes:
    """A predicate in every lane."""
    if isinstance(value, (bool, int)):
        return np.full(LANES, bool(value))
    return value


def floats(value: Value, bits: int = 32) -> Any:
    """Float bits as numbers: an array, or a numpy scalar for a uniform value."""
    kind = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
    if isinstance(value, int):
        return np.array(value & mask_of(bits), dtype=UNSIGNED[bits]).view(kind)[()]
    return as_bits(value, bits).view(kind)


def float_bits(numbers: Any, bits: int = 32) -> Value:
    """Numbers as the bits a register holds; a scalar becomes a uniform value."""
    kind = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
    array: Any = np.asarray(numbers, dtype=kind).view(UNSIGNED[bits])
    return int(array) if array.ndim == 0 else array


def bfloat16_bits(numbers: Lanes) -> Lanes:
    """float32 numbers rounded to the nearest bfloat16, ties to even, as 16-bit patterns."""
    bits = np.asarray(numbers, dtype=np.float32).view(np.uint32)
    rounded: Lanes = ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(numbers)
    if nan.any():
        rounded[nan] = 0x7FFF
    return rounded


def float16_bits(numbers: Lanes) -> Lanes:
    """float32 numbers rounded to the nearest float16, as 16-bit patterns; too large ones become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(numbers, dtype=np.float32).astype(np.float16).view(np.uint16)


def merge(mask: Lanes, new: Any, old: Any) -> Any:
    """``new`` in the lanes of the mask, ``old`` in the others."""
    if new is old:
        return old
    if type(new) is int and type(old) is int and new == old:
        return new
    if isinstance(new, bool) or isinstance(old, bool):
        return np.where(mask, predicate_lanes(new), predicate_lanes(old))
    template = new if isinstance(new, np.ndarray) else old
    if isinstance(template, np.ndarray):
        bits = template.dtype.itemsize * 8
        if template.dtype == np.bool_:
            return np.where(mask, predicate_lanes(new), predicate_lanes(old))
        return np.where(mask, lanes(new, bits), lanes(old, bits))
    if new == old:
        return new
    wide = 64 if max(new, old) >> 32 else 32
    return np.where(mask, lanes(new, wide), lanes(old, wide))


def distance(offset: int) -> np.uint64:
    """An offset, which may be negative, as what to add to unsigned addresses."""
    return np.uint64(offset % (1 << 64))
