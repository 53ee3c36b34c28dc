"""Checks the compiled host code makes before it launches, on sizes, strides and addresses.

What the call wrapper around it has checked already: dtypes, ranks, that M, N, K and L agree among the
tensors, unit strides, alignment of addresses and strides, one CUDA device.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cutegemm.callrecord import CallRecord, Outcome
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.parts.plan import KernelPlan


@dataclass(frozen=True)
class Record:
    """The fields of a CallRecord as host-side numbers."""

    l: Int32  # noqa: E741 - the field's own name for the batch mode
    m: Int32
    n: Int32
    k: Int32
    resident: Int32
    disjoint: Int32
    counters: Int64
    partials: Int64


def read_record(address: Int64) -> Record:
    """Loads a CallRecord from host memory."""
    numbers = _int32s_at(address, CallRecord.counters.offset // 4)
    pointer = cute.make_ptr(
        Int64, address + CallRecord.counters.offset, cute.AddressSpace.generic, assumed_align=8
    )
    addresses = cute.make_tensor(pointer, cute.make_layout(2))
    l, m, n, k, resident, disjoint = (numbers[i] for i in range(6))  # noqa: E741
    return Record(l, m, n, k, resident, disjoint, addresses[0], addresses[1])


def write_outcome(address: Int64, outcome: Int32) -> None:
    """Stores an Outcome in host memory."""
    _int32s_at(address, 1)[0] = outcome


def refusal(
    record: Record,
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    plan: KernelPlan,
    extras: tuple = (),
) -> Int32:
    """An Outcome: LAUNCHED if nothing speaks against the launch of this plan's kernel.

    extras: an epilogue's arguments; its tensors may lie at d's own address, but not elsewhere inside of it
    """
    sizes_differ = _differs(a.shape[-2], record.m) | _differs(a.shape[-1], record.k)
    sizes_differ = sizes_differ | _differs(b.shape[-1], record.n)
    if len(a.shape) == 3:
        sizes_differ = sizes_differ | _differs(a.shape[0], record.l)
    overlap = _meet(d, a) | _meet(d, b) | _lines_overlap(d)
    for extra in extras:
        if isinstance(extra, cute.Tensor):
            overlap = overlap | (_meet(d, extra) & (d.iterator.toint() != extra.iterator.toint()))
    overlap = overlap & (record.disjoint == 0)
    outcome = cutlass.select_(overlap, Int32(Outcome.MAY_OVERLAP), Int32(Outcome.LAUNCHED))
    if plan.store == "direct" and plan.splits == 1:
        outcome = cutlass.select_(_tma_could_store(d), Int32(Outcome.TMA_COULD_STORE), outcome)
    return cutlass.select_(sizes_differ, Int32(Outcome.OTHER_SIZES), outcome)


def _int32s_at(address: Int64, count: int) -> cute.Tensor:
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.generic, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(count))


def _differs(size: Int32, expected: Int32) -> Boolean:
    return Int32(size) != expected


def _first_and_end(tensor: cute.Tensor) -> tuple[Int64, Int64]:
    """Address of the first byte and of one past the last, for non-empty tensors."""
    start = tensor.iterator.toint()
    last = Int64(0)
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        last = last + (Int64(size) - 1) * Int64(stride)
    return start, start + (last + 1) * (tensor.element_type.width // 8)


def _meet(one: cute.Tensor, two: cute.Tensor) -> Boolean:
    one_first, one_end = _first_and_end(one)
    two_first, two_end = _first_and_end(two)
    return (one_first < two_end) & (two_first < one_end)


def _tma_could_store(d: cute.Tensor) -> Boolean:
    """Whether the output's address, pitches and lines are whole units of TMA's 16 bytes."""
    element = d.element_type.width // 8
    contiguous, pitched = _contiguous_and_pitched(d)

    def whole(elements: Int64) -> Boolean:
        return elements * element % TMA_ALIGNMENT == 0

    could = (d.iterator.toint() % TMA_ALIGNMENT == 0) & whole(Int64(d.shape[contiguous]))
    could = could & ((d.shape[pitched] == 1) | whole(Int64(d.stride[pitched])))
    if len(d.shape) == 3:
        could = could & ((d.shape[0] == 1) | whole(Int64(d.stride[0])))
    return could


def _contiguous_and_pitched(d: cute.Tensor) -> tuple[int, int]:
    """The modes along a line and across lines; only the unit stride is a number when traced."""
    return (-1, -2) if isinstance(d.stride[-1], int) else (-2, -1)


def _lines_overlap(d: cute.Tensor) -> Boolean:
    """Whether the output may hold an element twice: a pitch below its line, or interleaved batches."""
    contiguous, pitched = _contiguous_and_pitched(d)
    overlap = (Int64(d.stride[pitched]) < Int64(d.shape[contiguous])) & (d.shape[pitched] > 1)
    if len(d.shape) == 3:
        end = Int64(d.stride[pitched]) * (Int64(d.shape[pitched]) - 1) + Int64(d.shape[contiguous])
        overlap = overlap | ((Int64(d.stride[0]) < end) & (d.shape[0] > 1))
    return overlap
