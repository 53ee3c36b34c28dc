"""Fused kernels on the GPU: the library, random epilogues, shared memory, graphs, what is compiled when."""

import os
import time
from typing import Any

import pytest
import torch
from epilogue_checks import Truth, complaint, operands_for
from epilogue_random import PLANS, Plan
from gpu_checks import fresh_seed
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmConfig
from cutegemm import epilogue as epi
from cutegemm.cache import default_cache
from cutegemm.epilogue import library
from cutegemm.errors import OperandTypeError, ProblemError
from cutegemm.fuzz.judge import torch_sums_in_float32
from cutegemm.scheduler import Dynamic, StreamK, TileScheduler

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("CUTEGEMM_RANDOM_EPILOGUES", "500"))  # of all groups together
GROUPS = 10
SHAPES = [(1024, 2048, 512), (777, 1002, 264), (64, 4096, 1024), (4096, 512, 128)]


def inputs(m: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random a (M, K) and b (K, N) on the GPU, K contiguous, with results around 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(m, k, generator=generator, device="cuda").bfloat16()
    b = torch.randn(n, k, generator=generator, device="cuda") * max(1, k) ** -0.5
    return a, b.bfloat16().t()


def on_gpu(operands: dict[str, Any]) -> dict[str, Any]:
    """Tensors of operands on the GPU."""
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in operands.items()}


def judge(result: Any, truth: Any, what: object) -> None:
    """Fails unless a call's result is what the reference says."""
    main, further = result if isinstance(result, tuple) else (result, {})
    expected, others = truth if isinstance(truth, tuple) else (truth, {})
    assert set(further) == set(others)
    found = {"out": complaint(main.cpu(), expected.cpu())}
    found |= {name: complaint(further[name].cpu(), value.cpu()) for name, value in others.items()}
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, (what, wrong)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", library.every())
def test_the_library(name: str, shape: tuple[int, int, int]) -> None:
    fused, seed = library.every()[name], fresh_seed()
    a, b = inputs(*shape, seed)
    operands = on_gpu(operands_for(fused, *shape[:2], seed))
    with torch.no_grad(), torch_sums_in_float32():
        gemm: Any = cutegemm.compile(shape, torch.bfloat16, epilogue=fused)
        for _ in range(2):
            judge(gemm(a, b, **operands), fused.reference(a, b, **operands), (name, shape, seed))


def random_epilogue(plan: Plan, shape: tuple[int, int, int], out_dtype: str, streamed: bool) -> None:
    """One drawn epilogue, fused and judged."""
    fused = plan.fused()
    a, b = inputs(*shape, 3)
    operands = on_gpu(operands_for(fused, *shape[:2]))
    scheduler = TileScheduler(assignment=StreamK()) if streamed else None
    gemm: Any = cutegemm.compile(
        shape, torch.bfloat16, out_dtype=out_dtype, epilogue=fused, scheduler=scheduler
    )
    result = gemm(a, b, **operands)
    main, further = result if isinstance(result, tuple) else (result, {})
    Truth(fused, a, b, operands).judge(main, further, plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", range(GROUPS), ids="group{}".format)
def test_random_epilogues(group: int) -> None:
    """A tenth of them, other ones in each group: groups can run in processes of their own."""
    drawn = given(
        plan=PLANS,
        shape=st.sampled_from(SHAPES),
        out_dtype=st.sampled_from(["bfloat16", "float32"]),
        streamed=st.booleans(),
    )(random_epilogue)
    limits = settings(
        max_examples=-(-EXAMPLES // GROUPS),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    with torch.no_grad(), torch_sums_in_float32():
        seeded(GROUPS * fresh_seed() + group)(limits(drawn))()


@pytest.mark.parametrize("scheduler", [None, Dynamic(), StreamK()], ids=str)
def test_accumulation_in_place_again_and_again(scheduler: Any) -> None:
    assignment = None if scheduler is None else TileScheduler(assignment=scheduler)
    options = {"out_dtype": "float32", "epilogue": library.alpha_beta, "scheduler": assignment}
    gemm: Any = cutegemm.compile((1024, 1024, 512), "bfloat16", **options)
    a, b = inputs(1024, 1024, 512, 1)
    c = torch.zeros(1024, 1024, device="cuda")
    for _ in range(8):
        gemm(a, b, c=c, out=c, alpha=0.5, beta=1.0)
    with torch_sums_in_float32():
        assert complaint(c.cpu(), (4 * (a.float() @ b.float())).cpu()) is None
    c.fill_(float("nan"))
    gemm(a, b, c=c, out=c, beta=0.0)
    assert not c.isnan().any()


def test_repeated_calls_have_the_same_bits() -> None:
    gemm: Any = cutegemm.compile((2048, 2048, 1024), "bfloat16", epilogue=library.residual_rms)
    a, b = inputs(2048, 2048, 1024, 2)
    residual = torch.randn(2048, 2048, device="cuda").bfloat16()
    first, further = gemm(a, b, residual=residual)
    for _ in range(20):
        again, others = gemm(a, b, residual=residual)
        assert torch.equal(first, again)
        assert torch.equal(further["squares"], others["squares"])


@pytest.mark.parametrize("known", [False, True], ids=["first call", "repeated call"])
def test_calls_follow_the_stream_given_to_the_last_sum(known: bool) -> None:
    """What finishes the reductions runs on the same stream as the kernel, after what it depends on."""
    gemm: Any = cutegemm.compile((1024, 512, 256), "bfloat16", epilogue=library.residual_rms)
    a, b = inputs(1024, 512, 256, 9)
    residual = torch.randn(1024, 512, device="cuda").bfloat16()
    if known:
        gemm(a, b, residual=residual)
    values = residual.clone()
    residual.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # some 50 ms
        residual.copy_(values)
    result = gemm(a, b, residual=residual, stream=side)
    side.synchronize()
    with torch_sums_in_float32():
        judge(result, library.residual_rms.reference(a, b, residual=values), "on a stream")


@pytest.mark.parametrize("name", ["c", "bias"])
def test_operands_written_by_the_kernel_just_before(name: str) -> None:
    """The launch overlaps the tail of the kernel before it; whoever reads an operand waits for that one."""
    fused = library.alpha_beta if name == "c" else library.bias
    gemm: Any = cutegemm.compile((1024, 256, 64), "bfloat16", epilogue=fused)
    a, b = (torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16) for rows in (1024, 256))
    shape = (1024, 256) if name == "c" else (256,)
    operand = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(1024, 256, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(3000):
        operand.fill_(i % 8)
        gemm(a, b.t(), out=out, **{name: operand})
        wrong += (out != i % 8).sum()
    assert int(wrong) == 0


def test_an_operand_at_the_output_s_address_in_a_repeated_call() -> None:
    """Like a call that went well but for the addresses: only the host code can tell."""
    gemm: Any = cutegemm.compile((256, 256, 64), "bfloat16", epilogue=library.alpha_beta)
    a, b = inputs(256, 256, 64, 10)
    c, out = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    for _ in range(2):
        gemm(a, b, c=c.t(), out=out)
    with pytest.raises(ProblemError, match="out shares memory with c"):
        gemm(a, b, c=out.t(), out=out)
    for _ in range(2):
        before = out.clone()
        with torch_sums_in_float32():
            truth = library.alpha_beta.reference(a, b, c=before)
        judge(gemm(a, b, c=out, out=out), truth, "in place")


def test_a_captured_call_reads_a_scalar_of_the_gpu_when_it_is_replayed() -> None:
    gemm: Any = cutegemm.compile((512, 512, 512), "bfloat16", epilogue=library.alpha_beta)
    a, b = inputs(512, 512, 512, 4)
    c = torch.randn(512, 512, device="cuda").bfloat16()
    alpha, out = torch.tensor(1.0, device="cuda"), torch.empty_like(c)
    gemm(a, b, c=c, out=out, alpha=alpha, beta=2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, c=c, out=out, alpha=alpha, beta=2.0)
    for value in (1.0, -0.5):
        alpha.fill_(value)
        graph.replay()
        with torch_sums_in_float32():
            truth = library.alpha_beta.reference(a, b, c=c, alpha=value, beta=2.0)
        assert complaint(out.cpu(), truth.cpu()) is None


def test_errors_of_a_call_after_a_good_one() -> None:
    gemm: Any = cutegemm.compile((None, 512, 256), "bfloat16", epilogue=library.bias)
    a, b = inputs(128, 512, 256, 5)
    bias = torch.randn(512, device="cuda")
    gemm(a, b, bias=bias)
    with pytest.raises(OperandTypeError, match="called without bias"):
        gemm(a, b)
    with pytest.raises(OperandTypeError, match="has no operand baes"):
        gemm(a, b, bias=bias, baes=bias)
    with pytest.raises(ProblemError, match="bias has shape"):
        gemm(a, b, bias=bias[:-1])
    judge(gemm(a, b, bias=bias[::1]), library.bias.reference(a, b, bias=bias), "after errors")
    wide = torch.randn(1024, device="cuda")
    judge(gemm(a, b, bias=wide[::2]), library.bias.reference(a, b, bias=wide[::2]), "strided")


def test_matmul_takes_an_epilogue() -> None:
    a, b = inputs(256, 512, 128, 6)
    bias = torch.randn(512, device="cuda").bfloat16()
    judge(
        cutegemm.matmul(a, b, epilogue=library.bias_gelu, bias=bias),
        library.bias_gelu.reference(a, b, bias=bias),
        "matmul",
    )


def test_a_first_call_and_a_new_scalar() -> None:
    @epi.fuse
    def fresh(acc: Any, scale: epi.Scalar, bias: epi.Row) -> Any:
        return epi.gelu(acc * scale + bias) * 0.8125 + 0.171875

    a, b = inputs(512, 512, 512, 7)
    bias = torch.randn(512, device="cuda").bfloat16()
    cutegemm.matmul(a, b)  # brings in the compiler
    gemm: Any = cutegemm.compile((512, 512, 512), "bfloat16", epilogue=fresh)
    started = time.perf_counter()
    gemm(a, b, scale=1.0, bias=bias)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 3.0  # 1.5 s on a machine that does nothing else
    compiled = default_cache().stats().compiled
    for scale in (2.0, 3, torch.tensor(0.5), torch.tensor(0.25, device="cuda")):
        with torch_sums_in_float32():
            judge(gemm(a, b, scale=scale, bias=bias), fresh.reference(a, b, scale=scale, bias=bias), scale)
    assert default_cache().stats().compiled == compiled


@pytest.mark.parametrize(
    "config",
    [GemmConfig(128, 256, cluster_m=2), GemmConfig(256, 128), GemmConfig(128, 128, swap_ab=True),
     GemmConfig(128, 128, schedule="pingpong", cluster_m=2), GemmConfig(64, 256, schedule="pingpong")],
    ids=str,
)  # fmt: skip
def test_large_tiles(config: GemmConfig) -> None:
    @epi.fuse
    def everything(acc: Any, scale: epi.Scalar, bias: epi.Row, factor: epi.Col, r: epi.Tile) -> Any:
        x = acc * scale + bias
        return epi.gelu(x) * factor + r, {"x": epi.cast(x, "float32"), "amax": epi.row_amax(x)}

    for shape in ((2048, 2304, 512), (1000, 1004, 256)):
        a, b = inputs(*shape, 8)
        operands = on_gpu(operands_for(everything, *shape[:2]))
        gemm: Any = cutegemm.compile(shape, "bfloat16", epilogue=everything, config=config)
        with torch_sums_in_float32():
            judge(gemm(a, b, **operands), everything.reference(a, b, **operands), (config, shape))
