"""MMAs in flight: what a warp has issued, and the arithmetic when a group of them runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.elements import BYTES, STEP_BYTES, widen
from cutegemm.emulator.faults import RaceError
from cutegemm.emulator.values import Lanes, lanes
from cutegemm.emulator.wgmma import (
    WARP_ROWS,
    Footprint,
    footprint,
    from_fragment,
    gather,
    multiply,
    start_of,
    to_fragments,
)


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
    """What the instruction says: columns, types, which operands are contiguous along M or N.

    sign       of the products
    saturate   whether s32 sums stop at the ends of their range
    """

    n: int
    a: str
    b: str
    d: str = "f32"
    a_along_m: bool = False
    b_along_n: bool = False
    sign: int = 1
    saturate: bool = False

    @property
    def k(self) -> int:
        """Elements of K."""
        return STEP_BYTES // BYTES[self.a]

    def a_of(self, mmas: "list[Mma]") -> Footprint | None:
        """Where A lies, all 64 rows of it, over the steps of some MMAs; None if in registers."""
        descriptors = tuple(mma.a for mma in mmas if isinstance(mma.a, int))
        return footprint(descriptors, 4 * WARP_ROWS, self.a_along_m) if descriptors else None

    def b_of(self, mmas: "list[Mma]") -> Footprint:
        """Where B lies, over the steps of some MMAs."""
        return footprint(tuple(mma.b for mma in mmas), self.n, self.b_along_n)


class Mma(NamedTuple):
    """One issued instruction.

    a       descriptor, or the warp's rows of A out of registers as bytes
    b       descriptor
    slots   accumulator registers
    """

    kind: Kind
    a: int | Lanes
    b: int
    slots: tuple[int, ...]
    accumulate: bool
    where: str

    @property
    def label(self) -> str:
        """Shape and place of A and B, for the trace."""
        a = f"at {start_of(self.a)}" if isinstance(self.a, int) else "in registers"
        return f"m64n{self.kind.n}k{self.kind.k}, A {a}, B at {start_of(self.b)}"


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
    before   what accumulators held when the first open MMA on them was issued
    groups   committed and not waited for
    blocks   accumulators of MMAs in flight, by their registers: (registers, lanes) of 32 bits
    settled  accumulators as they were put into registers, which they still fill if nobody wrote to those
    fenced   the register file at the last wgmma.fence, for who checks
    """

    open: list[Mma] = field(default_factory=list)
    before: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    groups: list[MmaGroup] = field(default_factory=list)
    blocks: dict[tuple[int, ...], Lanes | None] = field(default_factory=dict)
    settled: dict[tuple[int, ...], tuple[Lanes, list[Lanes]]] = field(default_factory=dict)
    fenced: list[Any] | None = None

    def as_left(self, slots: tuple[int, ...]) -> Lanes | None:
        """The accumulators that an earlier group left for open MMAs, None if one was written since."""
        block, rows = self.settled.get(slots, (None, []))
        same = block is not None and all(map(is_, self.before[slots], rows))
        return block if same else None


def queue_of(warp: Any) -> MmaQueue:
    """The warp's queue."""
    queue = warp.engines.get("mma")
    if queue is None:
        queue = warp.engines["mma"] = MmaQueue()
    return queue


def issue(warp: Any, queue: MmaQueue, mma: Mma) -> None:
    """An MMA joins the open group: its accumulators leave the registers, not to be read until it is done."""
    queue.open.append(mma)
    if mma.slots in queue.blocks or mma.slots in queue.before:
        return
    r = warp.r
    queue.before[mma.slots] = [r[slot] for slot in mma.slots]
    in_flight = InFlight(warp, mma.where)
    for slot in mma.slots:
        r[slot] = in_flight


def commit(queue: MmaQueue) -> MmaGroup:
    """Closes a group."""
    group = MmaGroup(queue.open, {mma.slots for mma in queue.open})
    for mma in group.mmas:
        if mma.slots not in queue.blocks:
            queue.blocks[mma.slots] = _accumulators(queue, mma.slots) if mma.accumulate else None
    queue.open, queue.before = [], {}
    queue.groups.append(group)
    return group


def _accumulators(queue: MmaQueue, slots: tuple[int, ...]) -> Lanes:
    """What the registers held, (registers, lanes)."""
    block = queue.as_left(slots)
    return np.stack([lanes(value, 32) for value in queue.before[slots]]) if block is None else block


def wait(warp: Any, queue: MmaQueue, pending: int) -> list[MmaGroup]:
    """The groups that are complete once at most ``pending`` are not; runs those that have not."""
    split = max(0, len(queue.groups) - pending)
    complete, queue.groups = queue.groups[:split], queue.groups[split:]
    for group in complete:
        run(warp, queue, group)
    busy = {mma.slots for mma in queue.open}.union(*(group.slots for group in queue.groups))
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
        block = queue.blocks[slots] if mmas[0].accumulate else None
        kind = mmas[0].kind
        if warp.cta.machine.exact_sums and kind.d == "f32" and BYTES[kind.a] == 2:
            queue.blocks[slots] = _summed_as_by_hardware(warp, mmas, block)
            continue
        # Rounding or saturating after each instruction is not the same as after the last.
        steps = [mmas] if kind.d == "f32" else [[mma] for mma in mmas]
        for step in steps:
            block = _added(step[0].kind, _products(warp, step), block)
        queue.blocks[slots] = block


def _summed_as_by_hardware(warp: Any, mmas: list[Mma], before: Lanes | None) -> Lanes:
    """Accumulators after some MMAs, one instruction after the other, bit by bit; as registers hold them."""
    rows = (WARP_ROWS, mmas[0].kind.n)
    tile = np.zeros(rows, np.float32) if before is None else from_fragment(before.view(np.float32))
    mine = slice(warp.index % 4 * WARP_ROWS, (warp.index % 4 + 1) * WARP_ROWS)
    for mma in mmas:
        kind = mma.kind
        place = kind.a_of([mma])
        if place is None:
            a = widen(np.asarray(mma.a).view(f"u{BYTES[kind.a]}"), kind.a)
        else:
            a = gather(warp.cta.shared, place, kind.a)[mine]
        tile = numerics.added(kind.sign * a, gather(warp.cta.shared, kind.b_of([mma]), kind.b), tile)
    return np.ascontiguousarray(to_fragments(tile)[0])


def _added(kind: Kind, products: Lanes, before: Lanes | None) -> Lanes:
    """Sums of products, (elements of a lane, lanes), added to accumulators; as registers hold them."""
    if kind.sign < 0:
        products = -products
    if kind.d == "f32":
        return products if before is None else products + before.view(np.float32)
    if kind.d == "s32":
        total = products if before is None else products + before.view(np.int32)
        if kind.saturate:
            total = total.clip(-(2**31), 2**31 - 1)
        return total.astype(np.int64).astype(np.int32)
    # A register holds two neighbours of a row: elements 2i and 2i + 1.
    pairs = products.reshape(-1, 2, 32).transpose(0, 2, 1)
    if before is not None:
        pairs = pairs + np.ascontiguousarray(before).view(np.float16).reshape(*before.shape, 2)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(pairs.astype(np.float16)).view(np.uint32)[..., 0]


def _products(warp: Any, mmas: list[Mma]) -> Lanes:
    """Sums of products over the steps of some MMAs, for one warp: (elements of a lane, lanes)."""
    cta, kind = warp.cta, mmas[0].kind
    a, b = kind.a_of(mmas), kind.b_of(mmas)

    def right() -> Lanes:
        return _while_unchanged(cta, kind.b, (b,), lambda: gather(cta.shared, b, kind.b))

    if a is None:
        rows = np.concatenate([mma.a for mma in mmas], axis=1)
        own: Lanes = to_fragments(multiply(widen(rows.view(f"u{BYTES[kind.a]}"), kind.a), right()))[0]
        return own
    place = a

    def of_all_warps() -> Lanes:
        return to_fragments(multiply(gather(cta.shared, place, kind.a), right()))

    of_mine: Lanes = _while_unchanged(cta, kind, (place, b), of_all_warps)[warp.index % 4]
    return of_mine


def _while_unchanged(
    cta: Any, what: Any, places: tuple[Footprint, ...], compute: Callable[[], Lanes]
) -> Lanes:
    """What is computed from parts of shared memory, once for all warps that ask while their bytes stay."""
    pages = cta.shared.pages
    versions = [pages[place.pages] for place in places]
    key = (what, *map(id, places))
    known = cta.operands.get(key)
    if known is not None and known[0] == versions:
        return known[2]
    value = compute()
    cta.operands[key] = (versions, places, value)  # the places are kept so that no other gets their id
    return value
