"""WGMMA: operand descriptors, where operands lie in shared memory, where results lie in registers.

A descriptor is 64 bits: 0..13 start, 16..29 leading byte offset (LBO), 32..45 stride byte offset (SBO), all
in 16-byte units; 62..63 swizzle: 0 none, 1 = 128, 2 = 64, 3 = 32 bytes. With span = 128, 64 or 32 bytes and
es bytes an element, element (r, k) lies, before swizzling, at

    contiguous along K    (r % 8) * span + r / 8 * SBO + k * es
    contiguous along M/N  (r % t) * es + r / t * LBO + (k % 8) * span + k / 8 * SBO,  t = span / es
    no swizzle, along K   (r % 8) * 16 + r / 8 * SBO + (k * es) / 16 * LBO + (k * es) % 16
    no swizzle, along M/N (r % T) * es + r / T * SBO + (k % 8) * 16 + k / 8 * LBO,    T = 16 / es
"""

from functools import lru_cache

import numpy as np

from cutegemm.emulator.elements import BYTES, STEP_BYTES, widen
from cutegemm.emulator.faults import EmulationError
from cutegemm.emulator.memory import PAGE, SharedMemory
from cutegemm.emulator.values import Lanes

SWIZZLE_SPAN = {0: 16, 1: 128, 2: 64, 3: 32}
EXCHANGED_BITS = {0: 0, 1: 3, 2: 2, 3: 1}
WARP_ROWS = 16
ELEMENTS = 8  # of 16 bits in a 16-byte unit; operands contiguous along M or N have no others
ALONG_ROWS_STEP = STEP_BYTES // 2  # elements of K one instruction covers then
BLAS_LIMIT = 1 << 18  # multiply-adds of one BLAS call: few enough that it stays on this thread


class Footprint:
    """Where an operand lies in shared memory, over some steps along K.

    units       indices of 16-byte units: (rows, units of K) if contiguous along K, else (K, units of rows)
    low, high   the lowest of them, and one past the highest
    pages       of shared memory that they lie in
    """

    def __init__(self, units: Lanes, along_rows: bool) -> None:
        units.setflags(write=False)
        self.units = units
        self.along_rows = along_rows
        self.low, self.high = int(units.min()), int(units.max()) + 1
        self.pages = slice(self.low * 16 // PAGE, -(-self.high * 16 // PAGE))
        self._cells: dict[int | None, slice | Lanes] = {}

    def cells(self, quarter: int | None = None) -> slice | Lanes:
        """Units in ascending order: all, or those of the rows that one of a warpgroup's warps multiplies."""
        if quarter not in self._cells:
            cells = np.unique(self.units if quarter is None else self._quarter(quarter))
            first, end = int(cells[0]), int(cells[-1]) + 1
            self._cells[quarter] = slice(first, end) if end - first == len(cells) else cells
        return self._cells[quarter]

    def _quarter(self, number: int) -> Lanes:
        if self.along_rows:
            width = WARP_ROWS // ELEMENTS
            return self.units[:, number * width : (number + 1) * width]
        return self.units[number * WARP_ROWS : (number + 1) * WARP_ROWS]


@lru_cache(maxsize=512)
def footprint(descriptors: tuple[int, ...], rows: int, along_rows: bool) -> Footprint:
    """Of operands (``rows`` of M or N, STEP_BYTES of K each) that follow each other along K.

    along_rows: whether they are contiguous along M or N. Swizzling looks at absolute addresses.
    """
    units = np.concatenate(
        [_units(descriptor, rows, along_rows) for descriptor in descriptors], axis=0 if along_rows else 1
    )
    return Footprint(units, along_rows)


def start_of(descriptor: int) -> int:
    """Shared offset of an operand's first byte."""
    return (descriptor & 0x3FFF) << 4


def _units(descriptor: int, rows: int, along_rows: bool) -> Lanes:
    """Indices of the 16-byte units of one operand."""
    lbo, sbo = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    swizzle = descriptor >> 62
    span = SWIZZLE_SPAN[swizzle]
    if along_rows:
        r = np.arange(rows // ELEMENTS, dtype=np.int64)[None, :] * ELEMENTS
        k = np.arange(ALONG_ROWS_STEP, dtype=np.int64)[:, None]
        t = span // 2
        if swizzle:
            places = r % t * 2 + r // t * lbo + k % 8 * span + k // 8 * sbo
        else:
            places = r // ELEMENTS * sbo + k % 8 * 16 + k // 8 * lbo
    else:
        r = np.arange(rows, dtype=np.int64)[:, None]
        k = np.arange(STEP_BYTES // 16, dtype=np.int64)[None, :]
        places = r % 8 * span + r // 8 * sbo + k * (16 if swizzle else lbo)
    units: Lanes = (places + start_of(descriptor)) >> 4
    return units ^ (units >> 3 & ((1 << EXCHANGED_BITS[swizzle]) - 1))


def gather(shared: SharedMemory, place: Footprint, kind: str) -> Lanes:
    """Operand elements as numbers, (rows, K)."""
    if place.high > len(shared.chunks):
        raise EmulationError("an operand descriptor points outside of shared memory")
    values = widen(shared.chunks[place.units].view(f"u{BYTES[kind]}"), kind)
    return values.T if place.along_rows else values


def multiply(a: Lanes, b: Lanes) -> Lanes:
    """a (M, K) times the transpose of b (N, K), in their dtype."""
    step = max(8, BLAS_LIMIT // (a.shape[0] * a.shape[1]))
    if step >= len(b):
        return a @ b.T
    return np.concatenate([a @ b[i : i + step].T for i in range(0, len(b), step)], axis=1)


def to_fragments(tile: Lanes) -> Lanes:
    """(16 W, N) results of W warps as (warps, registers, lanes), an element in each.

    Register 4j+2h+e of lane 4g+q of warp w is (16w+8h+g, 8j+2q+e).
    """
    rows, n = tile.shape
    warps = rows // WARP_ROWS
    return tile.reshape(warps, 2, 8, n // 8, 4, 2).transpose(0, 3, 1, 5, 2, 4).reshape(warps, n // 2, 32)


def from_fragment(fragment: Lanes) -> Lanes:
    """One warp's (registers, lanes) as its (16, N) tile; undoes to_fragments."""
    n = 2 * len(fragment)
    return fragment.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(WARP_ROWS, n)


def from_registers(registers: Lanes) -> Lanes:
    """A warp's four registers of A, (4, lanes), as its 16 rows of STEP_BYTES bytes.

    Register 2u+h of lane 4g+q holds bytes 16u+4q .. 16u+4q+3 of row 8h+g.
    """
    pieces = registers.view(np.uint8).reshape(2, 2, 8, 4, 4)
    return pieces.transpose(1, 2, 0, 3, 4).reshape(WARP_ROWS, STEP_BYTES)
