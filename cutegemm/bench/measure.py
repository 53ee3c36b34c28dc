"""One shape, all implementations: check, capture, time in interleaved rounds, check again."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cutegemm.bench.accuracy import Errors
from cutegemm.bench.fusion import judge_of
from cutegemm.bench.gpu import DeviceLostError, Gpu, Launch, Recording, sentence
from cutegemm.bench.inputs import Operands, poison, random_operands
from cutegemm.bench.method import Method
from cutegemm.bench.peers import Implementation, Prepared
from cutegemm.bench.result import Result, Row, Timing
from cutegemm.bench.workload import Case, Ceilings, calls_per_replay, rotation_of

#: Told what happens next: (implementation, step).
Watch = Callable[[str, str], None]

ESTIMATE_CALLS = 16


@dataclass
class _Runner:
    implementation: Implementation
    prepared: Prepared | None = None
    recording: Recording | None = None
    errors: Errors | None = None
    rounds_us: list[float] = field(default_factory=list)
    failure: str | None = None

    def launches(self, operands: Sequence[Operands], calls: int) -> list[Launch]:
        """``calls`` calls that rotate through the operands."""
        if self.prepared is None:
            raise ValueError(f"{self.implementation.name} is not prepared")
        product = self.prepared.product
        return [_launch(product, operands[call % len(operands)]) for call in range(calls)]

    def row(self) -> Row:
        """What came out."""
        return Row(
            name=self.implementation.name,
            ours=self.implementation.ours,
            timing=Timing(tuple(self.rounds_us)) if self.rounds_us else None,
            relative_error=None if self.errors is None else self.errors.relative,
            largest_error=None if self.errors is None else self.errors.largest,
            config=self.prepared.config if self.prepared else "",
            failure=self.failure,
        )


def _launch(product: Callable[..., object], one: Operands) -> Launch:
    return lambda: product(one.a, one.b, one.out, **one.beside)


class Measurement:
    """One shape on one GPU. ``run`` is the whole of it; the methods are its steps, in order.

    A failing implementation is left out from then on and its sentence stands in its row.
    DeviceLostError, which no other implementation would survive, is raised with the culprit's name.
    """

    def __init__(
        self, case: Case, implementations: Sequence[Implementation], gpu: Gpu, method: Method, watch: Watch
    ) -> None:
        self._case = case
        self._judge = judge_of(case.problem)
        self._gpu = gpu
        self._method = method
        self._watch = watch
        self._runners = [_Runner(implementation) for implementation in implementations]
        facts = gpu.facts()
        self._rotation = rotation_of(
            case,
            rotate_bytes=method.rotate_bytes,
            l2_bytes=facts.l2_bytes,
            free_bytes=gpu.free_bytes(),
            share=method.memory_share,
        )

    def run(self, ceilings: Ceilings) -> Result:
        """Measures and checks everything."""
        operands = random_operands(self._case, self._rotation.sets, self._gpu.device, self._method.seed)
        first = self._judge.truth(operands[0])
        allowed = self._judge.allowed(operands[0], first)
        self._gpu.wait()
        self._check_one_call(operands, first, allowed)
        calls = self._choose_calls(operands)
        self._record(operands, calls)
        self._time_rounds(calls)
        self._check_replay(operands, allowed)
        return Result(
            case=self._case,
            rows=tuple(runner.row() for runner in self._runners),
            floor_us=ceilings.floor_us(self._case),
            sets=self._rotation.sets,
            calls=calls,
            cold=self._rotation.cold,
        )

    def _attempt(self, runner: _Runner, step: str, action: Callable[[], None]) -> None:
        if runner.failure is not None:
            return
        name = runner.implementation.name
        self._watch(name, step)
        try:
            try:
                action()
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its own failure
                runner.failure = sentence(error)
                runner.recording = None
                # Tells a refusal, after which the others can go on, from a GPU that is lost to this process.
                self._gpu.wait()
        except DeviceLostError as error:
            error.implementation = error.implementation or name
            raise

    def _check_one_call(self, operands: list[Operands], truth: torch.Tensor, allowed: Errors) -> None:
        one = operands[0]
        for runner in self._runners:

            def prepare_and_check(runner: _Runner = runner) -> None:
                runner.prepared = runner.implementation.prepare(self._case)
                poison([one])
                runner.prepared.product(one.a, one.b, one.out, **one.beside)
                self._gpu.wait()
                runner.errors = self._judge.check(one.out, truth, allowed)

            self._attempt(runner, "check", prepare_and_check)

    def _choose_calls(self, operands: list[Operands]) -> int:
        estimates: list[float] = []
        count = max(2, min(ESTIMATE_CALLS, len(operands)))
        for runner in self._runners:

            def estimate(runner: _Runner = runner) -> None:
                estimates.append(self._gpu.record(runner.launches(operands, count)).replay_us() / count)

            self._attempt(runner, "estimate", estimate)
            if estimates:
                return calls_per_replay(len(operands), estimates[0], self._method.replay_ms)
        return 0

    def _record(self, operands: list[Operands], calls: int) -> None:
        for runner in self._runners:

            def record(runner: _Runner = runner) -> None:
                runner.recording = self._gpu.record(runner.launches(operands, calls))

            self._attempt(runner, "capture", record)

    def _time_rounds(self, calls: int) -> None:
        order = random.Random(self._method.seed)
        runners = [runner for runner in self._runners if runner.recording is not None]
        for turn in range(self._method.rounds):
            order.shuffle(runners)
            for runner in runners:

                def time(runner: _Runner = runner) -> None:
                    self._gpu.pause(self._method.pause_ms)
                    if runner.recording is not None:
                        runner.rounds_us.append(runner.recording.replay_us() / calls)

                self._attempt(runner, f"round {turn + 1} of {self._method.rounds}", time)

    def _check_replay(self, operands: list[Operands], allowed: Errors) -> None:
        """All outputs poisoned, one replay: every captured call must write all of its output, and the last
        set, which the first check did not see, must be right as well."""
        truth = self._judge.truth(operands[-1])
        for runner in self._runners:

            def replay_and_check(runner: _Runner = runner) -> None:
                if runner.recording is None or runner.errors is None:
                    return
                poison(operands)
                self._gpu.wait()
                runner.recording.replay()
                self._gpu.wait()
                for one in operands[:-1]:
                    self._judge.check_written(one.out, truth)
                last = self._judge.check(operands[-1].out, truth, allowed)
                runner.errors = runner.errors.worst(last)

            self._attempt(runner, "final check", replay_and_check)
