"""Operands between canaries, truth and the bound: what the GPU tests judge a product by.

Nothing here needs a GPU; on a CPU the same checks judge torch's own product.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from cutegemm.fuzz.judge import torch_product

ALIGNMENT = 16  # bytes: what TMA asks of addresses and pitches

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SENTINEL = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A}


def fresh_seed() -> int:
    """A new seed for each test, or $CUTEGEMM_TEST_SEED to repeat one."""
    return int(os.environ.get("CUTEGEMM_TEST_SEED") or secrets.randbits(31))


@dataclass(frozen=True)
class Case:
    """One product: sizes, dtypes and majors, as ``cutegemm.compile`` names them. l None: no batch mode.

    out_shift: elements by which out's start and pitch miss the 16-byte units that TMA asks for.
    shifts: the same of a and b
    """

    m: int
    n: int
    k: int
    l: int | None = None  # noqa: E741 - the field's own name for the batch mode
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    a_major: str = "k"
    b_major: str = "k"
    out_major: str = "n"
    out_shift: int = 0
    shifts: tuple[int, int] = (0, 0)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of a, b and out."""
        lead = () if self.l is None else (self.l,)
        return (*lead, self.m, self.k), (*lead, self.k, self.n), (*lead, self.m, self.n)


@dataclass
class Guarded:
    """A matrix, or a batch of them, inside a larger buffer whose remaining elements are canaries."""

    parent: torch.Tensor
    tensor: torch.Tensor
    before: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.remember()

    @property
    def bits(self) -> torch.Tensor:
        """The whole buffer as integers: NaNs compare by their bits."""
        return self.parent.view(_BITS[self.parent.element_size()])

    def window(self, buffer: torch.Tensor) -> torch.Tensor:
        """The matrix's elements of a buffer of the same size."""
        return buffer.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())

    def remember(self) -> None:
        """Takes the present contents as those to keep."""
        self.before = self.bits.clone()

    def is_untouched(self) -> bool:
        """Whether no bit of the buffer has changed."""
        return torch.equal(self.bits, self.before)

    def is_untouched_outside(self) -> bool:
        """Whether no canary has changed."""
        expected = self.before.clone()
        self.window(expected).copy_(self.window(self.bits))
        return torch.equal(self.bits, expected)


def _empty_guarded(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    last_contiguous: bool,
    device: torch.device | str,
    shift: int = 0,
) -> Guarded:
    unit = ALIGNMENT // dtype.itemsize
    lines, run = (shape[-2], shape[-1]) if last_contiguous else (shape[-1], shape[-2])
    pitch = (-(-run // unit) + 3) * unit + shift
    batch_pitch = max(1, lines) * pitch + 5 * unit
    batches = shape[0] if len(shape) == 3 else 1
    before = 7 * unit + shift
    parent = torch.empty(before + batches * batch_pitch + 64 * unit, dtype=dtype, device=device)
    parent.view(_BITS[dtype.itemsize]).fill_(_SENTINEL[dtype.itemsize])
    strides = (pitch, 1) if last_contiguous else (1, pitch)
    if len(shape) == 3:
        strides = (batch_pitch, *strides)
    return Guarded(parent, parent.as_strided(shape, strides, before))


@dataclass
class Operands:
    """a, b and out of a case. The inputs lie between NaNs, out is NaN itself and lies between sentinels."""

    case: Case
    seed: int
    a: Guarded
    b: Guarded
    out: Guarded

    @classmethod
    def make(cls, case: Case, device: torch.device | str, seed: int | None = None) -> "Operands":
        """Normally distributed inputs, scaled so that results are around 1."""
        seed = fresh_seed() if seed is None else seed
        generator = torch.Generator(device).manual_seed(seed)
        a_shape, b_shape, out_shape = case.shapes
        a = _empty_guarded(a_shape, case.dtype, case.a_major == "k", device, case.shifts[0])
        b = _empty_guarded(b_shape, case.dtype, case.b_major == "n", device, case.shifts[1])
        out = _empty_guarded(out_shape, case.out_dtype, case.out_major == "n", device, case.out_shift)
        for operand, scale in ((a, 1.0), (b, max(1, case.k) ** -0.5)):
            operand.parent.fill_(float("nan"))
            values = torch.randn(operand.tensor.shape, generator=generator, device=device)
            operand.tensor.copy_(values * scale)
            operand.remember()
        out.tensor.fill_(float("nan"))
        out.remember()
        return cls(case, seed, a, b, out)

    def complaints(self) -> Iterator[str]:
        """What is wrong after ``out`` was computed; nothing if all is well."""
        for name in ("a", "b"):
            if not getattr(self, name).is_untouched():
                yield f"{name} or its surroundings were written"
        if not self.out.is_untouched_outside():
            yield "elements around out were written"
        yield from error_complaints(self.out.tensor, self.a.tensor, self.b.tensor)

    def judge(self, what: object = "") -> None:
        """Fails, with everything needed to repeat it, unless ``out`` is right and nothing else changed."""
        found = "; ".join(self.complaints())
        if found:
            raise AssertionError(f"{what} {self.case}, seed {self.seed}: {found}")


def float32_floor(k: int) -> float:
    """Relative error below which two float32 sums over K do not differ in earnest.

    A tensor core adds 16 products at a time and cuts the sum off at 24 bits; in how many such steps torch's
    kernel goes along K (it may split K) is chance.
    """
    return 2.0**-22 + k / 16 * 2.0**-24


def error_complaints(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Iterator[str]:
    """Compares with a float64 product: no error, overall or of one element, over twice that of torch."""
    truth = torch.matmul(a.double(), b.double())
    errors = (out.double() - truth).abs()
    theirs = (torch_product(a.contiguous(), b.contiguous(), out.dtype).double() - truth).abs()
    if out.numel() == 0:
        return
    missing = int(errors.isnan().sum())
    if missing:
        yield f"{missing} of {out.numel()} elements are NaN"
        return
    for name, mine, limit, scale in (
        ("relative error", errors.norm(), theirs.norm(), truth.norm()),
        ("largest error of an element", errors.max(), theirs.max(), truth.abs().max()),
    ):
        bound = 2 * float(limit) + float32_floor(a.shape[-1]) * float(scale)
        if not float(mine) <= bound:
            worst = tuple(int(i) for i in (errors == errors.max()).nonzero()[0])
            yield f"{name} {float(mine):.3e}, bound {bound:.3e} (scale {float(scale):.3e}), worst at {worst}"


def check(
    case: Case, compute: Callable[..., object], device: torch.device | str, what: object = ""
) -> Operands:
    """Runs ``compute(a, b, out=out)`` on fresh operands and judges the outcome."""
    operands = Operands.make(case, device)
    with torch.no_grad():
        compute(operands.a.tensor, operands.b.tensor, out=operands.out.tensor)
    operands.judge(what)
    return operands
