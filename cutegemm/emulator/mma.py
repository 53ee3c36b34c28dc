"""MMAs in flight: what a warp has issued, and the arithmetic when a group of them runs."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutegemm.emulator.faults import RaceError
from cutegemm.emulator.memory import PAGE
from cutegemm.emulator.values import Lanes, lanes
from cutegemm.emulator.wgmma import Operand, gather, multiply, to_fragment, units_of


class InFlight:
    """In an accumulator register from commit to wait: whoever looks at it is told off."""

    def __init__(self, warp: Any, where: str) -> None:
        self._warp = warp
        self._where = where

    def __getattr__(self, name: str) -> Any:
        raise RaceError(
            f"{self._warp.here()} reads an accumulator of {self._where} before wgmma.wait_group says that it "
            "is there"
        )


@dataclass(frozen=True)
class Kind:
    """What the opcode says: columns, operand type, which operands are contiguous along M or N."""

    n: int
    operand: str
    a_along_m: bool
    b_along_n: bool


@dataclass(frozen=True)
class Mma:
    """One issued instruction; ``slots`` are its accumulator registers."""

    kind: Kind
    a: Operand
    b: Operand
    slots: tuple[int, ...]
    accumulate: bool
    where: str


@dataclass
class MmaGroup:
    """MMAs committed together; ``finish`` is their cycle in the cost model."""

    mmas: list[Mma]
    slots: set[tuple[int, ...]]
    done: bool = False
    finish: int = 0
    release: Any = None


@dataclass
class MmaQueue:
    """A warp's WGMMAs.

    open     issued and not committed
    groups   committed and not waited for
    blocks   accumulators of MMAs in flight, by their registers: (registers, lanes) of float32
    """

    open: list[Mma] = field(default_factory=list)
    groups: list[MmaGroup] = field(default_factory=list)
    blocks: dict[tuple[int, ...], Lanes | None] = field(default_factory=dict)


def queue_of(warp: Any) -> MmaQueue:
    """The warp's queue."""
    queue = warp.engines.get("mma")
    if queue is None:
        queue = warp.engines["mma"] = MmaQueue()
    return queue


def commit(warp: Any, queue: MmaQueue) -> MmaGroup:
    """Closes a group: its accumulators leave the registers, which are not to be read meanwhile."""
    group = MmaGroup(queue.open, {mma.slots for mma in queue.open})
    queue.open = []
    for mma in group.mmas:
        if mma.slots in queue.blocks:
            continue
        queue.blocks[mma.slots] = (
            np.stack([lanes(warp.r[slot], 32) for slot in mma.slots]).view(np.float32)
            if mma.accumulate
            else None
        )
        for slot in mma.slots:
            warp.r[slot] = InFlight(warp, mma.where)
    queue.groups.append(group)
    return group


def wait(warp: Any, queue: MmaQueue, pending: int) -> list[MmaGroup]:
    """The groups that are complete once at most ``pending`` are not; runs those that have not."""
    split = max(0, len(queue.groups) - pending)
    complete, queue.groups = queue.groups[:split], queue.groups[split:]
    for group in complete:
        run(warp, queue, group)
    busy = set().union(*(group.slots for group in queue.groups)) if queue.groups else set()
    for group in complete:
        for slots in group.slots - busy:
            block = queue.blocks.pop(slots, None)
            if block is not None:
                for slot, row in zip(slots, list(block.view(np.uint32)), strict=True):
                    warp.r[slot] = row
    return complete


def run(warp: Any, queue: MmaQueue, group: MmaGroup) -> None:
    """Does a group's arithmetic, all steps along K of one accumulator at once."""
    if group.done:
        return
    group.done = True
    series: dict[tuple[int, ...], list[Mma]] = {}
    for mma in group.mmas:
        if not mma.accumulate:
            # What was computed before is overwritten.
            series.pop(mma.slots, None)
        series.setdefault(mma.slots, []).append(mma)
    for slots, mmas in series.items():
        product = to_fragment(_product(warp, mmas))
        before = queue.blocks[slots]
        if mmas[0].accumulate and before is not None:
            product = product + before
        queue.blocks[slots] = np.ascontiguousarray(product)


def _product(warp: Any, mmas: list[Mma]) -> Lanes:
    """This warp's 16 rows of the sum of products."""
    kind = mmas[0].kind
    shared = warp.cta.shared
    a_units = units_of(tuple(mma.a for mma in mmas), warp.index % 4)
    a = gather(shared, a_units, kind.a_along_m, kind.operand)
    return multiply(a, _shared_operand(warp.cta, tuple(mma.b for mma in mmas), kind))


def _shared_operand(cta: Any, operands: tuple[Operand, ...], kind: Kind) -> Lanes:
    """B as float32, decoded once for all warps that use it while its bytes stay."""
    key = (operands, kind.operand)
    known = cta.operands.get(key)
    pages = cta.shared.pages
    if known is not None:
        first, last, versions, matrix = known
        if pages[first:last] == versions:
            return matrix
    units = units_of(operands)
    matrix = gather(cta.shared, units, kind.b_along_n, kind.operand)
    first, last = int(units.min()) * 16 // PAGE, int(units.max()) * 16 // PAGE + 1
    cta.operands[key] = (first, last, pages[first:last], matrix)
    return matrix
