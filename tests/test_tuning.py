"""Tuning: what is measured, what may win, what is remembered, and what happens when something fails."""

import json
import multiprocessing
import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tuning_fakes import Machine, install

import cutegemm
from cutegemm import GemmConfig, GemmProblem, heuristic
from cutegemm.bench.peers import Variant
from cutegemm.bench.sweeps import SweepProgress
from cutegemm.errors import BuildError, CacheWarning, DeviceError, OperandTypeError, ProblemError, TargetError
from cutegemm.hardware import gpu_by_name
from cutegemm.kernels import Kernels
from cutegemm.parts.paths import ALIGNED, Paths
from cutegemm.scheduler import GroupedN, Persistent, RowMajor, SplitK, TileScheduler
from cutegemm.tuning import tuner, winners
from cutegemm.tuning.candidates import candidates
from cutegemm.tuning.tuner import decide, surely_faster
from cutegemm.tuning.winners import Winners, question

H200 = gpu_by_name("H200")
SMALL = GemmProblem(48, 64, 96)
LONG = GemmProblem(8, 64, 2048)  # few tiles, long K: splits are among the candidates


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A GPU of a test's own, and an empty cache."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "_known", {})
    return install(Machine(), monkeypatch)


def chosen(problem: GemmProblem) -> Variant:
    """The heuristic's choice."""
    choice = Kernels(problem, None, None, "sm_90a").choice(problem, H200, ALIGNED)
    return Variant(choice.config, choice.scheduler)


def other_than(problem: GemmProblem, number: int = 1) -> Variant:
    """Another candidate."""
    candidate = candidates(problem, H200, None)[number]
    return Variant(candidate.config, candidate.scheduler)


# --- candidates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [SMALL, LONG, GemmProblem(4096, 4096, 7168), GemmProblem(16, 8192, 8192)])
def test_the_heuristics_choice_is_the_first_candidate(problem: GemmProblem) -> None:
    found = candidates(problem, H200, None, 8)
    assert Variant(found[0].config, found[0].scheduler) == chosen(problem)
    assert len({candidate.name for candidate in found}) == len(found) >= 8
    for candidate in found:
        # Legal: raises ConfigError otherwise.
        Kernels(problem, candidate.config, candidate.scheduler, "sm_90a").choice(problem, H200, ALIGNED)
        assert candidate.predicted_us > 0


def test_splits_and_other_orders_are_candidates_where_they_may_win() -> None:
    splits = {candidate.scheduler.splits for candidate in candidates(LONG, H200, None)}
    assert splits == {1, 2, 4, 8}
    large = {
        candidate.scheduler.splits for candidate in candidates(GemmProblem(8192, 8192, 8192), H200, None)
    }
    assert 1 in large
    assert 8 not in large
    assert any(isinstance(c.scheduler.order, GroupedN) for c in candidates(SMALL, H200, None))


def test_a_given_scheduler_is_the_only_one_tried() -> None:
    given_one = TileScheduler(RowMajor(), SplitK(2))
    found = candidates(LONG, H200, given_one, 5)
    assert len(found) == 5
    assert {candidate.scheduler for candidate in found} == {given_one}


# --- deciding ----------------------------------------------------------------------------------------------

times = st.lists(st.floats(1.0, 2.0), min_size=9, max_size=9)


@given(st.dictionaries(st.sampled_from("abcdef"), times, min_size=1), st.sampled_from("abcdef"))
def test_whoever_wins_is_the_heuristics_choice_or_surely_faster(
    rounds: dict[str, list[float]], heuristic_choice: str
) -> None:
    best = decide(rounds, heuristic_choice)
    assert best in rounds
    if heuristic_choice in rounds and best != heuristic_choice:
        assert surely_faster(rounds[best], rounds[heuristic_choice])


def test_noise_does_not_win() -> None:
    noise = random.Random(3)
    wrong = 0
    for _ in range(200):
        rounds = {name: [noise.gauss(1.0, 0.01) for _ in range(9)] for name in "abcde"}
        wrong += decide(rounds, "a") != "a"
    assert wrong <= 4
    assert surely_faster([0.95] * 9, [1.0] * 9)
    assert not surely_faster([0.995] * 9, [1.0] * 9)
    assert not surely_faster([0.9] * 6 + [1.1] * 3, [1.0] * 9)


# --- a whole tuning ----------------------------------------------------------------------------------------


def test_a_faster_kernel_wins_and_is_remembered(machine: Machine) -> None:
    fast = other_than(SMALL, 3)
    machine.cost = lambda variant: 7.0 if variant == fast else 10.0
    tuned = tuner.tune(SMALL)
    winner = tuned.winner
    assert (winner.config, winner.scheduler(None)) == (fast.config, fast.scheduler)
    assert winner.us == pytest.approx(7.0)
    assert winner.heuristic_us == pytest.approx(10.0)
    assert winner.gain == pytest.approx(3 / 7)
    assert winner.cublas_us is not None
    assert tuned.trials[0].remark == "winner"
    assert [trial.remark for trial in tuned.trials].count("heuristic's choice") == 1
    # Two groups: all, then the fastest few with other inputs, against the heuristic's choice.
    first, second = machine.measured
    assert len(first.variants) == len(tuned.trials)
    assert 2 <= len(second.variants) <= tuner.FINALISTS + 1
    assert chosen(SMALL) in second.variants.values()
    assert first.method.seed != second.method.seed
    assert first.ceilings is not None  # or the GPU's rates would be measured

    assert tuner.tune(SMALL).winner == winner
    tuner._known.clear()  # another process
    again = tuner.tune(SMALL)
    assert (again.winner, again.trials) == (winner, ())
    assert len(machine.measured) == 2
    tuner.tune(SMALL, again=True)
    assert len(machine.measured) == 4


def test_a_gain_within_the_noise_is_none(machine: Machine) -> None:
    fast = other_than(SMALL)
    machine.cost = lambda variant: 9.95 if variant == fast else 10.0
    winner = tuner.tune(SMALL).winner
    assert Variant(winner.config, winner.scheduler(None)) == chosen(SMALL)
    assert winner.gain == 0


def test_a_split_kernel_can_win(machine: Machine) -> None:
    machine.cost = lambda variant: 5.0 if variant.scheduler.splits == 4 else 10.0  # type: ignore[union-attr]
    winner = tuner.tune(LONG).winner
    assert winner.splits == 4
    assert winner.scheduler(None) == TileScheduler(assignment=SplitK(4))
    gemm = cutegemm.compile((8, 64, 2048), "bfloat16", config="autotune", target="sm_90a")
    assert gemm.scheduler.splits == 4
    assert gemm.config == winner.config


def test_another_order_can_win(machine: Machine) -> None:
    machine.cost = lambda variant: 5.0 if isinstance(variant.scheduler.order, GroupedN) else 10.0  # type: ignore[union-attr]
    winner = tuner.tune(SMALL).winner
    tuner._known.clear()
    assert tuner.tune(SMALL).winner == winner
    assert isinstance(winner.scheduler(None).order, GroupedN)
    assert winner.scheduler(None).assignment == Persistent()


def test_compile_tunes_once(machine: Machine) -> None:
    fast = other_than(SMALL, 2)
    machine.cost = lambda variant: 7.0 if variant == fast else 10.0
    for _ in range(2):
        gemm = cutegemm.compile((48, 64, 96), "bfloat16", config="autotune", target="sm_90a")
        assert gemm.config == fast.config
    assert len(machine.measured) == 2


def test_a_given_scheduler_is_kept_and_is_another_question(machine: Machine) -> None:
    rows = TileScheduler(RowMajor())
    gemm = cutegemm.compile((48, 64, 96), "bfloat16", config="autotune", scheduler=rows, target="sm_90a")
    assert gemm.scheduler == rows
    assert {variant.scheduler for variant in machine.measured[0].variants.values()} == {rows}
    tuner._known.clear()
    assert tuner.tune(SMALL, scheduler=rows).winner.scheduler(rows) == rows
    assert len(machine.measured) == 2
    tuner.tune(SMALL)
    assert len(machine.measured) == 4


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem(24, 32, 40, 3, batched=True),
        GemmProblem(24, 32, 40, 1, "float16", "float16", "float32", "m", "n", "m"),
        GemmProblem(24, 32, 40, 2, "bfloat16", "bfloat16", "bfloat16", "m", "k", "m", batched=True),
    ],
    ids=str,
)
def test_every_kind_of_problem_can_be_tuned(machine: Machine, problem: GemmProblem) -> None:
    tuned = tuner.tune(problem, top=3)
    assert all(trial.failure is None for trial in tuned.trials)
    assert tuned.winner.us == pytest.approx(10.0)


def test_nothing_to_compute_is_nothing_to_measure(machine: Machine) -> None:
    gemm = cutegemm.compile((0, 64, 96), "bfloat16", config="autotune", target="sm_90a")
    assert gemm.config.tile_m >= 64
    assert machine.measured == []


class Told(SweepProgress):
    """Counts."""

    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = {}
        self._last = ""

    def phase(self, name: str, total: int) -> None:
        self._last = name
        self.phases[name] = [total, 0]

    def done(self, name: str) -> None:
        self.phases[self._last][1] += 1


def test_progress_is_told_of_every_candidate(machine: Machine) -> None:
    told = Told()
    tuned = tuner.tune(SMALL, top=5, progress=told)
    assert list(told.phases) == ["compile", "measure", "confirm"]
    assert told.phases["compile"][0] == len(tuned.trials)
    assert all(total == done for total, done in told.phases.values())


# --- operands that lie otherwise than those that were measured ----------------------------------------------


def cluster_wins(machine: Machine, problem: GemmProblem) -> Variant:
    """A kernel for aligned operands alone is the fastest by far: that one."""
    fast = next(
        Variant(found.config, found.scheduler)
        for found in candidates(problem, H200, None)
        if found.config.cluster_size > 1 and found.scheduler.splits == 1
    )
    machine.cost = lambda variant: 5.0 if variant == fast else 10.0
    return fast


def test_operands_off_16_bytes_get_the_heuristics_choice(machine: Machine) -> None:
    fast = cluster_wins(machine, SMALL)
    gemm = cutegemm.compile((48, 64, 96), "bfloat16", config="autotune", target="sm_90a")
    assert Variant(gemm.config, gemm.scheduler) == fast
    untuned = Kernels(SMALL, None, None, "sm_90a")
    for paths in (Paths("realigned"), Paths("tma", "realigned"), Paths("realigned", "realigned", "direct")):
        choice = gemm._kernels.choice(SMALL, H200, paths)
        assert choice == untuned.choice(SMALL, H200, paths)
        assert choice.config != fast.config
        assert gemm._kernels._key(choice) == untuned._key(choice), "one kernel, whoever asks for it"
    direct = gemm._kernels.choice(SMALL, H200, Paths(store="direct"))
    assert Variant(direct.config, direct.scheduler) == fast

    a, b = torch.randn(48, 97, dtype=torch.bfloat16)[:, 1:], torch.randn(64, 96, dtype=torch.bfloat16).t()
    for operand in (a, a.contiguous()):
        found = gemm.emulate(operand, b).out
        assert torch.allclose(found.float(), a.float() @ b.float(), rtol=2**-7, atol=1e-2)
    assert "configuration measured, not chosen" in gemm.explain()


def test_what_was_measured_with_odd_lines_is_not_taken_for_aligned_ones(machine: Machine) -> None:
    problem = GemmProblem(48, 64, 97)
    fast = other_than(problem, 2)
    machine.cost = lambda variant: 5.0 if variant == fast else 10.0
    gemm = cutegemm.compile((48, 64, 97), "bfloat16", config="autotune", target="sm_90a")
    assert Variant(gemm.config, gemm.scheduler) == fast
    assert str(gemm.paths) == "A realigned, B realigned, D tma"
    padded = gemm._kernels.choice(problem, H200, ALIGNED)
    assert padded == Kernels(problem, None, None, "sm_90a").choice(problem, H200, ALIGNED)


def test_a_given_scheduler_is_kept_for_operands_off_16_bytes(machine: Machine) -> None:
    rows = TileScheduler(RowMajor())
    cluster_wins(machine, SMALL)
    gemm = cutegemm.compile((48, 64, 96), "bfloat16", config="autotune", scheduler=rows, target="sm_90a")
    assert gemm._kernels.choice(SMALL, H200, Paths("realigned")).scheduler == rows
    again = pickle.loads(pickle.dumps(gemm))
    assert again == gemm
    assert again.config == gemm.config
    assert again._kernels.choice(SMALL, H200, Paths("realigned")).scheduler == rows


def test_what_was_measured_for_a_batch_is_not_taken_for_one_of_it(machine: Machine) -> None:
    problem = GemmProblem(48, 64, 96, 3, batched=True)
    fast = other_than(problem, 3)
    machine.cost = lambda variant: 5.0 if variant == fast else 10.0
    gemm = cutegemm.compile((3, 48, 64, 96), "bfloat16", config="autotune", target="sm_90a")
    assert gemm.config == fast.config
    single = gemm._one_product
    assert single == cutegemm.compile((48, 64, 96), "bfloat16", target="sm_90a")
    assert gemm._kernels.of_one_product().config is None


# --- what fails --------------------------------------------------------------------------------------------


def test_a_wrong_result_never_wins(machine: Machine) -> None:
    wrong, right = other_than(SMALL, 1), other_than(SMALL, 2)
    machine.cost = lambda variant: {wrong: 1.0, right: 7.0}.get(variant, 10.0)
    machine.spoils = lambda variant: variant == wrong
    tuned = tuner.tune(SMALL)
    assert tuned.winner.config == right.config
    (failed,) = [trial for trial in tuned.trials if trial.failure is not None]
    assert failed is tuned.trials[-1]
    assert failed.failure.startswith("WrongResultError: ")  # type: ignore[union-attr]
    assert failed.us is None


def test_a_kernel_that_cannot_be_built_is_left_out(machine: Machine) -> None:
    broken = other_than(SMALL)
    machine.fails = lambda variant: BuildError("it spills") if variant == broken else None
    tuned = tuner.tune(SMALL)
    assert tuned.trials[-1].failure == "it spills"
    assert sum(trial.failure is not None for trial in tuned.trials) == 1
    assert len(machine.measured[0].variants) == len(tuned.trials) - 1


def test_a_kernel_that_loses_the_gpu_is_left_out(machine: Machine) -> None:
    bad = other_than(SMALL)
    machine.loses = lambda variant: variant == bad
    tuned = tuner.tune(SMALL)
    assert tuned.trials[-1].failure == "a kernel did not finish"
    assert sum(trial.failure is not None for trial in tuned.trials) == 1


def test_where_the_heuristics_choice_fails_another_wins(machine: Machine) -> None:
    machine.spoils = lambda variant: variant == chosen(SMALL)
    winner = tuner.tune(SMALL).winner
    assert Variant(winner.config, winner.scheduler(None)) != chosen(SMALL)
    assert winner.gain is None


def test_where_all_fail_the_error_says_why(machine: Machine) -> None:
    machine.fails = lambda variant: BuildError("it spills")
    with pytest.raises(DeviceError, match=r"none of \d+ candidates .* the heuristic's choice: it spills"):
        tuner.tune(SMALL)
    assert Winners().entries() == []


def test_a_kernel_that_fails_in_the_decision_does_not_win(machine: Machine) -> None:
    fast = other_than(SMALL)
    machine.cost = lambda variant: 5.0 if variant == fast else 10.0
    machine.spoils = lambda variant: variant == fast and len(machine.measured) > 1
    tuned = tuner.tune(SMALL)
    assert Variant(tuned.winner.config, tuned.winner.scheduler(None)) == chosen(SMALL)


def test_memory_that_runs_out_costs_input_sets_only(machine: Machine) -> None:
    machine.memory_share = 0.2
    tuned = tuner.tune(SMALL)
    assert all(trial.failure is None for trial in tuned.trials)
    assert [job.method.memory_share for job in machine.measured] == [0.5, 0.25, 0.125, 0.125]


def test_memory_that_is_never_enough_is_an_error(machine: Machine) -> None:
    machine.memory_share = 0.01
    with pytest.raises(DeviceError, match="OutOfMemoryError"):
        tuner.tune(SMALL)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU here")
def test_without_a_gpu_the_error_says_what_to_do() -> None:
    with pytest.raises(DeviceError) as caught:
        cutegemm.compile((48, 64, 96), "bfloat16", config="autotune", target="sm_90a")
    assert "tuning measures kernels on a GPU, and there is none" in str(caught.value)
    assert "config=None" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_tuned_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProblemError, match=r"tuning measures one shape, and M, K of .* is not known"):
        cutegemm.compile((None, 64, None), "bfloat16", config="autotune", target="sm_90a")
    with pytest.raises(ProblemError, match="top=0"):
        tuner.tune(SMALL, top=0)
    with pytest.raises(OperandTypeError, match='or "autotune" to have the fastest measured'):
        cutegemm.compile((8, 8, 8), "bfloat16", config="fastest", target="sm_90a")  # type: ignore[arg-type]
    monkeypatch.setattr(tuner, "current_gpu", lambda: gpu_by_name("B200"))
    with pytest.raises(TargetError, match="cannot be measured on B200, which runs sm_100a"):
        tuner.tune(SMALL, target="sm_90a")
    assert machine.measured == []


def test_a_scheduler_of_a_script_is_refused(machine: Machine) -> None:
    order = type("Mine", (), {"tile": lambda self, i, tiles_m, tiles_n: (i // tiles_n, i % tiles_n)})
    order.__module__ = "__main__"
    with pytest.raises(OperandTypeError, match="cannot import Mine from a script; move the class"):
        tuner.tune(SMALL, scheduler=TileScheduler(order()))


# --- on disk -----------------------------------------------------------------------------------------------


def test_the_question_holds_what_the_answer_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    one = question(SMALL, H200, None)
    assert one == question(SMALL, H200, None)
    for other in (
        question(replace(SMALL, m=49), H200, None),
        question(replace(SMALL, a_major="m"), H200, None),
        question(replace(SMALL, out_dtype="float32"), H200, None),
        question(SMALL, replace(H200, sms=114), None),
        question(SMALL, gpu_by_name("H20"), None),
        question(SMALL, H200, TileScheduler()),
    ):
        assert other != one
    assert "H200, 132 SMs" in one.text
    monkeypatch.setattr("cutegemm.fingerprint.source_hash", lambda: "another version")
    assert question(SMALL, H200, None) != one


def the_file() -> Path:
    """The one result on disk."""
    (path,) = (Path(os.environ["CUTEGEMM_CACHE_DIR"]) / "tuned").iterdir()
    return path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def change(path: Path) -> None:
    path.write_text(path.read_text().replace('"tile_m": ', '"tile_m": 1'))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def another_format(path: Path) -> None:
    path.write_text("[1, 2]")


def impossible(path: Path) -> None:
    """Whole, but no configuration there is."""
    body = json.loads(path.read_text())
    del body["sha256"]
    body["winner"]["config"]["tile_m"] = -1
    path.write_text(json.dumps({"sha256": winners._digest(body), **body}))


@pytest.mark.parametrize("damage", [truncate, change, empty, not_text, another_format, impossible])
def test_a_damaged_result_is_measured_again(machine: Machine, damage: object) -> None:
    winner = tuner.tune(SMALL).winner
    damage(the_file())  # type: ignore[operator]
    tuner._known.clear()
    with pytest.warns(CacheWarning, match="the tuning result .* is damaged"):
        again = tuner.tune(SMALL).winner
    assert (again.config, again.us) == (winner.config, winner.us)
    assert len(machine.measured) == 4
    tuner._known.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuner.tune(SMALL)
    assert len(machine.measured) == 4


def test_a_result_of_another_question_is_damage(machine: Machine) -> None:
    tuner.tune(SMALL)
    first = the_file()
    first.rename(first.with_name(f"{question(LONG, H200, None)}.json"))
    tuner._known.clear()
    with pytest.warns(CacheWarning, match="answers another question"):
        tuner.tune(LONG)


def test_a_folder_that_cannot_be_written_costs_a_warning(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("a file where the folder should be")
    with pytest.warns(CacheWarning, match="tuning results cannot be kept"):
        winner = tuner.tune(SMALL).winner
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuner.tune(SMALL).winner == winner
    assert len(machine.measured) == 2


def test_results_are_listed_and_cleared(machine: Machine, tmp_path: Path) -> None:
    tuner.tune(SMALL)
    tuner.tune(LONG)
    kept = Winners(tmp_path)
    assert {winner.problem for winner in kept.entries()} == {str(SMALL), str(LONG)}
    assert kept.clear() == 2
    assert kept.entries() == []
    assert Winners(tmp_path / "nowhere").clear() == 0


def tune_in_a_process(folder: str, barrier: object) -> None:
    """One of several that tune the same shape at the same moment; logs what it measured."""
    os.environ["CUTEGEMM_CACHE_DIR"] = folder
    with pytest.MonkeyPatch.context() as patch:
        machine = install(Machine(), patch)
        barrier.wait(timeout=120)  # type: ignore[attr-defined]
        winner = tuner.tune(SMALL, top=3).winner
    record = {"measured": len(machine.measured), "config": repr(winner.config)}
    (Path(folder) / f"log-{os.getpid()}").write_text(json.dumps(record))


@pytest.mark.slow
def test_of_several_processes_one_measures(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=tune_in_a_process, args=(str(tmp_path), barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=180)
        assert process.exitcode == 0
    logs = [json.loads(path.read_text()) for path in tmp_path.glob("log-*")]
    assert sorted(log["measured"] for log in logs) == [0, 0, 2]
    assert len({log["config"] for log in logs}) == 1


# --- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
def test_tuning_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's GPU changes; the kernel is right, not slower, and found again unmeasured."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    problem = GemmProblem(64, 2112, 7168)
    free, stream = torch.cuda.mem_get_info()[0], torch.cuda.current_stream()
    precision, random_state = torch.get_float32_matmul_precision(), torch.cuda.get_rng_state()
    tuned = tuner.tune(problem, top=8)
    assert all(trial.failure is None for trial in tuned.trials), [trial.failure for trial in tuned.trials]
    assert tuned.winner.gain is not None
    assert tuned.winner.gain >= 0
    assert torch.cuda.current_stream() == stream
    assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert abs(torch.cuda.mem_get_info()[0] - free) < 2**28
    predictions = [trial.candidate.predicted_us / trial.us for trial in tuned.trials if trial.us]
    assert all(0.5 < ratio < 2 for ratio in predictions), predictions

    tuner._known.clear()
    monkeypatch.setattr(tuner, "candidates", lambda *_: pytest.fail("it was measured again"))
    gemm = cutegemm.compile((64, 2112, 7168), torch.bfloat16, config="autotune")
    assert gemm.config == tuned.winner.config
    a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((64, 7168), (2112, 7168)))
    truth = a.float() @ b.t().float()
    error = (gemm(a, b.t()).float() - truth).norm() / truth.norm()
    assert error <= 2 * (torch.mm(a, b.t()).float() - truth).norm() / truth.norm()


@pytest.mark.gpu
@pytest.mark.slow
def test_every_kind_of_problem_can_be_tuned_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    for problem in (
        GemmProblem(200, 264, 520, 3, batched=True),
        GemmProblem(200, 264, 520, 1, "float16", "float16", "float32", "m", "n", "n"),
        GemmProblem(200, 264, 520, 1, "bfloat16", "bfloat16", "bfloat16", "k", "k", "m"),
    ):
        tuned = tuner.tune(problem, top=3)
        assert all(trial.failure is None for trial in tuned.trials), [trial.failure for trial in tuned.trials]


def test_the_configuration_is_a_plain_one() -> None:
    """What is stored can be given back: no field of a configuration is lost on the way through JSON."""
    config = heuristic.choose(LONG, H200).config
    assert GemmConfig(**json.loads(json.dumps(vars(config)))) == config
