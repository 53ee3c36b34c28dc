"""Device memory that a launch needs beside its tensors: counters that are 0, and room for parts of sums.

Launches on one stream follow each other, so that they share one workspace: each leaves the counters as it
found them. A launch that is captured in a CUDA graph may run later beside anything, so that it gets counters
of its own, which are zeroed outside of the graph.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cutegemm.callrecord import CallRecord
from cutegemm.errors import ProblemError
from cutegemm.parts.limits import WARPGROUP_THREADS
from cutegemm.parts.plan import KernelPlan, counts_tasks
from cutegemm.residency import loading_allowed
from cutegemm.scheduler import TileScheduler

QUEUE_COUNTERS = 2  # see parts/feed.py, QueueFeed
SHARE_COUNTERS = 2  # see parts/sharing.py
SQUARE_BYTES = 16  # of four float32
PARTS = 2  # parts of shared tiles a worker has at most
SLAB_WORDS = 1 << 18  # counters for captured launches are cut from slabs of 1 MiB
ALIGNMENT_WORDS = 4
PER_THREAD_STREAM = 2  # CUDA's handle for a stream that is another one in each thread


@dataclass(frozen=True)
class Needs:
    """What a kernel's launches need: int32 counters, and bytes of float32 partial sums."""

    counters: int
    partial_bytes: int

    def __bool__(self) -> bool:
        return self.counters > 0


def needs(scheduler: TileScheduler, plan: KernelPlan, resident: int, k: int) -> Needs:
    """What launches with ``resident`` clusters at once need, for products of depth k.

    Raises ProblemError for a k whose stages StreamK cannot count.
    """
    if counts_tasks(scheduler, plan):
        return Needs(QUEUE_COUNTERS, 0)
    if not scheduler.streamed:
        return Needs(0, 0)
    workers = scheduler.assignment.workers(2**30, resident)
    longest = (2**31 - 1) // (PARTS * workers) * plan.config.tile_k
    if k > longest:
        raise ProblemError(
            f"K={k} is too long for StreamK with {workers} workers, whose stages are numbered in 31 bits; "
            f"up to {longest} is allowed: use SplitK or Persistent"
        )
    shares = PARTS * workers * plan.cluster_ctas
    return Needs(
        shares * plan.warpgroups_per_tile * SHARE_COUNTERS,
        shares * plan.warpgroups_per_tile * plan.thread_squares * SQUARE_BYTES * WARPGROUP_THREADS,
    )


class _Workspaces:
    """The workspaces of this process, by GPU and stream. They only grow, and are kept: kernels that wait in
    a queue may still use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[torch.Tensor] = []
        self._of_stream: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._slabs: dict[int, torch.Tensor] = {}

    def of_stream(self, device: int, stream: int, needed: Needs) -> tuple[int, int]:
        """Addresses of counters and partials for launches on a stream, which is the current one."""
        key = (device, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0)
        with self._lock:
            counters, partials = self._of_stream.get(key) or (_zeros(0, device), _bytes(0, device))
            if counters.numel() < needed.counters:
                self._kept.append(counters)
                counters = _zeros(max(needed.counters, 2 * counters.numel()), device)
            if partials.numel() < needed.partial_bytes:
                self._kept.append(partials)
                partials = _bytes(needed.partial_bytes, device)
            self._of_stream[key] = counters, partials
        return counters.data_ptr(), partials.data_ptr()

    def of_capture(self, device: int, needed: Needs) -> tuple[int, torch.Tensor]:
        """Address of counters that no other launch has, and partials from the graph's own memory."""
        words = -(-needed.counters // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
        with self._lock:
            slab = self._slabs.get(device)
            if slab is None or slab.numel() < words:
                slab = _zeros_outside_capture(max(words, SLAB_WORDS), device)
                self._kept.append(slab)
            self._slabs[device] = slab[words:]
        return slab.data_ptr(), _bytes(needed.partial_bytes, device)


workspaces = _Workspaces()


class WithWorkspace:
    """A kernel's host function, called with a record that has the workspace of the current stream."""

    def __init__(self, function: Callable[..., None], device: int, needed: Needs) -> None:
        self._function = function
        self._device = device
        self._needed = needed
        self._records: dict[tuple[int, int], tuple[CallRecord, int]] = {}

    def __call__(
        self, a: Any, b: Any, out: Any, record_address: int, outcome_address: int, *extras: Any
    ) -> None:
        """Launches as the function does; ``record_address`` is of a record without a workspace."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self(a, b, out, record_address, outcome_address, *extras)
            return
        if torch.cuda.is_current_stream_capturing():
            with loading_allowed():
                counters, partials = workspaces.of_capture(self._device, self._needed)
            record = with_addresses(record_address, counters, partials.data_ptr())
            self._function(a, b, out, ctypes.addressof(record), outcome_address, *extras)
            return
        stream = _current_stream(self._device)
        known = self._records.get((record_address, stream))
        if known is None or stream == PER_THREAD_STREAM:
            addresses = workspaces.of_stream(self._device, stream, self._needed)
            record = with_addresses(record_address, *addresses)
            known = self._records[record_address, stream] = record, ctypes.addressof(record)
        self._function(a, b, out, known[1], outcome_address, *extras)


def with_addresses(record_address: int, counters: int, partials: int) -> CallRecord:
    """A copy of the record at an address, with a workspace."""
    record = CallRecord.from_buffer_copy(CallRecord.from_address(record_address))
    record.counters, record.partials = counters, partials
    return record


@functools.cache
def _raw_stream_getter() -> Callable[[int], int]:
    fast: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return fast or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _current_stream(device: int) -> int:
    return _raw_stream_getter()(device)


def _zeros(words: int, device: int) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32, device=f"cuda:{device}")


def _bytes(count: int, device: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=f"cuda:{device}")


def _zeros_outside_capture(words: int, device: int) -> torch.Tensor:
    """Zeroed now, while the current stream is being captured; allocated outside of the graph's memory."""
    aside = torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        zeros = _zeros(words, device)
    aside.synchronize()
    return zeros
