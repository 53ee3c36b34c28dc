"""Every order with every assignment on a GPU: right products, the same bits, counters that need no reset."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from gpu_checks import Case, Operands, check

import cutegemm
from cutegemm import Gemm, GemmConfig
from cutegemm.fuzz.judge import torch_sums_in_float32
from cutegemm.scheduler import (
    Blocked,
    ColumnMajor,
    Dynamic,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    Persistent,
    RowMajor,
    SplitK,
    Static,
    StreamK,
    TileScheduler,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

ORDERS = [RowMajor(), ColumnMajor(), GroupedM(3), GroupedN(5), Blocked(3, 5), Morton(), Hilbert()]
ASSIGNMENTS = [
    Static(), Persistent(), Persistent(7), Dynamic(), Dynamic(7), SplitK(2), SplitK(8), StreamK(), StreamK(7),
    StreamK(ordered=False),
]  # fmt: skip
SHARING = [Dynamic(), StreamK(), StreamK(ordered=False)]
# Ragged on all sides, one element, one tile, lines of tiles, K of one stage and of many.
SIZES = [
    (1000, 999, 1001), (1, 8, 64), (64, 32, 64), (1, 1, 8), (3000, 40, 72), (24, 4096, 136), (130, 200, 8192),
    (2112, 1040, 64), (704, 768, 520), (8, 8, 20000),
]  # fmt: skip
CLUSTERED = GemmConfig(64, 32, cluster_m=2, schedule="pingpong")
ALONE = GemmConfig(64, 32, consumers=1)
# What sharing along K has to get right beside the order: shares of both kinds, both stores, clusters.
CONFIGS = [
    (GemmConfig(128, 256, cluster_m=2), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(192, 160), (F16, F32), ("m", "n", "m")),
    (GemmConfig(128, 152, schedule="pingpong"), (BF16, BF16), ("k", "k", "n")),
    (GemmConfig(64, 112, cluster_n=2, schedule="pingpong"), (F16, F16), ("k", "n", "m")),
    (GemmConfig(64, 16, 128, consumers=1, swap_ab=True), (BF16, F32), ("k", "k", "n")),
    (GemmConfig(128, 128, cluster_m=2, cluster_n=2), (BF16, BF16), ("m", "k", "n")),
]


@pytest.fixture(scope="module", autouse=True)
def _honest_reference() -> Iterator[None]:
    with torch_sums_in_float32():
        yield


@cache
def gemm_of(config: GemmConfig, case: Case, scheduler: TileScheduler) -> Gemm:
    return cutegemm.compile(
        (None,) * (3 if case.l is None else 4), case.dtype, out_dtype=case.out_dtype, a_major=case.a_major,
        b_major=case.b_major, out_major=case.out_major, config=config, scheduler=scheduler,
    )  # fmt: skip


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_with_every_assignment(order: Any, assignment: Any) -> None:
    scheduler = TileScheduler(order, assignment)
    clustered = ORDERS.index(order) % 2 == 1 and not isinstance(assignment, SplitK)
    config = CLUSTERED if clustered else ALONE
    gemm = cutegemm.compile((None, None, None), BF16, config=config, scheduler=scheduler)
    for size in SIZES:
        check(Case(*size), gemm, "cuda", f"{scheduler} {config}")


@pytest.mark.parametrize("assignment", SHARING, ids=str)
@pytest.mark.parametrize(("config", "dtypes", "majors"), CONFIGS, ids=str)
def test_configurations(
    config: GemmConfig, dtypes: tuple[torch.dtype, torch.dtype], majors: tuple[str, str, str], assignment: Any
) -> None:
    scheduler = TileScheduler(GroupedM(4), assignment)
    for size, batches in product(((1000, 999, 1001), (136, 2000, 4104), (1, 8, 64)), (None, 3)):
        case = Case(*size, batches, *dtypes, *majors)
        kind = Case(0, 0, 0, batches, *dtypes, *majors)
        check(case, gemm_of(config, kind, scheduler), "cuda", f"{scheduler} {config}")


@pytest.mark.parametrize("size", [(300, 4096, 8192), (128, 512, 16384), (2112, 2112, 2048)], ids=str)
@pytest.mark.parametrize("config", [GemmConfig(128, 128), ALONE, CLUSTERED], ids=str)
def test_a_stream_gives_the_same_bits_on_every_run(config: GemmConfig, size: tuple[int, int, int]) -> None:
    """Whoever comes last, also while another stream keeps SMs busy."""
    m, n, k = size
    a, w = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16)
    gemm = cutegemm.compile(
        size, BF16, out_dtype=F32, config=config, scheduler=TileScheduler(GroupedM(8), StreamK())
    )
    first = gemm(a, w.t()).clone()
    noise = torch.randn(1024, 1024, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    for run in range(20):
        if run >= 10:
            with torch.cuda.stream(side):
                noise @ noise
        out = torch.full_like(first, float("nan"))
        assert torch.equal(gemm(a, w.t(), out=out), first)
    torch.cuda.synchronize()


@pytest.mark.parametrize("assignment", SHARING, ids=str)
def test_two_streams_at_once(assignment: Any) -> None:
    """Small launches that run side by side: neither takes tasks or parts of the other's."""
    gemm = cutegemm.compile(
        (None, None, None), BF16, config=ALONE, scheduler=TileScheduler(RowMajor(), assignment)
    )
    streams = [torch.cuda.Stream() for _ in range(3)]
    operands = [[Operands.make(Case(300, 200 + 8 * i, 2056), "cuda") for _ in range(8)] for i in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, mine in zip(streams, operands, strict=True):
            for o in mine:
                gemm(o.a.tensor, o.b.tensor, out=o.out.tensor, stream=stream)
    torch.cuda.synchronize()
    for mine in operands:
        for o in mine:
            o.judge(assignment)


@pytest.mark.parametrize("assignment", SHARING, ids=str)
def test_graphs_replayed_at_once(assignment: Any) -> None:
    """Two graphs of several launches each, replayed on two streams beside launches outside of any graph."""
    gemm = cutegemm.compile(
        (None, None, None), BF16, config=ALONE, scheduler=TileScheduler(GroupedM(2), assignment)
    )
    cases = [Case(300, 264, 2056), Case(130, 72, 520), Case(1000, 136, 264)]
    sets = [[Operands.make(case, "cuda") for case in cases] for _ in range(3)]
    graphs = []
    for mine in sets[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for o in mine:
                gemm(o.a.tensor, o.b.tensor, out=o.out.tensor)
        graphs.append(graph)
    for mine in sets[:2]:
        for o in mine:
            o.out.tensor.fill_(float("nan"))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for o in sets[2]:
            gemm(o.a.tensor, o.b.tensor, out=o.out.tensor)
    torch.cuda.synchronize()
    for mine in sets:
        for o in mine:
            o.judge(assignment)


@pytest.mark.parametrize("assignment", SHARING, ids=str)
def test_a_graph_holds_nothing_but_the_launches(assignment: Any) -> None:
    """No node that resets a counter: as many kernels run in a replay as were launched."""
    gemm = cutegemm.compile(
        (None, None, None), BF16, config=ALONE, scheduler=TileScheduler(GroupedM(2), assignment)
    )
    operands = Operands.make(Case(300, 264, 2056), "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            gemm(operands.a.tensor, operands.b.tensor, out=operands.out.tensor)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) == 3, ran
    assert all("gemm_sm90a" in name for name in ran), ran
    operands.judge(assignment)


def test_a_stream_of_parts_that_cancel() -> None:
    """Parts far larger than the sum: they are kept in float32."""
    m, n, k = 64, 512, 8192
    a = torch.rand(m, k, device="cuda", dtype=BF16) * 100
    a[:, k // 2 :] = -a[:, : k // 2]
    w = torch.rand(n, k, device="cuda", dtype=BF16)
    w[:, k // 2 :] = w[:, : k // 2]
    w[:, -64:] += torch.randn(n, 64, device="cuda", dtype=BF16)
    truth = a.double() @ w.t().double()
    for ordered in (True, False):
        scheduler = TileScheduler(GroupedM(1), StreamK(ordered=ordered))
        ours = cutegemm.compile((m, n, k), BF16, out_dtype=F32, config=ALONE, scheduler=scheduler)(a, w.t())
        theirs = torch.mm(a, w.t()).double()
        assert (ours.double() - truth).norm() <= 2 * (theirs - truth).norm()


@pytest.mark.parametrize("assignment", [StreamK(), StreamK(ordered=False), SplitK(8), Dynamic()], ids=str)
def test_few_rows_and_many_columns(assignment: Any) -> None:
    """Products of few rows, for which stream-K kernels have been seen to fail and to hang."""
    clusters = not isinstance(assignment, SplitK)
    for m, n, k in ((8, 8192, 8192), (16, 2560, 8192), (1, 4096, 14336)):
        for config in (GemmConfig(128, 128, cluster_m=2) if clusters else GemmConfig(128, 128), ALONE):
            gemm = cutegemm.compile(
                (m, n, k), BF16, config=config, scheduler=TileScheduler(RowMajor(), assignment)
            )
            check(Case(m, n, k), gemm, "cuda", f"{assignment} {config}")


@pytest.mark.parametrize("assignment", [StreamK(), SplitK(8)], ids=str)
def test_one_tile_of_very_long_k_a_hundred_times(assignment: Any) -> None:
    m, n, k = 128, 128, 65536
    a, w = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16)
    gemm = cutegemm.compile(
        (m, n, k),
        BF16,
        out_dtype=F32,
        config=GemmConfig(128, 128),
        scheduler=TileScheduler(RowMajor(), assignment),
    )
    first = gemm(a, w.t()).clone()
    truth = a.double() @ w.t().double()
    assert (first.double() - truth).norm() <= 2e-5 * truth.norm()
    side, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=BF16)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(100):
        if run >= 50:
            with torch.cuda.stream(side):
                noise @ noise
        different += (gemm(a, w.t()) != first).sum()
    assert int(different) == 0


NEIGHBOUR = """
    import torch
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    print("ready", flush=True)
    while True:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
"""


@pytest.mark.parametrize("assignment", SHARING, ids=str)
def test_beside_another_process(assignment: Any) -> None:
    """Workers that are stopped and started as a second process takes its turns on the GPU."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NEIGHBOUR)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline().strip() == "ready"
        scheduler = TileScheduler(GroupedM(8), assignment)
        gemm = cutegemm.compile((None, None, None), BF16, config=GemmConfig(128, 128), scheduler=scheduler)
        operands = [Operands.make(Case(2100, 2056, 8192), "cuda") for _ in range(3)]
        for _ in range(20):
            for o in operands:
                gemm(o.a.tensor, o.b.tensor, out=o.out.tensor)
        torch.cuda.synchronize()
        for o in operands:
            o.judge(assignment)
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()
