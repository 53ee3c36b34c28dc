"""Many cases, in parallel, each in a worker process; what fails is shrunk to its smallest case.

Cases come in blocks. A block has a kind and a seed of its own, made from the run's seed and the block's
number, so that the same seed gives the same cases whatever the number of workers.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Flaky

from cutegemm.bench.worker import SilentWorkerError, Worker, WorkerError
from cutegemm.errors import DeviceError
from cutegemm.fuzz.case import Case
from cutegemm.fuzz.drawing import Limits, cases
from cutegemm.fuzz.kinds import Kind, random_kind
from cutegemm.fuzz.memory import MARGIN
from cutegemm.fuzz.product import Product
from cutegemm.fuzz.tally import Finding, Tally
from cutegemm.fuzz.trial import RIGHT, Start, Trial, Verdict

SHRINK_TRIES = 400  # cases run to shrink one failure
SHRINK_SECONDS = 120.0  # after which the smallest one so far is reported
SHRINK_HANGS = 6.0  # times the plan's limit, where that is more
START_SECONDS = 300.0  # for a worker to import what it needs, beside many others that do the same
NOT_TRIED = Verdict(RIGHT, "not tried")


@dataclass(frozen=True)
class Plan:
    """What to run.

    seed        of everything
    product     what is fuzzed
    limits      how large cases get
    jobs        worker processes
    cases       how many, about; seconds: how long; None: no limit
    failures    different ones after which to stop
    hang        seconds after which a case counts as a hang
    refusals    whether clear errors of the library count as refusals, not failures
    margin      elements of memory around each operand
    environment of the workers; None: this process's
    """

    seed: int
    product: Product
    limits: Limits
    jobs: int = 1
    cases: int | None = None
    seconds: float | None = None
    failures: int = 10
    hang: float = 120.0
    refusals: bool = False
    margin: int = MARGIN
    environment: Mapping[str, str] | None = None


class Executor:
    """Tries cases in a worker process, which is replaced when it hangs or dies."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._worker: Worker | None = None

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *_: object) -> None:
        self.renew()

    def renew(self) -> None:
        """The next case gets a worker that has done nothing before."""
        if self._worker is not None:
            self._worker.stop()

    def verdict(self, case: Case) -> Verdict:
        """What comes of a case: also where it never ends, or takes the process with it.

        Raises DeviceError if no worker can be had.
        """
        if self._worker is None or not self._worker.alive:
            self._worker = self._started()
        trial = Trial(case, self._plan.product, self._plan.refusals, self._plan.margin)
        try:
            for event in self._worker.ask(trial, self._plan.hang):
                verdict: Verdict = event["verdict"]
        except SilentWorkerError as error:
            return Verdict("hang", str(error))
        except WorkerError as error:
            return Verdict("crash", str(error))
        return verdict

    def _started(self) -> Worker:
        worker = Worker(self._plan.environment)
        try:
            list(worker.ask(Start(self._plan.product), START_SECONDS))
        except WorkerError as error:
            worker.stop()
            raise DeviceError(
                f"no worker process is to be had: {error}; `python -m cutegemm doctor` says what is missing"
            ) from error
        return worker


class _FailureError(Exception):
    """What hypothesis sees of a case that failed."""


@dataclass
class _Block:
    """One block of cases: hands them to the executor, and remembers the failure that is being shrunk."""

    plan: Plan
    executor: Executor
    tally: Tally
    is_over: Callable[[], bool]
    first: Case | None = None
    kind: str = ""
    smallest: tuple[Case, Verdict] | None = None
    tries: int = 0
    run: int = 0
    known: dict[Case, Verdict] = field(default_factory=dict)
    until: float = 0.0

    def take(self, case: Case) -> None:
        """One case from hypothesis. Raises _FailureError for the failure that is being shrunk."""
        verdict = self._try(case) if self.first is None else self._shrink(case)
        if self.first is not None and verdict.kind == self.kind:
            self.smallest = case, verdict
            raise _FailureError

    def _try(self, case: Case) -> Verdict:
        if self.is_over():
            return NOT_TRIED
        verdict = self.executor.verdict(case)
        self.run += 1
        self.tally.count(case, verdict)
        if verdict.failed and self.tally.is_new(case, verdict):
            self.first, self.kind = case, verdict.kind
            self.known[case] = verdict
            self.until = time.monotonic() + max(SHRINK_SECONDS, SHRINK_HANGS * self.plan.hang)
        return verdict

    def _shrink(self, case: Case) -> Verdict:
        if case not in self.known:
            if self.tries >= SHRINK_TRIES or time.monotonic() > self.until:
                return NOT_TRIED
            self.tries += 1
            self.known[case] = self.executor.verdict(case)
        return self.known[case]


def run(plan: Plan, tally: Tally, advance: Callable[[], None] = lambda: None) -> Tally:
    """Runs the plan and returns the tally; ``advance`` is called after every case.

    Raises what a worker thread raises.
    """
    return Campaign(plan, tally, advance).run()


class Campaign:
    """One run of a plan."""

    def __init__(self, plan: Plan, tally: Tally, advance: Callable[[], None]) -> None:
        self._plan = plan
        self._tally = tally
        self._advance = advance
        self._deadline = None if plan.seconds is None else time.monotonic() + plan.seconds
        self._blocks = self._numbered_blocks()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    def run(self) -> Tally:
        """Until there are enough cases, seconds or failures."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._plan.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)
        except KeyboardInterrupt:
            self._stop.set()
            raise
        if self._errors:
            raise self._errors[0]
        return self._tally

    def _numbered_blocks(self) -> Iterator[tuple[int, int]]:
        """(number, cases) of each block."""
        block = self._plan.limits.block
        if self._plan.cases is None:
            yield from zip(itertools.count(), itertools.repeat(block))
            return
        for number, first in enumerate(range(0, self._plan.cases, block)):
            yield number, min(block, self._plan.cases - first)

    def _is_over(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or self._stop.is_set() or len(self._tally.findings) >= self._plan.failures

    def _work(self) -> None:
        try:
            with Executor(self._plan) as executor:
                while not self._is_over():
                    with self._lock:
                        block = next(self._blocks, None)
                    if block is None:
                        return
                    self._run_block(executor, *block)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._errors.append(error)
            self._stop.set()

    def _run_block(self, executor: Executor, number: int, count: int) -> None:
        """All cases of a block, in parts: one ends where a failure was found."""
        kind = random_kind(_mixed(self._plan.seed, number, 0), self._plan.product.target)
        for part in itertools.count(1):
            state = _Block(self._plan, executor, self._tally, self._is_over)
            _draw(kind, self._plan, _mixed(self._plan.seed, number, part), count, self._watched(state))
            count -= state.run
            if state.first is None or state.smallest is None:
                return
            smallest, verdict = state.smallest
            executor.renew()
            alone = executor.verdict(smallest).kind == verdict.kind
            self._tally.found(Finding(state.first, smallest, verdict, state.tries, alone))
            if count <= 0 or self._is_over():
                return

    def _watched(self, state: _Block) -> Callable[[Case], None]:
        def take(case: Case) -> None:
            before = state.run
            try:
                state.take(case)
            finally:
                if state.run > before:
                    self._advance()

        return take


def _draw(kind: Kind, plan: Plan, seed: int, count: int, take: Callable[[Case], None]) -> None:
    """Draws cases for ``take``; once that raises _FailureError, smaller and smaller ones."""

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @seeded(seed)
    @given(cases(kind, plan.limits, plan.product.device == "cpu"))
    def every(case: Case) -> None:
        take(case)

    try:
        every()
    except (_FailureError, Flaky):  # the latter where it fails no more: it is remembered all the same
        return


def _mixed(*numbers: int) -> int:
    """A seed made of numbers."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(63)
