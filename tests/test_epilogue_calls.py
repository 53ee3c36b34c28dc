"""Calls of a FusedGemm on tensors that claim to lie on a GPU: what is checked, prepared, and kept.

The launch itself is replaced by the epilogue's reference, so that what reaches it can be seen.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from epilogue_checks import SMALL
from gpu_stand_ins import OnGpu, on_gpu, zeros

import cutegemm
from cutegemm import epilogue as epi
from cutegemm import fusedgemm
from cutegemm.callrecord import CallRecord, Outcome
from cutegemm.errors import CutegemmError, DeviceError, OperandTypeError, ProblemError
from cutegemm.fusedgemm import FusedGemm
from cutegemm.gemm import Launch
from cutegemm.kernels import Kernels


@epi.fuse
def affine(acc: Any, bias: epi.Row, c: epi.Tile, scale: epi.Scalar = 1.0) -> Any:
    return acc * scale + bias + c, {"x": epi.cast(acc, "float32")}


Seen = list[tuple[Any, ...]]


def refuse(kernels: Kernels, sizes: tuple[int, ...], bias: torch.Tensor, c: torch.Tensor) -> None:
    """What the code around a compiled kernel refuses."""
    for operand, tensor, shape in zip(
        kernels.problem.epilogue.operands, (bias, c), (sizes[2:3], sizes[1:3]), strict=False
    ):
        if str(tensor.dtype) != f"torch.{operand.dtype}":
            raise TypeError("Mismatched dtype")
        if tuple(tensor.shape) != shape or not isinstance(tensor, OnGpu):
            raise ValueError("Mismatched shape or device")
        if operand.access == "staged" and (tensor.data_ptr() % 16 or tensor.stride(-1) != 1):
            raise ValueError("Misaligned")


@pytest.fixture(params=["sizes open", "sizes known"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[FusedGemm, Seen, Seen]:
    """A FusedGemm; what its launches were given behind the addresses; the launches prepared."""
    monkeypatch.setattr(fusedgemm, "gpu_count", lambda: 1)
    shape = (16, 24, 64) if request.param == "sizes known" else (None, None, None)
    given: Seen = []
    prepared: Seen = []

    def prepare(
        self: FusedGemm, kernels: Kernels, sizes: tuple[int, int, int, int], device: int, store: str
    ) -> Launch:
        prepared.append((*sizes, store, kernels.problem.epilogue))

        def launch(a: Any, b: Any, out: Any, record: int, outcome: int, *extras: Any) -> None:
            given.append(extras)
            bias, c, scale, address, x = extras
            if isinstance(scale, bool) or not isinstance(scale, int | float):
                raise TypeError("Mismatched type on argument #7")
            refuse(kernels, sizes, bias, c)
            asked = CallRecord.from_address(record)
            ctypes.c_int32.from_address(outcome).value = (
                Outcome.LAUNCHED if (asked.m, asked.n) == tuple(out.shape) else Outcome.OTHER_SIZES
            )
            if address:
                scale = ctypes.c_float.from_address(address).value
            result, further = affine.reference(*map(plain, (a, b)), bias=plain(bias), c=plain(c), scale=scale)
            plain(out).copy_(result)
            plain(x).copy_(further["x"])

        records = (CallRecord(*sizes, 1, known) for known in (0, 1))
        return Launch(launch, *records, lambda: on_gpu(torch.empty(sizes[1:3]).bfloat16()))

    monkeypatch.setattr(FusedGemm, "_launch_among", prepare)
    gemm: Any = cutegemm.compile(shape, "bfloat16", epilogue=affine, config=SMALL, target="sm_90a")
    return gemm, given, prepared


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without the claim."""
    return tensor.as_subclass(torch.Tensor)


def operands() -> dict[str, Any]:
    return {"bias": on_gpu(torch.randn(24)), "c": on_gpu(torch.randn(16, 24).bfloat16())}


def a_and_b() -> tuple[torch.Tensor, torch.Tensor]:
    return on_gpu(torch.randn(16, 64).bfloat16()), on_gpu(torch.randn(24, 64).bfloat16()).t()


def right(result: Any, a: torch.Tensor, b: torch.Tensor, **given: Any) -> bool:
    """Whether a call's result is the reference's."""
    out, further = result
    truth, others = affine.reference(plain(a), plain(b), **{k: plain(v) if isinstance(v, torch.Tensor) else v
                                                            for k, v in given.items()})  # fmt: skip
    return torch.equal(plain(out), truth.bfloat16()) and torch.equal(plain(further["x"]), others["x"])


def test_a_call_like_the_one_before_is_not_checked_again(
    fused: tuple[FusedGemm, Seen, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm, given, prepared = fused
    a, b = a_and_b()
    first = {**operands(), "scale": 1.0}
    assert right(gemm(a, b, **first), a, b, **first)
    monkeypatch.setattr(FusedGemm, "_checked", None)  # would fail if it were called
    for scale in (2.0, 3, torch.tensor(0.5)):
        second = {**operands(), "scale": scale}
        assert right(gemm(a, b, **second), a, b, **second)
    assert len(prepared) == 1
    assert [extras[2:4] for extras in given] == [(1.0, 0), (2.0, 0), (3, 0), (0.5, 0)]


def test_a_scalar_on_the_gpu_is_passed_by_address(fused: tuple[FusedGemm, Seen, Seen]) -> None:
    gemm, given, _ = fused
    a, b = a_and_b()
    scale = on_gpu(torch.tensor(0.25))
    for number in (scale, on_gpu(torch.tensor(0.25, dtype=torch.bfloat16))):
        result = gemm(a, b, **operands(), scale=number)
        assert isinstance(result[0], OnGpu)
    assert given[0][3] == scale.data_ptr()
    assert given[1][3] not in (0, scale.data_ptr())


def test_other_dtypes_and_strides_have_kernels_of_their_own(fused: tuple[FusedGemm, Seen, Seen]) -> None:
    gemm, _, prepared = fused
    a, b = a_and_b()
    kinds: list[dict[str, Any]] = [
        operands(),
        {**operands(), "bias": on_gpu(torch.randn(24).bfloat16())},
        {**operands(), "c": on_gpu(torch.randn(16, 24))},
        {**operands(), "c": on_gpu(torch.randn(24, 16).bfloat16()).t()},
        {**operands(), "c": on_gpu(torch.randn(16, 25).bfloat16())[:, 1:]},
    ]
    for _ in range(2):
        for one in kinds:
            assert right(gemm(a, b, **one), a, b, **one)
    epilogues = [entry[-1] for entry in prepared]
    # The last two read c in the same way, and share a launch.
    assert [e.operands[1].access for e in epilogues] == ["staged", "staged", "staged", "direct"]
    assert len(set(epilogues)) == 4


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"bias": None}, OperandTypeError, "called without bias"),
        ({"bies": 1.0}, OperandTypeError, "no operand bies"),
        ({"scale": True}, OperandTypeError, "scale is True; pass a number"),
        ({"scale": "x"}, OperandTypeError, "scale is 'x'; pass a number"),
        ({"bias": zeros(23)}, ProblemError, r"bias has shape \(23,\)"),
        ({"c": zeros(24, 16)}, ProblemError, "pass its transpose"),
        ({"c": torch.zeros(16, 24)}, DeviceError, "c lies on cpu, a and b on cuda:0"),
        ({"c": on_gpu(torch.zeros(16, 24, requires_grad=True))}, ProblemError, "c requires grad"),
    ],
)
def test_errors_before_and_after_a_good_call(
    fused: tuple[FusedGemm, Seen, Seen], change: dict[str, Any], kind: type[CutegemmError], text: str
) -> None:
    gemm, _, _ = fused
    a, b = a_and_b()
    wrong = {name: value for name, value in {**operands(), **change}.items() if value is not None}
    calls: list[Callable[[], Any]] = [lambda: gemm(a, b, **wrong)]
    for _ in range(2):
        with pytest.raises(kind, match=text):
            calls[0]()
        good = operands()
        assert right(gemm(a, b, **good), a, b, **good)


def test_weights_that_would_have_gradients_are_no_news_without_them(
    fused: tuple[FusedGemm, Seen, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm, _, _ = fused
    a, b = a_and_b()
    given = {**operands(), "scale": 1.0}
    gemm(a, b, **given)
    given["bias"].requires_grad_()
    with pytest.raises(ProblemError, match="bias requires grad"):
        gemm(a, b, **given)
    monkeypatch.setattr(FusedGemm, "_checked", None)  # would fail if it were called
    with torch.no_grad():
        assert right(gemm(a, b, **given), a, b, **given)


def test_a_given_out_and_given_outputs(fused: tuple[FusedGemm, Seen, Seen]) -> None:
    gemm, _, _ = fused
    a, b = a_and_b()
    given = operands()
    out, x = zeros(16, 24), zeros(16, 24, dtype=torch.float32)
    for _ in range(2):
        result = gemm(a, b, out=out, outputs={"x": x}, **given)
        assert result[0] is out
        assert result[1]["x"] is x
        assert right(result, a, b, **given)
        out.zero_()
    c = given["c"]
    before = {**given, "c": plain(c).clone()}
    assert right(gemm(a, b, out=c, **given), a, b, **before)
