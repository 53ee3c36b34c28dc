"""TMA: tensor maps as the host code writes them, and the copies they describe.

A tensor map is 16 64-bit words, of which the host fills eight:

    0   bits 4..56   global address
    1   4..6 rank-1; 7..10 element type; 13..14 swizzle; 19..20 what is exchanged: 16 bytes, or 1 = 32;
        32..63 stride of dimension 1 in 16-byte units
    2   strides of dimensions 2 and 3; 3: of dimension 4, and bits 32..35, 36..39, ... of all four
    4   sizes minus one of dimensions 0, 1; 5: of 2, 3; 6: of 4 in bits 0..31
    6   56..63 box size minus one of dimension 0; 7: of dimensions 1, 2, ... in 8 bits each
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cutegemm.emulator.faults import EmulationError, OutOfBoundsError
from cutegemm.emulator.lazy import lazy
from cutegemm.emulator.memory import CHUNK, GlobalMemory, Region, SharedMemory
from cutegemm.emulator.values import Lanes

ELEMENT_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 10: 2}
SWIZZLE_PAIRS = 4  # 128 bytes, in which 32-byte pieces change places
UNIT = 16  # bytes: what TMA moves at least, and the granule of swizzling


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map; dimension 0 is the contiguous one.

    sizes, box   elements; strides: bytes, of dimensions 1 and up
    swizzle      address bits exchanged: 0, 1, 2 or 3 for none, 32, 64, 128 bytes, or SWIZZLE_PAIRS
    """

    address: int
    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @lazy
    def row_bytes(self) -> int:
        """Bytes of a box along dimension 0."""
        return self.box[0] * self.element

    @lazy
    def box_bytes(self) -> int:
        """Bytes of a whole box: what a load announces, whatever lies outside of the tensor."""
        return math.prod(self.box) * self.element


@lru_cache(maxsize=1024)
def decode_map(data: bytes) -> TensorMap:
    """Reads 128 bytes of a tensor map. Raises EmulationError for what is not understood."""
    words = [int.from_bytes(data[i * 8 : i * 8 + 8], "little") for i in range(8)]
    rank = (words[1] >> 4 & 7) + 1
    kind = words[1] >> 7 & 0xF
    swizzle, exchanged = words[1] >> 13 & 3, words[1] >> 19 & 3
    unknown = exchanged > 1 or (exchanged and swizzle != 3)
    if kind not in ELEMENT_BYTES or rank > 5 or words[6] >> 32 & 0xFFFFFF or unknown:
        raise EmulationError(
            f"a tensor map of rank {rank}, element type {kind} and words {[hex(w) for w in words]} "
            "is not understood"
        )
    low = [words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF]
    strides = [(low[i] | (words[3] >> (32 + 4 * i) & 0xF) << 32) * UNIT for i in range(rank - 1)]
    sizes = [words[4], words[4] >> 32, words[5], words[5] >> 32, words[6]]
    box = [words[6] >> 56, *(words[7] >> (8 * i) & 0xFF for i in range(4))]
    return TensorMap(
        address=words[0] & ((1 << 57) - 1) & ~0xF,
        element=ELEMENT_BYTES[kind],
        sizes=tuple((size & 0xFFFFFFFF) + 1 for size in sizes[:rank]),
        strides=tuple(strides),
        box=tuple(b + 1 for b in box[:rank]),
        swizzle=SWIZZLE_PAIRS if exchanged else swizzle,
    )


@lru_cache(maxsize=512)
def swizzled_units(phase: int, rows: int, row_units: int, swizzle: int) -> Lanes:
    """Where the 16-byte units of a box lie, counted from ``start - phase`` units; (rows, row_units).

    phase: the start in units within 1024 bytes. Address bits 4.. are exchanged with bits 7..
    """
    units = phase + np.arange(rows * row_units, dtype=np.int64)
    if swizzle == SWIZZLE_PAIRS:
        units = units ^ (units >> 3 & 3) << 1
    elif swizzle:
        units = units ^ (units >> 3 & ((1 << swizzle) - 1))
    return units.reshape(rows, row_units)


def _units(start: int, tensor_map: TensorMap) -> Lanes:
    """Indices of a box's 16-byte units in shared memory, (rows, units of a row)."""
    row_units = tensor_map.row_bytes // UNIT
    rows = tensor_map.box_bytes // tensor_map.row_bytes
    phase = start // UNIT % 64
    return swizzled_units(phase, rows, row_units, tensor_map.swizzle) + (start // UNIT - phase)


def _check_start(start: int, tensor_map: TensorMap, what: object) -> None:
    if start % 128 or tensor_map.row_bytes % UNIT:
        raise OutOfBoundsError(
            f"{what}: a box of {tensor_map.row_bytes}-byte rows at shared address {start} is not made of "
            "16-byte units on a 128-byte boundary"
        )


def _check_unit(tensor_map: TensorMap, coordinates: tuple[int, ...], what: object) -> None:
    """A GPU stops with "illegal instruction" where a row of the box begins inside a unit of memory."""
    if coordinates[0] * tensor_map.element % UNIT:
        raise OutOfBoundsError(
            f"{what}: a box from element {coordinates[0]} of a row, of {tensor_map.element} bytes each, does "
            f"not begin on a multiple of {UNIT} bytes"
        )


@dataclass(frozen=True)
class Window:
    """The part of a box that the tensor has elements for.

    inside   slices of the box's bytes, outermost dimension first; its last one is in bytes
    strides  bytes between neighbours in memory along each of them
    """

    inside: tuple[slice, ...]
    strides: tuple[int, ...]
    low: int
    high: int

    def inside_of(self, region: Region) -> Lanes:
        """Its bytes in memory, to be read or written."""
        shape = tuple(part.stop - part.start for part in self.inside)
        return np.ndarray(shape, np.uint8, region.data, self.low - region.base, self.strides)


def window_of(tensor_map: TensorMap, coordinates: tuple[int, ...], unit: int = 1) -> Window | None:
    """The part of a box that exists, None if there is none. unit: rows are widened to multiples of it."""
    address, reach = tensor_map.address, 0
    inside: list[slice] = []
    for dimension, (at, size, box) in enumerate(
        zip(coordinates, tensor_map.sizes, tensor_map.box, strict=True)
    ):
        first, end = max(0, -at), min(box, size - at)
        if first >= end:
            return None
        if dimension == 0:
            element = tensor_map.element
            count = min(-(-(end - first) * element // unit) * unit, (box - first) * element)
            inside.append(slice(first * element, first * element + count))
            address += (at + first) * element
            reach += count
        else:
            stride = tensor_map.strides[dimension - 1]
            inside.append(slice(first, end))
            address += (at + first) * stride
            reach += (end - first - 1) * stride
    return Window(tuple(reversed(inside)), (*reversed(tensor_map.strides), 1), address, address + reach)


def _shape(tensor_map: TensorMap) -> tuple[int, ...]:
    """Of a box in bytes, outermost dimension first."""
    return (*reversed(tensor_map.box[1:]), tensor_map.row_bytes)


def read_box(
    tensor_map: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory, what: object
) -> Lanes:
    """A box's bytes, outermost dimension first: zeros where the tensor has no elements."""
    _check_unit(tensor_map, coordinates, what)
    window = window_of(tensor_map, coordinates)
    if window is None:
        return np.zeros(_shape(tensor_map), dtype=np.uint8)
    data = window.inside_of(memory.locate(window.low, window.high, what, UNIT))
    if data.size == tensor_map.box_bytes:
        return np.ascontiguousarray(data)
    box = np.zeros(_shape(tensor_map), dtype=np.uint8)
    box[window.inside] = data
    return box


def put_box(tensor_map: TensorMap, box: Lanes, shared: SharedMemory, start: int, what: object) -> None:
    """Writes a box's bytes to swizzled shared memory."""
    _check_start(start, tensor_map, what)
    shared.check(start, start + tensor_map.box_bytes, what)
    units = _units(start, tensor_map)
    shared.chunks[units] = box.reshape(-1).view(CHUNK).reshape(units.shape)
    shared.touched(start, start + tensor_map.box_bytes)


def take_box(tensor_map: TensorMap, shared: SharedMemory, start: int, what: object) -> Lanes:
    """Reads a box's bytes from swizzled shared memory, outermost dimension first."""
    _check_start(start, tensor_map, what)
    shared.check(start, start + tensor_map.box_bytes, what)
    units = _units(start, tensor_map)
    return shared.chunks[units].view(np.uint8).reshape(_shape(tensor_map))


def write_box(
    tensor_map: TensorMap, coordinates: tuple[int, ...], box: Lanes, memory: GlobalMemory, what: object
) -> None:
    """Stores a box's elements that exist.

    Hardware writes whole 16-byte units: a row that ends inside one is written up to its end, with what the
    box holds there. Raises OutOfBoundsError if that leaves the allocation.
    """
    _check_unit(tensor_map, coordinates, what)
    window = window_of(tensor_map, coordinates, UNIT)
    if window is None:
        return
    region = memory.find(window.low, window.high, whole_allocation=True)
    if region is None:
        raise OutOfBoundsError(
            f"{what} writes global memory at 0x{window.low:x}..0x{window.high - 1:x}, outside of any tensor"
        )
    window.inside_of(region)[:] = box[window.inside]
    if region.marks is not None:
        window.inside_of(region.marks)[:] = 0xFF
    memory.writes += 1
