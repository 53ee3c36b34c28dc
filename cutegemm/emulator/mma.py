"""MMAs in flight: what a warp has issued, and the arithmetic when a group of them runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cutegemm.emulator.faults import RaceError
from cutegemm.emulator.values import Lanes, lanes
from cutegemm.emulator.wgmma import WARP_ROWS, Footprint, footprint, gather, multiply, to_fragments


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

    def a_of(self, mmas: "list[Mma]") -> Footprint:
        """Where A lies, all 64 rows of it, over the steps of some MMAs."""
        return footprint(tuple(mma.a for mma in mmas), 4 * WARP_ROWS, self.a_along_m)

    def b_of(self, mmas: "list[Mma]") -> Footprint:
        """Where B lies, over the steps of some MMAs."""
        return footprint(tuple(mma.b for mma in mmas), self.n, self.b_along_n)


class Mma(NamedTuple):
    """One issued instruction: operand descriptors, and its accumulator registers as ``slots``."""

    kind: Kind
    a: int
    b: int
    slots: tuple[int, ...]
    accumulate: bool
    where: str


class Issue(NamedTuple):
    """Who issued an MMA; text only when somebody reads it."""

    where: str
    warp: Any

    def __str__(self) -> str:
        return f"{self.where} by {self.warp.name}"


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
    settled  accumulators as they were put into registers, which they still fill if nobody wrote to those
    """

    open: list[Mma] = field(default_factory=list)
    groups: list[MmaGroup] = field(default_factory=list)
    blocks: dict[tuple[int, ...], Lanes | None] = field(default_factory=dict)
    settled: dict[tuple[int, ...], tuple[Lanes, list[Lanes]]] = field(default_factory=dict)


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
        queue.blocks[mma.slots] = _accumulators(warp, queue, mma.slots) if mma.accumulate else None
        in_flight = InFlight(warp, mma.where)
        for slot in mma.slots:
            warp.r[slot] = in_flight
    queue.groups.append(group)
    return group


def _accumulators(warp: Any, queue: MmaQueue, slots: tuple[int, ...]) -> Lanes:
    """What the registers hold, (registers, lanes) of float32."""
    r = warp.r
    block, rows = queue.settled.pop(slots, (None, []))
    if block is not None and all(r[slot] is row for slot, row in zip(slots, rows, strict=True)):
        return block
    stacked: Lanes = np.stack([lanes(r[slot], 32) for slot in slots]).view(np.float32)
    return stacked


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
                rows = list(block.view(np.uint32))
                for slot, row in zip(slots, rows, strict=True):
                    warp.r[slot] = row
                queue.settled[slots] = (block, rows)
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
        product = _products(warp.cta, mmas)[warp.index % 4]
        before = queue.blocks[slots]
        queue.blocks[slots] = product + before if mmas[0].accumulate and before is not None else product


def _products(cta: Any, mmas: list[Mma]) -> Lanes:
    """Sums of products of a warpgroup's four warps, as registers hold them: (warps, registers, lanes)."""
    kind = mmas[0].kind
    a, b = kind.a_of(mmas), kind.b_of(mmas)

    def compute() -> Lanes:
        left = gather(cta.shared, a, kind.operand)
        right = _while_unchanged(cta, (b,), kind.operand, lambda: gather(cta.shared, b, kind.operand))
        return to_fragments(multiply(left, right))

    return _while_unchanged(cta, (a, b), kind.operand, compute)


def _while_unchanged(
    cta: Any, places: tuple[Footprint, ...], kind: str, compute: Callable[[], Lanes]
) -> Lanes:
    """What is computed from parts of shared memory, once for all warps that ask while their bytes stay."""
    pages = cta.shared.pages
    versions = [pages[place.pages] for place in places]
    key = (kind, *map(id, places))
    known = cta.operands.get(key)
    if known is not None and known[0] == versions:
        return known[2]
    value = compute()
    cta.operands[key] = (versions, places, value)  # the places are kept so that no other gets their id
    return value
