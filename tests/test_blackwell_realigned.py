"""Operands whose lines begin anywhere, on sm_100a: of one CTA and of pairs that move half each, emulated."""

from functools import partial
from pathlib import Path

import pytest
import torch
from blackwell_space import F32, TARGET, Kind, pair
from emulation import gemm_of, replaced, with_ptx
from epilogue_checks import check as check_epilogue
from epilogue_checks import operands_for
from gpu_checks import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_realigned import BF16, REALIGNED, placed
from test_realigned import check as checked

import cutegemm
from cutegemm import GemmConfig, GemmProblem
from cutegemm.blackwell.plan import MOVERS, MOVERS_BESIDE_EPILOGUE, plan
from cutegemm.emulator import RaceError
from cutegemm.emulator.product import Circumstances
from cutegemm.epilogue import Fused, library
from cutegemm.errors import ConfigError
from cutegemm.hardware import gpu_by_name
from cutegemm.heuristic import choose
from cutegemm.kernels import Choice
from cutegemm.parts.limits import SMEM_BYTES
from cutegemm.parts.paths import Paths
from cutegemm.scheduler import Dynamic, GroupedM, SplitK, Static, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "blackwell.md"
SMALL, PAIR = GemmConfig(64, 64, consumers=1), pair(128, 128)
check = partial(checked, target=TARGET)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "majors"),
    [(SMALL, "kn"), (SMALL, "mk"), (PAIR, "kk"), (PAIR, "kn"), (PAIR, "mk"), (PAIR, "mn")],
    ids=str,
)
def test_lines_that_begin_anywhere(config: GemmConfig, majors: str) -> None:
    """Tiles that end beyond the operands, in a pair in its second half."""
    check((70, 130, 97), config, majors, seed=4)


@pytest.mark.parametrize("late", [0, 3, 6])
def test_every_shift(late: int) -> None:
    """With a pitch of whole units all lines begin equally late; with an odd one each differently."""
    check((64, 64, 72), SMALL, "kk", (late, 7 - late), (0, 0))
    check((200, 64, 71), PAIR, "mn", (late, 7 - late), (8, 3))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 3, 2), (2, 200, 66)], ids=str)
def test_fewer_lines_than_classes(sizes: tuple[int, int, int]) -> None:
    check(sizes, PAIR, "kk")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "scheduler"),
    [
        (GemmConfig(64, 64), TileScheduler(GroupedM(2), Dynamic())),
        (pair(256, 64), TileScheduler(GroupedM(2), Dynamic())),
        (pair(128, 64), TileScheduler(assignment=Dynamic(2))),
        (GemmConfig(64, 64, consumers=1), TileScheduler(GroupedM(2), SplitK(4))),
        (pair(256, 192, swap_ab=True), TileScheduler(assignment=Static())),
        (GemmConfig(64, 64), TileScheduler(assignment=StreamK(3))),
        (pair(128, 64), TileScheduler(assignment=StreamK(5))),
        (None, None),
    ],
    ids=str,
)
def test_kernels_and_schedulers(config: GemmConfig | None, scheduler: TileScheduler | None) -> None:
    check((150, 140, 333), config, "kk", scheduler=scheduler, seed=5, resident=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("aligned", ["a", "b"])
@pytest.mark.parametrize(("config", "majors"), [(SMALL, "kn"), (PAIR, "mk"), (PAIR, "kn")], ids=str)
def test_one_operand_goes_to_its_place(aligned: str, config: GemmConfig, majors: str) -> None:
    """Sizes are multiples of 8, so that padding and start decide."""
    late, pads = ((0, 3), (0, 1)) if aligned == "a" else ((3, 0), (1, 0))
    check((72, 136, 104), config, majors, late, pads, seed=6)


@settings(max_examples=4, deadline=None)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 140), st.integers(1, 300)),
    st.sampled_from([SMALL, PAIR]), st.sampled_from(["kk", "kn", "mk", "mn"]),
    st.tuples(st.integers(0, 7), st.integers(0, 7)), st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.none() | st.integers(0, 99),
)  # fmt: skip
def test_any_place(
    sizes: tuple[int, int, int], config: GemmConfig, majors: str, late: tuple[int, int],
    pads: tuple[int, int], seed: int | None,
) -> None:  # fmt: skip
    check(sizes, config, majors, late, pads, seed=seed, resident=3)


@pytest.mark.parametrize(
    ("fused", "config"), [(library.bias_residual, pair(256, 128)), (library.residual_rms, SMALL)], ids=str
)
def test_epilogues(fused: Fused, config: GemmConfig) -> None:
    """K is odd, and with it the pitch of dense operands."""
    operands = operands_for(fused, 150, 88)
    found = check_epilogue(
        fused, (150, 88, 99), operands, config=config, target=TARGET, circumstances={"check": True, "seed": 7}
    )
    first = 4 * config.consumers + 3
    beyond = {event.warp for event in found.trace.events if event.warp >= first}
    assert beyond == set(range(first, first + MOVERS_BESIDE_EPILOGUE))


def test_nan_and_inf_inside_come_out_where_they_belong() -> None:
    a, b = placed(20, 37, True, 1, 2, 1), placed(37, 21, True, 3, 1, 2)
    a[3, 36], b[0, 20], a[7, 5] = float("inf"), float("nan"), -float("inf")
    gemm = cutegemm.compile(
        (20, 21, 37), BF16, b_major="n", out_dtype=torch.float32, config=PAIR, target=TARGET
    )
    out, truth = gemm.emulate(a, b).out, a.float() @ b.float()
    assert out is not None
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out.isinf(), truth.isinf())


@pytest.mark.parametrize("stride", [19 * 21, 19 * 21 + 1])
def test_batches(stride: int) -> None:
    """Odd matrices one after another go one by one; a multiple of 16 bytes apart they go together."""
    m, n, k, l = 19, 33, 21, 3  # noqa: E741 - the batch mode's own name
    a = torch.randn(l * (stride + 8) + 64).to(BF16).as_strided((l, m, k), (stride, k, 1), 1)
    b = torch.randn(n, k).to(BF16).t().expand(l, k, n)
    gemm = cutegemm.compile((l, m, n, k), BF16, out_dtype=torch.float32, target=TARGET)
    found = gemm.emulate(a, b, check=True)
    assert found.out is not None
    torch.testing.assert_close(found.out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "majors", "words"),
    [
        (GemmConfig(128, 128, cluster_m=2), "kk", "cluster 2x1 with .* use a cluster of 1x1"),
        (pair(128, 128, cluster_m=4), "kk", "cluster 4x1 with .* use a cluster of 2x1"),
        (pair(128, 128, cluster_n=2), "kk", "cluster 2x2 with .* use a cluster of 2x1"),
        (GemmConfig(64, 64, 128), "kk", "tile_k=128: .* the nearest is 64"),
        (GemmConfig(64, 72), "kk", "tile_n=72: .* the nearest is 64"),
        (pair(128, 96), "kk", "tile_n=96: .* allows 64, 128, 192, 256; the nearest is 64"),
        (GemmConfig(128, 256), "kn", "tile_n=256: .* allows 64, 128, 192; the nearest is 192"),
        (pair(256, 192), "kn", "tile_n=192: B n-major, .* allows 128, 256; the nearest is 128"),
        (GemmConfig(128, 192, stages=3), "kk", "the nearest legal stages is 2"),
    ],
)
def test_configurations_that_cannot_realign(config: GemmConfig, majors: str, words: str) -> None:
    problem = GemmProblem(None, None, None, a_major=majors[0], b_major=majors[1])
    plan(config, problem)
    with pytest.raises(ConfigError, match=words):
        plan(config, problem, Paths(*REALIGNED))


def test_a_plan_counts_what_moving_takes() -> None:
    """256 lines of 72 elements a stage, in eight classes, beside the operands in their places."""
    problem = GemmProblem(None, None, None)
    aligned, found = (plan(pair(256, 256), problem, paths) for paths in (Paths(), Paths(*REALIGNED)))
    staged = 256 * 72 * 2
    assert found.line_boxes.staged_bytes == found.line_boxes.buffer_bytes == staged
    assert found.stage_bytes == aligned.stage_bytes == found.line_boxes.moved_bytes == 256 * 64 * 2
    assert found.smem_bytes >= 1024 + found.stages * (found.stage_bytes + staged)
    assert found.smem_bytes <= SMEM_BYTES
    assert found.threads == aligned.threads + 32 * MOVERS
    assert found.reading_warps == aligned.reading_warps + MOVERS
    assert (found.filling_arrivals, aligned.filling_arrivals) == (2 * MOVERS, 1)
    one = plan(pair(256, 256), problem, Paths("realigned", "tma"))
    assert one.line_boxes.in_place_bytes == one.line_boxes.moved_bytes == 128 * 64 * 2
    assert one.filling_arrivals == 1 + 2 * MOVERS


@pytest.mark.parametrize("loads", [REALIGNED, ("tma", "realigned")])
def test_the_heuristic_knows_what_moving_costs(loads: tuple) -> None:
    gpu, problem = gpu_by_name("B200"), GemmProblem(4097, 4099, 4095)
    best, aligned = (choose(problem, gpu, paths) for paths in (Paths(*loads), Paths()))
    assert plan(best.config, problem, Paths(*loads)).line_boxes.movers == MOVERS
    ratio = f"{best.total / aligned.total:.1f} times"
    assert ratio in DOCUMENT.read_text(encoding="utf-8"), ratio


@pytest.mark.parametrize("config", [GemmConfig(128, 64, consumers=1), pair(256, 64, consumers=1)], ids=str)
def test_lines_that_are_not_handed_to_the_mma_are_found(config: GemmConfig) -> None:
    """The store is direct, so that the movers' fence is the only one of its kind."""
    kind = Kind(config, Case(256, 64, 200, out_dtype=F32, out_shift=1, shifts=(1, 3)))
    gemm = gemm_of(kind.case, config, None, TARGET)
    artifact = gemm._kernels.artifact(Choice(kind.plan.config, TileScheduler(), kind.paths, TARGET))
    ptx = replaced(artifact.ptx, r"fence\.proxy\.async\.shared::cta;", "")
    with pytest.raises(RaceError, match=r"tcgen05\.mma.*realign\.py"):
        with_ptx(gemm, kind.case, ptx, Circumstances(check=True, seed=1, resident=1))
