"""Tiles whose K several workers share (StreamK): who has which part, and how those who have them meet.

The last warpgroup to finish its part of a tile adds the parts of the others, which lie in global memory. For
each warpgroup's share of each shared tile there are two counters there, both 0 before and after a launch:

    taken   warpgroups that have finished their part; who finds all others counted is the last
    left    parts that lie in global memory, to be added by the last

The last waits only for warpgroups that are already writing. A worker has at most two parts of shared tiles:
one that does not begin its tile, and one that begins it; each has a place of its own.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cutegemm.parts.limits import WARPGROUP_THREADS
from cutegemm.parts.plan import KernelPlan
from cutegemm.scheduler.stream import Stream

SQUARE = 4  # elements of a tile that a thread holds side by side
TICKET_WORDS = 4  # 16 bytes for each ticket: what one warpgroup writes is not near what another reads


@dataclass(frozen=True)
class Sharing:
    """A CTA's part in it.

    counters, partials   addresses of both in global memory
    tickets              shared memory, a word for each warpgroup: what thread 0 found, for the others to read
    worker, rank         the CTA's cluster, and its rank in that
    barrier              hardware barrier at which the first warpgroup's threads meet, the next one's follow

    In what follows member names the calling thread: ``consumer`` is its warpgroup, ``thread`` itself in that.
    share is which part of its CTA's tile the warpgroup has.
    """

    stream: Stream
    counters: Int64
    partials: Int64
    tickets: cute.Pointer
    worker: Int32
    rank: Int32
    plan: cutlass.Constexpr[KernelPlan]
    barrier: cutlass.Constexpr[int]

    def sharers(self, task: Int32) -> tuple[Int32, Int32]:
        """(first worker, workers) that share a tile; those in between follow each other."""
        begin = (task - self.stream.whole) * self.stream.k_tiles
        first = self.stream.worker_at(begin)
        return first, self.stream.worker_at(begin + self.stream.k_tiles - 1) - first + 1

    def counters_of(self, task: Int32, share: Int32) -> cute.Tensor:
        """The two counters of a share of this CTA's tile in a task."""
        tile = (task - self.stream.whole) * self.plan.cluster_ctas + self.rank
        index = tile * self.plan.warpgroups_per_tile + share
        pointer = cute.make_ptr(Int32, self.counters, cute.AddressSpace.gmem, assumed_align=8)
        return cute.make_tensor(pointer + 2 * index, cute.make_layout(2))

    def place(self, worker: Int32, begins_tile: Boolean, share: Int32) -> cute.Tensor:
        """(4, thread, square): where a worker's part lies; a square together, threads side by side."""
        plan = self.plan
        index = (worker * 2 + begins_tile.to(Int32)) * plan.cluster_ctas + self.rank
        index = index * plan.warpgroups_per_tile + share
        pointer = cute.make_ptr(Float32, self.partials, cute.AddressSpace.gmem, assumed_align=16)
        pointer = pointer + Int64(index) * (SQUARE * WARPGROUP_THREADS * plan.thread_squares)
        pointer = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((SQUARE, WARPGROUP_THREADS, plan.thread_squares)))

    @cute.jit
    def take_ticket(self, counters: cute.Tensor, member: Any) -> Int32:
        """How many of the tile's warpgroups have finished their part before this one."""
        if member.thread == 0:
            ticket = cute.arch.atomic_add(counters.iterator, Int32(1), sem="relaxed", scope="gpu")
            self._ticket(member)[0] = ticket
        self._meet(member)
        return self._ticket(member)[0]

    @cute.jit
    def announce(self, counters: cute.Tensor, member: Any) -> None:
        """What the warpgroup wrote of its part happens before what the last one reads."""
        cute.arch.fence_acq_rel_gpu()
        self._meet(member)
        if member.thread == 0:
            cute.arch.atomic_add(counters.iterator + 1, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def wait_for_others(self, counters: cute.Tensor, parts: Int32, member: Any) -> None:
        """The last one: until the others' parts are there; counters back to 0."""
        if member.thread == 0:
            left = Int32(0)
            while left < parts - 1:
                left = cute.arch.atomic_add(counters.iterator + 1, Int32(0), sem="acquire", scope="gpu")
            counters[0] = Int32(0)
            counters[1] = Int32(0)
        self._meet(member)
        cute.arch.fence_acq_rel_gpu()

    def _ticket(self, member: Any) -> cute.Tensor:
        return cute.make_tensor(self.tickets + TICKET_WORDS * member.consumer, cute.make_layout(1))

    def _meet(self, member: Any) -> None:
        """The warpgroup's threads meet; what they wrote before is seen by all of them."""
        cute.arch.barrier(barrier_id=self.barrier + member.consumer, number_of_threads=WARPGROUP_THREADS)


def make_sharing(stream: Stream, plan: KernelPlan, where: tuple[Any, Any, Any], barrier: int) -> Sharing:
    """Device side; where: shared memory, the kernel's TaskGrid and Place."""
    smem, grid, place = where
    tickets = smem.allocate_array(Int32, TICKET_WORDS * plan.config.consumers, byte_alignment=16)
    rank = place.cta_m + place.cta_n * plan.config.cluster_m
    return Sharing(stream, grid.counters, grid.partials, tickets, place.worker, rank, plan, barrier)
