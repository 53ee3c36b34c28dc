"""Measuring the candidates of one problem and choosing among them.

All candidates are built in processes of their own and measured side by side in another process, so that
nothing a kernel does can harm the caller, whose GPU state and memory stay as they are. Every result is
checked against the float32 product. The fastest few then run against the heuristic's choice once more, with
other inputs and more rounds; one of them wins only if it is faster by MARGIN, and in nearly all rounds.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cutegemm.alignment import expected_paths
from cutegemm.bench.method import FULL, Method
from cutegemm.bench.peers import Variant
from cutegemm.bench.result import BASELINE
from cutegemm.bench.sweeps import (
    Measured,
    MeasuringWorker,
    SweepProgress,
    build_all,
    default_workers,
    measure_group,
)
from cutegemm.bench.worker import Build, Measure, Worker
from cutegemm.bench.workload import Case, Ceilings
from cutegemm.cache import cache_dir, process_lock
from cutegemm.errors import DeviceError, OperandTypeError, ProblemError, TargetError
from cutegemm.hardware import Gpu, current_gpu
from cutegemm.kernels import Fastest
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler
from cutegemm.tuning.candidates import DEFAULT_TOP, Candidate, candidates
from cutegemm.tuning.winners import Winner, Winners, question

#: For the first look at all candidates, and for the decision among the fastest.
SCREEN = Method(rounds=5, replay_ms=4.0, pause_ms=2.0)
CONFIRM = replace(FULL, seed=1)
FINALISTS = 4
#: Nobody asks how near the floor a candidate comes, so that the GPU's rates need not be measured first.
NO_FLOOR = Ceilings(math.inf, math.inf, "")
MARGIN = 0.01  # of the time: a winner must be faster than the heuristic's choice by this
NEARLY_ALL = 8 / 9  # of the rounds in which it must be
LEAST_MEMORY_SHARE = 0.1
LOCK_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Trial:
    """What came of one candidate.

    us, spread  microseconds, those of the decision where it took part in it, and how far rounds differ
    remark      "winner", "heuristic's choice", both, or nothing
    """

    candidate: Candidate
    us: float | None
    spread: float | None
    remark: str = ""
    failure: str | None = None


@dataclass(frozen=True)
class Tuned:
    """The outcome for one problem. ``trials`` is empty where the winner was remembered, the fastest first."""

    problem: GemmProblem
    winner: Winner
    trials: tuple[Trial, ...] = ()


def autotuned(problem: GemmProblem, scheduler: TileScheduler | None, target: str) -> Fastest | None:
    """The kernel for ``compile(config="autotune")``: remembered, or measured now, with dense operands.

    A bar is drawn on standard error while it is measured, on a terminal. None for problems with nothing to
    compute. Raises as ``tune`` does, TargetError if the GPU here does not run ``target``.
    """
    if problem.is_static and 0 in (problem.l, problem.m, problem.n, problem.k):
        return None
    from cutegemm.tuning.report import TuneBar

    with TuneBar.on_stderr() as bar:
        bar.shape(str(problem), 1, 1)
        winner = tune(problem, scheduler=scheduler, target=target, progress=bar).winner
    return Fastest(winner.config, winner.scheduler(scheduler), expected_paths(problem))


def tune(
    problem: GemmProblem,
    *,
    scheduler: TileScheduler | None = None,
    target: str | None = None,
    top: int = DEFAULT_TOP,
    again: bool = False,
    progress: SweepProgress | None = None,
    make_worker: Callable[[], Worker] = Worker,
) -> Tuned:
    """The fastest kernel for a problem of known sizes on torch's current GPU.

    scheduler  the one to use; None: tried as well
    top        candidates of the heuristic's ranking that are measured, a few more beside them
    again      measure even if the answer is remembered

    Raises ProblemError for unknown sizes, DeviceError without a GPU or if no candidate could be measured,
    TargetError, OperandTypeError for a scheduler that another process cannot import.
    """
    _check(problem, scheduler, top)
    gpu, index = require_gpu(target)
    key, winners = question(problem, gpu, scheduler), _winners()
    if not again and (known := winners.get(key)) is not None:
        return Tuned(problem, known)
    locks = cache_dir() / "locks"
    with process_lock(locks / f"{key}.lock", LOCK_TIMEOUT_S, "tuning"):
        # Another process may have found it while this one waited.
        if not again and (known := winners.get(key)) is not None:
            return Tuned(problem, known)
        # Two measurements at a time on one GPU would spoil each other.
        with process_lock(locks / f"measuring-{index}.lock", LOCK_TIMEOUT_S, "measuring"):
            contest = _Contest(
                problem,
                candidates(problem, gpu, scheduler, top),
                gpu,
                index,
                progress or SweepProgress(),
                make_worker,
            )
            trials, winner = contest.run()
        winners.put(key, winner if scheduler is None else replace(winner, order=None))
    return Tuned(problem, winner, trials)


_known: dict[object, Winners] = {}
_known_lock = threading.Lock()


def _winners() -> Winners:
    """Those of the cache's folder; others if CUTEGEMM_CACHE_DIR has changed since."""
    with _known_lock:
        root = cache_dir()
        return _known.setdefault(root, Winners(root))


def _check(problem: GemmProblem, scheduler: TileScheduler | None, top: int) -> None:
    unknown = [name.upper() for name in "lmnk" if getattr(problem, name) is None]
    if unknown:
        raise ProblemError(
            f"tuning measures one shape, and {', '.join(unknown)} of {problem} is not known; "
            "give every size, or compile with config=None"
        )
    if top < 1:
        raise ProblemError(f"top={top}: at least one candidate must be measured; use 1 or more")
    for part in () if scheduler is None else (scheduler.order, scheduler.assignment):
        if type(part).__module__ == "__main__":
            raise OperandTypeError(
                f"tuning measures in another process, which cannot import {type(part).__name__} from a "
                "script; move the class to a module, or compile with config=None"
            )


def require_gpu(target: str | None) -> tuple[Gpu, int]:
    """torch's current GPU and its index. DeviceError without one, TargetError if it runs no ``target``."""
    try:
        gpu = current_gpu()
    except DeviceError as error:
        raise DeviceError(
            "tuning measures kernels on a GPU, and there is none to use here: tune where a Hopper GPU is, or "
            "compile with config=None (the heuristic chooses) or a GemmConfig of your own, and with "
            'target="sm_90a" where no GPU is; `python -m cutegemm doctor` says what is missing'
        ) from error
    if target is not None and gpu.target != target:
        raise TargetError(
            f"kernels for {target} cannot be measured on {gpu.name}, which runs {gpu.target}; "
            f'use target="{gpu.target}", or compile with config=None'
        )
    return gpu, torch.cuda.current_device()


class _Contest:
    """The measurements of one problem, from candidates to the winner."""

    def __init__(
        self,
        problem: GemmProblem,
        found: Sequence[Candidate],
        gpu: Gpu,
        index: int,
        progress: SweepProgress,
        make_worker: Callable[[], Worker],
    ) -> None:
        self._case = Case(problem)
        self._candidates = {candidate.name: candidate for candidate in found}
        self._heuristic = found[0].name
        self._gpu = gpu
        self._index = index
        self._progress = progress
        self._make_worker = make_worker
        self._memory_share = SCREEN.memory_share

    def run(self) -> tuple[tuple[Trial, ...], Winner]:
        """Every trial, the fastest first, and the winner."""
        seen = self._build()
        worker = MeasuringWorker(self._make_worker)
        try:
            built = [name for name in self._candidates if name not in seen]
            seen |= self._measure(worker, "measure", built, SCREEN)
            finalists = self._finalists(seen)
            confirmed = self._measure(worker, "confirm", finalists, CONFIRM)
        finally:
            worker.stop()
        return self._verdict(seen | confirmed, finalists)

    def _build(self) -> dict[str, "_Seen"]:
        """Compiles all; those that could not be."""
        self._progress.phase("compile", len(self._candidates))
        jobs = {name: Build(self._case, self._variant(name), self._gpu.target) for name in self._candidates}
        built = build_all(
            jobs, workers=default_workers(), make_worker=self._make_worker, done=self._progress.done
        )
        return {name: _Seen(failure=one.failure) for name, one in built.items() if one.failure is not None}

    def _variant(self, name: str) -> Variant:
        candidate = self._candidates[name]
        return Variant(candidate.config, candidate.scheduler)

    def _measure(
        self, worker: MeasuringWorker, phase: str, names: Sequence[str], method: Method
    ) -> dict[str, "_Seen"]:
        """All of them side by side; with fewer sets of inputs where memory runs out."""
        self._progress.phase(phase, len(names))
        variants = {name: self._variant(name) for name in names}
        while True:
            chosen = replace(method, memory_share=self._memory_share)
            measured = measure_group(Measure(self._case, variants, chosen, NO_FLOOR, self._index), worker)
            seen = {name: _Seen.of(one, name) for name, one in measured.items()}
            lacking = any("OutOfMemoryError" in (one.failure or "") for one in seen.values())
            if not lacking or self._memory_share / 2 < LEAST_MEMORY_SHARE:
                break
            self._memory_share /= 2
        for name in names:
            self._progress.done(name)
        return seen

    def _finalists(self, seen: Mapping[str, "_Seen"]) -> list[str]:
        """The fastest few, and the heuristic's choice."""
        good = {name: one.us for name, one in seen.items() if one.us is not None}
        finalists = sorted(good, key=lambda name: good[name])[:FINALISTS]
        if self._heuristic in good and self._heuristic not in finalists:
            finalists.append(self._heuristic)
        if not finalists:
            raise DeviceError(
                f"none of {len(seen)} candidates for {self._case.problem} could be measured; "
                f"the heuristic's choice: {seen[self._heuristic].failure}"
            )
        return finalists

    def _verdict(
        self, seen: Mapping[str, "_Seen"], finalists: Sequence[str]
    ) -> tuple[tuple[Trial, ...], Winner]:
        rounds = {name: seen[name].rounds_us for name in finalists if seen[name].us is not None}
        if not rounds:
            raise DeviceError(
                f"the fastest kernels for {self._case.problem} failed when they were measured again: "
                f"{seen[finalists[0]].failure}"
            )
        best = decide(rounds, self._heuristic)
        chosen = self._candidates[best]
        winner = Winner(
            config=chosen.config,
            order=repr(chosen.scheduler.order),
            splits=chosen.scheduler.splits,
            us=statistics.median(rounds[best]),
            heuristic_us=seen[self._heuristic].us,
            cublas_us=seen[best].cublas_us,
            problem=str(self._case.problem),
            gpu=f"{self._gpu.name}, {self._gpu.sms} SMs",
            created=time.time(),
        )
        order = sorted(
            self._candidates,
            key=lambda name: (seen[name].us is None, name not in finalists, seen[name].us or 0.0),
        )
        return tuple(self._trial(name, seen[name], best) for name in order), winner

    def _trial(self, name: str, seen: "_Seen", best: str) -> Trial:
        words = ["winner"] * (name == best) + ["heuristic's choice"] * (name == self._heuristic)
        return Trial(self._candidates[name], seen.us, seen.spread, ", ".join(words), seen.failure)


@dataclass(frozen=True)
class _Seen:
    """One candidate's latest measurement, or why there is none."""

    rounds_us: tuple[float, ...] = ()
    us: float | None = None
    spread: float | None = None
    cublas_us: float | None = None
    failure: str | None = None

    @classmethod
    def of(cls, measured: Measured, name: str) -> "_Seen":
        result = measured.result
        row = None if result is None else result.row(name)
        if result is None or row is None:
            return cls(failure=measured.failure or "not measured")
        if row.failure is not None or row.timing is None:
            return cls(failure=row.failure or "not measured")
        cublas = result.row(BASELINE)
        cublas_us = cublas.timing.us if cublas is not None and cublas.timing and cublas.good else None
        return cls(row.timing.rounds_us, row.timing.us, row.timing.spread, cublas_us)


def decide(rounds: Mapping[str, Sequence[float]], heuristic: str) -> str:
    """The fastest, unless it is not surely faster than the heuristic's choice: then that one.

    rounds: microseconds of every finalist in each round; all took turns in every round.
    """
    fastest = min(rounds, key=lambda name: statistics.median(rounds[name]))
    if heuristic not in rounds or surely_faster(rounds[fastest], rounds[heuristic]):
        return fastest
    return heuristic


def surely_faster(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` took less time by MARGIN in the median of the rounds, and less in nearly all."""
    ratios = [mine / theirs for mine, theirs in zip(one, other, strict=True)]
    faster = sum(ratio < 1 for ratio in ratios)
    return statistics.median(ratios) <= 1 - MARGIN and faster >= NEARLY_ALL * len(ratios)
