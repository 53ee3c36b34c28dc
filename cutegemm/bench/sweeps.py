"""Many configurations of one shape, compiled in parallel and timed side by side: ``sweep``."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console

from cutegemm import hardware
from cutegemm.bench.method import QUICK, Method
from cutegemm.bench.result import Result
from cutegemm.bench.worker import Build, Event, Job, Measure, Worker, WorkerError
from cutegemm.bench.workload import Case, as_cases
from cutegemm.problem import GemmProblem

#: Configurations timed in one interleaved group; each group has cuBLAS in it.
GROUP = 32
BUILD_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0

Row = dict[str, Any]


class SweepProgress:
    """Told how a sweep goes; does nothing: pass one for a silent sweep."""

    def phase(self, name: str, total: int) -> None:
        """A phase ("compile", "measure") of so many configurations begins."""

    def done(self, name: str) -> None:
        """One configuration of the phase is through."""


@dataclass(frozen=True)
class Built:
    """How a configuration's compilation went."""

    seconds: float | None
    failure: str | None = None


def named(configs: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Configurations by name: the mapping's own, else their text ("heuristic" for None); equal ones once."""
    if isinstance(configs, Mapping):
        return dict(configs)
    variants: dict[str, Any] = {}
    for config in configs:
        name = "heuristic" if config is None else str(config)
        while name in variants and variants[name] != config:
            name += "'"
        variants[name] = config
    return variants


def default_workers() -> int:
    """Compiling processes where nobody says: one per core, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


def build_all(
    jobs: Mapping[str, Job],
    *,
    workers: int,
    make_worker: Callable[[], Worker] = Worker,
    done: Callable[[str], None] = lambda name: None,
) -> dict[str, Built]:
    """Runs the build jobs in ``workers`` processes; a failing one costs only its own configuration."""
    idle: SimpleQueue[Worker | None] = SimpleQueue()
    workers = max(1, min(workers, len(jobs)))
    for _ in range(workers):
        idle.put(None)  # started by the first thread that takes it

    def build(job: Job) -> Built:
        worker = idle.get()
        try:
            if worker is None or not worker.alive:
                worker = make_worker()
            [answer] = worker.ask(job, BUILD_TIMEOUT_S)
            return Built(answer["seconds"])
        except WorkerError as error:
            return Built(None, str(error))
        finally:
            idle.put(worker)

    results: dict[str, Built] = {}
    try:
        with ThreadPoolExecutor(workers) as pool:
            futures = {pool.submit(build, job): name for name, job in jobs.items()}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                done(futures[future])
    finally:
        for _ in range(workers):
            worker = idle.get()
            if worker is not None:
                worker.stop()
    return {name: results[name] for name in jobs}


@dataclass(frozen=True)
class Measured:
    """One configuration's place in a sweep: the result it is a row of, or why there is none."""

    result: Result | None
    failure: str | None = None


class MeasuringWorker:
    """The process that measures; another takes its place when a kernel has broken it."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self.last = ""

    @property
    def alive(self) -> bool:
        """Whether the process survived its last job."""
        return self._worker is not None and self._worker.alive

    def ask(self, job: Job) -> Iterator[Event]:
        """The job's answers; ``last`` names the implementation of the latest step."""
        if self._worker is None or not self._worker.alive:
            self.stop()
            self._worker = self._make_worker()
        self.last = ""
        for event in self._worker.ask(job, STEP_TIMEOUT_S):
            if event["event"] == "step":
                self.last = event["name"]
            yield event

    def stop(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.stop()


def measure_group(job: Measure, worker: MeasuringWorker) -> dict[str, Measured]:
    """All variants of the job together; one that breaks the GPU is left out and the rest measured again."""
    lost: dict[str, Measured] = {}
    while True:
        variants = {name: config for name, config in job.variants.items() if name not in lost}
        if not variants:
            return lost
        try:
            # To the end of the job: what is left unread would be taken for the next job's answers.
            results = [
                event["result"]
                for event in worker.ask(replace(job, variants=variants))
                if event["event"] == "result"
            ]
            if results:
                return lost | dict.fromkeys(variants, Measured(results[0]))
            raise WorkerError("the worker process ended its job without a result")
        except WorkerError as error:
            culprit = error.implementation or worker.last
            if worker.alive or culprit not in variants:
                return lost | dict.fromkeys(variants, Measured(None, str(error)))
            lost[culprit] = Measured(None, str(error))


def sweep_many(
    work: Mapping[Case, Mapping[str, Any]],
    *,
    method: Method = QUICK,
    workers: int | None = None,
    json_path: Path | None = None,
    progress: SweepProgress | None = None,
    make_worker: Callable[[], Worker] = Worker,
    target: str | None = None,
) -> list[Row]:
    """Compiles every configuration of every case in parallel, then times each case's beside cuBLAS.

    work       case -> configurations by name (None: the heuristic's choice)
    workers    compiling processes; default: one per core, at most 16
    json_path  written after every group, so that an interrupted sweep leaves what it had
    progress   default: a bar on standard error
    target     of the kernels; default: this machine's GPU, and DeviceError if it has none

    Rows come in the order of ``work``. Configurations that cannot be built, compute something wrong,
    hang or break the GPU have "failure" set; all others are measured nonetheless.
    """
    target = target or hardware.current_target()
    if progress is None:
        from cutegemm.bench.report import SweepBar  # draws what this module only tells

        with SweepBar(Console(stderr=True)) as bar:
            return _sweep(work, method, workers, json_path, bar, make_worker, target)
    return _sweep(work, method, workers, json_path, progress, make_worker, target)


def _sweep(
    work: Mapping[Case, Mapping[str, Any]],
    method: Method,
    workers: int | None,
    json_path: Path | None,
    progress: SweepProgress,
    make_worker: Callable[[], Worker],
    target: str,
) -> list[Row]:
    total = sum(len(variants) for variants in work.values())
    progress.phase("compile", total)
    jobs: dict[str, Job] = {
        _key(case, name): Build(case, config, target)
        for case, variants in work.items()
        for name, config in variants.items()
    }
    count = workers or default_workers()
    built = build_all(jobs, workers=count, make_worker=make_worker, done=progress.done)
    progress.phase("measure", total)
    worker = MeasuringWorker(make_worker)
    rows: list[Row] = []
    try:
        for case, variants in work.items():
            good = {
                name: config for name, config in variants.items() if built[_key(case, name)].failure is None
            }
            measured: dict[str, Measured] = {}
            for group in _groups(list(good), GROUP):
                job = Measure(case, {name: good[name] for name in group}, method, None)
                measured |= measure_group(job, worker)
                for name in group:
                    progress.done(_key(case, name))
            for name, config in variants.items():
                rows.append(_row(case, name, config, built[_key(case, name)], measured.get(name)))
            if json_path is not None:
                write_json(json_path, rows)
    finally:
        worker.stop()
    return rows


def sweep(
    shape: Case | GemmProblem | Sequence[int],
    configs: Iterable[Any] | Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    method: Method = QUICK,
    workers: int | None = None,
    json_path: Path | None = None,
    progress: SweepProgress | None = None,
) -> list[Row]:
    """Times configurations of one shape beside cuBLAS; the rows, fastest first, failures last.

    shape     (M, N, K), a problem or a case; ``dtype`` applies to a tuple
    configs   GemmConfigs (None: the heuristic's choice), or name -> GemmConfig
    method    default: quick, enough to rank; ``Method()`` for numbers to publish

    The rest as in ``sweep_many``, which takes several shapes at once and is quicker for them.
    """
    [case] = as_cases([shape], dtype)
    rows = sweep_many(
        {case: named(configs)}, method=method, workers=workers, json_path=json_path, progress=progress
    )
    return sorted(rows, key=lambda row: (row["failure"] is not None, row["us"] or float("inf")))


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """The rows as a JSON list, replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(list(rows), indent=1) + "\n")
    partial.replace(path)


def _key(case: Case, name: str) -> str:
    return f"{case.problem}: {name}"


def _groups(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for begin in range(0, len(names), size):
        yield names[begin : begin + size]


def _row(case: Case, name: str, config: Any, built: Built, measured: Measured | None) -> Row:
    fields = asdict(config) if is_dataclass(config) and not isinstance(config, type) else None
    row: Row = {
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "name": name,
        "fields": fields,
        "build_s": built.seconds,
    }
    result = measured.result if measured else None
    if result is None:
        failure = built.failure or (measured.failure if measured else None) or "not measured"
        return row | dict.fromkeys(_MEASURED) | {"failure": failure}
    numbers = result.to_json()["implementations"][name]
    cublas = result.row("cublas")
    return (
        row
        | {key: numbers[key] for key in _MEASURED if key in numbers}
        | {
            "cublas_us": cublas.timing.us if cublas and cublas.timing else None,
            "cold": result.cold,
            "failure": numbers["failure"],
        }
    )


_MEASURED = (
    "config", "us", "min_us", "max_us", "spread", "tflops", "gb_per_s", "share_of_floor",
    "times_faster_than_cublas", "relative_error", "largest_error", "cublas_us", "cold",
)  # fmt: skip
