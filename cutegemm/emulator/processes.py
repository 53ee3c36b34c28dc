"""The clusters of a launch divided among forked processes.

Each process runs a share of the grid on its own copy of all memory and sends what came of it: the bytes it
has written, its trace, its count of instructions. Nothing is written here before all of them have succeeded.
"""

import math
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cutegemm.emulator.faults import DeadlockError, EmulationError, Stuck
from cutegemm.emulator.machine import SECONDS_BETWEEN_REPORTS, LaunchRecord, Machine, Progress, Turn
from cutegemm.emulator.memory import GlobalMemory
from cutegemm.emulator.processors import Processors, Sm
from cutegemm.emulator.trace import Event, Trace

SECONDS_BETWEEN_LOOKS = 0.2  # at whether the processes are still there


class Written(NamedTuple):
    """What was written to a region: its number, a bit for each of its bytes, and those bytes."""

    region: int
    marks: bytes
    values: bytes


class Touched(NamedTuple):
    """The elements of a region that were written and read, a bit for each."""

    writes: bytes
    reads: bytes


@dataclass(frozen=True)
class Share:
    """What came of a part of the grid.

    touched   by region, as its shadow is called; empty without checks
    """

    instructions: int
    turns: list[Turn]
    events: list[Event]
    written: list[Written]
    touched: dict[tuple[int, int], Touched]


def divide(clusters: int, processes: int) -> list[range]:
    """Numbers of clusters for each process: one run after another, of about equal length."""
    ends = [clusters * i // processes for i in range(processes + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def run_divided(
    build: Callable[[int], Machine],
    parts: Sequence[range],
    watch: Callable[[Progress], None] | None,
) -> tuple[Trace, int] | None:
    """Runs each part of the grid in a process of its own; the trace, and the instructions of all.

    build    the machine of a process, by the number of the process; called there
    parts    the clusters of each process
    None if two processes touched the same memory and at least one wrote it, which only checks look for.
    Then, and if a fault is raised, memory is as it was before. Raises the fault that one machine would have
    met first, and EmulationError if a process has ended before it was done.
    """
    here = build(0)
    workers: list[_Worker] = []
    try:
        for number, part in enumerate(parts):
            workers.append(_Worker(number, part, build, [worker.receiver for worker in workers]))
        _wait_for(workers, watch, math.prod(here.launch.grid))
    finally:
        for worker in workers:
            worker.end()
    _raise_fault(workers)
    shares = [worker.share for worker in workers if worker.share is not None]
    if _collide(shares):
        return None
    for share in shares:
        _write(here.memory, share.written)
    events = list(_in_order(here.launch, here.processors, shares))
    return Trace(events), sum(share.instructions for share in shares)


# --- in the parent -----------------------------------------------------------------------------------------


class _Worker:
    """A process as its parent sees it.

    share, fault      what came of it, once it is known
    ended             CTAs that have ended, as last told; ``instructions`` likewise
    status            as waitpid says it; None while it is not known to have ended
    """

    def __init__(
        self, number: int, part: range, build: Callable[[int], Machine], others: list[Connection]
    ) -> None:
        self.number, self.part = number, part
        self.share: Share | None = None
        self.fault: BaseException | None = None
        self.ended = self.instructions = 0
        self.status: int | None = None
        self.receiver, sender = Pipe(duplex=False)
        parent = os.getpid()
        # A signal in the child before its handlers are set would unwind a copy of all that the caller does.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run_part(build, number, part, sender, parent, mask, [*others, self.receiver])
        except OSError as error:
            self.receiver.close()
            raise EmulationError(
                f"process {number + 1} cannot be started: {error.strerror}; take fewer processes"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            sender.close()

    @property
    def settled(self) -> bool:
        """Whether it is known what came of it."""
        return self.share is not None or self.fault is not None

    def receive(self) -> None:
        """Takes in one message. Raises EmulationError if there will be none."""
        try:
            message = self.receiver.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(message, Share):
            self.share = message
        elif isinstance(message, BaseException):
            self.fault = message
        else:
            self.ended, self.instructions = message

    def look(self) -> None:
        """Raises EmulationError if the process has ended and nothing is to come from it."""
        if self._reaped(os.WNOHANG) and not self.receiver.poll():
            raise self._lost()

    def end(self) -> None:
        """Ends it if it still runs, and forgets it."""
        if self.status is None:
            with suppress(ProcessLookupError):  # somebody else may have waited for it
                os.kill(self.pid, signal.SIGKILL)
            self._reaped(0)
        self.receiver.close()

    def _reaped(self, options: int) -> bool:
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else has waited for it, or nobody is to
                pid, status = self.pid, 0
            if pid:
                self.status = status
        return self.status is not None

    def _lost(self) -> EmulationError:
        self._reaped(0)
        status = self.status or 0
        how = "ended"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"was ended by signal {number} ({signal.strsignal(number)})"
        return EmulationError(
            f"process {self.number + 1}, which emulated clusters {self.part.start}..{self.part.stop - 1}, "
            f"{how} before it was done; if memory ran out, take fewer processes"
        )


def _wait_for(workers: list[_Worker], watch: Callable[[Progress], None] | None, ctas: int) -> None:
    """Until all are done, or it is known which fault comes first."""
    told = -math.inf
    while pending := [worker for worker in _that_matter(workers) if not worker.settled]:
        ready = wait([worker.receiver for worker in pending], SECONDS_BETWEEN_LOOKS)
        for worker in pending:
            if worker.receiver in ready:
                worker.receive()
            else:
                worker.look()
        now = time.monotonic()
        over = all(worker.settled for worker in workers)
        if watch is not None and (over or now - told > SECONDS_BETWEEN_REPORTS):
            told = now
            ended, instructions = (
                sum(getattr(w, name) for w in workers) for name in ("ended", "instructions")
            )
            watch(Progress(ended, ctas, instructions))


def _that_matter(workers: list[_Worker]) -> list[_Worker]:
    """Those up to the first that met a fault; a deadlock shows only after everybody else has gone on."""
    for i, worker in enumerate(workers):
        if worker.fault is not None and not isinstance(worker.fault, DeadlockError):
            return workers[: i + 1]
    return workers


def _raise_fault(workers: list[_Worker]) -> None:
    faults = [worker.fault for worker in workers if worker.fault is not None]
    for fault in faults:
        if not isinstance(fault, DeadlockError):
            raise fault
    stuck = [fault.stuck for fault in faults if isinstance(fault, DeadlockError) and fault.stuck is not None]
    if stuck:
        raise DeadlockError.of(Stuck.together(stuck))


def _collide(shares: list[Share]) -> bool:
    """Whether two processes touched the same element, and at least one wrote it."""
    written: dict[tuple[int, int], Any] = {}
    read: dict[tuple[int, int], Any] = {}
    for share in shares:
        for key, touched in share.touched.items():
            writes, reads = (np.frombuffer(bits, dtype=np.uint8) for bits in touched)
            if key in written:
                if (writes & (written[key] | read[key]) | reads & written[key]).any():
                    return True
                writes, reads = writes | written[key], reads | read[key]
            written[key], read[key] = writes, reads
    return False


def _write(memory: GlobalMemory, written: list[Written]) -> None:
    for number, marks, values in written:
        data = memory.regions[number].data
        chosen = np.unpackbits(np.frombuffer(marks, dtype=np.uint8), count=len(data)).view(bool)
        data[chosen] = np.frombuffer(values, dtype=np.uint8)


@dataclass(eq=False)
class _Place:
    """Stands for a CTA on its SM."""

    sm: Sm


def _in_order(launch: LaunchRecord, processors: Processors, shares: list[Share]) -> Iterator[Event]:
    """The events in the order in which one machine, that gives each cluster its turn, would have had them."""
    turns: dict[int, list[tuple[list[Event], tuple[int, ...]]]] = {}
    for share in shares:
        first = 0
        for turn in share.turns:
            turns.setdefault(turn.cluster, []).append((share.events[first : turn.events], turn.gone))
            first = turn.events
    waiting = sorted(turns, reverse=True)
    resident: list[tuple[Iterator[tuple[list[Event], tuple[int, ...]]], list[_Place], list[int]]] = []
    while waiting or resident:
        while waiting and (sms := processors.place(math.prod(launch.cluster))) is not None:
            places = [_Place(sm) for sm in sms]
            for place in places:
                place.sm.ctas.add(place)
            number = waiting.pop()
            resident.append((iter(turns[number]), places, [len(turns[number])]))
        for played, places, left in resident:
            events, gone = next(played)
            left[0] -= 1
            yield from events
            for rank in gone:
                processors.leave(places[rank])
        resident = [entry for entry in resident if entry[2][0]]


# --- in a child --------------------------------------------------------------------------------------------


def _run_part(
    build: Callable[[int], Machine],
    number: int,
    part: range,
    sender: Connection,
    parent: int,
    mask: Any,
    unused: list[Connection],
) -> NoReturn:
    """All that a forked process does. Nothing of what it inherited is cleaned up, it is the parent's."""
    code = 1
    try:
        # Ctrl-C reaches the parent, which ends this process; handlers of the parent's are not for it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for connection in unused:
            connection.close()

        def tell(progress: Progress) -> None:
            if os.getppid() != parent:
                os._exit(1)  # nobody is left to tell
            sender.send((progress.ended, progress.instructions))

        result: Share | BaseException
        try:
            machine = build(number)
            machine.share, machine.watch = part, tell
            machine.memory.mark_writes()
            machine.run()
            result = _share_of(machine)
        except BaseException as error:  # noqa: BLE001 - raised again in the parent
            result = _portable(error)
        sender.send(result)
        code = 0
    finally:
        os._exit(code)


def _portable(error: BaseException) -> BaseException:
    """An error that can be sent; one that is no report about the kernel says where it came from."""
    if isinstance(error, EmulationError):
        return error
    text = "".join(traceback.format_exception(error))
    error.add_note(f"In a process of its own:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever keeps it from being sent
        return EmulationError(f"a process met an error of the emulator itself:\n{text}")
    return error


def _share_of(machine: Machine) -> Share:
    written = []
    for number, region in enumerate(machine.memory.regions):
        marks = region.marks
        if marks is not None and marks.data.any():
            chosen = marks.data != 0
            written.append(Written(number, np.packbits(chosen).tobytes(), region.data[chosen].tobytes()))
    touched = {
        key: Touched(np.packbits(shadow.writes != 0).tobytes(), np.packbits(shadow.reads != 0).tobytes())
        for key, shadow in machine.hooks.global_shadows().items()
    }
    return Share(machine.instructions, machine.turns, machine.trace.events, written, touched)
