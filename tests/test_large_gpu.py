"""Operands of more elements than 32 bits count, on a GPU: aligned, off 16 bytes, and of an epilogue."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from epilogue_checks import complaint
from gpu_checks import error_complaints

import cutegemm
from cutegemm.epilogue import library
from cutegemm.fuzz.judge import torch_sums_in_float32

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

BF16 = torch.bfloat16
LONG, DEEP = 65537, 32768  # of an input: their product is beyond 2^31
TALL, WIDE = 65544, 32776  # of a result: beyond it too


@pytest.fixture(autouse=True)
def _honest_reference() -> Iterator[None]:
    with torch.no_grad(), torch_sums_in_float32():
        yield
    torch.cuda.empty_cache()


def needs_gigabytes(count: int) -> None:
    """Skips where the GPU has less memory free."""
    free, _ = torch.cuda.mem_get_info()
    if free < count * 2**30:
        pytest.skip(f"needs {count} GiB of free GPU memory, {free / 2**30:.0f} are there")


def lying(lines: int, length: int, late: int, pad: int) -> torch.Tensor:
    """Random lines that begin ``late`` elements into a buffer, ``length + pad`` apart."""
    pitch = length + pad
    buffer = torch.empty(late + lines * pitch, device="cuda", dtype=BF16)
    for part in buffer.split(2**28):
        part.normal_()
    return buffer.as_strided((lines, length), (pitch, 1), late)


def ends(size: int, count: int = 128) -> list[slice]:
    """The first, some in the middle, and the last; a tile and a half of those."""
    return [slice(0, count), slice(size // 2, size // 2 + count), slice(size - count - 65, size)]


PLACES = {"aligned": (0, 0), "late": (1, 0), "odd pitch": (0, 3), "late, odd pitch": (3, 5)}


def assert_right_at_the_ends(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """a @ b in the first and last rows of a, or columns of b, whichever is the long operand."""
    out = cutegemm.matmul(a, b)
    assert not out.isnan().any()
    for part in ends(LONG):
        if name == "a":
            found = list(error_complaints(out[part], a[part], b))
        else:
            found = list(error_complaints(out[:, part], a, b[:, part]))
        assert not found, (part, found)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["a", "b"])
def test_an_input_of_many_long_lines(name: str, place: str) -> None:
    """K contiguous: 65,537 lines of 32,768 and more."""
    needs_gigabytes(10)
    large = lying(LONG, DEEP, *PLACES[place])
    assert large.numel() > 2**31
    small = torch.randn(136, DEEP, device="cuda", dtype=BF16).mul_(DEEP**-0.5)
    a, b = (large, small.t()) if name == "a" else (small, large.t())
    assert_right_at_the_ends(name, a, b)


@pytest.mark.parametrize("place", ["aligned", "late, odd pitch"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_an_input_whose_lines_lie_across_k(name: str, place: str) -> None:
    """M or N contiguous: 32,768 lines of 65,537 and more; an aligned pitch is longer than the line."""
    needs_gigabytes(10)
    late, pad = (0, 7) if place == "aligned" else PLACES[place]
    large = lying(DEEP, LONG, late, pad)
    small = torch.randn(136, DEEP, device="cuda", dtype=BF16).mul_(DEEP**-0.5)
    a, b = (large.t(), small.t()) if name == "a" else (small, large)
    assert_right_at_the_ends(name, a, b)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("realigned", [False, True], ids=["aligned inputs", "inputs off 16 bytes"])
def test_a_result_that_begins_anywhere(late: int, realigned: bool) -> None:
    needs_gigabytes(10)
    k = 65 if realigned else 64
    a, w = (torch.randn(rows, k, device="cuda", dtype=BF16) for rows in (TALL, WIDE))
    buffer = torch.full((late + TALL * WIDE,), float("nan"), device="cuda", dtype=BF16)
    out = buffer[late:].view(TALL, WIDE)
    cutegemm.matmul(a, w.t(), out=out)
    assert not late or bool(buffer[0].isnan()), "written before the result"
    for rows in ends(TALL):
        assert not list(error_complaints(out[rows], a[rows], w.t())), rows
    assert not any(bool(part.isnan().any()) for part in out.split(4096))


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("late", [0, 1], ids=["through shared memory", "element by element"])
def test_a_tile_operand(late: int, in_place: bool) -> None:
    needs_gigabytes(16)
    k = 64
    a = torch.randn(TALL, k, device="cuda", dtype=BF16)
    b = torch.randn(WIDE, k, device="cuda", dtype=BF16).mul_(k**-0.5).t()
    c = lying(TALL, WIDE, late, 0)
    before = [c[rows].clone() for rows in ends(TALL)]
    gemm: Any = cutegemm.compile((None, None, None), BF16, epilogue=library.alpha_beta)
    out = c if in_place else torch.full((TALL, WIDE), float("nan"), device="cuda", dtype=BF16)
    gemm(a, b, c=c, out=out, alpha=0.5, beta=-1.0)
    for rows, values in zip(ends(TALL), before, strict=True):
        truth = library.alpha_beta.reference(a[rows], b, c=values, alpha=0.5, beta=-1.0)
        assert complaint(out[rows].cpu(), truth.cpu()) is None, rows
    assert not any(bool(part.isnan().any()) for part in out.split(4096))


def test_a_further_output() -> None:
    """The product itself, kept beside a result of half the columns."""
    needs_gigabytes(24)
    k = 64
    a = torch.randn(TALL, k, device="cuda", dtype=BF16)
    b = torch.randn(WIDE, k, device="cuda", dtype=BF16).mul_(k**-0.5).t()
    gemm: Any = cutegemm.compile((None, None, None), BF16, epilogue=library.swiglu_keeping)
    out, further = gemm(a, b)
    for rows in ends(TALL):
        truth, others = library.swiglu_keeping.reference(a[rows], b)
        assert complaint(out[rows].cpu(), truth.cpu()) is None, rows
        for name, value in others.items():
            assert complaint(further[name][rows].cpu(), value.cpu()) is None, (name, rows)
