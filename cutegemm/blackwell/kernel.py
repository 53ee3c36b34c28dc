"""The Blackwell GEMM kernel (sm_100a): D = A @ B for 16-bit operands, float32 accumulation.

Read top to bottom in the order the hardware works: host launch, set-up, then the roles: a warp that loads,
one that issues MMAs, warpgroups that store results. What can be swapped is a part with a file of its own:
producer.py, mainloop.py, the store, the feed (whose work is what) and the tile scheduler.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

from cutegemm.blackwell.chunks import Member
from cutegemm.blackwell.feed import make_feed, worker_count
from cutegemm.blackwell.fences import fence_after_wait, fence_before_signal
from cutegemm.blackwell.layouts import make_layouts
from cutegemm.blackwell.mainloop import Tcgen05Mainloop
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.blackwell.producer import make_loader, make_producer
from cutegemm.blackwell.reduction import Reduction, make_reduction
from cutegemm.blackwell.results import (
    RESULT_BARRIERS,
    Result,
    ResultRing,
    init_result_barriers,
    make_results,
)
from cutegemm.blackwell.stages import as_lines, make_ring
from cutegemm.blackwell.stores import STORE_BARRIERS, Store, make_store
from cutegemm.parts.feed import Feed, divided
from cutegemm.parts.grid import Place, TaskGrid, k_share
from cutegemm.parts.host import Record, read_record, refusal, write_outcome
from cutegemm.parts.limits import ALIGNMENT, WARPGROUP_THREADS
from cutegemm.parts.loads import Loader, TmaProducer, multicast_mask
from cutegemm.parts.realign import Movers, make_movers, make_staging
from cutegemm.parts.ring import StageCursor, StageRing
from cutegemm.parts.tensors import CUTE_DTYPES, kernel_modes
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.arithmetic import divmod_

# Warps by their number behind the epilogue's; movers come after them.
MMA_WARP, LOAD_WARP, FETCHING_WARP = 0, 1, 2


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory.

    staging           a Staging where movers put lines in their place, or None
    result_barriers   see results.py
    tmem              where its tensor memory begins
    """

    ring: StageRing
    staging: Any
    result_barriers: cute.Pointer
    tmem: cute.Pointer
    feed: Feed
    reduction: Reduction
    stages: tuple[cute.Tensor, cute.Tensor]
    buffers: Any


class BlackwellGemm:
    """One kernel: a plan, the problem's dtypes and majors, and a scheduler. Sizes are run-time values.

    Roles in a CTA:
        warpgroup 0 (and 1)   epilogue: results from tensor memory to global memory, chunk by chunk in turn
        the warp after those  MMA: one thread issues all of a CTA's, or in the leader (the even rank) all of
                              a pair's; the warp also allocates and frees tensor memory
        the next warp         load: TMA loads of this CTA's part of A and B
        the warp after it     fetches work, where the scheduler has a queue
        eight more            movers, where TMA cannot put an operand in its place (parts/realign.py)

    Barriers: inputs_arrived counts 1 arrival and the bytes of a stage, and one of each mover, in a pair at
    the leader and of both CTAs; inputs_consumed one arrival for each tile of the cluster whose MMAs read what
    this CTA loads (see StageRing). result_ready and result_taken hand the two accumulators back and forth
    (see ResultRing).

    Timeline:
        load      | s0 s1 s2 s3 s0 ..
        MMA       |    tile 0 | tile 1 | tile 2 ..
        epilogue  |           | store 0  | store 1 ..
    """

    def __init__(self, plan: BlackwellPlan, problem: GemmProblem, scheduler: TileScheduler) -> None:
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
        """Host entry: checks the call (see parts/host.py), then launches. Compiled to machine code.

        a (M, K), b (K, N), d (M, N), each with a leading L when batched
        call      address of the CallRecord: the sizes this launch was chosen for
        outcome   address of the int32 that receives 0 (launched) or what kept it from launching
        extras    an epilogue's operands and further outputs, see epilogue/arguments.py
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
        clusters_m = cute.ceil_div(m, config.tile_m * plan.teams_m)
        clusters_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
        tasks = clusters_m * clusters_n * batch
        workers = worker_count(self.scheduler, plan, tasks, record.resident)
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
        """Device entry: shared memory, tensor memory and barriers, then each warp takes its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        role = warp - 4 * plan.config.consumers
        place = self._place(grid)
        leads = place.cta_m % plan.config.mma_ctas == 0

        if role == LOAD_WARP:
            producer.prefetch()
            store.prefetch()

        shared = self._shared(store, (a_staged, b_staged), grid, place)
        self._set_up(store, shared, role)
        results = make_results(shared.result_barriers, shared.tmem, tiled_mma, plan, place)
        # Everything above ran under the tail of the kernel before this one; from here on global memory
        # is touched, so every thread first waits until that kernel's writes are visible.
        cute.arch.griddepcontrol_wait()
        # The next kernel may set itself up as soon as SMs come free; its own wait keeps it from our data.
        cute.arch.griddepcontrol_launch_dependents()

        if role == LOAD_WARP:
            parts = shared.stages, tiled_mma
            loader = make_loader(producer, shared.ring, shared.staging, parts, plan, place)
            self._load(loader, shared, grid, place)
        elif role == MMA_WARP:
            if leads:
                self._multiply(self._mainloop(tiled_mma, shared, place), results, shared.feed, grid)
            else:
                self._follow(shared.feed, grid)
        elif role == FETCHING_WARP:
            if cutlass.const_expr(self.scheduler.queued):  # noqa: SIM102 - at trace time, and at run time
                if place.cta_m + place.cta_n == 0:
                    shared.feed.fetch()
        else:
            if cutlass.const_expr(shared.staging is None):
                self._epilogue(store, results, shared, (grid, place))
            else:
                if role < MMA_WARP:
                    self._epilogue(store, results, shared, (grid, place))
                else:
                    sA, sB = (as_lines(stages) for stages in shared.stages)
                    operands = (producer.a, sA), (producer.b, sB)
                    self._move(make_movers(shared.staging, shared.ring, operands), shared, grid)
        self._tear_down(shared, role)

    def _place(self, grid: TaskGrid) -> Place:
        """This CTA's place; ranks in a cluster run along K when that is split, else along M first: a pair's
        are neighbours."""
        config = self.plan.config
        block, _, _ = cute.arch.block_idx()
        if self.plan.cluster_ctas == 1:
            return Place(block, Int32(0), Int32(0), Int32(0), grid.k_tiles)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        worker = block // self.plan.cluster_ctas
        if self.plan.splits > 1:
            return Place(worker, Int32(0), Int32(0), *k_share(grid.k_tiles, self.plan.splits, rank))
        return Place(worker, rank % config.cluster_m, rank // config.cluster_m, Int32(0), grid.k_tiles)

    def _shared(self, store: Store, staged: tuple[Any, Any], grid: TaskGrid, place: Place) -> Shared:
        """Lays out shared memory; nothing is initialised yet."""
        plan = self.plan
        smem = cutlass.memory.SmemAllocator()
        of_results = 2 * plan.stages
        of_store = of_results + RESULT_BARRIERS
        of_staging = of_store + STORE_BARRIERS
        in_all = of_staging + (2 * plan.stages if plan.moving_warps else 0)
        barriers = smem.allocate_array(cutlass.Int64, in_all)
        tmem = smem.allocate_array(Int32, 1)
        feed = make_feed(self.scheduler, plan, smem, grid, place)
        reduction = make_reduction(self.scheduler, plan, self.problem, feed, (smem, grid, place))
        dtype = CUTE_DTYPES[self.problem.a_dtype]
        sA, sB = (
            smem.allocate_tensor(dtype, layout.outer, ALIGNMENT, swizzle=layout.inner) for layout in staged
        )
        staging: Any = make_staging(plan.line_boxes, plan.stages, dtype, smem, barriers + of_staging)
        buffers: Any = store.allocate(smem, barriers + of_store)
        if plan.padding_bytes:
            smem.allocate(plan.padding_bytes)
        ring = make_ring(barriers, plan, place)
        return Shared(ring, staging, barriers + of_results, tmem, feed, reduction, (sA, sB), buffers)

    @cute.jit
    def _set_up(self, store: Store, shared: Shared, role: Int32) -> None:
        """Barriers and tensor memory, in every CTA of the cluster before anyone goes on."""
        pair = self.plan.config.mma_ctas == 2
        if role == LOAD_WARP:
            with cute.arch.elect_one():
                shared.ring.init(1, self.plan.filling_arrivals)
                if cutlass.const_expr(shared.staging is not None):
                    shared.staging.init()
                init_result_barriers(shared.result_barriers, self.plan)
                shared.feed.init()
                store.init(shared.buffers)
                cute.arch.mbarrier_init_fence()
        if role == MMA_WARP:
            cute.arch.alloc_tmem(self.plan.tmem_columns, shared.tmem, pair)
            cute.arch.relinquish_tmem_alloc_permit(pair)
        self._meet()

    @cute.jit
    def _tear_down(self, shared: Shared, role: Int32) -> None:
        """Frees tensor memory when nobody uses it any more, the other CTA of a pair included."""
        self._meet()
        if role == MMA_WARP:
            pair = self.plan.config.mma_ctas == 2
            address = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, shared.tmem)
            cute.arch.dealloc_tmem(address, self.plan.tmem_columns, pair)

    @cute.jit
    def _meet(self) -> None:
        """All threads of the cluster wait for each other, what they did to tensor memory included."""
        fence_before_signal()
        if cutlass.const_expr(self.plan.cluster_ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        fence_after_wait()

    @cute.jit
    def _tile(self, task: Int32, grid: TaskGrid, place: Place) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) of the tile this CTA, or its pair, computes in task ``task`` of its cluster."""
        plan = self.plan
        batch = Int32(0)
        if cutlass.const_expr(self.problem.batched):
            batch, task = divmod_(task, grid.clusters_m * grid.clusters_n)
        m, n = self.scheduler.order.tile(task, grid.clusters_m, grid.clusters_n)
        team_m = place.cta_m // plan.config.mma_ctas
        return m * plan.teams_m + team_m, n * plan.config.cluster_n + place.cta_n, batch

    @cute.jit
    def _load(self, loader: Loader, shared: Shared, grid: TaskGrid, place: Place) -> None:
        """Load warp: every tile of this worker, stage by stage, as far ahead as the ring allows."""
        tasks, ring, feed = grid.tasks(), shared.ring, shared.feed
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
        if cutlass.const_expr(shared.staging is None):
            self._outlast(ring, cursor)

    @cute.jit
    def _move(self, movers: Movers, shared: Shared, grid: TaskGrid) -> None:
        """Moving warps: every stage of every tile of this worker, as its lines arrive."""
        cursor = movers.move_all(shared.feed, grid.tasks())
        # The load warp may be two rounds ahead of the MMAs, and a barrier tells only one from the next.
        self._outlast(shared.ring, cursor)

    @cute.jit
    def _outlast(self, ring: StageRing, cursor: StageCursor) -> None:
        """Until the last arrival at this CTA's barriers: MMAs, of other CTAs too, signal their end there."""
        for _ in cutlass.range_constexpr(self.plan.stages):
            ring.wait_consumed(cursor)
            cursor = ring.advanced(cursor)

    def _mainloop(self, tiled_mma: Any, shared: Shared, place: Place) -> Tcgen05Mainloop:
        """This CTA's operand descriptors, and the CTAs that are told when it is done with a stage."""
        config = self.plan.config
        tCrA, tCrB = (
            tiled_mma.make_fragment_A(shared.stages[0]),
            tiled_mma.make_fragment_B(shared.stages[1]),
        )
        # Those of this row of the cluster load its A, those of this column its B; a pair counts as one.
        pair = (1 << config.mma_ctas) - 1
        own_row = Int32(multicast_mask(config.cluster_n, config.cluster_m, place.cta_m))
        if config.cluster_n == 1:
            own_row = Int32(1) << place.cta_m
        own_column = Int32((1 << config.cluster_m) - 1) << (place.cta_n * config.cluster_m)
        return Tcgen05Mainloop(
            tiled_mma, tCrA, tCrB, shared.ring, Int16(own_row * pair | own_column), self.plan
        )

    @cute.jit
    def _multiply(self, mainloop: Tcgen05Mainloop, results: ResultRing, feed: Feed, grid: TaskGrid) -> None:
        """MMA warp: the sum of every tile, into the accumulators in turn."""
        tasks = grid.tasks()
        cursor, result = mainloop.ring.start(), results.start()
        position = feed.first()
        while position.task < tasks:
            span = feed.span(position)
            results.wait_taken(result)
            cursor = mainloop.compute(results.accumulator(result), cursor, span.k_count)
            results.announce(result)
            result = results.advanced(result)
            position = feed.next(position)

    @cute.jit
    def _follow(self, feed: Feed, grid: TaskGrid) -> None:
        """MMA warp of a pair's other CTA: takes note of every task, since a queue waits for that."""
        if cutlass.const_expr(self.scheduler.queued):
            tasks = grid.tasks()
            position = feed.first()
            while position.task < tasks:
                position = feed.next(position)

    @cute.jit
    def _epilogue(
        self, store: Store, results: ResultRing, shared: Shared, where: tuple[TaskGrid, Place]
    ) -> None:
        """Epilogue warpgroup: stores its chunks of every tile."""
        plan = self.plan
        grid, place = where
        thread = cute.arch.thread_idx()[0]
        consumer = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        member = Member(consumer, thread % WARPGROUP_THREADS)
        buffers: Any = store.buffers_of(consumer, shared.buffers)
        tasks, feed = grid.tasks(), shared.feed
        rows_down = place.cta_m % plan.config.mma_ctas * plan.cta_m
        cursor = results.start()
        position = feed.first()
        while position.task < tasks:
            m, n, batch = self._tile(position.task, grid, place)
            origin = (m * plan.config.tile_m + rows_down, n * plan.config.tile_n, batch)
            results.wait_ready(cursor)
            result = Result(results, cursor, member.thread)
            shared.reduction.store(store, result, feed.span(position), buffers, member, origin)
            cursor = results.advanced(cursor)
            position = feed.next(position)
        store.drain(buffers, member, cursor)
