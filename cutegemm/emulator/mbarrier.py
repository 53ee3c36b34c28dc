"""Barriers: mbarriers in shared memory, a CTA's numbered barriers, the barrier of a cluster."""

from dataclasses import dataclass, field
from typing import Any

from cutegemm.emulator.faults import BarrierCountError
from cutegemm.emulator.memory import SHARED_BASE


@dataclass
class Mbarrier:
    """One mbarrier.

    count       arrivals of a phase
    pending     those still missing
    tx          bytes announced and not yet arrived; may be negative for a while
    phase       number of completed phases
    suppliers   who has arrived or sent bytes so far: (what, warp) pairs
    clock, release   cycle and race-checker state that whoever waits inherits; next_...: of the open phase
    label       what the kernel calls it, if that is known
    origin      where it was initialised
    made        for the race checker: agent and epoch of its initialisation, and where that is
    users       warps that were found to know of it, and whether they told the async proxy of it
    """

    offset: int
    count: int
    cta: Any
    pending: int = 0
    tx: int = 0
    phase: int = 0
    label: str = ""
    origin: str = ""
    suppliers: dict[tuple[str, Any], None] = field(default_factory=dict)
    clock: int = 0
    next_clock: int = 0
    release: Any = None
    next_release: Any = None
    made: tuple[int, int, Any] | None = None
    users: set[tuple[Any, bool]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pending = self.count

    @property
    def name(self) -> str:
        """Place in shared memory, for reports; where the kernel makes it, if that gave it no name."""
        place = f"mbarrier at shared offset {self.offset - SHARED_BASE} of CTA {self.cta.number}"
        return f"{self.label}, {place}" if self.label else f"{place} (initialised at {self.origin})"

    def _supplied_by(self) -> str:
        names = [f"{what}{warp.name}" for what, warp in self.suppliers]
        return ", ".join(names[:12]) or "nobody so far"

    def arrive(self, count: int, by: Any, where: object, clock: int, what: str = "") -> None:
        """``count`` arrivals of a warp or of its ``what``. Raises BarrierCountError if fewer are expected."""
        self.suppliers[what, by] = None
        if count > self.pending:
            raise BarrierCountError(
                f"{where}: {count} arrival(s) at the {self.name}, which expects {self.pending} more in phase "
                f"{self.phase} (count {self.count}); arrivals so far came from {self._supplied_by()}"
            )
        self.pending -= count
        self.next_clock = max(self.next_clock, clock)
        self._advance()

    def expect(self, tx: int) -> None:
        """Announces bytes."""
        self.tx += tx

    def complete(self, tx: int, by: Any, clock: int, what: str = "TMA loads of ") -> None:
        """Bytes of a warp's TMA load have arrived, or of its ``what``."""
        self.suppliers[what, by] = None
        self.tx -= tx
        self.next_clock = max(self.next_clock, clock)
        self._advance()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete."""
        return (self.phase & 1) != parity

    def _advance(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.clock, self.next_clock = self.next_clock, 0
            self.release, self.next_release = self.next_release, None
            self.cta.cluster.machine.events += 1

    def missing(self) -> str:
        """What keeps the current phase from completing."""
        parts = []
        if self.pending:
            parts.append(f"{self.pending} of {self.count} arrivals missing")
        if self.tx > 0:
            parts.append(f"{self.tx} announced bytes have not arrived")
        elif self.tx < 0:
            parts.append(f"{-self.tx} bytes arrived that nobody announced")
        return f"{' and '.join(parts) or 'complete'}; supplied before by {self._supplied_by()}"


@dataclass(frozen=True)
class MbarrierWait:
    """A warp waits for a phase."""

    barrier: Mbarrier
    parity: int

    def ready(self) -> bool:
        """See warp.Wait."""
        return self.barrier.passed(self.parity)

    def describe(self) -> str:
        """See warp.Wait."""
        barrier = self.barrier
        return f"{barrier.name}: parity {self.parity}, phase {barrier.phase}, {barrier.missing()}"


@dataclass
class Rendezvous:
    """A barrier that counts threads: ``bar.sync`` ids of a CTA, or the barrier of a cluster.

    whole   used for all threads of a CTA that have not exited, however many those are
    """

    name: str
    expected: int = 0
    arrived: int = 0
    whole: bool = False
    generation: int = 0
    members: list[Any] = field(default_factory=list)
    clock: int = 0
    next_clock: int = 0
    release: Any = None
    next_release: Any = None

    def arrive(self, threads: int, expected: int, by: Any, where: object, clock: int) -> int:
        """Counts a warp's threads; returns the generation it waits for. Raises BarrierCountError."""
        if self.arrived and self.expected != expected and not self.whole:
            raise BarrierCountError(
                f"{where}: {self.name} is used for {expected} threads while {self.arrived} wait that "
                f"expect {self.expected}"
            )
        self.expected = expected
        self.arrived += threads
        self.members.append(by)
        if self.arrived > expected:
            raise BarrierCountError(
                f"{where}: {self.arrived} threads arrived at {self.name}, which expects {expected}: "
                + self.who()
            )
        self.next_clock = max(self.next_clock, clock)
        waiting_for = self.generation
        self.check()
        return waiting_for

    def who(self) -> str:
        """The warps that are there."""
        return ", ".join(warp.name for warp in self.members)

    def check(self) -> None:
        """Opens if everyone is there."""
        if self.arrived and self.arrived >= self.expected:
            self.arrived = 0
            self.members = []
            self.generation += 1
            self.clock, self.next_clock = self.next_clock, 0
            self.release, self.next_release = self.next_release, None

    def others_exited(self, live: int) -> None:
        """Threads of the CTA have exited, ``live`` are left."""
        if self.whole and self.arrived:
            self.expected = live
            self.check()

    def passed(self, generation: int) -> bool:
        """Whether the barrier has opened since."""
        return self.generation > generation


@dataclass(frozen=True)
class RendezvousWait:
    """A warp waits for the others."""

    barrier: Rendezvous
    generation: int

    def ready(self) -> bool:
        """See warp.Wait."""
        return self.barrier.passed(self.generation)

    def describe(self) -> str:
        """See warp.Wait."""
        barrier = self.barrier
        return f"{barrier.name}: {barrier.arrived} of {barrier.expected} threads are there: {barrier.who()}"
