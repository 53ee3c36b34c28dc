"""The judges of the GPU tests, judged on a CPU: what they accept, and that each kind of fault is found."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from gpu_checks import (
    Case,
    Operands,
    check,
    error_complaints,
    fresh_seed,
    torch_product,
)

from cutegemm.fuzz.judge import torch_sums_in_float32

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def right(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """A float32 product, rounded once."""
    out.copy_(a.float() @ b.float())


@pytest.mark.parametrize("majors", list(product("km", "kn", "nm")), ids="".join)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(BF16, BF16), (BF16, F32), (BF16, F16), (F16, F16), (F16, F32), (F16, BF16)]
)
@pytest.mark.parametrize("batches", [None, 1, 3])
def test_a_right_product_passes(
    batches: int | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    majors: tuple[str, str, str],
) -> None:
    check(Case(33, 41, 72, batches, dtype, out_dtype, *majors), right, "cpu")


@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 1, 3), (0, 8, 8), (8, 0, 8), (8, 8, 0), (64, 64, 2048)])
def test_sizes_at_the_edge(shape: tuple[int, int, int]) -> None:
    check(Case(*shape), right, "cpu")


@pytest.mark.parametrize("majors", list(product("km", "kn", "nm")), ids="".join)
def test_operands_obey_tma_and_are_surrounded(majors: tuple[str, str, str]) -> None:
    operands = Operands.make(Case(13, 11, 9, 2, BF16, F32, *majors), "cpu", seed=1)
    wanted = {"a": majors[0] == "k", "b": majors[1] == "n", "out": majors[2] == "n"}
    for name, last_contiguous in wanted.items():
        guarded = getattr(operands, name)
        tensor, size = guarded.tensor, guarded.tensor.element_size()
        unit, other = (-1, -2) if last_contiguous else (-2, -1)
        assert tensor.stride(unit) == 1
        assert tensor.stride(other) * size % 16 == tensor.stride(0) * size % 16 == 0
        assert tensor.storage_offset() * size % 16 == 0
        assert guarded.parent.numel() > 2 * tensor.numel()
        surroundings = guarded.parent.clone()
        guarded.window(surroundings).fill_(0)
        count = int(surroundings.isnan().sum()) if name != "out" else int((surroundings != 0).sum())
        assert count == guarded.parent.numel() - tensor.numel()


@pytest.mark.parametrize("majors", list(product("km", "kn", "nm")), ids="".join)
def test_an_output_may_miss_tma_s_units(majors: tuple[str, str, str]) -> None:
    case = Case(13, 11, 9, 2, BF16, F32, *majors, out_shift=1)
    out = check(case, right, "cpu").out.tensor
    assert out.data_ptr() % 16
    assert max(out.stride()[1:]) * 4 % 16


def test_data_are_fresh_unless_the_seed_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTEGEMM_TEST_SEED", raising=False)
    assert fresh_seed() != fresh_seed()
    monkeypatch.setenv("CUTEGEMM_TEST_SEED", "77")
    one, two = (Operands.make(Case(8, 8, 8), "cpu") for _ in range(2))
    assert one.seed == two.seed == 77
    assert torch.equal(one.a.tensor, two.a.tensor)


def spoilt(spoil: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Callable[..., None]:
    """A right product with something done to it."""

    def compute(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        right(a, b, out=out)
        spoil(a, b, out)

    return compute


def after(tensor: torch.Tensor) -> torch.Tensor:
    """The element behind a tensor's first line."""
    return tensor.as_strided(
        (1,), (1,), tensor.storage_offset() + min(max(tensor.shape), tensor.stride(0) - 1)
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a, b, out: out[2, 3:5].fill_(float("nan")), "2 of 4096 elements are NaN"),
        (lambda a, b, out: out[2, 3].add_(0.5), "largest error of an element .* worst at (2, 3)"),
        (lambda a, b, out: out.mul_(1.01), "relative error"),
        (lambda a, b, out: out[5].copy_(out[6].clone()), "largest error of an element"),
        (lambda a, b, out: after(out).fill_(1), "elements around out were written"),
        (lambda a, b, out: a[0, 0].add_(1), "a or its surroundings were written"),
        (lambda a, b, out: after(a).fill_(0), "a or its surroundings were written"),
        (lambda a, b, out: b[-1, -1].neg_(), "b or its surroundings were written"),
    ],
)  # fmt: skip
def test_each_fault_is_found(spoil: Callable[..., Any], words: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check(Case(64, 64, 64), spoilt(spoil), "cpu", "a kernel")
    message = str(caught.value)
    assert message.startswith("a kernel Case(m=64, n=64, k=64")
    assert "seed " in message
    for part in words.split(" .* "):
        assert part in message


def test_an_output_left_alone_is_found() -> None:
    with pytest.raises(AssertionError, match="256 of 256 elements are NaN"):
        check(Case(16, 16, 8), lambda a, b, out: None, "cpu")


def test_a_sum_in_bfloat16_is_found() -> None:
    """What a partial sum stored in the output's dtype does."""

    def halves(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        parts = [
            (x.float() @ y.float()).to(BF16) for x, y in zip(a.split(64, 1), b.split(64, 0), strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        out.copy_(total)

    with pytest.raises(AssertionError, match="error"):
        check(Case(64, 64, 1024), halves, "cpu")


def test_canaries_reach_the_result_if_they_are_read() -> None:
    """One element too many along K, and the NaN there shows."""

    def too_far(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        longer = a.as_strided((a.shape[0], a.shape[1] + 1), a.stride(), a.storage_offset())
        out.copy_(longer.float() @ torch.cat([b.float(), torch.zeros(1, b.shape[1])]))

    with pytest.raises(AssertionError, match="256 of 256 elements are NaN"):
        check(Case(16, 16, 7), too_far, "cpu")


def test_float32_output_is_held_to_float32() -> None:
    a, b = torch.randn(64, 256).to(BF16), torch.randn(256, 64).to(BF16)
    exact = a.double() @ b.double()
    assert not list(error_complaints(torch_product(a, b, F32), a, b))
    assert list(error_complaints(exact.to(BF16).float(), a, b))


def test_precision_flags_come_back() -> None:
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    with torch_sums_in_float32():
        assert not flags.allow_bf16_reduced_precision_reduction
        assert not flags.allow_tf32
    assert flags.allow_bf16_reduced_precision_reduction == before
