"""One warp: its registers, where its lanes are, and what it waits for."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cutegemm.emulator.decode import BLOCKED, DIVERGED, EXITED, Program
from cutegemm.emulator.faults import ConvergenceError
from cutegemm.emulator.values import ALL_BITS, ALL_LANES, Lanes, lanes_of, merge


class Wait(Protocol):
    """Something a warp waits for."""

    def ready(self) -> bool:
        """Whether the waiting instruction would now succeed."""

    def describe(self) -> str:
        """What is missing, for a deadlock report."""


@dataclass(eq=False)
class Group:
    """Lanes (one bit each) that are at the same instruction; ``wait`` while that cannot go on."""

    pc: int
    bits: int
    wait: Wait | None = None


@dataclass(frozen=True)
class OtherLanes:
    """A convergent instruction waits for the lanes that are elsewhere."""

    where: str

    def ready(self) -> bool:
        """The other lanes are looked at by the warp itself."""
        return False

    def describe(self) -> str:
        """See Wait."""
        return f"the other lanes of its warp, at {self.where}"


@dataclass(frozen=True)
class AnyOf:
    """Waits of several groups of lanes."""

    waits: tuple[Wait, ...]

    def ready(self) -> bool:
        """See Wait."""
        return any(wait.ready() for wait in self.waits)

    def describe(self) -> str:
        """See Wait."""
        return "; ".join(wait.describe() for wait in self.waits)


class Site(NamedTuple):
    """An instruction a warp executed; its text is put together only when somebody wants to read it."""

    warp: Any
    pc: int

    def __str__(self) -> str:
        return f"{self.warp.program.statement(self.pc).where} by {self.warp.name}"


class Warp:
    """32 lanes that run one program.

    r       register file; see values.py
    pc      next instruction while all lanes are together
    bits    lanes that execute, one bit each
    mask    the same as an array, None for all 32
    groups  where lanes are while they are not together
    clock   cycles of the cost model
    does    the role it was first seen in, "" where the code alone tells
    """

    def __init__(self, program: Program, cta: Any, index: int) -> None:
        self.program = program
        self.cta = cta
        self.index = index
        self.r: list[Any] = program.template.copy()
        self.pc = 0
        self.bits = ALL_BITS
        self.mask: Lanes | None = None
        self.first = 0
        self.split: tuple[int, int] = (0, 0)
        self.groups: list[Group] = []
        self.wait: Wait | None = None
        self.pending: dict[Any, Any] = {}
        self.done = False
        self.clock = 0
        self.executed = 0
        self.laziness = -1.0
        self._role = ""
        self.does = ""
        self.engines: dict[str, Any] = {}

    @property
    def role(self) -> str:
        """What the warp is there for: what it was seen doing, else as far as its place in the code tells."""
        if self.does:
            return self.does
        self._role = self.program.roles[self.current] or self._role
        return self._role

    @property
    def name(self) -> str:
        """Role and place, for reports."""
        role = f"{self.role} " if self.role else ""
        return f"{role}warp {self.index} of CTA {self.cta.number}"

    @property
    def where(self) -> str:
        """The instruction the warp is at."""
        pc = min((group.pc for group in self.groups), default=self.pc)
        return self.program.statement(pc).where

    def execute_as(self, bits: int) -> None:
        """Makes these the executing lanes."""
        self.bits = bits
        self.mask = None if bits == ALL_BITS else lanes_of(bits)
        self.first = (bits & -bits).bit_length() - 1

    def scalar(self, value: Any) -> int:
        """The value in the lowest executing lane."""
        return value if isinstance(value, int) else int(value[self.first])

    def active(self) -> Lanes:
        """The executing lanes."""
        return ALL_LANES if self.mask is None else self.mask

    def block(self, wait: Wait) -> int:
        """For an instruction that cannot go on yet: ``return warp.block(...)``."""
        self.wait = wait
        return BLOCKED

    def must_converge(self) -> bool:
        """Whether an instruction for all lanes of the warp meets only some of them."""
        return self.mask is not None and len(self.groups) > 1

    def here(self) -> str:
        """The instruction being executed, for messages."""
        return str(self.site())

    def site(self) -> Site:
        """The instruction being executed."""
        return Site(self, self.current)

    @property
    def current(self) -> int:
        """Index of the instruction being executed."""
        return self._running.pc if self.groups and self._running is not None else self.pc

    _running: Group | None = None

    def run(self, quantum: int) -> int:
        """Executes up to ``quantum`` instructions; returns how many were."""
        left = quantum
        while left > 0 and not self.done:
            before = left
            left -= self._run_apart(left) if self.groups else self._run_together(left)
            if self.wait is not None or left == before:
                break
        self.executed += quantum - left
        return quantum - left

    def _run_together(self, quantum: int) -> int:
        ops, counts = self.program.fused.ops, self.program.fused.counts
        self.wait = None
        count = 0
        while count < quantum:
            pc = self.pc
            following = ops[pc](self)
            if following is None:
                self.pc = pc + 1
            elif following >= 0:
                self.pc = following
            elif following == BLOCKED:
                return count
            elif following == DIVERGED:
                self._part(Group(self.pc, ALL_BITS), *self.split)
                return count + 1
            else:
                self.done = True
                return count + 1
            count += counts[pc]
        return count

    def _part(self, group: Group, target: int, taken: int) -> None:
        """Divides a group at a branch; lanes that exit leave."""
        if group in self.groups:
            self.groups.remove(group)
        rest = group.bits & ~taken
        if rest:
            self._join(Group(group.pc + 1, rest))
        if target != EXITED:
            self._join(Group(target, taken))
        self._settle()

    def _join(self, group: Group) -> None:
        for other in self.groups:
            if other.pc == group.pc:
                other.bits |= group.bits
                other.wait = None
                return
        self.groups.append(group)

    def _settle(self) -> None:
        """Back to running together when all 32 lanes are in one place; done when none is left."""
        if not self.groups:
            self.done = True
        elif self.groups[0].bits == ALL_BITS:
            self.pc = self.groups[0].pc
            self.groups = []
            self._running = None
            self.execute_as(ALL_BITS)

    def _run_apart(self, quantum: int) -> int:
        count = 0
        self.wait = None
        while self.groups and count < quantum:
            able = [g for g in self.groups if g.wait is None or g.wait.ready()]
            if not able:
                waits = [g.wait for g in self.groups if g.wait is not None]
                if all(isinstance(wait, OtherLanes) for wait in waits):
                    raise ConvergenceError(
                        f"{self.name}: its lanes wait for each other at "
                        + " and ".join(self.program.statement(g.pc).where for g in self.groups)
                    )
                self.wait = AnyOf(tuple(waits))
                break
            group = min(able, key=lambda g: g.pc)
            group.wait = None
            count += self._run_group(group, quantum - count)
        if self.groups and self.wait is None:
            self.execute_as(ALL_BITS)
        return count

    def _run_group(self, group: Group, quantum: int) -> int:
        """Runs one group until it meets another, waits, parts or ends."""
        program = self.program
        self._running = group
        self.execute_as(group.bits)
        limit = 1 << 60
        needed = 0  # registers the other lanes will read: what they hold there must stay
        for other in self.groups:
            if other is not group:
                limit = min(limit, other.pc)
                needed |= program.live[other.pc]
        if limit <= group.pc:
            limit = group.pc + 1
        for count in range(1, quantum + 1):
            if program.written[group.pc] & needed:
                following = self._run_beside(group.pc, needed)
            else:
                following = program.ops[group.pc](self)
            if following is None or following >= 0:
                place = group.pc + 1 if following is None else following
                if group.pc < place < limit and count < quantum:
                    group.pc = place  # still behind all others: nobody to meet yet
                    continue
                back = place <= group.pc  # where others may be: whom it can meet has to be found again
                self.groups.remove(group)
                group.pc = place
                self._join(group)
                self._settle()
                if back or group not in self.groups or not group.pc < limit:
                    return count
            elif following == BLOCKED:
                group.wait, self.wait = self.wait, None
                return count - 1
            elif following == DIVERGED:
                self._part(group, *self.split)
                return count
            else:
                self._part(group, EXITED, group.bits)
                return count
        return quantum

    def _run_beside(self, pc: int, needed: int) -> int | None:
        """Executes one instruction for the executing lanes; the others keep the registers they need."""
        r, mask = self.r, self.active()
        kept = [(slot, r[slot]) for slot in self.program.results[pc] if needed >> slot & 1]
        following = self.program.ops[pc](self)
        for slot, value in kept:
            r[slot] = merge(mask, r[slot], value)
        return following

    def wait_for_lanes(self) -> int:
        """For a convergent instruction met by only some lanes: they wait for the others."""
        return self.block(OtherLanes(self.program.statement(self.current).where))
