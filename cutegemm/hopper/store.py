"""The output store of a consumer warpgroup: accumulators -> registers -> shared memory -> TMA."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.hopper.layouts import chunk_copy, chunk_layout, chunk_mma, chunk_piece
from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.hopper.teams import Member, NamedBarrier
from cutegemm.parts.limits import ALIGNMENT, WARPGROUP_THREADS
from cutegemm.parts.tensors import CUTE_DTYPES
from cutegemm.problem import GemmProblem, dtype_bytes


@dataclass(frozen=True)
class TmaStore:
    """TMA store descriptors, one for each width of output piece (two at most), widest first.

    mD_mnl is the TMA coordinate tensor (M, N, L) of the output.
    """

    atoms: tuple
    tensors: tuple
    plan: cutlass.Constexpr[HopperPlan]
    problem: cutlass.Constexpr[GemmProblem]

    @property
    def barriers(self) -> int:
        """mbarriers the store uses."""
        return 0

    def prefetch(self) -> None:
        """Fetches the descriptors."""
        for atom in self.atoms:
            cpasync.prefetch_descriptor(atom)

    def init(self, buffers: cute.Pointer) -> None:
        """Initialises the store's barriers; one thread of the CTA calls this. There are none."""

    def allocate(self, smem: Any, barriers: cute.Pointer) -> cute.Pointer:
        """The output buffers of all consumers, in shared memory; STORE_BARRIERS barriers are at hand."""
        elements = self.plan.config.consumers * self._elements_per_consumer()
        return smem.allocate_array(CUTE_DTYPES[self.problem.out_dtype], elements, byte_alignment=ALIGNMENT)

    def buffers_of(self, consumer: Int32, buffers: cute.Pointer) -> cute.Pointer:
        """A consumer's own buffers among all."""
        own = buffers + consumer * self._elements_per_consumer()
        # The sum loses the alignment that stmatrix is checked for.
        dtype = CUTE_DTYPES[self.problem.out_dtype]
        return cute.make_ptr(dtype, own.toint(), cute.AddressSpace.smem, assumed_align=ALIGNMENT)

    def _elements_per_consumer(self) -> int:
        return self.plan.consumer_buffer_bytes // dtype_bytes(self.problem.out_dtype)

    def store(
        self,
        accumulators: cute.Tensor,
        buffers: cute.Pointer,
        ahead: None,
        member: Member,
        where: tuple,
        turn: Int32,
    ) -> None:
        """Writes this warpgroup's rows and columns of one tile.

        buffers   this warpgroup's output buffers in shared memory
        ahead     what ``ahead`` gave
        member    the calling thread and its warpgroup
        where     (tile, corner): m, n and l of the CTA's tile; row and column in it of the warpgroup's first
                  element. Rows of its further MMAs follow ``warpgroups_m`` MMA heights apart
        turn      how many tiles this warpgroup has stored before

        A buffer is written again only after TMA has read it; the last stores are still in flight on
        return, under the next tile's main loop.
        """
        plan = self.plan
        thread, barrier = member.thread, NamedBarrier.STORE + member.consumer
        row, column, batch = origin_of(plan, where)
        step = 0
        for mma in range(plan.warpgroup_m // MMA_M):
            for first, width in plan.chunks:
                buffer = step % plan.store_stages
                self.wait_for_buffer(thread, barrier, plan.pending_stores(step))
                self._to_shared(accumulators, buffers, thread, (mma, first, width), buffer)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
                position = (row + mma * plan.warpgroups_m * MMA_M, column + first, batch)
                self.send(buffers, thread, width, buffer, position)
                step += 1

    def ahead(self, buffers: cute.Pointer, member: Member, tile: tuple, corner: tuple) -> None:
        """Starts, before the main loop, what the store of a tile will need; arguments as ``store`` has them.

        What it returns is handed to ``store``.
        """

    @cute.jit
    def drain(self, buffers: cute.Pointer, member: Member, turn: Int32) -> None:
        """Until every store of this warpgroup has read its buffer; before the CTA may exit."""
        if member.thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def wait_for_buffer(self, thread: Int32, barrier: Int32, pending: cutlass.Constexpr[int]) -> None:
        """Until at most ``pending`` stores of the warpgroup still read their buffers; its threads meet."""
        if thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)

    def _to_shared(
        self, accumulators: cute.Tensor, buffers: cute.Pointer, thread: Int32, piece: tuple, buffer: int
    ) -> None:
        mma, first, width = piece
        fragment_shape = chunk_mma(self.problem, width).partition_shape_C((MMA_M, width))
        values = cute.make_rmem_tensor(fragment_shape, cutlass.Float32)
        start = mma * self.plan.warpgroup_n // 2 + first // 2
        for i in range(width // 2):
            values[i] = accumulators[start + i]
        self.put(values.load(), buffers, thread, width, buffer)

    def put(self, values: Any, buffers: cute.Pointer, thread: Int32, width: int, buffer: int) -> None:
        """A thread's values of a piece, a float32 vector, into a buffer."""
        dtype = CUTE_DTYPES[self.problem.out_dtype]
        sD = self.pieces(buffers, width)
        copy = chunk_copy(self.problem, width)
        thread_copy = copy.get_slice(thread)
        fragment_shape = chunk_mma(self.problem, width).partition_shape_C((MMA_M, width))
        out = cute.make_rmem_tensor(fragment_shape, dtype)
        for_store = values.to(dtype)
        out.store(for_store.reshape(fragment_shape))
        cute.copy(copy, thread_copy.retile(out), thread_copy.partition_D(sD)[None, None, None, buffer])

    def pieces(self, buffers: cute.Pointer, width: int) -> cute.Tensor:
        """(64, width, buffer): a warpgroup's buffers."""
        return tensor_at(buffers, chunk_layout(self.plan, self.problem, width))

    @cute.jit
    def send(self, buffers: cute.Pointer, thread: Int32, width: int, buffer: int, position: tuple) -> None:
        """Starts the store of a buffer to ``position`` (row, column, l), as a group of its own."""
        self.start(buffers, thread, width, buffer, position)
        self.commit(thread)

    @cute.jit
    def commit(self, thread: Int32) -> None:
        """What was started since the last commit is one group."""
        if thread < cute.arch.WARP_SIZE:
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def start(self, buffers: cute.Pointer, thread: Int32, width: int, buffer: int, position: tuple) -> None:
        """Starts the store of a buffer; the first warp does."""
        which = 0 if width == self.plan.chunks[0][1] else 1
        sD = tensor_at(buffers, chunk_layout(self.plan, self.problem, width))
        # The piece's own window of D; TMA coordinates, so the offset need not be a multiple of its width.
        gD = cute.local_tile(cute.domain_offset(position, self.tensors[which]), (MMA_M, width, 1), (0, 0, 0))
        tSsD, tSgD = cpasync.tma_partition(
            self.atoms[which],
            0,
            cute.make_layout(1),
            cute.group_modes(sD, 0, 2),
            cute.group_modes(gD[None, None, 0], 0, 2),
        )
        if thread < cute.arch.WARP_SIZE:
            cute.copy(self.atoms[which], tSsD[None, buffer], tSgD)


def make_tma_store(mD_mnl: cute.Tensor, plan: HopperPlan, problem: GemmProblem) -> TmaStore:
    """Host side: the TMA store descriptors."""
    atoms = []
    tensors = []
    for width in sorted({width for _, width in plan.chunks}, reverse=True):
        piece = chunk_piece(problem, width)
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mD_mnl, piece, (MMA_M, width)
        )
        atoms.append(atom)
        tensors.append(tensor)
    return TmaStore(tuple(atoms), tuple(tensors), plan, problem)


def tensor_at(pointer: cute.Pointer, layout: Any) -> cute.Tensor:
    """Shared memory seen through a layout that may be swizzled."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, pointer.dtype), layout.outer)


def origin_of(plan: HopperPlan, where: tuple) -> tuple:
    """(row, column, l) in D of a warpgroup's first element; where: as TmaStore.store has it."""
    (m, n, batch), (row, column) = where
    return m * plan.config.tile_m + row, n * plan.config.tile_n + column, batch
