"""Operands inside larger buffers: poison around what is read, canaries around what is written.

A buffer begins at a boundary of at least 16 bytes. The inputs' surroundings are NaN and Inf in turn, so that
nothing that leaks in can go unnoticed; all that a product may not change is compared bit by bit afterwards.
"""

import math
from dataclasses import dataclass

import torch

from cutegemm.fuzz.case import Case, Shape, Strided

MARGIN = 512  # elements before the first of a matrix and after its last
SPECIALS = (float("nan"), float("inf"), float("-inf"))

_BITS = {2: torch.int16, 4: torch.int32}
_CANARY = {2: 0x5A5A, 4: 0x5A5A5A5A}


@dataclass
class Placed:
    """A matrix, or a batch of them, in a buffer of its own.

    buffer   one-dimensional; tensor: the view of it that is passed on; before: the buffer's bits to keep
    """

    buffer: torch.Tensor
    tensor: torch.Tensor
    before: torch.Tensor

    @property
    def bits(self) -> torch.Tensor:
        """The buffer as integers: NaNs compare by their bits."""
        return self.buffer.view(_BITS[self.buffer.element_size()])

    def changed(self) -> int:
        """How many elements of the buffer differ from what they were."""
        return int((self.bits != self.before).sum())

    def changed_outside(self) -> int:
        """How many elements that are not the matrix's do."""
        kept = self.before.clone()
        mine = self.tensor
        window = kept.as_strided(mine.shape, mine.stride(), mine.storage_offset())
        window.copy_(self.bits.as_strided(mine.shape, mine.stride(), mine.storage_offset()))
        return int((self.bits != kept).sum())


def _buffer_elements(shape: Shape, where: Strided, margin: int) -> int:
    last = sum((size - 1) * stride for size, stride in zip(shape, where.strides, strict=True) if size > 1)
    return 2 * margin + where.offset + last + 1


def placed_input(case: Case, name: str, device: torch.device, margin: int = MARGIN) -> Placed:
    """Operand "a" or "b": normally distributed, B scaled so that results are around 1, amid poison."""
    shape, where = case.shape(name), case.placed(name)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(2 * case.seed + (name == "b"))
    size = _buffer_elements(shape, where, margin)
    values = torch.randn(size, generator=generator, device=device)
    if name == "b":
        values *= max(1, case.k) ** -0.5
    poison = torch.tensor(SPECIALS, device=device).repeat(-(-size // len(SPECIALS)))[:size]
    # Elements may be reached twice, as those of an expanded view: filled by place, not through the view.
    positions = _positions(shape, where, device) + margin
    mine = torch.zeros(size, dtype=torch.bool, device=device)
    mine[positions] = True
    buffer = torch.where(mine, values, poison).to(dtype)
    for turn in range(case.planted if positions.numel() else 0):
        chance = torch.randint(positions.numel(), (2,), generator=generator, device=device)
        buffer[positions[chance[0]]] = SPECIALS[(int(chance[1]) + turn) % len(SPECIALS)]
    tensor = buffer.as_strided(shape, where.strides, margin + where.offset)
    return Placed(buffer, tensor, buffer.view(_BITS[dtype.itemsize]).clone())


def placed_output(case: Case, device: torch.device, margin: int = MARGIN) -> Placed:
    """``out``: NaN itself, surrounded by canaries."""
    shape, where = case.shape("out"), case.placed("out")
    dtype = getattr(torch, case.out_dtype)
    buffer = torch.empty(_buffer_elements(shape, where, margin), dtype=dtype, device=device)
    bits = buffer.view(_BITS[dtype.itemsize])
    bits.fill_(_CANARY[dtype.itemsize])
    tensor = buffer.as_strided(shape, where.strides, margin + where.offset)
    tensor.fill_(float("nan"))
    return Placed(buffer, tensor, bits.clone())


def leave_poison(case: Case, device: torch.device) -> None:
    """Frees memory full of NaN, which an output allocated next is likely to get."""
    elements = math.prod(case.shape("out"))
    torch.full((elements,), float("nan"), dtype=getattr(torch, case.out_dtype), device=device)


def _positions(shape: Shape, where: Strided, device: torch.device) -> torch.Tensor:
    """Where every element lies, in the order of its indices, counted from the margin's end."""
    places = torch.full((), where.offset, dtype=torch.int64, device=device)
    for size, stride in zip(shape, where.strides, strict=True):
        steps = torch.arange(size, device=device) * (stride if size > 1 else 0)
        places = places.unsqueeze(-1) + steps
    return places.reshape(-1)
