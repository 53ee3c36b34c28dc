"""Tuning products with an epilogue: the fused call is measured, and judged by the epilogue's graph."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from epilogue_checks import complaint, inputs, operands_for
from epilogue_random import PLANS, Plan
from hypothesis import given, settings
from tuning_fakes import Machine, install

import cutegemm
from cutegemm import GemmProblem
from cutegemm import epilogue as epi
from cutegemm.bench.peers import Variant
from cutegemm.epilogue import Fused, library
from cutegemm.epilogue.interpreted import Interpreted
from cutegemm.epilogue.operands import default_epilogue
from cutegemm.fuzz.judge import torch_sums_in_float32
from cutegemm.hardware import gpu_by_name
from cutegemm.tuning import tuner
from cutegemm.tuning.candidates import candidates

H200 = gpu_by_name("H200")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A GPU of a test's own, and an empty cache."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "_known", {})
    return install(Machine(), monkeypatch)


def problem_of(fused: Fused, m: int = 48, n: int = 64, k: int = 96) -> GemmProblem:
    """The problem a compiled product with this epilogue has."""
    return replace(GemmProblem(m, n, k), epilogue=default_epilogue(fused.epilogue, "bfloat16"))


@epi.fuse
def masked(acc: Any, bias: epi.Row, offset: epi.Integer) -> Any:
    above = epi.row_index(acc) + offset <= epi.col_index(acc)
    return epi.where(above, epi.log(bias) + acc, float("-inf")), {"amax": epi.row_amax(acc)}


# --- the graph by itself -----------------------------------------------------------------------------------


def assert_same_by_graph(fused: Fused) -> None:
    """Fails unless the graph gives on tensors what the function gives."""
    a, b = inputs(24, 40, 32)
    operands = {**fused.defaults, **operands_for(fused, 24, 40)}
    graph: Fused = pickle.loads(pickle.dumps(Interpreted(fused.epilogue)))
    expected, found = (
        result if isinstance(result, tuple) else (result, {})
        for result in (fused.reference(a, b, **operands), graph.reference(a, b, **operands))
    )
    assert complaint(found[0], expected[0]) is None
    assert set(found[1]) == set(expected[1])
    assert not [name for name in expected[1] if complaint(found[1][name], expected[1][name])]


@pytest.mark.parametrize("name", library.every())
def test_a_graph_computes_what_its_function_does(name: str) -> None:
    assert_same_by_graph(library.every()[name])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(PLANS)
def test_graphs_of_random_functions(plan: Plan) -> None:
    assert_same_by_graph(plan.fused())


# --- tuning ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [library.bias_gelu, library.swiglu, library.residual_rms, masked], ids=str)
def test_compile_tunes_the_fused_call_once(machine: Machine, fused: Fused) -> None:
    problem = problem_of(fused)
    found = candidates(problem, H200, None)[2]
    fast = Variant(found.config, found.scheduler)
    machine.cost = lambda variant: 7.0 if variant == fast else 10.0
    for _ in range(2):
        gemm = cutegemm.compile((48, 64, 96), "bfloat16", epilogue=fused, config="autotune", target="sm_90a")
        assert gemm.config == fast.config
        assert gemm.problem == problem
    assert len(machine.measured) == 2
    assert machine.measured[0].case.problem.epilogue == problem.epilogue
    assert tuner.tune(problem).winner.cublas_us is None


def test_another_epilogue_is_another_question(machine: Machine) -> None:
    for fused in (library.bias_gelu, library.bias_relu):
        tuner.tune(problem_of(fused), top=2)
    tuner.tune(GemmProblem(48, 64, 96), top=2)
    assert len(machine.measured) == 6


@pytest.mark.parametrize("fused", [library.residual, masked], ids=str)
def test_a_wrong_kernel_does_not_win(machine: Machine, fused: Fused) -> None:
    problem = problem_of(fused)
    found = candidates(problem, H200, None)[1]
    wrong = Variant(found.config, found.scheduler)
    machine.cost = lambda variant: 5.0 if variant == wrong else 10.0
    machine.spoils = lambda variant: variant == wrong
    tuned = tuner.tune(problem, top=4)
    failed = {trial.candidate.name: trial.failure for trial in tuned.trials if trial.failure}
    assert list(failed) == [found.name]
    assert "wrong result" in str(failed[found.name]) or "other places" in str(failed[found.name])
    assert tuned.winner.config != found.config


def test_operands_of_other_dtypes_take_what_was_measured(machine: Machine) -> None:
    found = candidates(problem_of(library.bias_gelu), H200, None)[2]
    machine.cost = lambda variant: 7.0 if variant == Variant(found.config, found.scheduler) else 10.0
    gemm: Any = cutegemm.compile(
        (48, 64, 96), "bfloat16", epilogue=library.bias_gelu, config="autotune", target="sm_90a"
    )
    a, b = inputs(48, 64, 96)
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.randn(64).to(dtype)
        result = gemm.emulate(a, b, bias=bias).out
        assert complaint(result, library.bias_gelu.reference(a, b, bias=bias)) is None
        (kernels,) = (one for kind, one in gemm._kinds.items() if kind.operands[0].dtype in str(dtype))
        (choice,) = kernels._artifacts
        assert choice.config == found.config


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias_gelu", "swiglu", "residual_rms"])
def test_tuning_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    fused = library.every()[name]
    tuned = tuner.tune(problem_of(fused, 512, 1024, 768), top=4)
    assert all(trial.failure is None for trial in tuned.trials), [trial.failure for trial in tuned.trials]
    gemm: Any = cutegemm.compile((512, 1024, 768), "bfloat16", epilogue=fused, config="autotune")
    assert gemm.config == tuned.winner.config
    a, b = (x.cuda() for x in inputs(512, 1024, 768))
    operands = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x
        for name, x in operands_for(fused, 512, 1024).items()
    }
    with torch_sums_in_float32():
        result, truth = gemm(a, b, **operands), fused.reference(a, b, **operands)
    main, expected = (x[0] if isinstance(x, tuple) else x for x in (result, truth))
    assert complaint(main.cpu(), expected.cpu()) is None
