"""Checks the compiled host code makes before it launches, on sizes, strides and addresses.

What the call wrapper around it has checked already: dtypes, ranks, that M, N, K and L agree among the
tensors, unit strides, alignment of addresses and strides, one CUDA device.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cutegemm.callrecord import CallRecord, Outcome
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.parts.paths import LoadPath
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

    extras: an epilogue's arguments; a tensor among them may be d itself, but not lie in it otherwise
    """
    sizes_differ = _differs(a.shape[-2], record.m) | _differs(a.shape[-1], record.k)
    sizes_differ = sizes_differ | _differs(b.shape[-1], record.n)
    if len(a.shape) == 3:
        sizes_differ = sizes_differ | _differs(a.shape[0], record.l)
    overlap = _meet(d, a) | _meet(d, b) | _lines_overlap(d)
    for extra in extras:
        if isinstance(extra, cute.Tensor):
            overlap = overlap | (_meet(d, extra) & _is_another(d, extra))
    overlap = overlap & (record.disjoint == 0)
    outcome = cutlass.select_(overlap, Int32(Outcome.MAY_OVERLAP), Int32(Outcome.LAUNCHED))
    paths = plan.paths.swapped() if plan.config.swap_ab else plan.paths
    if plan.splits > 1:
        paths = replace(paths, store="tma")  # a split tile has one store, whatever D's alignment
    better = _better_way(a, paths.a) | _better_way(b, paths.b)
    if paths.store == "direct":
        better = better | (
            _whole_start(d)
            & _whole_pitches(d)
            & _whole_units(d, Int64(d.shape[_contiguous_and_pitched(d)[0]]))
        )
    outcome = cutlass.select_(better, Int32(Outcome.OTHER_PATHS), outcome)
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


def _is_another(one: cute.Tensor, two: cute.Tensor) -> Boolean:
    """Whether some index names another element of the one than of the other."""
    if one.element_type is not two.element_type or len(one.shape) != len(two.shape):
        return Boolean(True)
    other = one.iterator.toint() != two.iterator.toint()
    for mode in range(len(one.shape)):
        other = other | (Int32(one.shape[mode]) != Int32(two.shape[mode]))
        other = other | (Int64(one.stride[mode]) != Int64(two.stride[mode]))
    return other


def _better_way(operand: cute.Tensor, path: LoadPath) -> Boolean:
    """Whether an operand is aligned better than the path it was to take asks for."""
    if path == "realigned":
        return _whole_start(operand) & _whole_pitches(operand)
    return Boolean(False)


def _whole_units(tensor: cute.Tensor, elements: Int64) -> Boolean:
    """Whether that many elements are whole units of TMA's 16 bytes."""
    return elements * (tensor.element_type.width // 8) % TMA_ALIGNMENT == 0


def _whole_start(tensor: cute.Tensor) -> Boolean:
    return tensor.iterator.toint() % TMA_ALIGNMENT == 0


def _whole_pitches(tensor: cute.Tensor) -> Boolean:
    """Whether lines, and the matrices of a batch, are whole units apart."""
    _, pitched = _contiguous_and_pitched(tensor)
    whole = (tensor.shape[pitched] == 1) | _whole_units(tensor, Int64(tensor.stride[pitched]))
    if len(tensor.shape) == 3:
        whole = whole & ((tensor.shape[0] == 1) | _whole_units(tensor, Int64(tensor.stride[0])))
    return whole


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
