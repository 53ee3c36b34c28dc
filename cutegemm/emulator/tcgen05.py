"""tcgen05.mma: descriptors, where operands lie, and the arithmetic.

Instruction descriptor (32 bits): 2 sparse, 3 saturate; 4..5 type of D (0 f16, 1 f32, 2 s32); 7..9 and 10..12
types of A and B; 13, 14 negate A, B; 15, 16 A, B contiguous along M, N; 17..22 N / 8; 24..28 M / 16.

Operand descriptor (64 bits): 0..13 start, 16..29 leading byte offset (LBO), 32..45 stride byte offset (SBO),
all in 16-byte units; 46..48 version, 1 here; 49..51 base offset; 52 mode of LBO; 61..63 swizzle: 0 none,
2 = 128, 4 = 64, 6 = 32 bytes. Elements lie as they do for WGMMA (see wgmma.py), for any size of element.
Swizzle 1, for operands contiguous along M or N: 128 bytes, of which 32-byte pieces change places; after 4
steps of K, not 8, it goes on at SBO.

K covers 32 bytes of each operand. Element (row, n) of D is in tensor memory, from D's address on, at

    one CTA, M = 128      lane row, column n
    one CTA, M = 64       lane 32 * (row / 16) + row % 16, plus the lane of the address (0 or 16); column n
    pair, M = 256         CTA row / 128, lane row % 128, column n
    pair, M = 128         CTA row / 64; lane row % 64, column n for n < N / 2,
                          or lane 64 + row % 64, column n - N / 2 for the others
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cutegemm.emulator.elements import STEP_BYTES, widen
from cutegemm.emulator.faults import MisuseError, OutOfBoundsError
from cutegemm.emulator.lazy import lazy
from cutegemm.emulator.memory import PAGE
from cutegemm.emulator.tmem import ROWS
from cutegemm.emulator.values import Lanes
from cutegemm.emulator.wgmma import multiply

UNIT = 16
PAIRS = 1
SWIZZLE_SPAN = {0: 16, PAIRS: 128, 2: 128, 4: 64, 6: 32}
EXCHANGED_BITS = {0: 0, 2: 3, 4: 2, 6: 1}
# Operand types by kind and code: name and bytes of an element.
OPERANDS = {
    "f16": {0: ("f16", 2), 1: ("bf16", 2)},
    "tf32": {2: ("tf32", 4)},
    "f8f6f4": {0: ("e4m3", 1), 1: ("e5m2", 1)},
    "i8": {0: ("u8", 1), 1: ("s8", 1)},
}
RESULTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction descriptor; m and n are those of the pair for two CTAs."""

    kind: str
    ctas: int
    m: int
    n: int
    a: str
    b: str
    d: str
    a_along_m: bool
    b_along_n: bool
    sign: int
    saturate: bool
    element: int

    @property
    def k(self) -> int:
        """Elements of K."""
        return STEP_BYTES // self.element

    @property
    def rows(self) -> int:
        """Rows of A in each CTA."""
        return self.m // self.ctas

    @property
    def columns(self) -> int:
        """Columns of tensor memory D takes in each CTA."""
        return self.n // 2 if self.folded else self.n

    @property
    def folded(self) -> bool:
        """Whether the right half of D lies beside the left one, in lanes 64 and up."""
        return self.ctas == 2 and self.m == 128

    def __str__(self) -> str:
        pair = " of a CTA pair" if self.ctas == 2 else ""
        return f"m{self.m}n{self.n}k{self.k}{pair}"


@lru_cache(maxsize=256)
def decode_instruction(bits: int, kind: str, ctas: int) -> Instruction:
    """Reads an instruction descriptor. Raises MisuseError for what the instruction does not allow."""
    a, b, d = bits >> 7 & 7, bits >> 10 & 7, bits >> 4 & 3
    m, n = (bits >> 24 & 0x1F) * 16, (bits >> 17 & 0x3F) * 8
    operands, results = OPERANDS[kind], RESULTS[kind]
    wrong = []
    if a not in operands or b not in operands or d not in results:
        wrong.append(f"the types A {a}, B {b}, D {d}")
    sizes = (64, 128) if ctas == 1 else (128, 256)
    granule = {64: 8, 128: 16}.get(m, 16) if ctas == 1 else 32 if kind == "f16" else 16
    if m not in sizes:
        wrong.append(f"M = {m} (allowed are {sizes[0]} and {sizes[1]})")
    if not granule <= n <= 256 or n % granule:
        wrong.append(f"N = {n} (allowed are multiples of {granule} up to 256)")
    if bits & 0x7 or bits >> 6 & 1 or bits >> 23 & 1 or bits >> 29:
        wrong.append("sparsity, shifts or reserved bits")
    if bits >> 3 & 1 and kind != "i8":
        wrong.append("saturation")
    if wrong:
        raise MisuseError(
            f"the instruction descriptor 0x{bits:08x} of kind::{kind}, cta_group::{ctas} asks for "
            + ", ".join(wrong)
        )
    sign = -1 if (bits >> 13 & 1) != (bits >> 14 & 1) else 1
    (a_name, element), (b_name, _) = operands[a], operands[b]
    along_m, along_n = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    return Instruction(
        kind, ctas, m, n, a_name, b_name, results[d], along_m, along_n, sign, bool(bits >> 3 & 1), element
    )


@dataclass(frozen=True)
class Operand:
    """One operand in one CTA's shared memory: descriptor, rows (M or N), element bytes, orientation."""

    descriptor: int
    rows: int
    element: int
    along_rows: bool

    @property
    def start(self) -> int:
        """Shared offset of the first byte."""
        return (self.descriptor & 0x3FFF) << 4

    @lazy
    def layout(self) -> tuple[int, int, int, int, int, bool]:
        """What decides where its units lie, besides the start. Raises MisuseError."""
        d = self.descriptor
        swizzle = d >> 61
        unknown = swizzle not in SWIZZLE_SPAN or (swizzle == PAIRS and not self.along_rows)
        if unknown or d >> 46 & 7 != 1 or d >> 49 & 0xF:
            raise MisuseError(
                f"the operand descriptor 0x{d:016x} has swizzle {swizzle}, version {d >> 46 & 7}, base "
                f"offset {d >> 49 & 7} and leading mode {d >> 52 & 1}; known are "
                "swizzle 0, 1 (along M or N), 2, 4, 6 with version 1 and zeros"
            )
        return (
            (d >> 16 & 0x3FFF) << 4,
            (d >> 32 & 0x3FFF) << 4,
            swizzle,
            self.rows,
            self.element,
            self.along_rows,
        )

    def units(self) -> Lanes:
        """Its 16-byte units: (rows, 2) if contiguous along K, else (K, units of rows)."""
        phase = self.start % PAGE
        return unit_indices(phase, *self.layout) + ((self.start - phase) >> 4)


@lru_cache(maxsize=1024)
def unit_indices(
    phase: int, lbo: int, sbo: int, swizzle: int, rows: int, element: int, along_rows: bool
) -> Lanes:
    """16-byte units of an operand, counted from ``start - phase`` bytes.

    phase: the start within 1024 bytes, because swizzling looks at absolute addresses
    """
    span = SWIZZLE_SPAN[swizzle]
    if along_rows:
        each = UNIT // element  # rows of a unit
        r = np.arange(rows // each, dtype=np.int64)[None, :] * each
        k = np.arange(STEP_BYTES // element, dtype=np.int64)[:, None]
        t = span // element
        if swizzle:
            period = 4 if swizzle == PAIRS else 8
            places = r % t * element + r // t * lbo + k % period * span + k // period * sbo
        else:
            places = r // each * sbo + k % 8 * UNIT + k // 8 * lbo
    else:
        r = np.arange(rows, dtype=np.int64)[:, None]
        k = np.arange(STEP_BYTES // UNIT, dtype=np.int64)[None, :]
        places = r % 8 * span + r // 8 * sbo + k * (UNIT if swizzle else lbo)
    units = (places + phase) >> 4
    if swizzle == PAIRS:
        units = units ^ (units >> 3 & 3) << 1
    else:
        units = units ^ (units >> 3 & ((1 << EXCHANGED_BITS[swizzle]) - 1))
    units.setflags(write=False)
    return units


def gather(cta: Any, operands: list[Operand], name: str, where: object) -> Lanes:
    """Elements of operands that follow each other along K, as float32 (integers: float64), (rows, K)."""
    first = operands[0]
    units = np.concatenate([operand.units() for operand in operands], axis=0 if first.along_rows else 1)
    chunks = cta.shared.chunks
    if units.max() >= len(chunks):
        raise OutOfBoundsError(
            f"{where}: an operand descriptor points outside of the shared memory of CTA {cta.number}"
        )
    raw = chunks[units].view(f"u{first.element}").reshape(len(units), -1)
    values = widen(raw, name)
    return values.T if first.along_rows else values


@lru_cache(maxsize=16)
def lanes_of(rows: int, lane: int) -> Lanes | slice:
    """Lanes of tensor memory that rows of D lie in, in order; a slice for all 128."""
    if rows == ROWS:
        return slice(0, ROWS)
    row = np.arange(rows)
    return row // 16 * 32 + row % 16 + lane


@dataclass(frozen=True)
class Mma:
    """One issued instruction.

    a          descriptor, or (None and) the tensor memory column of A
    d          address of D: lane << 16 | column
    enabled    lanes of D that are written: (ctas * 128) bool, None for all
    """

    instruction: Instruction
    a: int | None
    a_column: int
    b: int
    d: int
    accumulate: bool
    enabled: tuple[bool, ...] | None
    where: object

    @property
    def column(self) -> int:
        """D's first column."""
        return self.d & 0xFFFF

    @property
    def lane(self) -> int:
        """The lane of D's address."""
        return self.d >> 16

    @lazy
    def a_operand(self) -> Operand | None:
        """A in shared memory, the part of one CTA; None if it is in tensor memory."""
        i = self.instruction
        return None if self.a is None else Operand(self.a, i.rows, i.element, i.a_along_m)

    @lazy
    def b_operand(self) -> Operand:
        """B in shared memory, the part of one CTA."""
        i = self.instruction
        return Operand(self.b, i.n // i.ctas, i.element, i.b_along_n)

    @property
    def series(self) -> tuple[Any, ...]:
        """What MMAs that add to the same D have in common."""
        return (self.instruction, self.d, self.enabled, self.a is None)


def run(ctas: tuple[Any, ...], mmas: list[Mma]) -> None:
    """Does the arithmetic of MMAs that follow each other, all steps along K of one D at once."""
    begin = 0
    for i in range(1, len(mmas) + 1):
        if i == len(mmas) or not mmas[i].accumulate or mmas[i].series != mmas[begin].series:
            _run_series(ctas, mmas[begin:i])
            begin = i


def _run_series(ctas: tuple[Any, ...], mmas: list[Mma]) -> None:
    instruction = mmas[0].instruction
    if instruction.d == "f16":  # each step is rounded
        for mma in mmas:
            _add(ctas, mma, _product(ctas, [mma]), mma.accumulate)
    else:
        _add(ctas, mmas[0], _product(ctas, mmas), mmas[0].accumulate)


def _product(ctas: tuple[Any, ...], mmas: list[Mma]) -> Lanes:
    """The sum of products, (N, M)."""
    i = mmas[0].instruction
    where = mmas[0].where
    a_parts, b_parts = [], []
    for cta in ctas:
        operands = [mma.a_operand for mma in mmas if mma.a_operand is not None]
        a_parts.append(gather(cta, operands, i.a, where) if operands else _from_tensor_memory(cta, mmas))
        b_parts.append(gather(cta, [mma.b_operand for mma in mmas], i.b, where))
    a = a_parts[0] if len(a_parts) == 1 else np.concatenate(a_parts)
    b = b_parts[0] if len(b_parts) == 1 else np.concatenate(b_parts)
    product = multiply(b, a)
    return -product if i.sign < 0 else product


def _from_tensor_memory(cta: Any, mmas: list[Mma]) -> Lanes:
    """A from tensor memory: lane is row, each cell holds consecutive elements of K."""
    i = mmas[0].instruction
    cells = STEP_BYTES // 4
    columns = np.concatenate([mma.a_column + np.arange(cells) for mma in mmas])
    raw = np.ascontiguousarray(cta.sm.memory.cells[columns].T)
    return widen(raw.view(f"u{i.element}"), i.a)


def _add(ctas: tuple[Any, ...], mma: Mma, product: Lanes, accumulate: bool) -> None:
    """Puts a product into tensor memory, or adds it to what is there."""
    i = mma.instruction
    rows, lanes = i.rows, lanes_of(ROWS if i.folded else i.rows, mma.lane)
    for number, cta in enumerate(ctas):
        part = product[:, number * rows : (number + 1) * rows]
        if i.folded:
            part = np.concatenate([part[: i.columns], part[i.columns :]], axis=1)
        block = cta.sm.memory.cells[mma.column : mma.column + i.columns]
        result = _sum(i, part, block[:, lanes] if accumulate else None)
        if mma.enabled is not None:
            keep = ~np.array(mma.enabled[number * ROWS : (number + 1) * ROWS])[lanes]
            result[:, keep] = block[:, lanes][:, keep]
        block[:, lanes] = result


def _sum(instruction: Instruction, product: Lanes, before: Lanes | None) -> Lanes:
    """Cells of D after an addition."""
    kind = instruction.d
    if kind == "f32":
        sums = product if before is None else product + before.view(np.float32)
        return np.ascontiguousarray(sums, dtype=np.float32).view(np.uint32)
    if kind == "s32":
        whole = product.astype(np.int64)
        sums = whole if before is None else whole + before.view(np.int32)
        if instruction.saturate:
            sums = np.clip(sums, -(1 << 31), (1 << 31) - 1)
        return sums.astype(np.int32).view(np.uint32)
    half = before.astype(np.uint16).view(np.float16).astype(np.float32) if before is not None else 0
    with np.errstate(over="ignore"):
        return (product + half).astype(np.float16).view(np.uint16).astype(np.uint32)
