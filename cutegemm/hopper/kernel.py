"""The Hopper GEMM kernel (sm_90a): D = A @ B for 16-bit operands, float32 accumulation.

Read top to bottom in the order the hardware works: host launch, setup, producer warp, consumer
warpgroups.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.hopper.layouts import CUTE_DTYPES, Layouts, make_layouts
from cutegemm.hopper.mainloop import WgmmaMainloop
from cutegemm.hopper.plan import (
    ALIGNMENT,
    CONSUMER_REGISTERS,
    MMA_M,
    PRODUCER_REGISTERS,
    WARPGROUP_THREADS,
    HopperPlan,
)
from cutegemm.hopper.producer import TmaProducer, make_loader, make_producer
from cutegemm.hopper.ring import StageRing
from cutegemm.hopper.store import TmaStore, make_store
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler

PRODUCER_WARPGROUP = 0


class NamedBarrier(IntEnum):
    """Hardware barriers in use; 0 belongs to whole-CTA synchronisation."""

    STORE = 1  # + consumer: its 128 threads agree that an output buffer is free or filled
    TURN = 3  # + team: both teams meet here, one waiting for its turn, the other granting it


@dataclass(frozen=True)
class TaskGrid:
    """Output tiles as the scheduler sees them, in clusters; device-side numbers."""

    clusters_m: Int32
    clusters_n: Int32
    batch: Int32
    workers: Int32
    k_tiles: Int32


class HopperGemm:
    """One kernel: a plan, the problem's dtypes and majors, and a scheduler. Sizes are run-time values.

    Roles in a CTA (128 threads each):
        warpgroup 0         warp 0 is the producer; its other warps only lend their registers
        warpgroups 1, 2     consumers: all on one tile (cooperative), or each on its own (ping-pong)

    Barriers (see StageRing): inputs_arrived counts 1 arrival and the bytes of a stage;
    inputs_consumed counts one arrival for each consumer warp of each CTA that reads what this one loads.

    Timeline, cooperative:                      ping-pong:
        producer   | load s0 s1 s2 s3 s0 ..         producer   | load ...
        consumers  |    mma s0 s1 s2 .. | store     consumer 1 | mma tile 0 | store |   mma tile 2 ..
                                                    consumer 2 |            | mma tile 1 | store ..
    The producer runs ahead into the next tile while a tile is being stored.
    """

    def __init__(self, plan: HopperPlan, problem: GemmProblem, scheduler: TileScheduler) -> None:
        self.plan = plan
        self.problem = problem
        self.scheduler = scheduler

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, resident: Int32, stream):
        """Host entry. a (M, K), b (K, N), d (M, N), each with a leading L when batched.

        resident: how many clusters of this kernel the GPU holds at once.
        """
        plan = self.plan
        config = plan.config
        mA_mkl, mB_nkl, mD_mnl = self._kernel_modes(a, b, d)
        layouts = make_layouts(plan, self.problem)
        producer = make_producer(mA_mkl, mB_nkl, layouts, plan)
        store = make_store(mD_mnl, plan, self.problem)
        m, n, batch = mD_mnl.shape
        clusters_m = cute.ceil_div(m, config.tile_m * config.cluster_m)
        clusters_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
        tasks = clusters_m * clusters_n * batch
        workers = self.scheduler.assignment.workers(tasks, resident)
        grid = TaskGrid(
            clusters_m, clusters_n, Int32(batch), workers, cute.ceil_div(mA_mkl.shape[1], config.tile_k)
        )
        self.kernel(producer, store, layouts.tiled_mma, layouts.a_staged, layouts.b_staged, grid).launch(
            grid=(workers * config.cluster_size, 1, 1),
            block=(plan.threads, 1, 1),
            cluster=(config.cluster_size, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def _kernel_modes(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        """(M, K, L), (N, K, L), (M, N, L) views of the user's tensors; M and N exchanged when swapped."""
        if self.plan.config.swap_ab:
            a, b = b, a
            return self._view(a, -1, -2), self._view(b, -2, -1), self._view(d, -1, -2)
        return self._view(a, -2, -1), self._view(b, -1, -2), self._view(d, -2, -1)

    def _view(self, tensor: cute.Tensor, first: int, second: int) -> cute.Tensor:
        shape, stride = tensor.shape, tensor.stride
        batch, batch_stride = (shape[0], stride[0]) if self.problem.batched else (1, 0)
        layout = cute.make_layout(
            (shape[first], shape[second], batch), stride=(stride[first], stride[second], batch_stride)
        )
        return cute.make_tensor(tensor.iterator, layout)

    @cute.kernel
    def kernel(
        self,
        producer: TmaProducer,
        store: TmaStore,
        tiled_mma: cute.TiledMma,
        a_staged: cute.ComposedLayout,
        b_staged: cute.ComposedLayout,
        grid: TaskGrid,
    ):
        """Device entry: shared memory and barriers, then each warpgroup takes its role."""
        plan = self.plan
        config = plan.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        rank = Int32(0)
        if cutlass.const_expr(config.cluster_size > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta = (rank % config.cluster_m, rank // config.cluster_m)
        block, _, _ = cute.arch.block_idx()
        worker = block // config.cluster_size

        if warp == 0:
            producer.prefetch()
            store.prefetch()

        ring, sA, sB, buffers = self._shared_memory(a_staged, b_staged)
        if warp == 0:
            with cute.arch.elect_one():
                ring.init(plan.consumer_warps_per_tile)
                cute.arch.mbarrier_init_fence()
        self._sync_cluster()
        # Everything above ran under the tail of the kernel before this one; from here on global memory
        # is touched, so every thread first waits until that kernel's writes are visible.
        cute.arch.griddepcontrol_wait()
        # The next kernel may set itself up as soon as SMs come free; its own wait keeps it from our data.
        cute.arch.griddepcontrol_launch_dependents()

        if warpgroup == PRODUCER_WARPGROUP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self._produce(make_loader(producer, sA, sB, plan, cta), ring, grid, worker, cta)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[config.consumers])
            consumer = warpgroup - 1
            mainloop = self._mainloop(tiled_mma, sA, sB, ring, consumer, cta)
            self._consume(mainloop, store, buffers, grid, worker, cta, consumer)

    def _shared_memory(self, a_staged, b_staged):
        """Allocates the CTA's shared memory: barriers, operand stages, output buffers."""
        plan = self.plan
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * plan.stages)
        dtype = CUTE_DTYPES[self.problem.a_dtype]
        sA = smem.allocate_tensor(dtype, a_staged.outer, ALIGNMENT, swizzle=a_staged.inner)
        sB = smem.allocate_tensor(dtype, b_staged.outer, ALIGNMENT, swizzle=b_staged.inner)
        out = CUTE_DTYPES[self.problem.out_dtype]
        elements = plan.config.consumers * plan.store_stages * plan.store_buffer_bytes * 8 // out.width
        buffers = smem.allocate_array(out, elements, byte_alignment=ALIGNMENT)
        readers = plan.config.cluster_m + plan.config.cluster_n - 1
        return StageRing(barriers, barriers + plan.stages, plan.stages, readers), sA, sB, buffers

    def _sync_cluster(self):
        """Barriers are initialised in every CTA of the cluster before anyone touches them."""
        if self.plan.config.cluster_size > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _tile(self, task: Int32, grid: TaskGrid, cta: tuple):
        """(m, n, l) of this CTA's tile in task ``task`` of its cluster."""
        config = self.plan.config
        per_batch = grid.clusters_m * grid.clusters_n
        batch = Int32(0)
        if cutlass.const_expr(self.problem.batched):
            batch = task // per_batch
            task = task - batch * per_batch
        m, n = self.scheduler.order.tile(task, grid.clusters_m, grid.clusters_n)
        return m * config.cluster_m + cta[0], n * config.cluster_n + cta[1], batch

    @cute.jit
    def _produce(self, loader, ring: StageRing, grid: TaskGrid, worker: Int32, cta: tuple):
        """Producer warp: every tile of this worker, stage by stage, as far ahead as the ring allows."""
        tasks = grid.clusters_m * grid.clusters_n * grid.batch
        cursor = ring.start()
        task = self.scheduler.assignment.first(worker)
        while task < tasks:
            tile = self._tile(task, grid, cta)
            for k_tile in cutlass.range(grid.k_tiles, unroll=1):
                ring.wait_consumed(cursor)
                loader.load(ring.inputs_arrived + cursor.stage, cursor.stage, k_tile, tile)
                cursor = ring.advanced(cursor)
            task = self.scheduler.assignment.next(task, grid.workers)
        if cutlass.const_expr(self.plan.config.cluster_size > 1):
            # A CTA stays until its peers have sent their last arrival here.
            for _ in cutlass.range_constexpr(self.plan.stages):
                ring.wait_consumed(cursor)
                cursor = ring.advanced(cursor)

    def _mainloop(self, tiled_mma, sA, sB, ring: StageRing, consumer: Int32, cta: tuple) -> WgmmaMainloop:
        """This warpgroup's operand descriptors and the CTAs it reports to."""
        config = self.plan.config
        member = consumer if self.plan.teams == 1 else Int32(0)
        thread_mma = tiled_mma.get_slice(member * WARPGROUP_THREADS)
        tCrA = tiled_mma.make_fragment_A(thread_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thread_mma.partition_B(sB))
        lane = cute.arch.lane_idx()
        # Lanes 0..cluster_n-1 name the CTAs of this row (they load A slices), the rest those of this column.
        along_n = cta[0] + lane * config.cluster_m
        along_m = lane - config.cluster_n + cta[1] * config.cluster_m
        along_m = along_m + (along_m >= cta[0] + cta[1] * config.cluster_m).to(Int32)
        peer = cutlass.select_(lane < config.cluster_n, along_n, along_m)
        return WgmmaMainloop(tiled_mma, tCrA, tCrB, ring, peer, ring.readers)

    @cute.jit
    def _consume(
        self,
        mainloop: WgmmaMainloop,
        store: TmaStore,
        buffers,
        grid: TaskGrid,
        worker: Int32,
        cta: tuple,
        consumer: Int32,
    ):
        """Consumer warpgroup: every tile of its team, main loop then store."""
        plan = self.plan
        config = plan.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        tasks = grid.clusters_m * grid.clusters_n * grid.batch
        accumulators = cute.make_rmem_tensor(
            mainloop.tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), cutlass.Float32
        )
        out = CUTE_DTYPES[self.problem.out_dtype]
        own = buffers + consumer * (plan.store_stages * plan.store_buffer_bytes * 8 // out.width)
        own = cute.make_ptr(out, own.toint(), cute.AddressSpace.smem, assumed_align=ALIGNMENT)
        row = Int32(0)
        column = Int32(0)
        if cutlass.const_expr(plan.warpgroups_m > 1):
            row = consumer * MMA_M
        if cutlass.const_expr(plan.warpgroups_n > 1):
            column = consumer * plan.warpgroup_n

        cursor = mainloop.ring.start()
        task = self.scheduler.assignment.first(worker)
        if cutlass.const_expr(plan.teams == 2):
            if consumer == 1:
                # The second team starts one tile later; it grants the first its first turn.
                cute.arch.barrier_arrive(
                    barrier_id=NamedBarrier.TURN, number_of_threads=2 * WARPGROUP_THREADS
                )
                task = self.scheduler.assignment.next(task, grid.workers)
                cursor = mainloop.ring.skipped(cursor, grid.k_tiles)
        while task < tasks:
            m, n, batch = self._tile(task, grid, cta)
            if cutlass.const_expr(plan.teams == 2):
                cute.arch.barrier(
                    barrier_id=NamedBarrier.TURN + consumer, number_of_threads=2 * WARPGROUP_THREADS
                )
            cursor = mainloop.compute(accumulators, cursor, grid.k_tiles)
            if cutlass.const_expr(plan.teams == 2):
                cute.arch.barrier_arrive(
                    barrier_id=NamedBarrier.TURN + 1 - consumer, number_of_threads=2 * WARPGROUP_THREADS
                )
                cursor = mainloop.ring.skipped(cursor, grid.k_tiles)
                task = self.scheduler.assignment.next(task, grid.workers)
            store.store(
                accumulators, own, thread, NamedBarrier.STORE + consumer,
                (m * config.tile_m + row, n * config.tile_n + column, batch),
            )  # fmt: skip
            task = self.scheduler.assignment.next(task, grid.workers)
        store.drain(thread)
