"""Memory a kernel sees: the tensors' own bytes, and the shared memory of a CTA.

Addresses: a tensor lies where torch put it; kernel parameters begin at decode.PARAM_SPACE; shared memory is
rank << 24 | offset, with the CTA's rank in its cluster, in both shared windows.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cutegemm.emulator.faults import OutOfBoundsError
from cutegemm.emulator.values import Lanes

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_BASE = 1024  # where a CTA's own shared memory begins; what is below belongs to the system
PAGE = 1024  # granularity at which changes of shared memory are noticed
CHUNK = np.complex128  # stands for any 16 bytes: moved as one element, never computed with


@dataclass
class Region:
    """Bytes a kernel was given.

    first, end   addresses of its elements' first byte and of one past the last
    base         address of ``data[0]``; data is the whole allocation, of which the region may be a part
    unit         bytes of an element
    marks        the same bytes, all ones where something was written; None if nobody wants to know
    """

    name: str
    base: int
    data: Lanes
    first: int
    end: int
    unit: int = 1
    views: dict[int, Lanes] = field(default_factory=dict)
    marks: "Region | None" = None

    def view(self, width: int) -> Lanes:
        """The allocation as unsigned elements of ``width`` bytes (16: chunks), from its base on."""
        if width not in self.views:
            whole = len(self.data) // width * width
            self.views[width] = self.data[:whole].view(CHUNK if width == 16 else f"u{width}")
        return self.views[width]


def tensor_region(name: str, tensor: torch.Tensor) -> Region:
    """The region of a CPU tensor; strides must not be negative, the tensor may be a view."""
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    first = tensor.data_ptr()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = first + (span + 1) * tensor.element_size() if tensor.numel() else first
    return Region(name, storage.data_ptr(), data, first, end, tensor.element_size())


class GlobalMemory:
    """All regions, with every access checked against them."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.writes = 0

    def add(self, region: Region) -> None:
        """Gives the kernel a region."""
        self.regions.append(region)

    def mark_writes(self) -> None:
        """From now on each region's marks say which of its bytes were written."""
        for region in self.regions:
            blank = np.zeros(len(region.data), dtype=np.uint8)  # costs nothing where it is not written
            region.marks = replace(region, data=blank, views={}, marks=None)

    def find(self, low: int, high: int, whole_allocation: bool = False, granule: int = 1) -> Region | None:
        """The region that holds [low, high): its elements, or with ``whole_allocation`` all around them.

        granule: what is accessed begins on a multiple of that many bytes, and so may a region's elements be
        taken to.
        """
        for region in self.regions:
            first, end = (
                (region.base, region.base + len(region.data))
                if whole_allocation
                else (max(region.first // granule * granule, region.base), region.end)
            )
            if first <= low and high <= end:
                return region
        return None

    def locate(self, low: int, high: int, what: object, granule: int = 1) -> Region:
        """The region of [low, high), see ``find``. Raises OutOfBoundsError."""
        region = self.find(low, high, granule=granule)
        if region is None:
            raise OutOfBoundsError(
                f"{what} touches global memory at 0x{low:x}..0x{high - 1:x}, outside of every operand; "
                + "given are "
                + ", ".join(f"{r.name} 0x{r.first:x}..0x{r.end - 1:x}" for r in self.regions)
            )
        return region

    def load(self, addresses: Lanes, width: int, what: object) -> Lanes:
        """Elements of ``width`` bytes at each address, as unsigned numbers."""
        region, index = self._index(addresses, width, what)
        return region.view(width)[index]

    def store(self, addresses: Lanes, values: Lanes, width: int, what: object) -> None:
        """Writes elements of ``width`` bytes; of equal addresses the last wins."""
        region, index = self._index(addresses, width, what)
        region.view(width)[index] = values
        if region.marks is not None:
            marks = region.marks.view(width)
            marks[index] = np.full(width, 0xFF, dtype=np.uint8).view(marks.dtype)
        self.writes += 1

    def _index(self, addresses: Lanes, width: int, what: object) -> tuple[Region, Lanes]:
        region = self.locate(int(addresses.min()), int(addresses.max()) + width, what)
        offsets = addresses.astype(np.int64) - region.base
        if (offsets % width).any():
            raise OutOfBoundsError(
                f"{what} accesses {width} bytes at 0x{int(addresses.min()):x}, which is not aligned to them"
            )
        return region, offsets // width


class SharedMemory:
    """Shared memory of one CTA, filled with ones: every float in it is NaN until written.

    pages   for each page a number that changes whenever it is written
    """

    def __init__(self, end: int, label: str) -> None:
        self.label = label
        self.end = end
        size = -(-end // PAGE) * PAGE
        self.data = np.full(size, 0xFF, dtype=np.uint8)
        self.chunks = self.data.view(CHUNK)
        self.views: dict[int, Lanes] = {
            1: self.data,
            2: self.data.view(np.uint16),
            4: self.data.view(np.uint32),
            8: self.data.view(np.uint64),
            16: self.chunks,
        }
        self.pages = [0] * (size // PAGE)
        self.version = 0

    def touched(self, low: int, high: int) -> None:
        """Notes that [low, high) was written."""
        self.version += 1
        first, last = low // PAGE, -(-high // PAGE)
        self.pages[first:last] = [self.version] * (last - first)

    def check(self, low: int, high: int, what: object) -> None:
        """Raises OutOfBoundsError unless [low, high) is the CTA's."""
        if low < SHARED_BASE or high > self.end:
            raise OutOfBoundsError(
                f"{what} touches shared memory of {self.label} at offset {low - SHARED_BASE}.."
                f"{high - SHARED_BASE - 1}; it has {self.end - SHARED_BASE} bytes"
            )

    def _index(self, offsets: Lanes, width: int, what: object) -> Lanes:
        low, high = int(offsets.min()), int(offsets.max()) + width
        self.check(low, high, what)
        if (offsets % width).any():
            raise OutOfBoundsError(
                f"{what} accesses {width} bytes of shared memory of {self.label} at offset "
                f"{low - SHARED_BASE}, which is not aligned to them"
            )
        return offsets // width

    def load(self, offsets: Lanes, width: int, what: object) -> Lanes:
        """Elements of ``width`` bytes at each offset, as unsigned numbers."""
        return self.views[width][self._index(offsets, width, what)]

    def store(self, offsets: Lanes, values: Lanes, width: int, what: object) -> None:
        """Writes elements of ``width`` bytes."""
        self.views[width][self._index(offsets, width, what)] = values
        self.touched(int(offsets.min()), int(offsets.max()) + width)


def offset_of(address: int) -> int:
    """Offset of a shared address in its CTA."""
    return address & OFFSET_MASK


def rank_of(address: int) -> int:
    """Rank of the CTA a shared address lies in."""
    return address >> RANK_SHIFT
