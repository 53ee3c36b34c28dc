"""The choice of a configuration: legal, the same each time, quick, sensible, explained; no shape table."""

import ast
import inspect
import math
import statistics
import time
import warnings
from dataclasses import replace
from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmConfig, GemmProblem, heuristic
from cutegemm.errors import DeviceError, TargetError
from cutegemm.hardware import BUILT_TARGETS, GPUS, Gpu, gpu_by_name
from cutegemm.hopper.plan import HopperPlan, plan
from cutegemm.parts.paths import ALIGNED

HOPPERS = [gpu for gpu in GPUS if gpu.target == "sm_90a"]
H200 = gpu_by_name("H200")

sizes = st.one_of(st.integers(1, 300), st.integers(1, 20_000), st.sampled_from([1, 8, 64, 4096, 2**20]))


@st.composite
def problems_of_any_kind(draw: st.DrawFn) -> GemmProblem:
    """Problems with all sizes known."""
    dtype, out_dtype = (
        draw(st.sampled_from(["bfloat16", "float16"])),
        draw(st.sampled_from(["float16", "float32"])),
    )
    majors = draw(st.tuples(st.sampled_from("km"), st.sampled_from("kn"), st.sampled_from("nm")))
    batches = draw(st.sampled_from([1, 1, 1, 2, 7, 300]))
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    return GemmProblem(m, n, k, batches, dtype, dtype, out_dtype, *majors, batched=batches > 1)


problems = problems_of_any_kind()


def legal_plan(estimate: heuristic.Estimate, problem: GemmProblem) -> HopperPlan:
    """The plan of an estimated configuration for a problem; raises ConfigError if there is none."""
    seen = problem.swapped() if estimate.config.swap_ab else problem
    return plan(estimate.config, seen, splits=estimate.splits)


def tiles_needed(config: GemmConfig, problem: GemmProblem) -> int:
    """Output tiles that cover the problem."""
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    return math.ceil(m / config.tile_m) * math.ceil(n / config.tile_n) * problem.l  # type: ignore[operator]


@given(problems, st.sampled_from(HOPPERS))
@settings(deadline=None)
def test_every_candidate_shown_is_legal_and_covers_the_problem(problem: GemmProblem, gpu: Gpu) -> None:
    for estimate in heuristic.ranked(problem, gpu, 8):
        worked_out = legal_plan(estimate, problem)
        assert estimate.tiles >= tiles_needed(estimate.config, problem)
        workers = gpu.resident_clusters(worked_out.cluster_ctas)
        clusters = estimate.tiles // estimate.config.cluster_size
        assert estimate.waves == math.ceil(clusters / workers)


@given(problems, st.sampled_from(HOPPERS))
@settings(deadline=None)
def test_the_choice_is_the_first_of_the_ranking(problem: GemmProblem, gpu: Gpu) -> None:
    ranking = heuristic.ranked(problem, gpu, 8)
    assert heuristic.choose(problem, gpu) == ranking[0]
    totals = [estimate.total for estimate in ranking]
    assert totals == sorted(totals)
    assert all(math.isfinite(total) and total > 0 for total in totals)
    assert len({(estimate.config, estimate.splits) for estimate in ranking}) == len(ranking)


@given(problems)
@settings(deadline=None, max_examples=20)
def test_the_choice_does_not_depend_on_what_was_asked_before(problem: GemmProblem) -> None:
    first = heuristic.choose(problem, H200)
    heuristic.ranked.cache_clear()
    heuristic.candidates.cache_clear()
    heuristic.choose(GemmProblem(4096, 4096, 4096), H200)
    assert heuristic.choose(problem, H200) == first


@pytest.mark.parametrize("gpu", HOPPERS, ids=lambda gpu: gpu.name)
def test_every_hopper_and_every_kind_of_problem_has_a_choice(gpu: Gpu) -> None:
    for majors, out_dtype in product(product("km", "kn", "nm"), ("bfloat16", "float16", "float32")):
        for size in ((1, 1, 1), (8192, 8192, 8192), (None, None, None)):
            problem = GemmProblem(*size, 1, "bfloat16", "bfloat16", out_dtype, *majors)
            legal_plan(heuristic.choose(problem, gpu), problem)


def test_a_problem_with_nothing_to_compute_has_a_choice_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in ((0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)):
            problem = GemmProblem(*size)
            legal_plan(heuristic.choose(problem, H200), problem)


def test_a_choice_takes_less_than_a_millisecond() -> None:
    heuristic.choose(GemmProblem(1, 1, 1), H200)
    seconds = []
    for m, n, k in islice(product(range(100, 700, 30), range(90, 500, 40), (500, 3000)), 200):
        start = time.perf_counter()
        heuristic.choose(GemmProblem(m, n, k), H200)
        seconds.append(time.perf_counter() - start)
    # The promise is 1 ms; a shared machine gets three times as much.
    assert statistics.median(seconds) < 3e-3, f"median {statistics.median(seconds) * 1e3:.2f} ms"


@given(problems, st.integers(2, 5), st.sampled_from("mnkl"))
@settings(deadline=None, max_examples=25)
def test_more_work_is_not_predicted_to_be_faster(problem: GemmProblem, factor: int, name: str) -> None:
    """For configurations whose tiles are full: more rows, columns, depth or batches cost as much at least.

    A tile that reaches beyond the matrix is another matter: rows outside cost more than rows inside.
    """
    # Multiples of 64, so that lines that start on 128 bytes still do.
    less = replace(problem, **{name: getattr(problem, name) * 64})
    more = replace(problem, **{name: getattr(problem, name) * 64 * factor})
    small = {(e.config, e.splits): e.total for e in heuristic.ranked(less, H200, 10_000)}
    large = {(e.config, e.splits): e.total for e in heuristic.ranked(more, H200, 10_000)}
    assert small.keys() == large.keys()

    def full(config: GemmConfig) -> bool:
        m, n = (less.n, less.m) if config.swap_ab else (less.m, less.n)
        tile_m, tile_n = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
        return m % tile_m == 0 == n % tile_n  # type: ignore[operator]

    tried = [key for key in small if name in "kl" or full(key[0])]
    # Neighbours that appear share what they read; that makes up for the rest by a thousandth at times.
    faster = [key for key in tried if large[key] < small[key] * (1 - 1e-3)]
    assert not faster, faster[0]


@given(problems)
@settings(deadline=None, max_examples=50)
def test_a_tile_is_not_far_larger_than_the_problem(problem: GemmProblem) -> None:
    """Where one tile is all a CTA does, no smaller legal one would cover as much of the problem."""
    (chosen,) = heuristic.ranked(problem, H200, 1)
    if chosen.waves > 1:
        return  # then hiding the epilogue may be worth a larger tile
    config = chosen.config
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    assert config.tile_m < 2 * m + 64
    assert config.tile_n <= max(2 * n + 16, 32)  # type: ignore[operator]


@pytest.mark.parametrize("tiles", [131, 132, 133, 264, 265])
def test_steps_are_no_larger_than_the_count_of_tiles_explains(tiles: int) -> None:
    """One more tile than a full wave may not cost as much as a second wave of the same tiles."""
    full = GemmProblem(128 * 132, 256, 4096)
    asked = GemmProblem(128 * tiles, 256, 4096)
    ratio = heuristic.ranked(asked, H200, 1)[0].total / heuristic.ranked(full, H200, 1)[0].total
    assert ratio <= 1.5 * max(1.0, tiles / 132)


def test_tiles_fit_one_wave_where_some_width_makes_them() -> None:
    """4096 x 576: 32 x 5 tiles of 128 x 128 would take a second wave of 132 SMs for the last 28."""
    (chosen,) = heuristic.ranked(GemmProblem(4096, 576, 7168), H200, 1)
    assert chosen.waves == 1
    assert chosen.tiles > 100


def test_rows_are_not_paid_for_twice() -> None:
    """A thin product takes the narrow side of the instruction: few rows are put where the tile is narrow."""
    for problem in (GemmProblem(8, 8192, 8192), GemmProblem(8192, 8, 8192)):
        config = heuristic.choose(problem, H200).config
        narrow = config.tile_n if (problem.m == 8) == config.swap_ab else config.tile_m
        assert narrow <= 64


# --- explain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(4096, 4096, 7168), (64, 2112, 7168), (None, 512, 512), (3, 128, 128, 128)]
)
def test_explain_lists_the_choice_first(shape: tuple[int | None, ...]) -> None:
    gemm = cutegemm.compile(shape, "bfloat16", target="sm_90a")
    lines = gemm.explain(5).splitlines()
    assert str(gemm.problem) in lines[0]
    assert "sm_90a" in lines[0]
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["total", "waves"])
    rows = lines[header + 1 : header + 6]
    assert f"  {gemm.config}" in rows[0]
    totals = [float(row.split()[0]) for row in rows]
    assert totals == sorted(totals)


def test_explain_says_that_a_configuration_was_given() -> None:
    config = GemmConfig(64, 40, consumers=1)
    text = cutegemm.compile((128, 128, 128), "bfloat16", target="sm_90a", config=config).explain()
    assert "configuration given, not chosen: 64x40x64" in text


def test_explain_costs_a_given_configuration_too() -> None:
    best = cutegemm.compile((512, 512, 512), "bfloat16", target="sm_90a")
    given = cutegemm.compile(
        (512, 512, 512), "bfloat16", target="sm_90a", config=best.config, scheduler=best.scheduler
    )
    first = given.explain(1).splitlines()[3]
    assert first == best.explain(1).splitlines()[3]
    poor = cutegemm.compile((512, 512, 512), "bfloat16", target="sm_90a", config=GemmConfig(256, 128))
    assert float(poor.explain(1).splitlines()[3].split()[0]) > float(first.split()[0])


def test_explain_for_another_gpu() -> None:
    gemm = cutegemm.compile((8192, 8192, 8192), "bfloat16", target="sm_90a")
    assert "on H20 (78 SMs" in gemm.explain(gpu="H20")
    assert gemm.explain(gpu="H20") != gemm.explain(gpu="H200")
    with pytest.raises(TargetError, match="B200 runs sm_100a kernels"):
        gemm.explain(gpu="B200")
    with pytest.raises(DeviceError, match="no GPU model called 'H2000'"):
        gemm.explain(gpu="H2000")


def test_unknown_sizes_are_said_to_be_guessed() -> None:
    gemm = cutegemm.compile((None, 512, 512), "bfloat16", target="sm_90a")
    assert "not known are taken as 4096" in gemm.explain()
    one = heuristic.ranked(GemmProblem(64, 64, 64, 1, batched=True), HOPPERS[0], 1)
    assert heuristic.ranked(GemmProblem(64, 64, 64, None, batched=True), HOPPERS[0], 1) == one


def test_gpus_differ_in_what_they_are_predicted_to_take() -> None:
    problem = GemmProblem(8192, 8192, 8192)
    cycles = {gpu.name: heuristic.ranked(problem, gpu, 1)[0].total for gpu in HOPPERS}
    assert cycles["H20"] > 3 * cycles["H200"]  # a fraction of the tensor cores
    assert cycles["H100 PCIe"] > cycles["H100 SXM"]  # fewer SMs


# --- no table ----------------------------------------------------------------------------------------------


def test_sizes_unknown_at_compile_time_build_few_kernels() -> None:
    """50 heights at fixed N and K: at most one configuration for each power of two."""
    gemm = cutegemm.compile((None, 4096, 4096), "bfloat16", target="sm_90a")
    chosen = {
        gemm._kernels.choice(gemm.problem.with_sizes(1, m, 4096, 4096), H200, ALIGNED)
        for m in range(1, 4097, 82)
    }
    assert len(chosen) <= 12


def test_the_model_knows_no_shapes() -> None:
    """Three sizes side by side would be a shape; a container of containers of numbers a table of them."""
    tree = ast.parse(inspect.getsource(heuristic))
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            assert not any(isinstance(key, ast.Tuple) for key in node.keys), ast.unparse(node)
        if isinstance(node, ast.Tuple | ast.List):
            numbers = [e for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, int)]
            large = [e.value for e in numbers if e.value > 256]  # beyond any tile
            assert len(large) < 2, ast.unparse(node)
        if isinstance(node, ast.Compare):
            compared = [c.value for c in node.comparators if isinstance(c, ast.Constant)]
            assert not any(isinstance(v, int) and v > 256 for v in compared), ast.unparse(node)


@pytest.mark.parametrize("target", BUILT_TARGETS)
@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 8, 8, 8), (0, 0, 0)])
@pytest.mark.filterwarnings("error")
def test_a_product_of_nothing_gets_a_configuration_without_a_warning(
    target: str, shape: tuple[int, ...]
) -> None:
    assert cutegemm.compile(shape, "bfloat16", target=target).config.tile_m > 0
