"""WGMMA: operand descriptors, where operands lie in shared memory, where results lie in registers.

A descriptor is 64 bits: 0..13 start, 16..29 leading byte offset (LBO), 32..45 stride byte offset (SBO), all
in 16-byte units; 62..63 swizzle: 0 none, 1 = 128, 2 = 64, 3 = 32 bytes. With span = 128, 64 or 32 bytes and
es bytes an element, element (r, k) lies, before swizzling, at

    contiguous along K    (r % 8) * span + r / 8 * SBO + k * es
    contiguous along M/N  (r % t) * es + r / t * LBO + (k % 8) * span + k / 8 * SBO,  t = span / es
    no swizzle, along K   (r % 8) * 16 + r / 8 * SBO + (k * es) / 16 * LBO + (k * es) % 16
    no swizzle, along M/N (r % T) * es + r / T * SBO + (k % 8) * 16 + k / 8 * LBO,    T = 16 / es
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cutegemm.emulator.faults import EmulationError
from cutegemm.emulator.memory import PAGE, SharedMemory
from cutegemm.emulator.values import Lanes

SWIZZLE_SPAN = {0: 16, 1: 128, 2: 64, 3: 32}
EXCHANGED_BITS = {0: 0, 1: 3, 2: 2, 3: 1}
K_STEP = 16  # elements of K one instruction covers, for 16-bit operands
WARP_ROWS = 16
ELEMENTS = 8  # 16-bit elements of a 16-byte unit
BLAS_LIMIT = 1 << 17  # multiply-adds of one BLAS call: few enough that it stays on this thread


@dataclass(frozen=True)
class Operand:
    """One operand of one instruction: descriptor, rows (M or N), whether it is contiguous along them."""

    descriptor: int
    rows: int
    along_rows: bool

    @property
    def start(self) -> int:
        """Shared offset of the first byte."""
        return (self.descriptor & 0x3FFF) << 4

    def relative(self, base: int) -> tuple[int, int, int, int, int, bool]:
        """What decides where its units lie, seen from ``base``."""
        d = self.descriptor
        return (
            self.start - base,
            (d >> 16 & 0x3FFF) << 4,
            (d >> 32 & 0x3FFF) << 4,
            d >> 62,
            self.rows,
            self.along_rows,
        )


@lru_cache(maxsize=2048)
def unit_indices(phase: int, layouts: tuple[tuple[int, int, int, int, int, bool], ...]) -> Lanes:
    """16-byte units of several operands along K, counted from ``base - phase`` bytes.

    (rows, units of K) if contiguous along K, else (K, units of rows).
    phase: the base within 1024 bytes, because swizzling looks at absolute addresses
    """
    pieces = []
    for start, lbo, sbo, swizzle, rows, along_rows in layouts:
        span = SWIZZLE_SPAN[swizzle]
        if along_rows:
            r = np.arange(rows // ELEMENTS, dtype=np.int64)[None, :] * ELEMENTS
            k = np.arange(K_STEP, dtype=np.int64)[:, None]
            t = span // 2
            if swizzle:
                places = r % t * 2 + r // t * lbo + k % 8 * span + k // 8 * sbo
            else:
                places = r // ELEMENTS * sbo + k % 8 * 16 + k // 8 * lbo
        else:
            r = np.arange(rows, dtype=np.int64)[:, None]
            k = np.arange(K_STEP // ELEMENTS, dtype=np.int64)[None, :]
            places = r % 8 * span + r // 8 * sbo + k * (16 if swizzle else lbo)
        units = (places + start + phase) >> 4
        units = units ^ (units >> 3 & ((1 << EXCHANGED_BITS[swizzle]) - 1))
        pieces.append(units)
    indices = np.concatenate(pieces, axis=0 if layouts[0][5] else 1)
    indices.setflags(write=False)
    return indices


def units_of(operands: tuple[Operand, ...], quarter: int | None = None) -> Lanes:
    """Indices of the 16-byte units of operands that follow each other along K.

    quarter: only the rows of this one of four warps.
    """
    base = operands[0].start
    phase = base % PAGE
    indices = unit_indices(phase, tuple(operand.relative(base) for operand in operands))
    if quarter is not None:
        if operands[0].along_rows:
            width = WARP_ROWS // ELEMENTS
            indices = indices[:, quarter * width : (quarter + 1) * width]
        else:
            indices = indices[quarter * WARP_ROWS : (quarter + 1) * WARP_ROWS]
    return indices + ((base - phase) >> 4)


def gather(shared: SharedMemory, units: Lanes, along_rows: bool, kind: str) -> Lanes:
    """Operand elements as float32, (rows, K)."""
    if units.min() < 0 or units.max() >= len(shared.chunks):
        raise EmulationError("an operand descriptor points outside of shared memory")
    raw = shared.chunks[units].view(np.uint16).reshape(len(units), -1)
    values = widen(raw, kind)
    return values.T if along_rows else values


def widen(raw: Lanes, kind: str) -> Lanes:
    """16-bit patterns as float32, exactly."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float16).astype(np.float32)


def multiply(a: Lanes, b: Lanes) -> Lanes:
    """a (16, K) times the transpose of b (N, K), in float32."""
    step = max(8, BLAS_LIMIT // (a.shape[0] * a.shape[1]))
    if step >= len(b):
        return a @ b.T
    return np.concatenate([a @ b[i : i + step].T for i in range(0, len(b), step)], axis=1)


def to_fragment(tile: Lanes) -> Lanes:
    """A warp's (16, N) results as (registers, lanes): register 4j+2h+e of lane 4g+q is (8h+g, 8j+2q+e)."""
    n = tile.shape[1]
    return tile.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
