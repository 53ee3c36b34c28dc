"""Where the operands of an epilogue and the result may lie, in the emulator: anywhere, or it is refused."""

import ctypes
from typing import Any

import pytest
import torch
from epilogue_checks import SMALL, complaint, inputs, judge

import cutegemm
from cutegemm import epilogue as epi
from cutegemm.callrecord import CallRecord, Outcome
from cutegemm.emulator.arguments import Addresses
from cutegemm.emulator.host import TensorArgument
from cutegemm.emulator.run import run
from cutegemm.epilogue import library
from cutegemm.epilogue.call import emulated_argument
from cutegemm.errors import OperandTypeError, ProblemError
from cutegemm.fusedgemm import FusedGemm

M, N, K = 72, 40, 64
BF16 = torch.bfloat16


@epi.fuse
def affine(acc: Any, alpha: epi.Scalar, bias: epi.Row, factor: epi.Col, c: epi.Tile) -> Any:
    """One operand of each kind."""
    return alpha * acc * factor + bias + c


def gemm_of(fused: epi.Fused, *, batched: bool = False, **options: Any) -> FusedGemm:
    """Sizes open, so that the tests of this file share few kernels."""
    shape = (None,) * (4 if batched else 3)
    options = {"config": SMALL, "target": "sm_90a", **options}
    gemm = cutegemm.compile(shape, "bfloat16", epilogue=fused, **options)
    assert isinstance(gemm, FusedGemm)
    return gemm


def flat(count: int, start: int, dtype: torch.dtype = BF16, after: int = 64) -> torch.Tensor:
    """Random elements that begin ``start`` elements into a buffer, NaN before and behind."""
    buffer = torch.full((start + count + after,), float("nan"), dtype=dtype)
    buffer[start : start + count] = torch.randn(count, generator=torch.Generator().manual_seed(start))
    return buffer[start : start + count]


def operands(start: int = 0) -> dict[str, Any]:
    """Contiguous slices that all begin so many elements into their buffers."""
    return {
        "alpha": flat(1, start, torch.float32)[0],
        "bias": flat(N, start),
        "factor": flat(M, start, torch.float16),
        "c": flat(M * N, start).view(M, N),
    }


@pytest.mark.parametrize("start", [1, 2, 3, 4, 8])
def test_contiguous_slices_with_any_start(start: int) -> None:
    a, b = (flat(M * K, start).view(M, K), flat(N * K, start).view(N, K).t())
    given = operands(start)
    out = flat(M * N, start).view(M, N)
    around = out._base
    assert around is not None
    before = around.clone()
    before[start : start + M * N] = 0
    emulation = gemm_of(affine).emulate(a, b, out=out, **given)
    judge(emulation, affine.reference(a, b, **given))
    around[start : start + M * N] = 0
    assert torch.equal(around.view(torch.int16), before.view(torch.int16)), "written beside out"


def test_pitches_are_those_of_the_tensors() -> None:
    """Windows of wider buffers, every pitch another; nothing takes a pitch for a size."""
    a, b = flat(M * 192, 0).view(M, 192)[:, :K], flat(N * 136, 0).view(N, 136)[:, :K].t()
    for wide in (N + 8, N + 5):  # what TMA can address, and what it cannot
        given = {**operands(), "c": flat(M * (wide + 16), 0).view(M, wide + 16)[:, :N]}
        out = flat(M * wide, 0).view(M, wide)[:, :N]
        judge(gemm_of(affine).emulate(a, b, out=out, **given), affine.reference(a, b, **given))


@pytest.mark.parametrize("size", [(129, 17), (65, 1), (1, 9)], ids=str)
def test_vectors_that_end_with_their_memory(size: tuple[int, int]) -> None:
    """Tiles reach beyond the product; a value read from behind a vector's end would be a fault."""
    m, n = size
    a, b = inputs(m, n, K)
    given = {"alpha": 0.5, "bias": flat(n, 0, after=0), "factor": flat(m, 0, torch.float16, after=0)}
    given["c"] = flat(m * n, 0, after=0).view(m, n)
    judge(gemm_of(affine).emulate(a, b, **given), affine.reference(a, b, **given))


@pytest.mark.parametrize("far", [2**31, 2**33 + 8])
def test_a_stride_of_one_element_may_be_anything(far: int) -> None:
    """A batch of one: its stride is longer than 32 bits hold, and leads nowhere."""
    a, b = inputs(M, N, K)
    c = torch.randn(M, N).to(BF16)
    out = torch.full((M, N), float("nan"), dtype=BF16)

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided((1, *tensor.shape), (far, *tensor.stride()))

    given = {"alpha": 2.0, "beta": -1.0}
    gemm = gemm_of(library.alpha_beta, batched=True)
    gemm.emulate(alone(a), alone(b), c=alone(c), out=alone(out), **given)
    assert complaint(out, library.alpha_beta.reference(a, b, c=c, **given)) is None


# --- C and D in one place ----------------------------------------------------------------------------------


def test_c_is_the_output_itself() -> None:
    """D = alpha A B + C with D in C's place, alpha a tensor, beta 1."""
    a, b = inputs(M, N, K)
    c = torch.randn(M, N).to(BF16)
    given = {"alpha": torch.tensor(0.5), "beta": 1.0}
    truth = library.alpha_beta.reference(a, b, c=c.clone(), **given)
    emulation = gemm_of(library.alpha_beta).emulate(a, b, c=c, out=c, **given)
    assert emulation.out is c
    judge(emulation, truth)


def test_no_product_is_left_with_c() -> None:
    c = torch.randn(M, N).to(BF16)
    a, b = torch.empty(M, 0, dtype=BF16), torch.empty(0, N, dtype=BF16)
    for beta in (1.0, -0.5, 0.0):
        out = torch.full((M, N), float("nan"), dtype=BF16)
        gemm_of(library.alpha_beta, a_major="k", b_major="n").emulate(a, b, c=c, out=out, beta=beta)
        assert torch.equal(out, (beta * c.float()).to(BF16))


@pytest.mark.parametrize("sizes", [(0, M, N, K), (2, 0, N, K), (2, M, 0, 0)], ids=str)
def test_no_elements_no_launch(sizes: tuple[int, int, int, int]) -> None:
    batch, m, n, k = sizes
    a, b = inputs(m, n, k, batch)
    c = torch.randn(batch, m, n).to(BF16)
    emulation = gemm_of(library.alpha_beta, batched=True).emulate(a, b, c=c, beta=1.0)
    assert emulation.launch is None
    assert emulation.out is not None
    assert tuple(emulation.out.shape) == (batch, m, n)


SQUARE = 64


def places() -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    """An output and a C each, and whether the pair may be used."""

    def square(start: int = 0) -> torch.Tensor:
        return memory[start : start + SQUARE * SQUARE].view(SQUARE, SQUARE)

    memory = torch.randn(3 * SQUARE * SQUARE).to(BF16)
    halves = memory.view(torch.float16)
    wide = memory[: 2 * SQUARE * SQUARE].view(SQUARE, 2 * SQUARE)
    return {
        "apart": (square(), square(SQUARE * SQUARE), True),
        "the same": (square(), square(), True),
        "the same, pitched": (wide[:, :SQUARE], wide[:, :SQUARE], True),
        "transposed": (square(), square().t(), False),
        "a row later": (square(), square(SQUARE), False),
        "another pitch": (square(), wide[:, :SQUARE], False),
        "one row for all": (square(), square()[:1].expand(SQUARE, SQUARE), False),
        "other elements": (square(), halves[: SQUARE * SQUARE].view(SQUARE, SQUARE), False),
    }


def host_outcome(gemm: FusedGemm, a: Any, b: Any, out: Any, operands: dict[str, Any]) -> Outcome:
    """What the compiled host code says to a repeated call, whose overlaps nobody has looked at."""
    call = gemm._checked(a, b, (torch.empty_like(out), {}), operands, "cpu")
    kernels = gemm._kernels_for(call.epilogue)
    choice = kernels.choice(kernels.problem.with_sizes(*call.sizes), gemm._gpu(), call.paths)
    record, outcome = CallRecord(*call.sizes, 132, 0, 0, 0), ctypes.c_int32(-1)
    extras: list[Any] = []
    for operand in call.epilogue.operands:
        extras += emulated_argument(operand, call.operands[operand.name], "n")
    arguments = (TensorArgument(a, -1), TensorArgument(b, -2), TensorArgument(out, -1), Addresses(record, {}))
    run(kernels.artifact(choice), *arguments, outcome, None, *extras)
    return Outcome(outcome.value)


@pytest.mark.parametrize("place", places())
def test_c_may_be_the_output_and_nothing_else_of_it(place: str) -> None:
    """By the checks of a first call, and by the host code's own on a call like one that went well."""
    out, c, allowed = places()[place]
    a, b = inputs(SQUARE, SQUARE, SQUARE)
    gemm = gemm_of(library.alpha_beta)
    given = {"c": c, "beta": 1.0, "alpha": 1.0}
    wanted = Outcome.LAUNCHED if allowed else Outcome.MAY_OVERLAP
    assert host_outcome(gemm, a, b, out, given) == wanted
    if not allowed:
        with pytest.raises(ProblemError, match="out shares memory with c"):
            gemm.emulate(a, b, out=out, **given)


def test_a_vector_at_the_output_s_address_is_refused() -> None:
    out = torch.zeros(SQUARE, SQUARE, dtype=BF16)
    a, b = inputs(SQUARE, SQUARE, SQUARE)
    gemm = gemm_of(library.bias)
    assert host_outcome(gemm, a, b, out, {"bias": out[0]}) == Outcome.MAY_OVERLAP
    assert host_outcome(gemm, a, b, out, {"bias": out[0].clone()}) == Outcome.LAUNCHED
    with pytest.raises(ProblemError, match="out shares memory with bias"):
        gemm.emulate(a, b, out=out, bias=out[0])


# --- views that memory does not hold the values of --------------------------------------------------------


def negated(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A view torch negates as it reads, made as users make one."""
    parts = torch.randn(*shape, 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    view = torch.view_as_complex(parts).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("k", [K, 1])
def test_a_negated_input_counts_as_what_it_shows(k: int) -> None:
    a, b = negated(M, k, dtype=torch.float16), torch.randn(N, k).half().t()
    gemm = cutegemm.compile((None, None, None), "float16", config=SMALL, target="sm_90a")
    found = gemm.emulate(a, b).out
    assert found is not None
    assert torch.allclose(found.float(), a.float() @ b.float(), rtol=2**-9, atol=1e-2)


def test_a_negated_output_or_operand_is_refused() -> None:
    a, b = inputs(M, N, K)
    gemm = gemm_of(library.bias)
    with pytest.raises(OperandTypeError, match=r"^bias is a view that torch negates .* bias\.resolve_neg"):
        gemm.emulate(a, b, bias=negated(N))
    half = cutegemm.compile((None, None, None), "float16", config=SMALL, target="sm_90a")
    with pytest.raises(OperandTypeError, match=r"^out is a view that torch negates"):
        half.emulate(a.half(), b.half(), out=negated(M, N, dtype=torch.float16))
