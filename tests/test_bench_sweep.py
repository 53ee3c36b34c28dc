"""Workers and sweeps: parallel builds, and configurations that fail, kill their process or lose the GPU."""

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import QUICK, Die, Echo, FakeGemm, LocalWorker, Lose, Numbered, Refuse, Sleep
from rich.console import Console

from cutegemm.bench import peers, sweep, sweep_many, sweep_table
from cutegemm.bench.sweeps import MeasuringWorker, SweepProgress, build_all, measure_group, named
from cutegemm.bench.worker import Build, Worker, WorkerError
from cutegemm.bench.workload import Case, as_cases
from cutegemm.cache import default_cache
from cutegemm.config import GemmConfig
from cutegemm.errors import DeviceError

SHAPE = (32, 48, 64)
CONFIGS = {f"c{i}": GemmConfig(64, 8 * i) for i in range(1, 6)}


def spawn() -> Worker:
    """A real worker that can import the jobs of this folder."""
    return Worker({**os.environ, "PYTHONPATH": str(Path(__file__).parent), "BENCH_TEST": "seen"})


def test_a_worker_answers_in_another_process() -> None:
    with spawn() as worker:
        for _ in range(2):
            first, second = worker.ask(Echo("BENCH_TEST"), 60)
            assert first["pid"] != os.getpid()
            assert first["value"] == "seen"
            assert second == {"event": "second"}
        assert worker.alive
    assert not worker.alive


def test_a_worker_survives_a_job_that_raises() -> None:
    with spawn() as worker:
        with pytest.raises(WorkerError, match=r"^ProblemError: K=3 is odd$"):
            list(worker.ask(Refuse(), 60))
        assert worker.alive
        assert len(list(worker.ask(Echo(), 60))) == 2


def test_a_worker_that_dies_says_so() -> None:
    with spawn() as worker:
        with pytest.raises(WorkerError, match=r"died \(exit code 7\)"):
            list(worker.ask(Die(), 60))
        assert not worker.alive


def test_a_lost_gpu_ends_the_worker_and_names_the_culprit() -> None:
    with spawn() as worker:
        with pytest.raises(WorkerError, match="did not finish") as caught:
            list(worker.ask(Lose(), 60))
        assert caught.value.implementation == "the culprit"
        assert not worker.alive


def test_a_silent_worker_is_ended() -> None:
    with spawn() as worker:
        list(worker.ask(Echo(), 60))
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"no answer in 0\.3 s"):
            list(worker.ask(Sleep(), 0.3))
        assert time.monotonic() - begin < 10
        assert not worker.alive


def test_one_dying_build_costs_only_itself() -> None:
    done: list[str] = []
    jobs = {"a": Refuse(), "b": Die(), "c": Refuse(), "d": Die()}
    built = build_all(jobs, workers=2, make_worker=spawn, done=done.append)
    assert list(built) == list(jobs)
    assert sorted(done) == list(jobs)
    assert built["a"].failure == built["c"].failure == "ProblemError: K=3 is odd"
    assert built["b"].failure == built["d"].failure == "the worker process died (exit code 7)"


def test_configurations_get_names() -> None:
    one, other = GemmConfig(128, 256), GemmConfig(256, 128)
    variants = named([None, one, other, one])
    assert list(variants) == ["heuristic", str(one), str(other)]
    assert named({"mine": one}) == {"mine": one}


class Count(SweepProgress):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def phase(self, name: str, total: int) -> None:
        self.told.append(f"{name} {total}")

    def done(self, name: str) -> None:
        self.told.append("done")


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> dict[Any, FakeGemm]:
    """What compiling a configuration gives; every other one works."""
    known: dict[Any, FakeGemm] = {}

    def compile_case(case: Case, config: Any = None, target: str | None = None) -> FakeGemm:
        return known.get(config, FakeGemm(config))

    monkeypatch.setattr(peers, "compile_case", compile_case)
    return known


def run(
    variants: dict[str, Any], make_worker: Callable[[], Any] = LocalWorker, **keywords: Any
) -> dict[str, Any]:
    """Rows by name of a sweep of one small shape."""
    [case] = as_cases([SHAPE])
    rows = sweep_many(
        {case: variants}, method=QUICK, workers=2, make_worker=make_worker, target="sm_90a", **keywords
    )
    assert all(set(row) == set(rows[0]) for row in rows)
    return {row["name"]: row for row in rows}


def test_a_sweep_has_a_row_per_configuration(gemms: dict[Any, FakeGemm], tmp_path: Path) -> None:
    progress = Count()
    rows = run(CONFIGS, json_path=tmp_path / "sweep" / "rows.json", progress=progress)
    assert list(rows) == list(CONFIGS)
    for name, row in rows.items():
        assert row["failure"] is None
        assert row["us"] == pytest.approx(1.0)
        assert row["cublas_us"] == pytest.approx(1.0)
        assert row["times_faster_than_cublas"] == pytest.approx(1.0)
        assert row["build_s"] >= 0
        assert row["cold"] is True
        assert row["fields"]["tile_n"] == CONFIGS[name].tile_n
        assert GemmConfig(**row["fields"]) == CONFIGS[name]
        assert (row["m"], row["n"], row["k"]) == SHAPE
        assert row["config"] == str(CONFIGS[name])
    assert json.loads((tmp_path / "sweep" / "rows.json").read_text()) == list(rows.values())
    assert progress.told == ["compile 5", *["done"] * 5, "measure 5", *["done"] * 5]


def test_failing_and_wrong_configurations_have_a_sentence(gemms: dict[Any, FakeGemm]) -> None:
    gemms[CONFIGS["c2"]] = FakeGemm(failure=RuntimeError("too many registers"))
    gemms[CONFIGS["c4"]] = FakeGemm(spoil=lambda out: out.zero_())
    rows = run(CONFIGS)
    assert "too many registers" in rows["c2"]["failure"]
    assert rows["c2"]["us"] is None
    assert "relative error 1.0" in rows["c4"]["failure"]
    assert all(rows[name]["failure"] is None for name in ("c1", "c3", "c5"))
    assert set(rows["c2"]) == set(rows["c1"])


def test_a_process_that_measures_twice_gives_each_job_its_own_answer() -> None:
    worker = MeasuringWorker(spawn)
    try:
        for number in range(3):
            job: Any = Numbered({"c1": None}, number)
            measured = measure_group(job, worker)["c1"]
            assert measured.failure is None
            assert measured.result == number  # type: ignore[comparison-overlap]
    finally:
        worker.stop()


def test_configurations_that_lose_the_gpu_are_left_out_and_the_rest_measured(
    gemms: dict[Any, FakeGemm],
) -> None:
    workers: list[LocalWorker] = []

    def make() -> LocalWorker:
        workers.append(LocalWorker(breaks=["c2", "c4"]))
        return workers[-1]

    rows = run(CONFIGS, make)
    assert rows["c2"]["failure"] == rows["c4"]["failure"] == "a kernel did not finish"
    assert all(rows[name]["failure"] is None and rows[name]["us"] for name in ("c1", "c3", "c5"))
    assert all(not worker.alive for worker in workers)


def test_cublas_breaking_the_gpu_ends_the_group_not_the_sweep(
    gemms: dict[Any, FakeGemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(LocalWorker):
        def ask(self, job: Any, timeout_s: float) -> Any:
            if hasattr(job, "variants"):
                self.alive = False
                yield {"event": "step", "name": "cublas", "step": "check"}
                raise WorkerError("a kernel did not finish")
            yield from super().ask(job, timeout_s)

    rows = run(CONFIGS, Broken)
    assert {row["failure"] for row in rows.values()} == {"a kernel did not finish"}


def test_many_configurations_are_measured_in_groups(
    gemms: dict[Any, FakeGemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.modules["cutegemm.bench.sweeps"], "GROUP", 2)
    rows = run(CONFIGS)
    assert list(rows) == list(CONFIGS)
    assert all(row["failure"] is None for row in rows.values())


def test_sweep_of_one_shape_is_sorted_with_failures_last(
    gemms: dict[Any, FakeGemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    module = sys.modules["cutegemm.bench.sweeps"]
    times = {"c1": 3.0, "c2": None, "c3": 1.0, "c4": 2.0}

    def sweep_many(work: Any, **keywords: Any) -> list[dict[str, Any]]:
        return [{"name": name, "us": us, "failure": None if us else "no"} for name, us in times.items()]

    monkeypatch.setattr(module, "sweep_many", sweep_many)
    assert [row["name"] for row in sweep(SHAPE, CONFIGS)] == ["c3", "c4", "c1", "c2"]


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU here")
def test_a_sweep_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="a GPU is needed"):
        sweep(SHAPE, CONFIGS)


def test_the_table_has_the_fastest_first_and_failures_last(gemms: dict[Any, FakeGemm]) -> None:
    gemms[CONFIGS["c2"]] = FakeGemm(failure=RuntimeError("too [bold]many[/bold] registers"))
    rows = run(CONFIGS)
    rows["c5"]["us"] = 0.5
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sweep_table(list(rows.values())))
    lines = [line for line in console.export_text().splitlines() if "32x48x64" in line]
    assert "c5" in lines[0]
    assert "0.50" in lines[0]
    assert "c2" in lines[-1]
    assert "too [bold]many[/bold] registers" in lines[-1]
    assert len(lines) == 5
    console.print(sweep_table(list(rows.values()), best=2))
    assert console.export_text().count("32x48x64") == 2


def test_without_a_terminal_the_default_progress_is_a_line_per_phase(
    gemms: dict[Any, FakeGemm], capsys: pytest.CaptureFixture[str]
) -> None:
    run(CONFIGS)
    assert capsys.readouterr().err.splitlines() == ["compile: 5 configurations", "measure: 5 configurations"]


@pytest.mark.slow
def test_workers_compile_real_kernels() -> None:
    [case] = as_cases([(256, 256, 256)])
    configs = {"good": GemmConfig(128, 112), "illegal": GemmConfig(128, 512), "chosen": None}
    jobs = {name: Build(case, config, "sm_90a") for name, config in configs.items()}
    built = build_all(jobs, workers=2)
    assert built["good"].failure is None
    assert built["chosen"].failure is None
    assert built["illegal"].failure is not None
    assert "tile_n=512" in built["illegal"].failure
    # What the workers built is on disk for this process.
    before = default_cache().stats()
    peers.compile_case(case, configs["good"], "sm_90a").build()
    after = default_cache().stats()
    assert after.compiled == before.compiled
    assert after.from_disk == before.from_disk + 1
