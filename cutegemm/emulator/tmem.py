"""Tensor memory: 128 lanes by 512 columns of 32 bits in each SM, and who may use which columns.

An address is lane << 16 | column. Columns are allocated 32, 64, .. 512 at a time by a warp of a CTA, or by a
warp in each CTA of a pair together. Only the holder of an SM's permit allocates there; a CTA takes the permit
with its first allocation and keeps it until it relinquishes it or exits.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cutegemm.emulator.faults import MisuseError, OutOfBoundsError
from cutegemm.emulator.values import Lanes

COLUMNS = 512
ROWS = 128  # lanes of tensor memory; a warp reaches 32 of them
SLICE = 32  # columns: the least allocation, and the granule of all
POISON = 0xFFFFFFFF  # NaN, as whatever type it is read


@dataclass
class Allocation:
    """Columns of one CTA, or the same columns of both CTAs of a pair.

    freed   CTAs of the pair that have given them back
    """

    start: int
    columns: int
    ctas: tuple[Any, ...]
    where: object
    freed: set[int] = field(default_factory=set)


class TensorMemory:
    """The tensor memory of one SM.

    cells    (column, lane), as the bits of 32-bit cells; ``numbers``: the same as float32
    owner    for each column the number of the CTA it belongs to, -1 if it is free
    permit   the CTA that may allocate, None if any may
    """

    def __init__(self) -> None:
        self.cells = np.full((COLUMNS, ROWS), POISON, dtype=np.uint32)
        self.numbers = self.cells.view(np.float32)
        self.owner = np.full(COLUMNS, -1, dtype=np.int64)
        self.permit: Any = None

    def check(self, cta: Any, column: int, count: int, what: object) -> None:
        """Raises OutOfBoundsError unless these columns belong to the CTA."""
        if (
            column >= 0
            and column + count <= COLUMNS
            and (self.owner[column : column + count] == cta.number).all()
        ):
            return
        mine = np.flatnonzero(self.owner == cta.number)
        has = f"it has columns {mine[0]}..{mine[-1]}" if len(mine) else "it has none allocated"
        raise OutOfBoundsError(
            f"{what} touches columns {column}..{column + count - 1} of the tensor memory of CTA "
            f"{cta.number}; {has}"
        )

    def free_columns(self) -> Lanes:
        """For each slice of 32 columns, whether it is free."""
        return np.all(self.owner.reshape(-1, SLICE) < 0, axis=1)


def _room(memories: list[TensorMemory], columns: int) -> int | None:
    """The first column from which all memories have room."""
    free = np.logical_and.reduce([memory.free_columns() for memory in memories])
    slices = columns // SLICE
    for first in range(len(free) - slices + 1):
        if free[first : first + slices].all():
            return first * SLICE
    return None


class AllocationRequest:
    """A wait for columns; ``start`` is where they begin once they are there."""

    def __init__(self, ctas: tuple[Any, ...], columns: int, where: object) -> None:
        self.ctas = ctas
        self.columns = columns
        self.where = where
        self.arrived: set[int] = set()
        self.start: int | None = None

    def ready(self) -> bool:
        """See warp.Wait; takes the columns as soon as that is possible."""
        if self.start is None and len(self.arrived) == len(self.ctas):
            memories = [cta.sm.memory for cta in self.ctas]
            if all(m.permit in (None, cta) for m, cta in zip(memories, self.ctas, strict=True)):
                for memory, cta in zip(memories, self.ctas, strict=True):
                    memory.permit = cta
                self.start = _room(memories, self.columns)
                if self.start is not None:
                    self._take(memories, self.start)
        return self.start is not None

    def _take(self, memories: list[TensorMemory], start: int) -> None:
        allocation = Allocation(start, self.columns, self.ctas, self.where)
        for memory, cta in zip(memories, self.ctas, strict=True):
            memory.owner[start : start + self.columns] = cta.number
            cta.allocations[start] = allocation
        self.ctas[0].machine.events += 1

    def describe(self) -> str:
        """See warp.Wait."""
        parts = []
        for cta in self.ctas:
            memory = cta.sm.memory
            if cta.rank not in self.arrived:
                parts.append(f"CTA {cta.number} of the pair to allocate as well")
            elif memory.permit not in (None, cta):
                parts.append(
                    f"the permit of SM {cta.sm.number} to allocate, which CTA {memory.permit.number} holds "
                    "and has not relinquished"
                )
            elif len(self.arrived) == len(self.ctas):
                owners = sorted(set(memory.owner[memory.owner >= 0].tolist()))
                parts.append(
                    f"{self.columns} columns of the tensor memory of SM {cta.sm.number}, of which "
                    f"{int((memory.owner < 0).sum())} are free"
                    + (f" and the others belong to CTA {', '.join(map(str, owners))}" if owners else "")
                )
        return " and ".join(dict.fromkeys(parts))


def pair_of(cta: Any, group: int, what: object) -> tuple[Any, ...]:
    """The CTA alone, or both CTAs of its pair. Raises MisuseError where there is no pair."""
    if group == 1:
        return (cta,)
    ctas = cta.cluster.ctas
    first = cta.rank & ~1
    if first + 1 >= len(ctas):
        raise MisuseError(
            f"{what} is for pairs of CTAs; CTA {cta.number} has no peer in its cluster of {len(ctas)}"
        )
    if ctas[first].sm is ctas[first + 1].sm:
        raise MisuseError(
            f"{what} is for CTAs on two SMs, and the emulated GPU has one; run it with more of them"
        )
    return (ctas[first], ctas[first + 1])


def request(cta: Any, columns: int, group: int, what: object) -> AllocationRequest:
    """A warp of a CTA asks for columns; for a pair, the second one to ask joins the first."""
    if cta.relinquished:
        raise MisuseError(f"{what} allocates tensor memory after its CTA has relinquished the permit to")
    if columns not in (32, 64, 128, 256, 512):
        raise MisuseError(f"{what} allocates {columns} columns; allowed are 32, 64, 128, 256 and 512")
    ctas = pair_of(cta, group, what)
    waiting = ctas[0].requests.get(group)
    if waiting is None or cta.rank in waiting.arrived:
        waiting = ctas[0].requests[group] = AllocationRequest(ctas, columns, what)
    if waiting.columns != columns:
        raise MisuseError(
            f"{what} allocates {columns} columns while the other CTA of the pair allocates {waiting.columns}"
        )
    waiting.arrived.add(cta.rank)
    if len(waiting.arrived) == len(ctas):
        del ctas[0].requests[group]
    return waiting


def free(cta: Any, start: int, columns: int, group: int, what: object) -> Allocation:
    """A warp of a CTA gives columns back; those of a pair are free when both have. Raises MisuseError."""
    allocation = cta.allocations.get(start)
    if allocation is None or cta.rank in allocation.freed:
        held = ", ".join(f"{a.columns} from {a.start}" for a in cta.allocations.values()) or "none"
        raise MisuseError(
            f"{what} frees columns from {start} on, where nothing is allocated; allocated are: {held}"
        )
    if allocation.columns != columns or len(allocation.ctas) != group:
        raise MisuseError(
            f"{what} frees {columns} columns of {group} CTA(s); {allocation.columns} of "
            f"{len(allocation.ctas)} were allocated by {allocation.where}"
        )
    allocation.freed.add(cta.rank)
    if len(allocation.freed) == len(allocation.ctas):
        for owner in allocation.ctas:
            memory = owner.sm.memory
            memory.owner[start : start + columns] = -1
            memory.cells[start : start + columns] = POISON
            del owner.allocations[start]
        cta.machine.events += 1
    return allocation


def check_group(cta: Any, column: int, group: int, what: object) -> None:
    """Raises MisuseError unless a column was allocated for as many CTAs as an instruction is for."""
    for allocation in cta.allocations.values():
        inside = allocation.start <= column < allocation.start + allocation.columns
        if inside and len(allocation.ctas) != group:
            raise MisuseError(
                f"{what} is for {group} CTA(s), but its columns in CTA {cta.number} were allocated for "
                f"{len(allocation.ctas)} by {allocation.where}; all tcgen05 instructions of a kernel have "
                "the same cta_group"
            )


def relinquish(cta: Any) -> None:
    """The CTA will not allocate any more; others may."""
    cta.relinquished = True
    if cta.sm.memory.permit is cta:
        cta.sm.memory.permit = None
        cta.machine.events += 1


def leave(cta: Any) -> None:
    """All warps of a CTA have exited. Raises MisuseError if it leaves tensor memory allocated."""
    relinquish(cta)
    for allocation in cta.allocations.values():
        if cta.rank not in allocation.freed:
            raise MisuseError(
                f"CTA {cta.number} exits and leaves {allocation.columns} columns of tensor memory allocated "
                f"(from column {allocation.start}, by {allocation.where}); tcgen05.dealloc is missing"
            )


@dataclass(frozen=True)
class Window:
    """Cells a warp loads or stores: register i of lane t is (column, lane) of ``places``.

    column, columns   first column and how many are touched
    lane, lanes       first lane and how many
    packed            two 16-bit columns share a register
    """

    shape: str
    count: int
    column: int
    columns: int
    lane: int
    lanes: int
    packed: bool
    split: int = 0

    def read(self, memory: TensorMemory) -> Lanes:
        """Registers, (registers, lanes of the warp)."""
        if self.shape == "32x32b":
            block = memory.cells[self.column : self.column + self.columns, self.lane : self.lane + 32]
            if self.packed:
                return block[::2] & np.uint32(0xFFFF) | block[1::2] << np.uint32(16)
            return block.copy()
        columns, lanes = self._places()
        if self.packed:
            low, high = memory.cells[columns, lanes], memory.cells[columns + 1, lanes]
            return low & np.uint32(0xFFFF) | high << np.uint32(16)
        return memory.cells[columns, lanes]

    def write(self, memory: TensorMemory, block: Lanes) -> None:
        """Stores (registers, lanes of the warp)."""
        columns, lanes = self._places()
        if self.packed:
            memory.cells[columns, lanes] = block & np.uint32(0xFFFF)
            memory.cells[columns + 1, lanes] = block >> np.uint32(16)
        else:
            memory.cells[columns, lanes] = block

    def _places(self) -> tuple[Lanes, Lanes]:
        columns, lanes = places(self.shape, self.count, self.split)
        return columns * (2 if self.packed else 1) + self.column, lanes + self.lane

    def __str__(self) -> str:
        return f"{self.shape}.x{self.count} from column {self.column}, lane {self.lane}"


# Columns of one repetition, lanes, registers of one repetition.
SHAPES = {
    "32x32b": (1, 32, 1),
    "16x64b": (2, 16, 1),
    "16x128b": (4, 16, 2),
    "16x256b": (8, 16, 4),
    "16x32bx2": (1, 16, 1),
}


@lru_cache(maxsize=64)
def places(shape: str, count: int, split: int = 0) -> tuple[Lanes, Lanes]:
    """Column and lane of (register, thread), counted from the window's first.

    split   columns between the halves of a warp for 16x32bx2
    """
    registers = SHAPES[shape][2] * count
    i, t = np.arange(registers)[:, None], np.arange(32)[None, :]
    column, lane = {
        "32x32b": (i, t),
        "16x64b": (2 * i + t // 2 % 2, t // 4 + 8 * (t % 2)),
        "16x128b": (4 * (i // 2) + t % 4, t // 4 + 8 * (i % 2)),
        "16x256b": (8 * (i // 4) + 2 * (t % 4) + i % 2, t // 4 + 8 * (i // 2 % 2)),
        "16x32bx2": (i + split * (t // 16), t % 16),
    }[shape]
    columns, lanes = np.broadcast_arrays(column, lane)
    return columns.copy(), lanes.copy()
