"""The store of a tile whose values pass through an epilogue: as TmaStore, with operands brought in ahead.

What each operand does while the tensor cores work on its tile:

    one value for each of the kernel's columns   a warpgroup's threads load them before the main loop, into a
                                                 register or two each, and share them after it
    one for each of its rows                     every thread loads those of its own rows
    one for each element                         TMA brings the first pieces into buffers beside those of the
                                                 output; a further one starts as soon as its buffer was read
    others                                       read from global memory where they are needed

    operands_arrived[b]   completes when every byte of buffer b's pieces has landed
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.epilogue.device import (
    DTYPES,
    DirectSource,
    Evaluation,
    Matrices,
    Places,
    element,
    number_of,
    offset_of,
    user_places,
    vector,
)
from cutegemm.epilogue.graph import FULL, HALF, Output
from cutegemm.epilogue.spec import Epilogue, Operand, scaled_size
from cutegemm.epilogue.totals import Totals
from cutegemm.hopper.copied import CopiedStore
from cutegemm.hopper.layouts import chunk_load, chunk_mma, chunk_piece
from cutegemm.hopper.plan import MMA_M, ROWS_OF_A_PART, HopperPlan, piece_bytes
from cutegemm.hopper.store import TmaStore, make_tma_store, tensor_at
from cutegemm.hopper.teams import Member, NamedBarrier
from cutegemm.parts.limits import ALIGNMENT, WARPGROUP_THREADS
from cutegemm.problem import GemmProblem, dtype_bytes


@dataclass(frozen=True)
class StagedBuffers:
    """Shared memory of a store: of all consumers, or of one.

    outs               of the pieces of each staged output
    operands           of the pieces of each staged operand
    columns            for each operand by column its values
    operands_arrived   a barrier for each buffer
    """

    outs: tuple
    operands: tuple
    columns: tuple
    operands_arrived: cute.Pointer


@dataclass(frozen=True)
class Ahead:
    """What a thread has loaded before the main loop.

    scalars   by operand
    wanted    for each staged operand whether it is read at all
    columns   by operand: values of columns thread, thread + 128, ... of the warpgroup's part
    rows      by operand: values of the thread's rows, two for each MMA, in the operand's dtype: a conversion
              here would have the main loop wait for the loads
    """

    scalars: tuple
    wanted: tuple
    columns: tuple
    rows: tuple


@dataclass(frozen=True)
class StagedStore:
    """See the module.

    outs            store the pieces of the main output and of further ones that TMA can store
    atoms, tensors  for each staged operand TMA loads, one for each width of piece, widest first
    """

    outs: tuple
    atoms: tuple
    tensors: tuple
    matrices: Matrices
    plan: cutlass.Constexpr[HopperPlan]
    problem: cutlass.Constexpr[GemmProblem]

    @property
    def epilogue(self) -> Epilogue:
        """Of the problem as the kernel sees it."""
        return self.problem.epilogue

    def prefetch(self) -> None:
        """See TmaStore.prefetch."""
        for out in self.outs:
            out.prefetch()
        for atoms in self.atoms:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

    def allocate(self, smem: Any, barriers: cute.Pointer) -> StagedBuffers:
        """See TmaStore.allocate."""
        plan, consumers = self.plan, self.plan.config.consumers
        outs = tuple(out.allocate(smem, barriers) for out in self.outs)
        operands = tuple(
            smem.allocate_array(
                DTYPES[name], consumers * self._piece_elements(name), byte_alignment=ALIGNMENT
            )
            for name in (str(operand.dtype) for operand in self.epilogue.staged)
        )
        columns = tuple(
            smem.allocate_array(DTYPES[str(operand.dtype)], consumers * plan.warpgroup_n, byte_alignment=16)
            for operand in self.epilogue.columns
        )
        return StagedBuffers(outs, operands, columns, barriers)

    def _piece_elements(self, dtype: str) -> int:
        """Of a dtype, in all buffers of one warpgroup for pieces of one operand."""
        return self.plan.store_stages * self.plan.piece_bytes(dtype) // dtype_bytes(dtype)

    def init(self, buffers: StagedBuffers) -> None:
        """See TmaStore.init."""
        for i in range(self.barriers):
            cute.arch.mbarrier_init(buffers.operands_arrived + i, 1)

    @property
    def barriers(self) -> int:
        """See TmaStore.barriers."""
        return self.plan.config.consumers * self.plan.store_stages

    def buffers_of(self, consumer: Int32, buffers: StagedBuffers) -> StagedBuffers:
        """See TmaStore.buffers_of."""
        plan = self.plan

        def own(pointer: cute.Pointer, dtype: str, elements: int, alignment: int) -> cute.Pointer:
            address = (pointer + consumer * elements).toint()
            return cute.make_ptr(DTYPES[dtype], address, cute.AddressSpace.smem, assumed_align=alignment)

        outs = [out.buffers_of(consumer, all_) for out, all_ in zip(self.outs, buffers.outs, strict=True)]
        operands = [
            own(pointer, str(operand.dtype), self._piece_elements(str(operand.dtype)), ALIGNMENT)
            for operand, pointer in zip(self.epilogue.staged, buffers.operands, strict=True)
        ]
        columns = [
            own(pointer, str(operand.dtype), plan.warpgroup_n, 2 * dtype_bytes(str(operand.dtype)))
            for operand, pointer in zip(self.epilogue.columns, buffers.columns, strict=True)
        ]
        arrived = buffers.operands_arrived + consumer * plan.store_stages
        return StagedBuffers(tuple(outs), tuple(operands), tuple(columns), arrived)

    # --- before the main loop --------------------------------------------------------------------------

    def ahead(self, buffers: StagedBuffers, member: Member, tile: tuple, corner: tuple) -> Ahead:
        """Starts loading what the tile's epilogue will need.

        tile, corner   as TmaStore.ahead has them
        """
        origin = self._origin(tile, corner)
        numbers = {
            operand.name: self.matrices.scalar(i)
            for i, operand in enumerate(self.epilogue.operands)
            if operand.is_scalar
        }
        wanted = tuple(self._is_wanted(operand, numbers) for operand in self.epilogue.staged)
        if not self.plan.streamed:
            self._load_first(buffers, wanted, member, origin)
        columns, rows = [], []
        for i, operand in enumerate(self.epilogue.operands):
            if operand.is_scalar:
                continue
            if self.epilogue.by_column(operand):
                columns.append(self._column_values(i, operand, member.thread, origin))
            elif self.epilogue.by_row(operand):
                rows.append(self._row_values(i, operand, member.thread, origin))
        return Ahead(tuple(numbers.values()), wanted, tuple(columns), tuple(rows))

    def _is_wanted(self, operand: Operand, numbers: dict[str, Any]) -> Boolean:
        guard = self.epilogue.guard_of(operand)
        return Boolean(True) if guard is None else number_of(self.epilogue, guard, numbers) != 0.0

    def _origin(self, tile: tuple, corner: tuple) -> tuple:
        (m, n, batch), (row, column), config = tile, corner, self.plan.config
        return m * config.tile_m + row, n * config.tile_n + column, batch

    def _read(self, index: int, along: str, place: Int32, batch: Int32) -> Any:
        """A value of an operand of one mode; beyond the edge the last one."""
        tensor = self.matrices.operands[index]
        rows, columns, _ = tensor.shape
        row = cutlass.min(place, rows - 1) if along == "m" else Int32(0)
        column = cutlass.min(place, columns - 1) if along == "n" else Int32(0)
        return element(tensor, offset_of(tensor, row, column, batch))[0]

    def _column_values(self, index: int, operand: Operand, thread: Int32, origin: tuple) -> tuple:
        _, column, batch = origin
        rounds = -(-self.plan.warpgroup_n // WARPGROUP_THREADS)
        return tuple(
            self._read(index, operand.modes, column + thread + i * WARPGROUP_THREADS, batch)
            for i in range(rounds)
        )

    def _row_values(self, index: int, operand: Operand, thread: Int32, origin: tuple) -> tuple:
        row, _, batch = origin
        own, _ = self.first_place(thread)
        plan = self.plan
        return tuple(
            self._read(index, operand.modes, row + own + mma * plan.warpgroups_m * MMA_M + 8 * low, batch)
            for mma in range(plan.warpgroup_m // MMA_M)
            for low in range(2)
        )

    def first_place(self, thread: Int32) -> tuple[Int32, Int32]:
        """Row and column of a thread's first value in a piece, as WGMMA hands out its sums."""
        warp, lane = thread // cute.arch.WARP_SIZE, thread % cute.arch.WARP_SIZE
        return warp * ROWS_OF_A_PART + lane // 4, lane % 4 * 2

    # --- pieces of operands ----------------------------------------------------------------------------

    def _load_first(self, buffers: StagedBuffers, wanted: tuple, member: Member, origin: tuple) -> None:
        """Starts the loads of the pieces that the buffers have room for. Nobody reads the buffers any more:
        the warpgroup has met since it read the last piece of the tile before."""
        for step in range(min(self.plan.store_stages, self.plan.store_steps)):
            self._load_piece(buffers, wanted, member, origin, step)

    def _load_piece(
        self, buffers: StagedBuffers, wanted: tuple, member: Member, origin: tuple, step: int
    ) -> None:
        if self.epilogue.staged:
            self._load(buffers, wanted, member.thread, origin, step)

    @cute.jit
    def _load(
        self,
        buffers: StagedBuffers,
        wanted: tuple,
        thread: Int32,
        origin: tuple,
        step: cutlass.Constexpr[int],
    ) -> None:
        plan = self.plan
        row, column, batch = origin
        mma, (first, width) = step // len(plan.chunks), plan.chunks[step % len(plan.chunks)]
        buffer = step % plan.store_stages
        barrier = buffers.operands_arrived + buffer
        total = Int32(0)
        for i, operand in enumerate(self.epilogue.staged):
            size = MMA_M * width * dtype_bytes(str(operand.dtype))
            total = total + (size if self.epilogue.guard_of(operand) is None else size * wanted[i].to(Int32))
        if thread < cute.arch.WARP_SIZE:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, total)
            for i, operand in enumerate(self.epilogue.staged):
                which = 0 if width == plan.chunks[0][1] else 1
                sC = tensor_at(buffers.operands[i], plan_piece_layout(plan, self.problem, operand, width))
                position = (
                    row + mma * plan.warpgroups_m * MMA_M,
                    column + first,
                    batch if operand.batched else 0,
                )
                gC = cute.local_tile(
                    cute.domain_offset(position, self.tensors[i][which]), (MMA_M, width, 1), (0, 0, 0)
                )
                tSsC, tSgC = cpasync.tma_partition(
                    self.atoms[i][which],
                    0,
                    cute.make_layout(1),
                    cute.group_modes(sC, 0, 2),
                    cute.group_modes(gC[None, None, 0], 0, 2),
                )
                if wanted[i]:
                    cute.copy(self.atoms[i][which], tSgC, tSsC[None, buffer], tma_bar_ptr=barrier)

    def _wait_for_pieces(self, buffers: StagedBuffers, turn: Int32, step: int) -> None:
        """Until the operands' pieces of a step have landed; turn: tiles stored before."""
        if not self.epilogue.staged:
            return
        plan = self.plan
        buffer = step % plan.store_stages
        uses = len(range(buffer, plan.store_steps, plan.store_stages))
        round_ = turn * uses + step // plan.store_stages
        cute.arch.mbarrier_wait(buffers.operands_arrived + buffer, round_ & 1)

    # --- after the main loop ---------------------------------------------------------------------------

    def store(
        self,
        accumulators: cute.Tensor,
        buffers: StagedBuffers,
        ahead: Ahead,
        member: Member,
        where: tuple,
        turn: Int32,
    ) -> None:
        """See TmaStore.store."""
        plan = self.plan
        origin = self._origin(*where)
        thread, barrier = member.thread, NamedBarrier.STORE + member.consumer
        row, column, batch = origin
        if plan.streamed:
            self._load_first(buffers, ahead.wanted, member, origin)
        buffers = replace(buffers, outs=tuple(_found_here(pointer) for pointer in buffers.outs))
        self._share_columns(buffers, ahead, thread)
        totals = Totals(self.epilogue, self.matrices.outputs, 1, thread, self._sizes())
        for step in range(plan.store_steps):
            mma, piece = step // len(plan.chunks), step % len(plan.chunks)
            buffer = step % plan.store_stages
            self._wait_for_buffers(thread, barrier, step)
            self._wait_for_pieces(buffers, turn, step)
            evaluation = self._evaluation(accumulators, buffers, ahead, thread, origin, step)
            # Each is put away before the next is computed: several would not fit the registers.
            for out, output, own in self._staged_outputs(buffers):
                self._put(out, evaluation, output, own, thread, out.plan.chunks[piece][1], buffer)
            for output in self.epilogue.reductions:
                # What they read of shared memory is read before others may write it again.
                evaluation.output(output)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
            for out, output, own in self._staged_outputs(buffers):
                first, width = out.plan.chunks[piece]
                across = scaled_size(column, self.epilogue.graph.width(output))
                position = (row + mma * plan.warpgroups_m * MMA_M, across + first, batch)
                out.start(own, thread, width, buffer, position)
            self._commit(thread)
            if step + plan.store_stages < plan.store_steps:
                self._load_piece(buffers, ahead.wanted, member, origin, step + plan.store_stages)
            self._reduce(totals, evaluation, origin, step)

    def _reduce(self, totals: Totals, evaluation: Evaluation, origin: tuple, step: int) -> None:
        """Takes a piece into the totals, which are those of an MMA's rows."""
        if not self.epilogue.reductions:
            return
        plan, (row, column, batch) = self.plan, origin
        mma, piece = step // len(plan.chunks), step % len(plan.chunks)
        if piece == 0:
            totals.begin()
        first, warp = row + mma * plan.warpgroups_m * MMA_M, totals.thread // 32
        totals.add(evaluation, first // ROWS_OF_A_PART + warp, batch)
        if piece == len(plan.chunks) - 1:
            own = first + warp * ROWS_OF_A_PART + totals.thread % 32 // 4
            totals.finish((own, own + 8), column // plan.warpgroup_n, batch)

    def drain(self, buffers: StagedBuffers, member: Member, turn: Int32) -> None:
        """See TmaStore.drain."""
        if self._by_tma:
            self._by_tma[0].drain(buffers.outs[0], member, turn)

    def _sizes(self) -> tuple[Int32, Int32]:
        """M and N of the user's product."""
        out = self.outs[0]
        matrix = out.tensors[0] if isinstance(out, TmaStore) else out.mD_mnl
        rows, columns, _ = matrix.shape
        if self.epilogue.swapped:
            rows, columns = columns, rows
        return rows, scaled_size(columns, -self.epilogue.width)

    @property
    def _by_tma(self) -> list[TmaStore]:
        """Those of the outputs that TMA stores."""
        return [out for out in self.outs if isinstance(out, TmaStore)]

    def _wait_for_buffers(self, thread: Int32, barrier: Int32, step: int) -> None:
        """Until a step's buffers may be filled again; the warpgroup's threads meet."""
        if self._by_tma:
            self._by_tma[0].wait_for_buffer(thread, barrier, self.plan.pending_stores(step))
        else:
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)

    def _commit(self, thread: Int32) -> None:
        """The TMA stores of a step are one group."""
        if self._by_tma:
            self._by_tma[0].commit(thread)

    def _staged_outputs(
        self, buffers: StagedBuffers
    ) -> list[tuple[TmaStore | CopiedStore, Output, cute.Pointer]]:
        """Each output's store, what it is, and its buffers."""
        return list(zip(self.outs, self.epilogue.stored, buffers.outs, strict=True))

    def _share_columns(self, buffers: StagedBuffers, ahead: Ahead, thread: Int32) -> None:
        """Column values into shared memory; they are seen once the warpgroup has met for the first buffer."""
        for i, values in enumerate(ahead.columns):
            for part, value in enumerate(values):
                self._share(buffers.columns[i], thread + part * WARPGROUP_THREADS, value)

    @cute.jit
    def _share(self, columns: cute.Pointer, column: Int32, value: Any) -> None:
        if column < self.plan.warpgroup_n:
            cute.make_tensor(columns, cute.make_layout(self.plan.warpgroup_n))[column] = value

    def _evaluation(
        self,
        accumulators: cute.Tensor,
        buffers: StagedBuffers,
        ahead: Ahead,
        thread: Int32,
        origin: tuple,
        step: int,
    ) -> Evaluation:
        plan = self.plan
        mma, (first, width) = step // len(plan.chunks), plan.chunks[step % len(plan.chunks)]
        start = mma * plan.warpgroup_n // 2 + first // 2
        values = cute.make_tensor(accumulators.iterator + start, cute.make_layout(width // 2)).load()
        row, column, batch = origin

        def find() -> tuple[list[Int32], list[Int32]]:
            r, c = self.first_place(thread)
            rows = [row + r + (mma * plan.warpgroups_m * MMA_M + 8 * low) for low in range(2)]
            columns = [column + c + (first + 8 * j + odd) for j in range(width // 8) for odd in range(2)]
            of_each = range(width // 2)
            return [rows[i % 4 // 2] for i in of_each], [columns[i // 4 * 2 + i % 2] for i in of_each]

        places = user_places(self.epilogue, width // 2, batch, find)
        source = StagedSource(self, buffers, ahead, thread, step)
        return Evaluation(self.epilogue.graph, self.epilogue.operands, values, places, source)

    def _put(
        self,
        out: TmaStore | CopiedStore,
        evaluation: Evaluation,
        output: Output,
        buffers: cute.Pointer,
        thread: Int32,
        width: int,
        buffer: int,
    ) -> None:
        """An output's values of a piece into its buffer."""
        values = evaluation.output(output)
        across = self.epilogue.graph.width(output)
        if across == FULL:
            out.put(values, buffers, thread, width, buffer)
            return
        # A thread has every fourth column here, or four in a row: no matrices for stmatrix to store.
        sD = out.pieces(buffers, width)
        r, c = self.first_place(thread)
        rounded = values.to(DTYPES[out.problem.out_dtype])
        run = 1 if across == HALF else 4
        for i in range(width // 2):
            low, square, right = i // run % 2, i // (2 * run), i % run
            sD[r + 8 * low, scaled_size(c, across) + scaled_size(8, across) * square + right, buffer] = (
                rounded[i]
            )


class StagedSource:
    """Operands of one piece, from where StagedStore has put them."""

    def __init__(
        self, store: StagedStore, buffers: StagedBuffers, ahead: Ahead, thread: Int32, step: int
    ) -> None:
        self.store, self.buffers, self.ahead, self.thread, self.step = store, buffers, ahead, thread, step
        self.direct = DirectSource(store.epilogue, store.matrices)

    def read(self, operand: Operand, places: Places, guard: Any) -> Any:
        """See Source.read."""
        epilogue = self.store.epilogue
        if operand.is_scalar:
            value = self.ahead.scalars[[o.name for o in epilogue.scalars].index(operand.name)]
            return cute.full(len(places), value, Float32 if operand.type == "float" else Int32)
        if epilogue.by_row(operand):
            index = [o.name for o in epilogue.operands if epilogue.by_row(o)].index(operand.name)
            return self._rows(self.ahead.rows[index], len(places))
        if epilogue.by_column(operand):
            index = [o.name for o in epilogue.operands if epilogue.by_column(o)].index(operand.name)
            return self._columns(operand, index)
        if operand.access == "staged":
            return self._piece(operand, guard)
        return self.direct.read(operand, places, guard)

    def _rows(self, values: tuple, count: int) -> Any:
        """A thread's row values spread over its elements; narrower fragments have rows at other places."""
        mma = self.step // len(self.store.plan.chunks)
        full = self._width // 2
        period = 4 if count == full else 2 if count < full else 8
        own = vector([values[2 * mma + low].to(Float32) for low in range(2)], Float32)
        return _repeated(own, (period // 2, 2, count // period), (0, 1, 0))

    @property
    def _width(self) -> int:
        chunks = self.store.plan.chunks
        return chunks[self.step % len(chunks)][1]

    def _columns(self, operand: Operand, index: int) -> Any:
        store, dtype = self.store, DTYPES[str(operand.dtype)]
        first, width = store.plan.chunks[self.step % len(store.plan.chunks)]
        _, c = store.first_place(self.thread)
        address = (self.buffers.columns[index] + (first + c)).toint()
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=dtype.width // 4)
        # (neighbour, 8 columns): a thread has two neighbours of every eight.
        shared = cute.make_tensor(pointer, cute.make_layout((2, width // 8), stride=(1, 8)))
        own = cute.make_rmem_tensor((2, width // 8), dtype)
        cute.autovec_copy(shared, own)
        return _repeated(own.load().to(Float32), (2, 2, width // 8), (1, 0, 2))

    def _piece(self, operand: Operand, guard: Any) -> Any:
        store, width = self.store, self._width
        plan, problem = store.plan, replace(store.problem, out_dtype=str(operand.dtype))
        index = [o.name for o in store.epilogue.staged].index(operand.name)
        sC = tensor_at(self.buffers.operands[index], plan_piece_layout(plan, problem, operand, width))
        copy = chunk_load(problem, width)
        thread_copy = copy.get_slice(self.thread)
        shape = chunk_mma(problem, width).partition_shape_C((MMA_M, width))
        values = cute.make_rmem_tensor(shape, DTYPES[str(operand.dtype)])
        buffer = self.step % plan.store_stages
        source, target = thread_copy.partition_S(sC)[None, None, None, buffer], thread_copy.retile(values)
        if guard is None:
            cute.copy(copy, source, target)
        else:
            values.fill(0.0)
            _copy_unless_zero(guard, copy, source, target)
        return values.load().to(Float32).reshape((width // 2,))


def _repeated(values: Any, shape: tuple[int, int, int], stride: tuple[int, int, int]) -> Any:
    """A float32 vector read through a layout that has a stride of 0."""
    fragment = cute.make_rmem_tensor(cute.size(values.shape), Float32)
    fragment.store(values.reshape(fragment.shape))
    spread = cute.make_tensor(fragment.iterator, cute.make_layout(shape, stride=stride))
    return spread.load().reshape((cute.size(shape),))


def _found_here(pointer: cute.Pointer) -> cute.Pointer:
    """The same pointer, of which the compiler cannot know before the tile is there.

    It would find every address of every output once for all tiles, and keep them in registers meanwhile.
    """
    address = cute.arch.make_warp_uniform(pointer.toint())
    return cute.make_ptr(pointer.dtype, address, cute.AddressSpace.smem, assumed_align=pointer.alignment)


@cute.jit
def _copy_unless_zero(guard: Float32, copy: Any, source: cute.Tensor, target: cute.Tensor) -> None:
    if guard != 0.0:
        cute.copy(copy, source, target)


def plan_piece_layout(plan: HopperPlan, problem: GemmProblem, operand: Operand, width: int) -> Any:
    """(64, width, buffer): the buffers of an operand's pieces of one warpgroup."""
    name = str(operand.dtype)
    piece = chunk_piece(replace(problem, out_dtype=name), width)
    elements = plan.piece_bytes(name) // dtype_bytes(name)
    outer = cute.append(piece.outer, cute.make_layout(plan.store_stages, stride=elements))
    return cute.make_composed_layout(piece.inner, 0, outer)


def make_staged_store(
    mD_mnl: cute.Tensor, plan: HopperPlan, problem: GemmProblem, matrices: Matrices
) -> StagedStore:
    """Host side: the TMA descriptors of the output and of staged operands."""
    epilogue: Epilogue = problem.epilogue  # type: ignore[assignment]
    all_atoms, all_tensors = [], []
    for i, operand in enumerate(epilogue.operands):
        if operand.access != "staged":
            continue
        atoms, tensors = [], []
        matrix = _kernel_matrix(epilogue, matrices.operands[i], problem)
        for width in sorted({width for _, width in plan.chunks}, reverse=True):
            piece = chunk_piece(replace(problem, out_dtype=str(operand.dtype)), width)
            atom, tensor = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), matrix, piece, (MMA_M, width)
            )
            atoms.append(atom)
            tensors.append(tensor)
        all_atoms.append(tuple(atoms))
        all_tensors.append(tuple(tensors))
    outs = []
    for output in epilogue.stored:
        matrix, by_tma = mD_mnl, plan.paths.store == "tma"
        if output.name is not None:
            matrix = _kernel_matrix(epilogue, matrices.outputs[epilogue.further.index(output)], problem)
            by_tma = output.name not in epilogue.direct
        dtype = output.dtype or problem.out_dtype
        width = epilogue.graph.width(output)
        chunks = tuple((scaled_size(first, width), scaled_size(each, width)) for first, each in plan.chunks)
        own_plan = replace(plan, chunks=chunks, store_buffer_bytes=piece_bytes(chunks, dtype))
        own_problem = replace(problem, out_dtype=dtype)
        outs.append(
            make_tma_store(matrix, own_plan, own_problem)
            if by_tma
            else CopiedStore(matrix, own_plan, own_problem)
        )
    return StagedStore(tuple(outs), tuple(all_atoms), tuple(all_tensors), matrices, plan, problem)


def _kernel_matrix(epilogue: Epilogue, matrix: cute.Tensor, problem: GemmProblem) -> cute.Tensor:
    """A (row, column, batch) matrix of the user's in the kernel's modes."""
    shape, stride = matrix.shape, matrix.stride
    first, second = (1, 0) if epilogue.swapped else (0, 1)
    layout = cute.make_layout(
        (shape[first], shape[second], shape[2]), stride=(stride[first], stride[second], stride[2])
    )
    return cute.make_tensor(matrix.iterator, layout)
