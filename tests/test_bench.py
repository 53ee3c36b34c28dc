"""The bench without a GPU: arithmetic, interleaving, checks, failures, results, command line."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_fakes import LAUNCH_US, Fake, FakeGpu
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.bench import (
    Case,
    Ceilings,
    Method,
    Result,
    hostcost,
    peers,
    run_suite,
)
from cutegemm.bench.accuracy import Errors, WrongResultError, allowed_errors, check, truth_of
from cutegemm.bench.gpu import DeviceLostError
from cutegemm.bench.inputs import random_operands
from cutegemm.bench.peers import Prepared
from cutegemm.bench.suite import find_ceilings, measure_ceilings
from cutegemm.bench.workload import KNOWN_CEILINGS, MAX_SETS, as_cases, calls_per_replay, rotation_of
from cutegemm.errors import OperandTypeError, ProblemError

SHAPE = (32, 48, 64)
METHOD = Method(rounds=5, replay_ms=0.05, pause_ms=3.0, rotate_bytes=50_000)
CEILINGS = Ceilings(1e12, 1e12, "made up")


def measure(gpu: FakeGpu, *implementations: Fake, method: Method = METHOD) -> Result:
    """One small shape by cuBLAS's stand-in and the given ones, ours last."""
    everyone = [Fake(gpu, "cublas"), *implementations]
    others = [one for one in everyone if not one.ours]
    ours = {one.name: one for one in everyone if one.ours}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutegemm.bench.suite.our_variants", lambda variants: list(ours.values()))
        [result] = run_suite([SHAPE], peers=others, method=method, gpu=gpu, ceilings=CEILINGS)
    return result


# What is measured


def test_bytes_flops_and_floor() -> None:
    [case] = as_cases([(64, 2112, 7168)])
    assert case.input_bytes == 2 * 7168 * (64 + 2112)
    assert case.bytes == case.input_bytes + 2 * 64 * 2112
    assert case.flops == 2 * 64 * 2112 * 7168
    [wide] = as_cases([(64, 2112, 7168)], out_dtype="float32")
    assert wide.bytes == case.input_bytes + 4 * 64 * 2112


@pytest.mark.parametrize(
    ("shape", "floor_us"),
    [((4096, 4096, 4096), 165.59), ((64, 2112, 7168), 7.6), ((16384, 16384, 8192), 5298.85)],
)
def test_h200_floor(shape: tuple[int, int, int], floor_us: float) -> None:
    [case] = as_cases([shape])
    assert KNOWN_CEILINGS["NVIDIA H200"].floor_us(case) == pytest.approx(floor_us, rel=2e-3)


@given(
    st.tuples(*[st.integers(1, 20000)] * 3),
    st.integers(0, 10**9),
    st.integers(0, 10**8),
    st.integers(10**9, 10**11),
)
def test_rotation_is_cold_or_says_it_is_not(shape: Any, rotate: int, l2: int, free: int) -> None:
    [case] = as_cases([shape])
    try:
        rotation = rotation_of(case, rotate_bytes=rotate, l2_bytes=l2, free_bytes=free)
    except ProblemError:
        assert 2 * case.bytes > free
        return
    assert rotation.sets * case.bytes <= free / 2
    assert rotation.sets <= MAX_SETS
    if rotation.cold:
        assert rotation.sets >= 2
        assert rotation.sets * case.input_bytes > max(rotate, 2 * l2)
        # One set fewer would not do.
        assert rotation.sets == 2 or (rotation.sets - 1) * case.input_bytes <= max(rotate, 2 * l2)


def test_rotation_of_the_extremes() -> None:
    [tiny, huge] = as_cases([(16, 16, 16), (16384, 16384, 8192)])
    h200 = {"rotate_bytes": 150_000_001, "l2_bytes": 60 * 2**20, "free_bytes": 139 * 2**30}
    assert rotation_of(tiny, **h200).sets == MAX_SETS
    assert not rotation_of(tiny, **h200).cold
    assert rotation_of(huge, **h200).sets == 2
    assert rotation_of(huge, **h200).cold
    with pytest.raises(ProblemError, match=r"8192 takes 1\.0 GiB, more than 50% of the 1\.0 GiB"):
        rotation_of(huge, rotate_bytes=0, l2_bytes=0, free_bytes=2**30)


@given(st.integers(1, MAX_SETS), st.floats(0.01, 1e6), st.floats(0.1, 100.0))
def test_calls_turn_through_all_sets(sets: int, call_us: float, replay_ms: float) -> None:
    calls = calls_per_replay(sets, call_us, replay_ms)
    assert calls % sets == 0
    assert calls >= sets
    assert calls < 8192 + sets
    # As long as asked for, unless the bound on graph nodes cuts it.
    assert calls * max(call_us, 0.1) >= 1e3 * replay_ms * 0.999 or calls >= 8192


def test_shapes_that_cannot_be_measured() -> None:
    with pytest.raises(ProblemError, match="give every size, each at least 1"):
        as_cases([(0, 5, 5)])
    with pytest.raises(ProblemError, match="give every size, each at least 1"):
        as_cases([(0, 5, 5, 5)])
    with pytest.raises(ProblemError, match="at least 1"):
        as_cases([(None, 5, 5)])  # type: ignore[list-item]
    with pytest.raises(OperandTypeError, match="float64"):
        as_cases([(8, 8, 8)], "float64")


@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_operands_have_the_majors_asked_for(a_major: str, b_major: str) -> None:
    [case] = as_cases([SHAPE], "float16", out_dtype="float32", a_major=a_major, b_major=b_major)
    first, second = random_operands(case, 2, torch.device("cpu"), seed=1)
    m, n, k = SHAPE
    assert first.a.shape == (m, k)
    assert first.b.shape == (k, n)
    assert first.a.stride() == ((k, 1) if a_major == "k" else (1, m))
    assert first.b.stride() == ((1, k) if b_major == "k" else (n, 1))
    assert first.a.dtype == torch.float16
    assert first.out.dtype == torch.float32
    assert first.out.isnan().all()
    assert not torch.equal(first.a, second.a)
    assert 0.9 < float(first.b.float().std()) < 1.1


# How it is measured


def test_every_implementation_once_a_round_in_changing_order() -> None:
    gpu = FakeGpu()
    log: list[str] = []
    ours = Fake(gpu, "mine", ours=True, log=log)
    peer = Fake(gpu, "peer", log=log)
    result = measure(
        gpu, peer, ours, method=Method(rounds=20, replay_ms=0.01, pause_ms=3.0, rotate_bytes=50_000)
    )
    runs = [name for name, previous in zip(log, ["", *log], strict=False) if name != previous]
    assert {len(row.timing.rounds_us) for row in result.rows if row.timing} == {20}
    assert gpu.pauses == [3.0] * 60
    # With 20 rounds, one fixed order would show as strict alternation; random order has repeats.
    replays = "".join(name[0] * 1 for name in runs)
    assert "mp" in replays
    assert "pm" in replays
    assert len(runs) < 44


def test_median_spread_and_derived_numbers() -> None:
    gpu = FakeGpu()
    rounds = iter([10.0, 50.0, 20.0, 30.0, 40.0])
    now = [4.0]

    def cost() -> float:
        return now[0]

    ours = Fake(gpu, "mine", ours=True, cost=cost)

    class Gpu(FakeGpu):
        """Each pause of ours begins a new round with the next cost."""

    real_pause = gpu.pause
    replays_per_round = 2
    seen = [0]

    def pause(milliseconds: float) -> None:
        real_pause(milliseconds)
        seen[0] += 1
        if seen[0] % replays_per_round == 1:
            now[0] = next(rounds)

    gpu.pause = pause  # type: ignore[method-assign]
    result = measure(gpu, ours)
    row = result.row("mine")
    assert row is not None
    assert row.timing is not None
    assert row.timing.rounds_us == pytest.approx((10.0, 50.0, 20.0, 30.0, 40.0))
    assert row.timing.us == pytest.approx(30.0)
    assert row.timing.spread == pytest.approx(40 / 30)
    assert result.speedup("mine") == pytest.approx(LAUNCH_US / 30)
    assert result.tflops("mine") == pytest.approx(result.case.flops / 30e-6 / 1e12)
    assert result.gb_per_s("mine") == pytest.approx(result.case.bytes / 30e-6 / 1e9)
    assert result.share_of_floor("mine") == pytest.approx(CEILINGS.floor_us(result.case) / 30)
    assert row.config == "config of mine"


def test_calls_of_one_replay_rotate_through_all_sets() -> None:
    gpu = FakeGpu()
    ours = Fake(gpu, "mine", ours=True)
    result = measure(gpu, ours)
    assert result.cold
    assert result.sets == 50_000 // result.case.input_bytes + 1
    assert result.calls % result.sets == 0
    assert gpu.recorded_calls[-2:] == [result.calls] * 2
    assert len(ours.outputs) == result.sets
    assert gpu.releases == 1


def test_l2_of_the_gpu_sets_the_rotation_too() -> None:
    gpu = FakeGpu(l2_bytes=100_000)
    result = measure(gpu, Fake(gpu, "mine", ours=True))
    assert result.sets * result.case.input_bytes > 200_000


# Whether it is right


def operands_and_truth(**layout: Any) -> tuple[Any, torch.Tensor, Errors]:
    """One set, its float32 product and the bound."""
    [case] = as_cases([(64, 64, 256)], **layout)
    [one] = random_operands(case, 1, torch.device("cpu"), seed=0)
    truth = truth_of(one)
    return one, truth, allowed_errors(one, truth)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_itself_is_within_the_bound(dtype: str) -> None:
    one, truth, allowed = operands_and_truth(dtype=dtype)
    errors = check(torch.mm(one.a, one.b), truth, allowed)
    assert errors.relative <= allowed.relative / 2
    assert allowed.relative < 1e-2


def test_float32_output_has_a_tight_bound() -> None:
    _, truth, allowed = operands_and_truth(out_dtype="float32")
    check(truth.clone(), truth, allowed)
    assert allowed.relative < 1e-4
    with pytest.raises(WrongResultError, match="relative error"):
        check(truth.bfloat16().float(), truth, allowed)


def spoil_one_nan(out: torch.Tensor) -> None:
    out[1, 1] = float("nan")


def spoil_all_a_little(out: torch.Tensor) -> None:
    out.mul_(1.02)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_one_nan, "1 of 4096 elements are NaN or infinite"),
        (spoil_all_a_little, "relative error"),
    ],
)
def test_wrong_results_are_seen(spoil: Callable[[torch.Tensor], None], sentence: str) -> None:
    one, truth, allowed = operands_and_truth()
    out = torch.mm(one.a, one.b)
    spoil(out)
    with pytest.raises(WrongResultError, match=sentence):
        check(out, truth, allowed)


def test_one_wrong_element_in_a_million_is_seen() -> None:
    truth = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    out = truth.bfloat16()
    allowed = Errors(2 * 1.7e-3, 2 * 0.02)
    check(out, truth, allowed)
    out[500, 500] += 1.5
    assert (
        float(torch.linalg.vector_norm(out.float() - truth) / torch.linalg.vector_norm(truth))
        < allowed.relative
    )
    with pytest.raises(WrongResultError, match="one element"):
        check(out, truth, allowed)


def test_tf32_setting_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        operands_and_truth()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


class WritesOnce(Fake):
    """Writes each output at its first call only; later calls find the right values there already."""

    def prepare(self, case: Case) -> Prepared:
        whole = super().prepare(case).product

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if out.data_ptr() not in self.outputs:
                whole(a, b, out)

        return Prepared(product)


def test_poison_shows_an_output_not_written_in_the_replay() -> None:
    gpu = FakeGpu()
    row = measure(gpu, WritesOnce(gpu, "mine", ours=True)).row("mine")
    assert row is not None
    assert row.failure is not None
    assert f"{SHAPE[0] * SHAPE[1]} of {SHAPE[0] * SHAPE[1]} elements are NaN" in row.failure
    assert not row.good


def test_the_last_set_is_checked_after_the_replays() -> None:
    gpu = FakeGpu()
    ours = Fake(gpu, "mine", ours=True)
    seen: set[int] = set()

    def wrong_but_for_the_first(out: torch.Tensor) -> None:
        seen.add(out.data_ptr())
        if len(seen) > 1:
            out.mul_(1.02)

    ours.spoil = wrong_but_for_the_first
    row = measure(gpu, ours).row("mine")
    assert row is not None
    assert row.failure is not None
    assert "relative error" in row.failure


# What fails


def explode(out: torch.Tensor) -> None:
    raise RuntimeError("misaligned address\nstack of the library")


def test_a_failing_peer_costs_only_itself() -> None:
    gpu = FakeGpu()
    result = measure(gpu, Fake(gpu, "peer", spoil=explode), Fake(gpu, "mine", ours=True))
    rows = {row.name: row for row in result.rows}
    assert rows["peer"].failure == "RuntimeError: misaligned address"
    assert rows["peer"].timing is None
    assert rows["mine"].good
    assert result.speedup("peer") is None
    assert result.speedup("mine") == pytest.approx(1.0)


def test_a_failing_capture_costs_only_its_implementation() -> None:
    gpu = FakeGpu()
    peer = Fake(gpu, "peer")
    calls = [0]

    def fail_in_capture(out: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    peer.spoil = fail_in_capture
    rows = {row.name: row for row in measure(gpu, peer, Fake(gpu, "mine", ours=True)).rows}
    assert rows["peer"].failure == "RuntimeError: operation not permitted when stream is capturing"
    assert rows["mine"].good


def test_cublas_failing_leaves_ours_measured() -> None:
    gpu = FakeGpu()
    broken = Fake(gpu, "cublas", spoil=explode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutegemm.bench.suite.our_variants", lambda variants: [Fake(gpu, "mine", ours=True)])
        [result] = run_suite([SHAPE], peers=[broken], method=METHOD, gpu=gpu, ceilings=CEILINGS)
    assert result.calls > 0
    mine = result.row("mine")
    assert mine is not None
    assert mine.good
    assert result.speedup("mine") is None


def test_a_lost_gpu_is_raised_with_the_culprit() -> None:
    gpu = FakeGpu()

    def lose(out: torch.Tensor) -> None:
        gpu.lost = True

    with pytest.raises(DeviceLostError, match="did not finish") as caught:
        measure(gpu, Fake(gpu, "peer", spoil=lose), Fake(gpu, "mine", ours=True))
    assert caught.value.implementation == "peer"


def test_an_error_that_breaks_the_context_is_a_lost_gpu() -> None:
    gpu = FakeGpu()

    def lose(out: torch.Tensor) -> None:
        gpu.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLostError) as caught:
        measure(gpu, Fake(gpu, "mine", ours=True, spoil=lose))
    assert caught.value.implementation == "mine"


def test_a_shape_too_large_is_a_row_not_an_end() -> None:
    gpu = FakeGpu(memory_bytes=100_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutegemm.bench.suite.our_variants", lambda variants: [Fake(gpu, "mine", ours=True)])
        shapes = [(500, 500, 500), SHAPE]
        large, small = run_suite(
            shapes, peers=[Fake(gpu, "cublas")], method=METHOD, gpu=gpu, ceilings=CEILINGS
        )
    assert all(row.failure is not None and "more than 50%" in row.failure for row in large.rows)
    assert all(row.good for row in small.rows)


# Peers


def test_absent_peers_are_named_and_cublas_is_always_there() -> None:
    gpu = FakeGpu()
    chosen, notes = peers.choose_peers([Fake(gpu, "other", absent="it is not installed"), Fake(gpu, "here")])
    assert [one.name for one in chosen] == ["cublas", "here"]
    assert notes == ["other was not measured: it is not installed"]
    with pytest.raises(ProblemError, match="peer 'cutlas' is unknown; choose from cublas, deepgemm"):
        peers.choose_peers(["cutlas"])


def test_peers_not_installed_say_which_package() -> None:
    assert peers._missing("no_such_package_at_all") == "the package no_such_package_at_all is not installed"
    assert peers._missing("torch") is None


def test_cublas_peer_is_torch_mm() -> None:
    [case] = as_cases([SHAPE])
    [one] = random_operands(case, 1, torch.device("cpu"), seed=0)
    peers.Cublas().prepare(case).product(one.a, one.b, one.out)
    assert torch.equal(one.out, torch.mm(one.a, one.b))


def test_deepgemm_and_quack_get_their_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    def bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        torch.mm(a, b.t(), out=d)

    def gemm(
        a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, out_dtype: torch.dtype, tuned: bool
    ) -> None:
        assert out.dtype == out_dtype
        torch.mm(a, b, out=out)
        chosen.append(tuned)

    chosen: list[bool] = []
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(bf16_gemm_nt=bf16_gemm_nt))
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace(gemm=gemm))
    [case, half] = [*as_cases([SHAPE]), *as_cases([SHAPE], "float16")]
    for peer in (peers.DeepGemm(), peers.Quack(), peers.Quack(tuned=True)):
        [one] = random_operands(case, 1, torch.device("cpu"), seed=0)
        peer.prepare(case).product(one.a, one.b, one.out)
        assert torch.equal(one.out, torch.mm(one.a, one.b))
    assert chosen == [False, True]
    with pytest.raises(ProblemError, match="DeepGEMM takes bfloat16 operands"):
        peers.DeepGemm().prepare(half)


# Ceilings


def test_ceilings_known_or_measured() -> None:
    assert find_ceilings(FakeGpu()) is KNOWN_CEILINGS["NVIDIA H200"]
    gpu = FakeGpu("Another GPU")
    ceilings = measure_ceilings(gpu, copy_bytes=4096, size=64)
    # The fake clock moves by LAUNCH_US a launch: 4096 bytes read and written, 2 * 64**3 operations in that.
    assert ceilings.copy_bytes_per_s == pytest.approx(2 * 4096 / (LAUNCH_US * 1e-6))
    assert ceilings.flops_per_s == pytest.approx(2 * 64**3 / (LAUNCH_US * 1e-6))
    assert "Another GPU" in ceilings.source


# Host cost


def test_host_cost_is_the_median_batch_and_waits_between() -> None:
    now = [0]
    events: list[str] = []
    durations = {"fast": 1_000, "slow": 5_000}

    def call(name: str) -> Callable[[], None]:
        def one() -> None:
            now[0] += durations[name]
            events.append(name)

        return one

    calls = {name: call(name) for name in durations}
    costs = hostcost.host_us(calls, lambda: events.append("wait"), batches=3, clock=lambda: now[0])
    assert costs == {"fast": 1.0, "slow": 5.0}
    batches = re.findall(r"(?:(?:fast )+|(?:slow )+)wait ", " ".join(events) + " ")
    assert len(batches) == 2 + 2 * 3
    assert {batch.count(" ") - 1 for batch in batches} == {hostcost.BATCH_CALLS}
