"""The output store of an epilogue warpgroup: tensor memory -> registers -> shared memory -> TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.blackwell.chunks import ChunkedStore, Member
from cutegemm.blackwell.layouts import box_layout, box_ring
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.blackwell.results import Result, piece_copy
from cutegemm.parts.limits import ALIGNMENT, WARPGROUP_THREADS
from cutegemm.parts.ring import StageCursor
from cutegemm.parts.tensors import CUTE_DTYPES
from cutegemm.problem import GemmProblem, dtype_bytes

STORE_BARRIER = 1  # + warpgroup: its threads agree that an output buffer is free or filled; 0 is the CTA's


@dataclass(frozen=True)
class TmaStore(ChunkedStore):
    """TMA store descriptors, one for each width of box (two at most), widest first.

    mD_mnl is the TMA coordinate tensor (M, N, L) of the output.
    """

    atoms: tuple
    tensors: tuple

    def prefetch(self) -> None:
        """Fetches the descriptors."""
        for atom in self.atoms:
            cpasync.prefetch_descriptor(atom)

    def init(self, buffers: cute.Pointer) -> None:
        """Initialises the store's barriers; one thread of the CTA calls this. There are none."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> cute.Pointer:
        """The output buffers of all epilogue warpgroups, in shared memory; STORE_BARRIERS are at hand."""
        elements = self.plan.config.consumers * self._elements_per_consumer()
        return smem.allocate_array(CUTE_DTYPES[self.problem.out_dtype], elements, byte_alignment=ALIGNMENT)

    def buffers_of(self, consumer: Int32, buffers: cute.Pointer) -> cute.Pointer:
        """A warpgroup's own buffers among all."""
        own = buffers + consumer * self._elements_per_consumer()
        # The sum loses the alignment that stmatrix is checked for.
        dtype = CUTE_DTYPES[self.problem.out_dtype]
        return cute.make_ptr(dtype, own.toint(), cute.AddressSpace.smem, assumed_align=ALIGNMENT)

    def _elements_per_consumer(self) -> int:
        return self.plan.consumer_buffer_bytes // dtype_bytes(self.problem.out_dtype)

    def _chunk(self, result: Result, buffers: cute.Pointer, member: Member, piece: tuple) -> None:
        """See ChunkedStore._chunk."""
        self._put(self._read(result, piece), result, buffers, member, piece)

    def _put(
        self, values: cute.Tensor, result: Result, buffers: cute.Pointer, member: Member, piece: tuple
    ) -> None:
        """Stores a chunk's values by way of the buffer whose turn it is."""
        origin, first, width, step, _ = piece
        buffer = step % self.plan.store_stages
        self._wait_for_buffer(member, self._pending_stores(step))
        self._to_shared(values, buffers, member.thread, width, buffer, result)
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync(member)
        row, column, batch = origin
        self._to_global(buffers, member.thread, width, buffer, (row, column + first, batch))

    def _pending_stores(self, step: Any) -> int:
        """How many of the latest stores may be under way when a step's buffer is filled."""
        return self.plan.pending_stores(step)

    @cute.jit
    def _end_step(self, member: Member) -> None:
        """One group of stores a step, be it empty: what pending_stores counts."""
        if member.thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self, buffers: cute.Pointer, member: Member, cursor: StageCursor) -> None:
        """Until every store of this warpgroup has read its buffer; before the CTA may exit.

        cursor: that of the results after the last tile
        """
        if member.thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _wait_for_buffer(self, member: Member, pending: cutlass.Constexpr[int]) -> None:
        if member.thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        self._sync(member)

    def _sync(self, member: Member) -> None:
        barrier = STORE_BARRIER + member.consumer
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)

    def _to_shared(
        self,
        values: cute.Tensor,
        buffers: cute.Pointer,
        thread: Int32,
        width: int,
        buffer: Any,
        result: Result,
    ) -> None:
        copy = cute.make_tiled_copy_D(self._shared_atom(width), piece_copy(result.ring, width))
        thread_copy = copy.get_slice(thread)
        ring = _tensor_at(buffers, box_ring(self.plan, self.problem, width))
        # (row, column) with the columns of both halves beside each other
        sD = cute.group_modes(ring[None, None, None, buffer], 1, 3)
        out = cute.make_rmem_tensor(values.shape, CUTE_DTYPES[self.problem.out_dtype])
        out.store(values.load().to(out.element_type))
        cute.copy(copy, thread_copy.retile(out), thread_copy.partition_D(sD))

    def _shared_atom(self, width: int) -> Any:
        """16-bit outputs go through stmatrix, transposed when D is M-major; float32 through plain stores."""
        dtype = CUTE_DTYPES[self.problem.out_dtype]
        m_major = self.problem.out_major == "m"
        if dtype.width == 16:
            matrices = 4 if width % 16 == 0 else 2
            return cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(m_major, matrices), dtype)
        bits = 32 if m_major else 64
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=bits)

    @cute.jit
    def _to_global(
        self, buffers: cute.Pointer, thread: Int32, width: int, buffer: Any, position: tuple
    ) -> None:
        plan = self.plan
        which = 0 if width == plan.chunks[0][1] else 1
        ring = _tensor_at(buffers, box_ring(plan, self.problem, width))
        row, column, batch = position
        for half in cutlass.range_constexpr(plan.halves):
            # The box's own window of D; TMA coordinates, so the offset need not be a multiple of its width.
            corner = (row, column + half * plan.accumulator_columns, batch)
            gD = cute.local_tile(
                cute.domain_offset(corner, self.tensors[which]), (plan.cta_m, width, 1), (0, 0, 0)
            )
            tSsD, tSgD = cpasync.tma_partition(
                self.atoms[which],
                0,
                cute.make_layout(1),
                cute.group_modes(ring[None, None, half, None], 0, 2),
                cute.group_modes(gD[None, None, 0], 0, 2),
            )
            if thread < cute.arch.WARP_SIZE:
                cute.copy(self.atoms[which], tSsD[None, buffer], tSgD)


def make_tma_store(mD_mnl: cute.Tensor, plan: BlackwellPlan, problem: GemmProblem) -> TmaStore:
    """Host side: a store with its TMA descriptors."""
    atoms = []
    tensors = []
    for width in sorted({width for _, width in plan.chunks}, reverse=True):
        box = box_layout(plan, problem, width)
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mD_mnl, box, (plan.cta_m, width)
        )
        atoms.append(atom)
        tensors.append(tensor)
    return TmaStore(plan, problem, tuple(atoms), tuple(tensors))


def _tensor_at(pointer: cute.Pointer, layout: Any) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, pointer.dtype), layout.outer)
