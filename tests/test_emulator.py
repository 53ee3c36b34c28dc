"""Every family of Hopper kernels, run from its PTX on the CPU and judged like a GPU's product."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import gemm_of, judged, kernel
from gpu_checks import Case, error_complaints

import cutegemm
from cutegemm import GemmConfig
from cutegemm.errors import DeviceError, OperandTypeError, ProblemError
from cutegemm.scheduler import SplitK, TileScheduler

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# (case, configuration, clusters that run at once): ragged tiles, and more tiles than workers, throughout.
FAMILIES = {
    "cooperative": (Case(200, 264, 136), GemmConfig(128, 128), 3),
    "ping-pong": (Case(200, 264, 136), GemmConfig(64, 128, schedule="pingpong"), 3),
    "ping-pong wide": (
        Case(200, 136, 72, dtype=F16, out_dtype=F16),
        GemmConfig(64, 192, schedule="pingpong"),
        1,
    ),
    "cluster 2x1": (Case(300, 280, 200, out_dtype=F32), GemmConfig(128, 256, cluster_m=2), 1),
    "cluster 1x2": (Case(136, 520, 192), GemmConfig(128, 128, cluster_n=2), 1),
    "cluster 2x2": (
        Case(300, 304, 136, dtype=F16, out_dtype=F16),
        GemmConfig(64, 128, cluster_m=2, cluster_n=2),
        2,
    ),
    "cluster ping-pong": (Case(264, 200, 136), GemmConfig(64, 64, cluster_m=2, schedule="pingpong"), 2),
    "swapped": (Case(24, 304, 200), GemmConfig(128, 24, swap_ab=True), 2),
    "swapped n-major B": (Case(17, 136, 96, b_major="n"), GemmConfig(64, 16, swap_ab=True, consumers=1), 2),
    "tile 8": (Case(200, 16, 136), GemmConfig(192, 8, consumers=1), 2),
    "tile 24": (Case(130, 72, 136), GemmConfig(128, 24), 2),
    "tile 72 float32": (Case(260, 144, 64, out_dtype=F32), GemmConfig(256, 72), 1),
    "tile 176": (Case(100, 184, 128), GemmConfig(64, 176), 2),
    "tile 64x256": (Case(72, 264, 136), GemmConfig(64, 256), 1),
    "tile 256x128": (Case(300, 136, 136), GemmConfig(256, 128), 1),
    "tile_k 128": (Case(192, 128, 328), GemmConfig(128, 128, tile_k=128), 1),
    "m-major A": (Case(136, 136, 136, a_major="m"), GemmConfig(128, 128), 2),
    "n-major B": (Case(136, 136, 136, b_major="n"), GemmConfig(128, 96), 2),
    "m-major D": (Case(136, 130, 136, out_major="m"), GemmConfig(64, 96), 2),
    "m-major D float32": (Case(136, 130, 136, out_major="m", out_dtype=F32), GemmConfig(128, 64), 2),
    "all other majors": (
        Case(200, 264, 136, a_major="m", b_major="n", out_major="m", dtype=F16, out_dtype=BF16),
        GemmConfig(128, 128, cluster_m=2),
        1,
    ),
    "batch": (Case(136, 72, 72, l=3, a_major="m", out_dtype=F32), GemmConfig(128, 64), 2),
    "direct store": (Case(100, 101, 136), GemmConfig(128, 128), 1),
    "direct store ping-pong": (
        Case(101, 70, 72, out_dtype=F32, out_major="m"),
        GemmConfig(64, 64, schedule="pingpong"),
        1,
    ),
    "direct store misaligned": (
        Case(70, 64, 136, dtype=F16, out_dtype=F16, out_shift=3),
        GemmConfig(64, 64),
        1,
    ),
    "one element": (Case(1, 1, 8), GemmConfig(64, 8, consumers=1), 1),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_right_and_stays_inside_its_output(name: str) -> None:
    case, config, resident = FAMILIES[name]
    gemm = gemm_of(case, config)
    result = judged(gemm, case, resident=resident)
    assert result.instructions > 0
    judged(gemm, case, resident=resident, check=True, seed=0)


@pytest.mark.parametrize("splits", [2, 4])
def test_split_k_sums_through_the_shared_memory_of_other_ctas(splits: int) -> None:
    case = Case(136, 101, 520)
    gemm = gemm_of(case, GemmConfig(128, 64), TileScheduler(assignment=SplitK(splits)))
    judged(gemm, case, resident=1)
    for seed in range(3):
        judged(gemm, case, resident=1, check=True, seed=seed)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_gives_the_same_bits(seed: int) -> None:
    case = Case(264, 200, 264)
    gemm = kernel(GemmConfig(64, 64, cluster_m=2, cluster_n=2, schedule="pingpong"), case)
    a = torch.randn(case.m, case.k).bfloat16()
    b = torch.randn(case.n, case.k).bfloat16().t()
    plain = gemm.emulate(a, b, resident=2)
    adverse = gemm.emulate(a, b, resident=2, seed=seed, check=seed % 2 == 0)
    assert plain.out is not None
    assert adverse.out is not None
    assert torch.equal(plain.out, adverse.out)


def test_the_heuristics_choice_is_emulated() -> None:
    gemm = cutegemm.compile((256, 128, 192), "bfloat16", target="sm_90a")
    a, b = torch.randn(256, 192).bfloat16(), torch.randn(128, 192).bfloat16().t()
    result = gemm.emulate(a, b)
    assert result.out is not None
    assert not list(error_complaints(result.out, a, b))
    assert result.launch is not None
    assert result.launch.block[0] == gemm.resources.threads


def test_a_sum_of_no_products_is_zero_without_a_launch() -> None:
    gemm = kernel(GemmConfig(128, 128))
    result = gemm.emulate(torch.empty(16, 0).bfloat16(), torch.empty(0, 8).bfloat16())
    assert result.out is not None
    assert torch.equal(result.out, torch.zeros(16, 8).bfloat16())
    assert result.launch is None


def test_operands_are_checked_as_for_a_gpu_call() -> None:
    gemm = kernel(GemmConfig(128, 128))
    a, b = torch.zeros(16, 64).bfloat16(), torch.zeros(8, 64).bfloat16().t()
    with pytest.raises(OperandTypeError, match="dtype"):
        gemm.emulate(a.half(), b)
    with pytest.raises(ProblemError, match="K differs"):
        gemm.emulate(a[:, :56], b)
    with pytest.raises(ProblemError, match="b_major"):
        gemm.emulate(a, b.contiguous())
    with pytest.raises(DeviceError, match="CPU"):
        gemm.emulate(a.to("meta"), b)
    with pytest.raises(ProblemError, match="shares memory"):
        gemm.emulate(a, b, out=a[:, :8])


@pytest.mark.parametrize(
    ("wish", "kind", "text"),
    [
        ({"resident": 0}, ProblemError, "resident is 0; give clusters from 1 on"),
        ({"resident": -1}, ProblemError, "resident is -1; give clusters from 1 on"),
        ({"seed": "x"}, OperandTypeError, "seed is 'x'; pass a whole number"),
        ({"processes": 1.5}, OperandTypeError, "processes is 1.5; pass a whole number"),
    ],
    ids=str,
)
def test_circumstances_that_are_none(wish: dict[str, Any], kind: type[Exception], text: str) -> None:
    case = Case(8, 8, 8)
    with pytest.raises(kind, match=text):
        judged(gemm_of(case, GemmConfig(64, 64, consumers=1)), case, **wish)


def test_the_trace_tells_who_did_what() -> None:
    case = Case(256, 256, 576)
    result = judged(kernel(GemmConfig(128, 128)), case, resident=2)
    events = result.trace.events
    loads = [event for event in events if event.kind == "load"]
    assert len(loads) == 4 * 9 * 2  # tiles, stages of K, operands
    assert {event.role for event in loads} == {"producer"}
    groups = [event for event in events if event.kind == "mma"]
    assert len(groups) == 4 * 9 * 8  # tiles, stages, consumer warps
    assert {event.role for event in groups} == {"consumer"}
    assert len([event for event in events if event.kind == "store"]) == 4 * 2 * 2
    assert all(event.begin <= event.end for event in events)
    # A consumer cannot multiply a stage before it is loaded.
    assert min(event.begin for event in groups) >= min(event.end for event in loads)
    assert result.trace.cycles == max(event.end for event in events)


def test_the_trace_is_written_for_perfetto(tmp_path: Path) -> None:
    result = judged(kernel(GemmConfig(128, 128)), Case(128, 128, 128))
    path = tmp_path / "trace.json"
    result.trace.write_chrome(path)
    rows = json.loads(path.read_text())["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == len(result.trace.events)
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert "CTA 0" in names
    assert any(name.startswith("TMA load") for name in names)


def test_a_kernel_of_ones_own_runs() -> None:
    """``emulator.run`` takes an artifact and the host function's own arguments, outcome word included."""
    import ctypes

    from cutegemm import emulator
    from cutegemm.callrecord import CallRecord, Outcome

    gemm = kernel(GemmConfig(128, 128))
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    out = torch.full((128, 64), float("nan")).bfloat16()
    outcome = ctypes.c_int32(-1)
    sizes = CallRecord(1, 128, 64, 64, 4, 0)
    result = emulator.run(gemm.artifact, a, b.t(), out, sizes, outcome, None)
    assert outcome.value == Outcome.LAUNCHED
    assert result.launch is not None
    assert not list(error_complaints(out, a, b.t()))
    before = out.clone()
    result = emulator.run(gemm.artifact, a, b.t(), out, CallRecord(1, 128, 64, 72, 4, 0), outcome, None)
    assert outcome.value == Outcome.OTHER_SIZES
    assert result.launch is None
    assert torch.equal(out, before)


def test_the_emulator_needs_no_compiler_for_a_cached_kernel(tmp_path: Path) -> None:
    """A process that never imports the DSL runs what another one compiled."""
    gemm = kernel(GemmConfig(128, 128))
    gemm.build()
    script = (
        "import sys, torch, cutegemm\n"
        "gemm = cutegemm.compile((None, None, None), 'bfloat16', target='sm_90a', "
        "scheduler=cutegemm.scheduler.TileScheduler(), config=cutegemm.GemmConfig(128, 128))\n"
        "a = torch.ones(64, 64).bfloat16()\n"
        "assert gemm.emulate(a, a.t()).out.eq(64).all()\n"
        "assert 'cutlass' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr


def test_operands_may_be_padded_and_permuted() -> None:
    case = Case(136, 72, 72, l=2)
    gemm = kernel(GemmConfig(128, 64), case)
    a = torch.randn(case.m, 2, 96).bfloat16().permute(1, 0, 2)[..., :72]
    b = torch.randn(2, case.n, 80).bfloat16()[..., :72].mT
    result = gemm.emulate(a, b)
    assert result.out is not None
    assert not list(error_complaints(result.out, a, b))
