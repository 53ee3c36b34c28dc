"""Tiles whose K is shared by the CTAs of a cluster, on a GPU: right, repeatable, alone in their memory."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from gpu_checks import Case, check

import cutegemm
from cutegemm import Gemm, GemmConfig
from cutegemm.fuzz.judge import torch_sums_in_float32
from cutegemm.scheduler import ColumnMajor, GroupedM, SplitK, TileScheduler

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

CONFIGS = [
    (GemmConfig(64, 16, 128, consumers=1, swap_ab=True), BF16, ("k", "k", "n")),
    (GemmConfig(64, 8, consumers=1), F16, ("m", "k", "m")),
    (GemmConfig(64, 72, consumers=1), BF16, ("k", "k", "n")),
    (GemmConfig(64, 256), F32, ("k", "n", "n")),
    (GemmConfig(128, 128), BF16, ("m", "n", "n")),
    (GemmConfig(192, 64), F32, ("k", "k", "m")),
]
# Ragged tiles, more tiles than workers, K of fewer stages than CTAs, one element.
SIZES = [(1000, 999, 1001), (16, 72, 8192), (200, 136, 328), (1, 8, 64), (1, 1, 8), (64, 4096, 520)]


@pytest.fixture(scope="module", autouse=True)
def _honest_reference() -> Iterator[None]:
    with torch_sums_in_float32():
        yield


def split_gemm(config: GemmConfig, splits: int, case: Case) -> Gemm:
    return cutegemm.compile(
        (None,) * (3 if case.l is None else 4), case.dtype, out_dtype=case.out_dtype, a_major=case.a_major,
        b_major=case.b_major, out_major=case.out_major, config=config,
        scheduler=TileScheduler(GroupedM(4), SplitK(splits)),
    )  # fmt: skip


@pytest.mark.parametrize(("config", "out_dtype", "majors"), CONFIGS, ids=str)
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_products(
    splits: int, config: GemmConfig, out_dtype: torch.dtype, majors: tuple[str, str, str]
) -> None:
    dtype = F16 if out_dtype == F16 else BF16
    for m, n, k in SIZES:
        case = Case(m, n, k, None, dtype, out_dtype, *majors)
        check(case, split_gemm(config, splits, case), "cuda", f"split {splits} {config}")


@pytest.mark.parametrize("splits", [2, 8])
def test_batches_and_unaligned_outputs(splits: int) -> None:
    config = GemmConfig(64, 64, consumers=1)
    for batches, shift in product((None, 3), (0, 1)):
        case = Case(130, 200, 520, batches, out_shift=shift)
        check(case, split_gemm(config, splits, case), "cuda", f"split {splits} {config}")


@pytest.mark.parametrize(("splits", "config"), [(8, CONFIGS[0][0]), (4, CONFIGS[2][0]), (2, CONFIGS[4][0])])
def test_the_same_bits_on_every_run(splits: int, config: GemmConfig) -> None:
    """Also with another stream busy, and for tiles that a CTA does one after another."""
    m, n, k = 300, 4096, 8192
    a, w = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16)
    gemm = cutegemm.compile(
        (m, n, k), BF16, out_dtype=F32, config=config, scheduler=TileScheduler(ColumnMajor(), SplitK(splits))
    )
    first = gemm(a, w.t()).clone()
    noise = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    for run in range(20):
        if run >= 10:
            with torch.cuda.stream(side):
                noise @ noise
        out = torch.full_like(first, float("nan"))
        assert torch.equal(gemm(a, w.t(), out=out), first)
    torch.cuda.synchronize()


def test_sums_that_cancel() -> None:
    """Partial sums far larger than the result: only float32 partials survive it."""
    m, n, k = 64, 512, 8192
    a = torch.rand(m, k, device="cuda", dtype=BF16) * 100
    a[:, k // 2 :] = -a[:, : k // 2]
    w = torch.rand(n, k, device="cuda", dtype=BF16)
    w[:, k // 2 :] = w[:, : k // 2]
    w[:, -64:] += torch.randn(n, 64, device="cuda", dtype=BF16)
    truth = a.double() @ w.t().double()
    ours = cutegemm.compile(
        (m, n, k), BF16, out_dtype=F32, config=GemmConfig(64, 64, consumers=1),
        scheduler=TileScheduler(GroupedM(1), SplitK(8)),
    )(a, w.t())  # fmt: skip
    theirs = torch.mm(a, w.t()).double()
    assert (ours.double() - truth).norm() <= 2 * (theirs - truth).norm()


def test_chosen_for_few_tiles_and_long_k() -> None:
    for m, n, k in ((9, 512, 8000), (26, 64, 8128), (176, 1152, 8192)):
        case = Case(m, n, k)
        gemm = cutegemm.compile((m, n, k), BF16)
        check(case, gemm, "cuda", f"{gemm.config} {gemm.scheduler}")
