"""Products on a GPU: right for every kind of kernel, size, layout and dtype, and nothing else touched.

The bound is nobody's choice: twice the error that torch's product of the same inputs has, measured against a
float64 product.
Kernels take sizes at run time, so that the cases of a configuration share one of them.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from gpu_checks import Case, Operands, check, error_complaints, fresh_seed

import cutegemm
from cutegemm import Gemm, GemmConfig
from cutegemm.fuzz.judge import torch_sums_in_float32
from cutegemm.scheduler import ColumnMajor, GroupedM, GroupedN, Persistent, RowMajor, Static, TileScheduler

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
K_MAJOR = ("k", "k", "n")


@pytest.fixture(scope="module", autouse=True)
def _honest_reference() -> Iterator[None]:
    with torch_sums_in_float32():
        yield


@functools.cache
def gemm_for(
    config: GemmConfig | None,
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    majors: tuple[str, str, str] = K_MAJOR,
    batched: bool = False,
    scheduler: TileScheduler | None = None,
) -> Gemm:
    """One Gemm, sizes open; shared by all tests of this file."""
    return cutegemm.compile(
        (None,) * (4 if batched else 3), dtypes[0], out_dtype=dtypes[1], a_major=majors[0], b_major=majors[1],
        out_major=majors[2], config=config, scheduler=scheduler,
    )  # fmt: skip


def gemm_of(config: GemmConfig | None, case: Case, scheduler: TileScheduler | None = None) -> Gemm:
    """The shared Gemm that takes a case."""
    majors = (case.a_major, case.b_major, case.out_major)
    return gemm_for(config, (case.dtype, case.out_dtype), majors, case.l is not None, scheduler)


# --- every family of configurations ------------------------------------------------------------------------

# Whole tiles, ragged ones, one row, one column, K shorter than a stage and longer than the pipeline, more
# tiles than workers. Operands are padded: none of these sizes breaks TMA's rule.
SIZES = [
    (256, 512, 128),
    (1000, 999, 1001),
    (1, 8, 64),
    (8, 1, 8),
    (1, 1, 1),
    (130, 131, 8),
    (64, 2112, 1536),
    (777, 1543, 520),
    (3000, 2500, 72),
]

FAMILIES = [
    # cooperative, two consumers along M, or along N where tile_m is an odd number of MMA heights
    (GemmConfig(128, 256), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(128, 256, cluster_m=2), (BF16, BF16), ("m", "n", "n")),
    (GemmConfig(128, 256, cluster_n=2), (F16, F16), ("k", "n", "n")),
    (GemmConfig(128, 256, cluster_m=2, cluster_n=2), (BF16, BF16), ("k", "k", "m")),
    (GemmConfig(256, 128, cluster_m=2), (BF16, F32), ("m", "k", "n")),
    (GemmConfig(256, 192), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(192, 144, cluster_n=2), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(192, 224), (F16, F32), ("k", "k", "m")),
    (GemmConfig(64, 208), (BF16, F16), ("m", "k", "m")),
    (GemmConfig(128, 176, cluster_m=2), (BF16, F32), ("k", "k", "n")),
    (GemmConfig(128, 144), (BF16, BF16), ("k", "n", "m")),
    (GemmConfig(128, 128, 128), (BF16, BF16), ("m", "n", "n")),
    # one consumer
    (GemmConfig(64, 8, consumers=1), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(64, 16, consumers=1), (F16, BF16), ("k", "n", "n")),
    (GemmConfig(128, 24, consumers=1), (F16, F32), ("k", "k", "n")),
    (GemmConfig(128, 40, consumers=1, cluster_n=2), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(64, 72, 128, consumers=1), (BF16, BF16), ("k", "k", "m")),
    (GemmConfig(64, 200, consumers=1), (F16, F16), ("k", "k", "m")),
    # ping-pong
    (GemmConfig(128, 128, schedule="pingpong"), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(128, 128, cluster_m=2, schedule="pingpong"), (BF16, F32), ("k", "n", "n")),
    (GemmConfig(64, 256, cluster_n=2, schedule="pingpong"), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(64, 104, schedule="pingpong"), (F16, F16), ("m", "k", "n")),
    (GemmConfig(128, 176, cluster_m=2, cluster_n=2, schedule="pingpong"), (BF16, BF16), ("k", "k", "n")),
    # operands exchanged, and the least depths
    (GemmConfig(128, 64, swap_ab=True), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(64, 16, consumers=1, swap_ab=True), (F16, F32), ("m", "n", "m")),
    (GemmConfig(128, 96, cluster_m=2, schedule="pingpong", swap_ab=True), (BF16, BF16), ("k", "n", "n")),
    (GemmConfig(128, 128, stages=2, store_stages=1), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(64, 64, stages=2, store_stages=1, schedule="pingpong"), (BF16, BF16), ("k", "k", "n")),
]  # fmt: skip


@pytest.mark.parametrize(("config", "dtypes", "majors"), FAMILIES, ids=str)
def test_family(
    config: GemmConfig, dtypes: tuple[torch.dtype, torch.dtype], majors: tuple[str, str, str]
) -> None:
    for m, n, k in SIZES:
        case = Case(m, n, k, None, *dtypes, *majors)
        check(case, gemm_of(config, case), "cuda", config)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32)], ids=str)
@pytest.mark.parametrize("majors", list(product("km", "kn", "nm")), ids="".join)
def test_majors(majors: tuple[str, str, str], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    config = GemmConfig(128, 64)
    for size in ((128, 192, 64), (200, 136, 328)):
        case = Case(*size, None, *dtypes, *majors)
        check(case, gemm_of(config, case), "cuda", config)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(BF16, BF16), (BF16, F16), (BF16, F32), (F16, F16), (F16, BF16), (F16, F32)]
)
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    config = GemmConfig(64, 72, consumers=1)
    for size in ((100, 200, 300), (511, 511, 511)):
        case = Case(*size, None, dtype, out_dtype)
        check(case, gemm_of(config, case), "cuda", config)


@pytest.mark.parametrize(("config", "dtypes", "majors"), FAMILIES[::4], ids=str)
@pytest.mark.parametrize("batches", [None, 2])
def test_outputs_that_tma_cannot_store(
    batches: int | None,
    config: GemmConfig,
    dtypes: tuple[torch.dtype, torch.dtype],
    majors: tuple[str, str, str],
) -> None:
    for size in ((256, 512, 128), (130, 131, 8), (1, 8, 64)):
        case = Case(*size, batches, *dtypes, *majors, out_shift=1)
        check(case, gemm_of(config, case), "cuda", config)


BATCHED = [
    GemmConfig(128, 128, cluster_m=2),
    GemmConfig(64, 40, schedule="pingpong"),
    GemmConfig(64, 64, consumers=1, swap_ab=True),
]


@pytest.mark.parametrize("config", BATCHED, ids=str)
@pytest.mark.parametrize("batches", [1, 3, 200])
def test_batches(batches: int, config: GemmConfig) -> None:
    for size in ((200, 136, 328), (1, 8, 8), (65, 129, 64)):
        case = Case(*size, batches)
        check(case, gemm_of(config, case), "cuda", config)


ORDERS = [RowMajor(), ColumnMajor(), GroupedM(3), GroupedN(5)]
ASSIGNMENTS = [Persistent(), Persistent(7), Static()]


@pytest.mark.parametrize(
    ("order", "assignment"),
    [*product(ORDERS, ASSIGNMENTS[:1]), *product(ORDERS[2:3], ASSIGNMENTS[1:])],
    ids=str,
)
def test_schedulers(order: Any, assignment: Any) -> None:
    scheduler = TileScheduler(order, assignment)
    for config in (GemmConfig(64, 32, cluster_m=2, schedule="pingpong"), GemmConfig(64, 32, consumers=1)):
        for size in ((1100, 777, 200), (64, 32, 64)):
            case = Case(*size)
            check(case, gemm_of(config, case, scheduler), "cuda", f"{scheduler} {config}")


# --- the heuristic's choices, and matmul -------------------------------------------------------------------

CHOSEN_SIZES = [
    (8, 8192, 8192), (16, 2560, 8192), (511, 511, 511), (1000, 999, 1001), (1, 1, 1), (128, 128, 16),
    (2048, 576, 7168), (1408, 1408, 384), (64, 4096, 14336), (128, 128, 65536), (2112, 132, 7168),
]  # fmt: skip


@pytest.mark.parametrize("size", CHOSEN_SIZES, ids=str)
def test_chosen_configuration(size: tuple[int, int, int]) -> None:
    gemm = cutegemm.compile(size, "bfloat16")
    check(Case(*size), gemm, "cuda", gemm.config)


def test_cancelling_sums() -> None:
    """Terms around 1 whose sum is near 0: a partial sum kept in 16 bits would show."""
    generator = torch.Generator("cuda").manual_seed(seed := fresh_seed())
    half = torch.rand(64, 7168, generator=generator, device="cuda") * 2 - 1
    a = torch.cat([half, -half], dim=1).to(BF16)
    weights = torch.rand(7168, 512, generator=generator, device="cuda") * 2 - 1
    b = torch.cat([weights, weights + torch.randn_like(weights) * 2**-6], dim=0).to(BF16)
    found = list(error_complaints(cutegemm.matmul(a, b), a, b))
    assert not found, (seed, found)


def test_matmul_reads_everything_off_the_tensors() -> None:
    for dtype, out_dtype, (a_major, b_major, out_major), batches in (
        (BF16, BF16, ("k", "k", "n"), None),
        (F16, F32, ("m", "n", "m"), None),
        (BF16, BF16, ("m", "k", "n"), 3),
    ):
        case = Case(200, 136, 328, batches, dtype, out_dtype, a_major, b_major, out_major)
        operands = check(case, cutegemm.matmul, "cuda", "matmul")
        if out_dtype == dtype and out_major == "n":
            again = cutegemm.matmul(operands.a.tensor, operands.b.tensor)
            assert torch.equal(again, operands.out.tensor)
            assert again.is_contiguous()


def test_dense_tensors_and_a_result_of_the_gemm_s_own() -> None:
    """No padding, as torch allocates; out left to the gemm, in both of its layouts."""
    for out_major in "nm":
        gemm = gemm_for(None, (BF16, BF16), ("k", "k", out_major))
        a, w = (
            torch.randn(264, 520, device="cuda", dtype=BF16),
            torch.randn(136, 520, device="cuda", dtype=BF16),
        )
        out = gemm(a, w.t())
        assert out.shape == (264, 136)
        assert out.stride() == ((136, 1) if out_major == "n" else (1, 264))
        assert not list(error_complaints(out, a, w.t()))


@pytest.mark.parametrize("size", [(136, 999, 64), (999, 136, 64), (101, 103, 104)], ids=str)
def test_a_result_with_odd_lines(size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, w = (torch.randn(rows, k, device="cuda", dtype=BF16) for rows in (m, n))
    for out_major in "nm":
        out = gemm_for(None, (BF16, BF16), ("k", "k", out_major))(a, w.t())
        assert out.shape == (m, n)
        assert not list(error_complaints(out, a, w.t()))


def test_a_single_row_of_any_pitch() -> None:
    """With one row there is no pitch to keep: a dense (1, 999) is an ordinary operand."""
    a = torch.randn(1, 999, device="cuda", dtype=BF16)
    w = torch.randn(72, 1000, device="cuda", dtype=BF16)[:, :999]
    gemm = gemm_for(None)
    assert not list(error_complaints(gemm(a, w.t()), a, w.t()))
    assert not list(error_complaints(gemm(a[:, :64], w[:71, :64].t()), a[:, :64], w[:71, :64].t()))


@pytest.mark.parametrize("which", ["rows of a", "columns of b", "batches of a"])
def test_expanded_operands(which: str) -> None:
    row = torch.randn(1, 64, device="cuda", dtype=BF16)
    a, w = torch.randn(96, 64, device="cuda", dtype=BF16), torch.randn(72, 64, device="cuda", dtype=BF16)
    if which == "rows of a":
        a = row.expand(96, 64)
    elif which == "columns of b":
        w = row.expand(72, 64)
    if which == "batches of a":
        a, b = a.expand(3, 96, 64), torch.randn(3, 72, 64, device="cuda", dtype=BF16).mT
    else:
        b = w.t()
    out = cutegemm.matmul(a, b)
    assert not list(error_complaints(out, a, b))


@pytest.mark.parametrize("size", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (128, 128, 0), (10, 43200, 0)])
@pytest.mark.parametrize("batches", [None, 0, 2])
def test_empty_products(size: tuple[int, int, int], batches: int | None) -> None:
    case = Case(*size, batches)
    operands = Operands.make(case, "cuda")
    gemm = gemm_of(None, case)
    for _ in range(2):
        operands.out.tensor.fill_(float("nan"))
        gemm(operands.a.tensor, operands.b.tensor, out=operands.out.tensor)
        assert not operands.out.tensor.count_nonzero()
        operands.judge("empty")
    assert gemm(operands.a.tensor, operands.b.tensor).shape == case.shapes[2]


# --- values ------------------------------------------------------------------------------------------------

SMALL = GemmConfig(64, 72, consumers=1)


def assert_same_specials(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """NaN where a float64 product is NaN, infinities of its sign at its places, finite elsewhere."""
    truth = a.double() @ b.double()
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out.isposinf(), truth.isposinf())
    assert torch.equal(out.isneginf(), truth.isneginf())


def inputs(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense a (m, k) and b (k, n), both K-major, all elements finite and none zero."""
    a, w = (torch.rand(rows, k, device="cuda").add_(0.5).to(dtype) for rows in (m, n))
    return a, w.t()


def test_a_nan_stays_in_its_row_and_column() -> None:
    a, b = inputs(200, 136, 328)
    a[3, 5] = float("nan")
    out = gemm_for(SMALL)(a, b)
    assert out[3].isnan().all()
    assert int(out.isnan().sum()) == 136
    a[3, 5] = 1
    b[7, 11] = float("nan")
    out = gemm_for(SMALL)(a, b)
    assert out[:, 11].isnan().all()
    assert int(out.isnan().sum()) == 200


def test_infinities() -> None:
    inf = float("inf")
    a, b = inputs(200, 136, 328)
    a[2, 0], b[0, 4] = inf, 0  # inf * 0
    a[9, 100], b[100, 70] = -inf, -1
    a[150, 1], a[150, 2] = inf, inf  # inf - inf in column 8
    b[1, 8], b[2, 8] = 1, -1
    out = gemm_for(SMALL)(a, b)
    assert_same_specials(out, a, b)
    assert out[2, 4].isnan()
    assert out[150, 8].isnan()
    assert out[9, 70] == inf
    assert out[9, 71] == -inf


def test_float16_overflows_to_infinity() -> None:
    a, b = inputs(130, 136, 64, F16)
    a[1], a[2] = 200, -200
    b[:, 5] = 200
    out = gemm_for(SMALL, (F16, F16))(a, b)
    assert out[1, 5] == float("inf")
    assert out[2, 5] == float("-inf")
    assert int(out.isinf().sum()) == 2
    wide = gemm_for(SMALL, (F16, F32))(a, b)
    assert wide[1, 5] == 64 * 200 * 200


def test_nan_behind_the_end_of_k_is_not_read() -> None:
    for k in (1, 8, 100, 1001):
        a = torch.full((130, 1024), float("nan"), device="cuda", dtype=BF16)
        w = a.clone()
        a[:, :k], w[:, :k] = torch.randn(130, k, device="cuda"), torch.randn(130, k, device="cuda")
        a, b = a[:, :k], w[:, :k].t()
        assert not list(error_complaints(gemm_for(SMALL)(a, b), a, b)), k


@pytest.mark.parametrize(
    "config",
    [GemmConfig(128, 256, cluster_m=2, cluster_n=2), GemmConfig(64, 72, schedule="pingpong"), SMALL],
    ids=str,
)  # fmt: skip
def test_a_thousand_runs_are_bitwise_equal(config: GemmConfig) -> None:
    case = Case(1000, 999, 1001)
    gemm = gemm_of(config, case)
    operands = check(case, gemm, "cuda", config)
    a, b, out = operands.a.tensor, operands.b.tensor, operands.out.tensor
    first = out.clone().view(torch.int16)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        gemm(a, b, out=out)
        different += (out.view(torch.int16) != first).sum()
    assert int(different) == 0


# --- more elements than 32 bits count ----------------------------------------------------------------------


def needs_gigabytes(count: int) -> None:
    """Skips where the GPU has less memory free."""
    free, _ = torch.cuda.mem_get_info()
    if free < count * 2**30:
        pytest.skip(f"needs {count} GiB of free GPU memory, {free / 2**30:.0f} are there")


@pytest.fixture
def _memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_memory_given_back")
@pytest.mark.parametrize("batched", [False, True], ids=["matrix", "batch of one"])
def test_more_than_2_31_elements_of_a(batched: bool) -> None:
    needs_gigabytes(10)
    m, n, k = 65537, 128, 32768
    a = torch.empty(m, k, device="cuda", dtype=BF16)
    for rows in a.split(4096):
        rows.normal_()
    w = torch.randn(n, k, device="cuda", dtype=BF16).mul_(k**-0.5)
    if batched:
        out = cutegemm.matmul(a.unsqueeze(0), w.t().unsqueeze(0)).squeeze(0)
    else:
        out = cutegemm.matmul(a, w.t())
    for rows in (slice(0, 128), slice(m // 2, m // 2 + 128), slice(m - 257, m)):
        assert not list(error_complaints(out[rows], a[rows], w.t())), rows
    assert not out.isnan().any()


@pytest.mark.usefixtures("_memory_given_back")
@pytest.mark.parametrize("out_major", ["n", "m"])
def test_more_than_2_31_elements_of_out(out_major: str) -> None:
    needs_gigabytes(10)
    m, n, k = 65544, 32776, 64
    assert m * n > 2**31
    a, w = (torch.randn(rows, k, device="cuda", dtype=BF16) for rows in (m, n))
    gemm = gemm_for(None, (BF16, BF16), ("k", "k", out_major))
    out = torch.empty((m, n) if out_major == "n" else (n, m), device="cuda", dtype=BF16).fill_(float("nan"))
    out = gemm(a, w.t(), out=out if out_major == "n" else out.t())
    for rows in (slice(0, 128), slice(m // 2, m // 2 + 128), slice(m - 256, m)):
        assert not list(error_complaints(out[rows], a[rows], w.t())), rows
    parts = out.split(4096) if out_major == "n" else out.t().split(4096)
    assert not any(bool(part.isnan().any()) for part in parts)


@pytest.mark.usefixtures("_memory_given_back")
def test_batches_further_than_2_31_elements_apart() -> None:
    needs_gigabytes(12)
    batches, m, n, k = 3, 128, 136, 64
    stride = 2**30 + 4096
    memory = torch.full((2 * stride + m * k,), float("nan"), device="cuda", dtype=BF16)
    a = memory.as_strided((batches, m, k), (stride, k, 1))
    a.copy_(torch.randn(batches, m, k, device="cuda"))
    w = torch.randn(batches, n, k, device="cuda", dtype=BF16)
    assert not list(error_complaints(cutegemm.matmul(a, w.mT), a, w.mT))
