"""Operands whose lines begin anywhere: every load, shift and bound of the realigning kernels, emulated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.hopper.plan import plan
from cutegemm.parts.paths import LoadPath, Paths
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import Dynamic, GroupedM, Persistent, SplitK, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

BF16 = torch.bfloat16
SMALL = GemmConfig(64, 64, consumers=1)


def placed(rows: int, columns: int, last_contiguous: bool, late: int, pad: int, seed: int) -> torch.Tensor:
    """A random matrix that begins ``late`` elements after a 16-byte unit, NaN in all memory around it."""
    lines, length = (rows, columns) if last_contiguous else (columns, rows)
    memory = torch.full((16 + lines * (length + pad) + 64,), float("nan"), dtype=BF16)
    start = 8 + late
    view = memory.as_strided((lines, length), (length + pad, 1), start)
    view.copy_(torch.randn(lines, length, generator=torch.Generator().manual_seed(seed)))
    return view if last_contiguous else view.t()


def check(
    sizes: tuple[int, int, int],
    config: GemmConfig | None,
    majors: str = "kk",
    late: tuple[int, int] = (1, 3),
    pads: tuple[int, int] = (1, 2),
    scheduler: TileScheduler | None = None,
    target: str = "sm_90a",
    **circumstances: object,
) -> None:
    """Emulates one product with all checks and compares it with the float64 one."""
    m, n, k = sizes
    a = placed(m, k, majors[0] == "k", late[0], pads[0], 1)
    b = placed(k, n, majors[1] == "n", late[1], pads[1], 2)
    out = torch.full((m, n), float("nan"), dtype=torch.float32)
    gemm = cutegemm.compile(
        (None,) * 3, BF16, out_dtype=torch.float32, a_major=majors[0], b_major=majors[1], config=config,
        scheduler=scheduler, target=target,
    )  # fmt: skip
    gemm.emulate(a, b, out=out, check=True, **circumstances)  # type: ignore[arg-type]
    truth = a.double() @ b.double()
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6 * k)


@pytest.mark.parametrize("majors", ["kk", "kn", "mk", "mn"])
def test_lines_that_begin_anywhere(majors: str) -> None:
    check((70, 130, 97), SMALL, majors)


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", range(8))
def test_every_shift(late: int) -> None:
    """With a pitch of whole units all lines begin equally late; with an odd one each differently."""
    check((64, 64, 72), SMALL, "kk", (late, 7 - late), (0, 0))
    check((64, 64, 71), SMALL, "mn", (late, 7 - late), (8, 3))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 7, 3), (5, 3, 2), (9, 8, 7), (65, 63, 1), (2, 200, 66)], ids=str
)
@pytest.mark.parametrize("majors", ["kk", "mn"])
def test_fewer_lines_than_classes(sizes: tuple[int, int, int], majors: str) -> None:
    check(sizes, SMALL, majors)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "scheduler"),
    [
        (GemmConfig(128, 64, schedule="pingpong"), TileScheduler(GroupedM(2), Dynamic(3))),
        (GemmConfig(64, 64, consumers=1), TileScheduler(GroupedM(2), SplitK(4))),
        (GemmConfig(128, 96), TileScheduler(GroupedM(3), StreamK(3))),
        (GemmConfig(64, 32, consumers=1, swap_ab=True), TileScheduler(GroupedM(3), Persistent(2))),
        (GemmConfig(192, 128), None),
        (None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [5])
def test_kernels_and_schedulers(
    config: GemmConfig | None, scheduler: TileScheduler | None, seed: int | None
) -> None:
    check((150, 140, 333), config, "kk", scheduler=scheduler, seed=seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("aligned", ["a", "b"])
@pytest.mark.parametrize("majors", ["kk", "kn", "mk"])
def test_one_operand_goes_to_its_place(aligned: str, majors: str) -> None:
    """Sizes are multiples of 8, so that padding and start decide."""
    late, pads = ((0, 3), (0, 1)) if aligned == "a" else ((3, 0), (1, 0))
    check((72, 136, 104), SMALL, majors, late, pads)


@settings(max_examples=6, deadline=None)
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 140), st.integers(1, 200)),
    st.sampled_from(["kk", "kn", "mk", "mn"]), st.tuples(st.integers(0, 7), st.integers(0, 7)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)), st.none() | st.integers(0, 99),
)  # fmt: skip
def test_any_place(
    sizes: tuple[int, int, int], majors: str, late: tuple[int, int], pads: tuple[int, int], seed: int | None
) -> None:
    check(sizes, SMALL, majors, late, pads, seed=seed)


def test_nan_and_inf_inside_come_out_where_they_belong() -> None:
    a, b = placed(20, 37, True, 1, 2, 1), placed(37, 21, True, 3, 1, 2)
    a[3, 36], b[0, 20], a[7, 5] = float("inf"), float("nan"), -float("inf")
    gemm = cutegemm.compile((20, 21, 37), BF16, b_major="n", out_dtype=torch.float32, target="sm_90a")
    out, truth = gemm.emulate(a, b).out, a.float() @ b.float()
    assert out is not None
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out.isinf(), truth.isinf())


@pytest.mark.parametrize("gap", [0, 1, 8])
def test_batches(gap: int) -> None:
    """Odd matrices one after another, matrices a multiple of 16 bytes apart, one for the whole batch."""
    m, n, k, l = 19, 33, 21, 3  # noqa: E741 - the batch mode's own name
    memory = torch.randn(l * (m * k + 8 * 8 + 64)).to(BF16)
    stride = m * k + gap if gap < 8 else (m * k + 7) // 8 * 8
    a = memory.as_strided((l, m, k), (stride, k, 1), 1)
    w = torch.randn(n, k).to(BF16)
    b = w.t().expand(l, k, n)
    gemm = cutegemm.compile((l, m, n, k), BF16, out_dtype=torch.float32, target="sm_90a")
    out = gemm.emulate(a, b).out
    assert out is not None
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_matrices_without_a_contiguous_mode() -> None:
    a, b = torch.randn(40, 60).to(BF16)[::2, ::3], torch.randn(40, 31).to(BF16)[::2]
    out = torch.full((40, 64), float("nan"), dtype=BF16)
    target = out[::2, 1:63:2]
    cutegemm.compile((20, 31, 20), BF16, b_major="n", target="sm_90a").emulate(a, b, out=target)
    torch.testing.assert_close(target.double(), a.double() @ b.double(), rtol=1e-2, atol=1e-2)
    assert out[1::2].isnan().all()
    assert out[::2, ::2].isnan().all()


REALIGNED: tuple[LoadPath, LoadPath] = ("realigned", "realigned")


@pytest.mark.parametrize(
    ("config", "majors", "words"),
    [
        (GemmConfig(128, 128, cluster_m=2), "kk", "use a cluster of 1x1"),
        (GemmConfig(64, 64, 128, consumers=1), "kk", "the nearest is 64"),
        (GemmConfig(64, 72, consumers=1), "kk", "the nearest is 64"),
        (GemmConfig(64, 96, consumers=1), "kn", "the nearest is 64"),
        (GemmConfig(256, 64), "mk", "the nearest is 192"),
        (GemmConfig(128, 256), "kk", "nearest legal tile_n is 192, or use 1 consumer"),
    ],
)
def test_configurations_that_cannot_realign(config: GemmConfig, majors: str, words: str) -> None:
    problem = GemmProblem(None, None, None, a_major=majors[0], b_major=majors[1])
    plan(config, problem)
    with pytest.raises(ConfigError, match=words):
        plan(config, problem, Paths(*REALIGNED))


def test_a_loop_over_slices_builds_one_kernel_for_each_alignment() -> None:
    gemm = cutegemm.compile((None, None, None), BF16, config=SMALL, target="sm_90a")
    memory = torch.randn(70, 200).to(BF16)
    b = torch.randn(64, 64).to(BF16).t()
    for start in range(20):
        gemm.emulate(memory[:, start : start + 64], b)
    assert len(gemm._kernels._artifacts) == 2
