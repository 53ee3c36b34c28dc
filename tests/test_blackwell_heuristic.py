"""The choice of an sm_100a configuration: legal, bounded below by the hardware, explained, as documented."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_heuristic import problems

import cutegemm
from cutegemm import GemmConfig, GemmProblem, heuristic
from cutegemm.blackwell.costmodel import ASSUMED
from cutegemm.blackwell.plan import plan
from cutegemm.errors import TargetError
from cutegemm.hardware import GPUS, Gpu, gpu_by_name
from cutegemm.parts.paths import ALIGNED, Paths

BLACKWELLS = [gpu for gpu in GPUS if gpu.target == "sm_100a"]
B200 = gpu_by_name("B200")
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "blackwell.md"


@given(problems, st.sampled_from(BLACKWELLS), st.sampled_from(["tma", "direct"]))
@settings(deadline=None, max_examples=60)
def test_candidates_are_legal_and_in_order(problem: GemmProblem, gpu: Gpu, store: str) -> None:
    paths = Paths(store=store)  # type: ignore[arg-type]
    ranking = heuristic.ranked(problem, gpu, 8, paths)
    totals = [estimate.total for estimate in ranking]
    assert totals == sorted(totals)
    for estimate in ranking:
        seen = problem.swapped() if estimate.config.swap_ab else problem
        worked_out = plan(estimate.config, seen, paths, estimate.splits)
        assert heuristic.estimate(worked_out, problem, gpu).total == pytest.approx(estimate.total)


@given(problems)
@settings(deadline=None, max_examples=60)
def test_nothing_is_faster_than_tensor_cores_and_memory_allow(problem: GemmProblem) -> None:
    m, n, k, batch = (int(size or 1) for size in (problem.m, problem.n, problem.k, problem.l))
    best = heuristic.choose(problem, B200).total
    assert best >= batch * m * n * k / (ASSUMED.macs_per_cycle * B200.sms)
    moved = batch * (m * k + k * n) * 2
    assert best >= moved / B200.memory_bytes_per_s * B200.sm_clock_hz


def test_pairs_are_chosen_for_large_products_and_narrow_tiles_for_few_rows() -> None:
    for size in (4096, 8192, 16384):
        config = heuristic.choose(GemmProblem(size, size, size), B200).config
        assert (config.mma_ctas, config.tile_m) == (2, 256)
    few = heuristic.choose(GemmProblem(16, 7168, 16384), B200).config
    assert few.tile_n <= 32
    assert few.swap_ab


def test_a_long_k_with_few_tiles_is_split() -> None:
    (best,) = heuristic.ranked(GemmProblem(64, 128, 65536), B200, 1)
    assert best.splits == 8
    assert best.reduce > 0
    whole = heuristic.ranked(GemmProblem(64, 128, 65536), B200, 1, ALIGNED, (1,))[0]
    assert best.total < whole.total / 3


def test_a_longer_k_takes_longer_and_a_hidden_epilogue_shows_once() -> None:
    worked_out = plan(GemmConfig(256, 256, cluster_m=2, mma_ctas=2), GemmProblem(None, None, None))
    short, long = (heuristic.estimate(worked_out, GemmProblem(8192, 8192, k), B200) for k in (4096, 8192))
    assert long.total > 1.9 * (short.total - short.store)
    assert short.store < short.mma


def test_explain_names_the_gpu_and_its_candidates() -> None:
    text = cutegemm.compile((4096, 4096, 4096), "bfloat16", target="sm_100a").explain(3)
    assert "B200 (148 SMs, sm_100a)" in text
    assert len(re.findall("MMAs of 2 CTAs", text)) == 3
    with pytest.raises(TargetError, match="H200 runs sm_90a kernels, this is one for sm_100a"):
        cutegemm.compile((64, 64, 64), "bfloat16", target="sm_100a").explain(gpu="H200")


@pytest.mark.parametrize("size", [4096, 8192])
def test_the_document_says_what_the_model_says(size: int) -> None:
    found = heuristic.choose(GemmProblem(size, size, size), B200)
    row = next(
        line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {size} x {size} x {size}")
    )
    config = found.config
    assert f"pair {config.tile_m} x {config.tile_n}, cluster {config.cluster_m}x{config.cluster_n}" in row
    thousands, microseconds, teraflops, share = (
        float(re.search(pattern, row)[1].replace(",", ""))  # type: ignore[index]
        for pattern in (r"([\d,]+) thousand", r"([\d,]+) us", r"([\d,]+) Tflop", r"(\d+) %")
    )
    seconds = found.total / B200.sm_clock_hz
    assert thousands == pytest.approx(found.total / 1e3, abs=1)
    assert microseconds == pytest.approx(seconds * 1e6, abs=1)
    assert teraflops == pytest.approx(2 * size**3 / seconds / 1e12, rel=0.005)
    assert share == pytest.approx(100 * 2 * size**3 / seconds / B200.bf16_flops, abs=1)
