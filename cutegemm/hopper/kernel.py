"""The Hopper GEMM kernel (sm_90a): D = A @ B for 16-bit operands, float32 accumulation.

Read top to bottom in the order the hardware works: host launch, set-up, producer warp, consumer
warpgroups. What can be swapped is a part with a file of its own: producer.py, mainloop.py, teams.py
(cooperative or ping-pong), feed.py (whose work is what), reduction.py (sums that workers share), store.py,
and the tile scheduler.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.hopper.layouts import make_layouts
from cutegemm.hopper.mainloop import WgmmaMainloop
from cutegemm.hopper.plan import (
    ALIGNMENT,
    MMA_M,
    MOVING_REGISTERS,
    WARPGROUP_THREADS,
    HopperPlan,
)
from cutegemm.hopper.producer import make_loader, make_producer
from cutegemm.hopper.reduction import Reduction, make_reduction
from cutegemm.hopper.stores import STORE_BARRIERS, Store, make_store
from cutegemm.hopper.teams import Member, Steps, make_team
from cutegemm.parts.feed import Feed, divided, make_feed
from cutegemm.parts.grid import Place, TaskGrid, k_share
from cutegemm.parts.host import Record, read_record, refusal, write_outcome
from cutegemm.parts.loads import Loader, TmaProducer
from cutegemm.parts.realign import make_movers, make_staging
from cutegemm.parts.ring import StageRing
from cutegemm.parts.tensors import CUTE_DTYPES, kernel_modes
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.arithmetic import divmod_

PRODUCER_WARPGROUP = 0
PRODUCER_WARP = 0
FETCHING_WARP = 1


class HopperGemm:
    """One kernel: a plan, the problem's dtypes and majors, and a scheduler. Sizes are run-time values.

    Roles in a CTA (128 threads each):
        warpgroup 0         warp 0 is the producer, warp 1 fetches tasks (Dynamic); the others only lend
                            their registers
        warpgroups 1, 2     consumers: all on one tile (cooperative), or each on its own (ping-pong)
        one more            movers, where TMA cannot put an operand in its place (parts/realign.py)

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
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        call: Int64,
        outcome: Int64,
        stream: Any,
        *extras: Any,
    ) -> None:
        """Host entry: checks the call (see host.py), then launches. Compiled to machine code.

        a (M, K), b (K, N), d (M, N), each with a leading L when batched
        call      address of the CallRecord: the sizes this launch was chosen for
        outcome   address of the int32 that receives 0 (launched) or what kept it from launching
        extras    an epilogue's operands and further outputs, see build.py
        """
        record = read_record(call)
        refused = refusal(record, a, b, d, self.plan, extras)
        write_outcome(outcome, refused)
        if refused == 0:
            self._launch((a, b, d), record, stream, extras)

    def _launch(self, tensors: tuple, record: Record, stream: Any, extras: tuple) -> None:
        """Descriptors, grid and launch; ``record.resident`` clusters fit on the GPU at once."""
        plan = self.plan
        config = plan.config
        a, b, d = tensors
        mA_mkl, mB_nkl, mD_mnl = kernel_modes(a, b, d, config.swap_ab)
        layouts = make_layouts(plan, self.problem)
        producer = make_producer(mA_mkl, mB_nkl, layouts, plan)
        store = make_store(mD_mnl, plan, self.problem, extras)
        # Of the product: an epilogue may make D narrower or wider.
        m, n, batch = mA_mkl.shape[0], mB_nkl.shape[0], mD_mnl.shape[2]
        clusters_m = cute.ceil_div(m, config.tile_m * config.cluster_m)
        clusters_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
        tasks = clusters_m * clusters_n * batch
        workers = self.scheduler.assignment.workers(tasks, record.resident)
        k_tiles = cute.ceil_div(mA_mkl.shape[1], config.tile_k)
        division = divided(self.scheduler, tasks, workers, k_tiles)
        addresses = record.counters, record.partials
        grid = TaskGrid(clusters_m, clusters_n, Int32(batch), workers, k_tiles, *addresses, division)
        self.kernel(producer, store, layouts.tiled_mma, layouts.a_staged, layouts.b_staged, grid).launch(
            grid=(workers * plan.cluster_ctas, 1, 1),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster_ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        producer: TmaProducer,
        store: Store,
        tiled_mma: cute.TiledMma,
        a_staged: cute.ComposedLayout,
        b_staged: cute.ComposedLayout,
        grid: TaskGrid,
    ) -> None:
        """Device entry: shared memory and barriers, then each warpgroup takes its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP_THREADS)
        place = self._place(grid)

        if warp == PRODUCER_WARP:
            producer.prefetch()
            store.prefetch()

        smem = cutlass.memory.SmemAllocator()
        of_store = 2 * plan.stages
        of_staging = of_store + max(STORE_BARRIERS, store.barriers)
        in_all = of_staging + (2 * plan.stages if plan.staged_bytes else 0)
        barriers = smem.allocate_array(cutlass.Int64, in_all)
        feed = make_feed(self.scheduler, plan, smem, grid, place)
        reduction = make_reduction(self.scheduler, plan, feed, smem, grid, place)
        sA, sB = self._operand_stages(a_staged, b_staged, smem)
        readers = plan.config.cluster_m + plan.config.cluster_n - 1
        ring = StageRing(barriers, barriers + plan.stages, plan.stages, readers)
        dtype = CUTE_DTYPES[self.problem.a_dtype]
        staging: Any = make_staging(plan.line_boxes, plan.stages, dtype, smem, barriers + of_staging)
        buffers: Any = store.allocate(smem, barriers + of_store)
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                ring.init(plan.consumer_warps_per_tile, plan.filling_arrivals)
                if cutlass.const_expr(staging is not None):
                    staging.init()
                feed.init()
                store.init(buffers)
                cute.arch.mbarrier_init_fence()
        self._sync_cluster()
        # Everything above ran under the tail of the kernel before this one; from here on global memory
        # is touched, so every thread first waits until that kernel's writes are visible.
        cute.arch.griddepcontrol_wait()
        # The next kernel may set itself up as soon as SMs come free; its own wait keeps it from our data.
        cute.arch.griddepcontrol_launch_dependents()

        if warpgroup == PRODUCER_WARPGROUP:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == PRODUCER_WARP:
                loader = make_loader(producer, ring, staging, (sA, sB), plan, place)
                self._produce(loader, ring, feed, grid, place)
            if cutlass.const_expr(self.scheduler.queued):  # noqa: SIM102 - at trace time, and at run time
                if (warp == FETCHING_WARP) & (place.cta_m + place.cta_n == 0):
                    feed.fetch()
        else:
            roles = (tiled_mma, sA, sB, ring), (feed, reduction, store, buffers), (grid, place)
            if cutlass.const_expr(staging is None):
                self._be_consumer(warpgroup, *roles)
            else:
                if warpgroup <= plan.config.consumers:
                    self._be_consumer(warpgroup, *roles)
                else:
                    cute.arch.setmaxregister_decrease(MOVING_REGISTERS)
                    movers = make_movers(staging, ring, ((producer.a, sA), (producer.b, sB)))
                    movers.move_all(feed, grid.tasks())

    def _be_consumer(
        self,
        warpgroup: Int32,
        operands: tuple[Any, ...],
        parts: tuple[Any, ...],
        where: tuple[TaskGrid, Place],
    ) -> None:
        """A consumer warpgroup's registers, and its loop over the tiles."""
        cute.arch.setmaxregister_increase(self.plan.consumer_registers)
        grid, place = where
        consumer = warpgroup - 1
        tiled_mma, sA, sB, ring = operands
        mainloop = self._mainloop(tiled_mma, sA, sB, ring, consumer, place)
        self._consume(mainloop, *parts, (grid, place, consumer))

    def _place(self, grid: TaskGrid) -> Place:
        """This CTA's place; ranks in a cluster run along M first, or along K when that is split."""
        config, splits = self.plan.config, self.plan.splits
        block, _, _ = cute.arch.block_idx()
        if self.plan.cluster_ctas == 1:
            return Place(block, Int32(0), Int32(0), Int32(0), grid.k_tiles)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        worker = block // self.plan.cluster_ctas
        if splits == 1:
            return Place(worker, rank % config.cluster_m, rank // config.cluster_m, Int32(0), grid.k_tiles)
        return Place(worker, Int32(0), Int32(0), *k_share(grid.k_tiles, splits, rank))

    def _operand_stages(
        self, a_staged: Any, b_staged: Any, smem: cutlass.memory.SmemAllocator
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Shared memory for the stages of A and B."""
        dtype = CUTE_DTYPES[self.problem.a_dtype]
        sA = smem.allocate_tensor(dtype, a_staged.outer, ALIGNMENT, swizzle=a_staged.inner)
        sB = smem.allocate_tensor(dtype, b_staged.outer, ALIGNMENT, swizzle=b_staged.inner)
        return sA, sB

    def _sync_cluster(self) -> None:
        """Barriers are initialised in every CTA of the cluster before anyone touches them."""
        if self.plan.cluster_ctas > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _tile(self, task: Int32, grid: TaskGrid, place: Place) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) of this CTA's tile in task ``task`` of its cluster."""
        config = self.plan.config
        batch = Int32(0)
        if cutlass.const_expr(self.problem.batched):
            batch, task = divmod_(task, grid.clusters_m * grid.clusters_n)
        m, n = self.scheduler.order.tile(task, grid.clusters_m, grid.clusters_n)
        return m * config.cluster_m + place.cta_m, n * config.cluster_n + place.cta_n, batch

    @cute.jit
    def _produce(
        self,
        loader: Loader,
        ring: StageRing,
        feed: Feed,
        grid: TaskGrid,
        place: Place,
    ) -> None:
        """Producer warp: every tile of this worker, stage by stage, as far ahead as the ring allows."""
        tasks = grid.tasks()
        cursor = ring.start()
        position = feed.first()
        while position.task < tasks:
            tile = self._tile(position.task, grid, place)
            span = feed.span(position)
            feed.begin()
            for step in cutlass.range(span.k_count, unroll=1):
                loader.load(cursor, span.k_first + step, tile)
                cursor = ring.advanced(cursor)
            position = feed.next(position)
        if cutlass.const_expr(ring.readers > 1):
            # A CTA stays until its peers have sent their last arrival here.
            for _ in cutlass.range_constexpr(self.plan.stages):
                ring.wait_consumed(cursor)
                cursor = ring.advanced(cursor)

    def _mainloop(
        self, tiled_mma: Any, sA: Any, sB: Any, ring: StageRing, consumer: Int32, place: Place
    ) -> WgmmaMainloop:
        """This warpgroup's operand descriptors, and the CTAs it tells when it is done with a stage."""
        config = self.plan.config
        member = make_team(self.plan).member(consumer)
        thread_mma = tiled_mma.get_slice(member * WARPGROUP_THREADS)
        tCrA = tiled_mma.make_fragment_A(thread_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thread_mma.partition_B(sB))
        lane = cute.arch.lane_idx()
        # Lanes 0..cluster_n-1 name the CTAs of this row (they load A slices), the rest those of this column.
        own_rank = place.cta_m + place.cta_n * config.cluster_m
        in_row = place.cta_m + lane * config.cluster_m
        in_column = lane - config.cluster_n + place.cta_n * config.cluster_m
        in_column = in_column + (in_column >= own_rank).to(Int32)
        peer = cutlass.select_(lane < config.cluster_n, in_row, in_column)
        return WgmmaMainloop(tiled_mma, tCrA, tCrB, ring, peer)

    @cute.jit
    def _consume(
        self,
        mainloop: WgmmaMainloop,
        feed: Feed,
        reduction: Reduction,
        store: Store,
        buffers: Any,
        where: tuple[TaskGrid, Place, Int32],
    ) -> None:
        """Consumer warpgroup: every tile of its team, main loop then store."""
        grid, place, consumer = where
        plan = self.plan
        config = plan.config
        team = make_team(plan)
        member = Member(consumer, cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        accumulators = cute.make_rmem_tensor(
            mainloop.tiled_mma.partition_shape_C((config.tile_m, config.tile_n)), cutlass.Float32
        )
        own_buffers: Any = store.buffers_of(consumer, buffers)
        share = team.member(consumer)
        row = share % plan.warpgroups_m * MMA_M
        column = share // plan.warpgroups_m * plan.warpgroup_n

        tasks = grid.tasks()
        steps = Steps(feed, mainloop.ring)
        turn = Int32(0)
        position, cursor = team.first(consumer, feed.first(), mainloop.ring.start(), steps)
        while position.task < tasks:
            m, n, batch = self._tile(position.task, grid, place)
            span = feed.span(position)
            tile, corner = (m, n, batch), (row, column)
            ahead: Any = store.ahead(own_buffers, member, tile, corner)
            team.wait_turn(consumer)
            cursor = mainloop.compute(accumulators, cursor, span.k_count)
            team.pass_turn(consumer)
            if reduction.complete(accumulators, span, member, share):
                store.store(accumulators, own_buffers, ahead, member, (tile, corner), turn)
                turn = turn + 1
            position, cursor = team.following(position, cursor, steps)
        store.drain(own_buffers, member, turn)
