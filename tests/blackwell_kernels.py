"""A small GEMM for sm_100a, every barrier in plain sight: what the emulator's tests run and break.

d = a b^T; a (M, K), b (N, K), d (M, N), all contiguous along the last mode, sizes multiples of the tile. Six
warps: 0..3 read accumulators and store them, 4 issues MMAs, 5 loads. Tiles are taken one after another; two
accumulators, so that the next tile is computed while one is stored.

    inputs_arrived[s]      bytes of a stage; in a pair those of both CTAs, at the leader
    inputs_consumed[s]     the MMAs of a stage are done, in every pair (or CTA) of the cluster
    result_ready[i]        all MMAs of an accumulator are done
    result_taken[i]        an arrival of each storing warp of each CTA
"""

import os
import tempfile
from functools import cache

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

OPERAND = cutlass.Float16
STAGES = 3
RESULTS = 2
TILE_K = 64
STORING_WARPS = 4
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 192
SM_BYTES = 228 * 1024
# Offsets of the barriers in shared memory, for reports.
BARRIER_LABELS = {
    8 * i: f"{name}[{j}]"
    for i, (name, j) in enumerate(
        [("inputs_arrived", s) for s in range(STAGES)]
        + [("inputs_consumed", s) for s in range(STAGES)]
        + [("result_ready", i) for i in range(RESULTS)]
        + [("result_taken", i) for i in range(RESULTS)]
    )
}


@cute.struct
class Storage:
    inputs_arrived: cute.struct.MemRange[cutlass.Int64, STAGES]
    inputs_consumed: cute.struct.MemRange[cutlass.Int64, STAGES]
    result_ready: cute.struct.MemRange[cutlass.Int64, RESULTS]
    result_taken: cute.struct.MemRange[cutlass.Int64, RESULTS]
    tensor_memory: cutlass.Int32


class TinyGemm:
    """One CTA computes tiles of 128 x tile_n, or a pair of them tiles of 256 x tile_n.

    teams      CTAs or pairs in a cluster; they compute tiles one below the other and share loads of B
    clusters   of the launch
    """

    def __init__(self, tile_n: int, pair: bool, teams: int, clusters: int):
        self.pair = pair
        self.teams = teams
        self.ctas = 2 if pair else 1
        self.tile = (128 * self.ctas, tile_n, TILE_K)
        self.clusters = clusters
        self.columns = 1 << (max(32, RESULTS * tile_n) - 1).bit_length()
        # No more CTAs on an SM than have room for their columns: where clusters hold columns on one SM and
        # wait for some on another, they could wait for each other for ever.
        shared = STAGES * TILE_K * 2 * (128 + tile_n // self.ctas)
        self.padding = max(0, SM_BYTES // (512 // self.columns + 1) - shared)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        group = tcgen05.CtaGroup.TWO if cutlass.const_expr(self.pair) else tcgen05.CtaGroup.ONE
        along_k = cute.nvgpu.OperandMajorMode.K
        op = tcgen05.MmaF16BF16Op(
            OPERAND,
            cutlass.Float32,
            (*self.tile[:2], 16),
            group,
            tcgen05.OperandSource.SMEM,
            along_k,
            along_k,
        )
        mma = cute.make_tiled_mma(op)
        a_layout = sm100.make_smem_layout_a(mma, self.tile, OPERAND, STAGES)
        b_layout = sm100.make_smem_layout_b(mma, self.tile, OPERAND, STAGES)
        stage = [0, 1, 2]
        cluster = cute.tiled_divide(cute.make_layout((self.ctas * self.teams, 1, 1)), (mma.thr_id,))
        load = cpasync.CopyBulkTensorTileG2SOp(group)
        shared_load = load
        if cutlass.const_expr(self.teams > 1):
            shared_load = cpasync.CopyBulkTensorTileG2SMulticastOp(group)
        tma_a, a_map = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, cute.select(a_layout, mode=stage), self.tile, mma, cluster.shape
        )
        tma_b, b_map = cute.nvgpu.make_tiled_tma_atom_B(
            shared_load, b, cute.select(b_layout, mode=stage), self.tile, mma, cluster.shape
        )
        self.kernel(mma, tma_a, a_map, tma_b, b_map, d, a_layout, b_layout).launch(
            grid=[self.ctas * self.teams * self.clusters, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.ctas * self.teams, 1, 1],
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        mD: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        rank = cta % self.ctas  # in the pair
        team = cta // self.ctas % self.teams
        cluster = cta // (self.ctas * self.teams)
        smem = SmemAllocator()
        storage = smem.allocate(Storage)
        sA = smem.allocate_tensor(OPERAND, a_layout.outer, 1024, a_layout.inner)
        sB = smem.allocate_tensor(OPERAND, b_layout.outer, 1024, b_layout.inner)
        if cutlass.const_expr(self.padding):
            smem.allocate(self.padding)
        self.set_up(storage, warp)

        # Two accumulators, each of tile_n columns (a pair's CTA holds its own 128 rows).
        accumulator = mma.make_fragment_C(cute.append(mma.partition_shape_C(self.tile[:2]), RESULTS))
        address = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, storage.tensor_memory.ptr)
        tC = cute.make_tensor(address, accumulator.layout)

        slice_ = mma.get_slice(rank)
        gA = slice_.partition_A(cute.local_tile(mA, (self.tile[0], TILE_K), (None, None)))
        gB = slice_.partition_B(cute.local_tile(mB, (self.tile[1], TILE_K), (None, None)))
        gD = slice_.partition_C(cute.local_tile(mD, self.tile[:2], (None, None)))
        if warp == LOAD_WARP:
            self.load(storage, (tma_a, sA, gA), (tma_b, sB, gB), gD, (cluster, team, rank))
        elif warp == MMA_WARP:
            if rank == 0:
                self.multiply(storage, mma, (sA, sB, tC), gA, gD, (cluster, team))
        else:
            self.store(storage, tC, gD, (cluster, team))
        self.tear_down(address, warp)

    @cute.jit
    def set_up(self, storage, warp):
        """Barriers, and tensor memory by the MMA warp."""
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(storage.inputs_arrived.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(storage.inputs_consumed.data_ptr() + i, self.teams)
                for i in cutlass.range_constexpr(RESULTS):
                    cute.arch.mbarrier_init(storage.result_ready.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(storage.result_taken.data_ptr() + i, STORING_WARPS * self.ctas)
            cute.arch.mbarrier_init_fence()
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(self.columns, storage.tensor_memory.ptr, self.pair)
            cute.arch.relinquish_tmem_alloc_permit(self.pair)
        self.meet()

    @cute.jit
    def meet(self):
        """All threads of the cluster wait for each other."""
        if cutlass.const_expr(self.ctas * self.teams > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def tear_down(self, address, warp):
        """Tensor memory is freed when nobody, the peer included, uses it any more."""
        self.meet()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(address, self.columns, self.pair)

    @cute.jit
    def load(self, storage, a, b, gD, place):
        cluster, team, rank = place
        tma_a, sA, gA = a
        tma_b, sB, gB = b
        one = cute.make_layout(1)
        tAs, tAg = cpasync.tma_partition(
            tma_a, 0, one, cute.group_modes(sA, 0, 3), cute.group_modes(gA, 0, 3)
        )
        tBs, tBg = cpasync.tma_partition(
            tma_b,
            team,
            cute.make_layout(self.teams),
            cute.group_modes(sB, 0, 3),
            cute.group_modes(gB, 0, 3),
        )
        # The CTAs of this one's rank in every team.
        sharers = cutlass.Int16(sum(1 << self.ctas * i for i in range(self.teams))) << cutlass.Int16(rank)
        tiles_m, tiles_n = cute.size(gD, mode=[3]), cute.size(gD, mode=[4])
        steps = cute.size(gA, mode=[4])
        stage_bytes = cute.size_in_bytes(OPERAND, cute.select(sA.layout, mode=[0, 1, 2]))
        stage_bytes += cute.size_in_bytes(OPERAND, cute.select(sB.layout, mode=[0, 1, 2]))
        step = cutlass.Int32(0)
        rows = tiles_m // self.teams
        for tile in cutlass.range(cluster, rows * tiles_n, self.clusters):
            row = tile % rows * self.teams + team
            for k in cutlass.range(steps):
                stage, turn = step % STAGES, step // STAGES
                arrived = storage.inputs_arrived.data_ptr() + stage
                cute.arch.mbarrier_wait(storage.inputs_consumed.data_ptr() + stage, turn % 2 ^ 1)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(arrived, stage_bytes * self.ctas)
                cute.copy(tma_a, tAg[None, row, k], tAs[None, stage], tma_bar_ptr=arrived)
                column = tBg[None, tile // rows, k]
                if cutlass.const_expr(self.teams > 1):
                    cute.copy(tma_b, column, tBs[None, stage], tma_bar_ptr=arrived, mcast_mask=sharers)
                else:
                    cute.copy(tma_b, column, tBs[None, stage], tma_bar_ptr=arrived)
                step += 1
        # Stay until the last arrival from another CTA is there.
        for _ in cutlass.range(STAGES):
            stage, turn = step % STAGES, step // STAGES
            cute.arch.mbarrier_wait(storage.inputs_consumed.data_ptr() + stage, turn % 2 ^ 1)
            step += 1

    @cute.jit
    def multiply(self, storage, mma, tensors, gA, gD, place):
        cluster, team = place
        sA, sB, tC = tensors
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        tiles = cute.size(gD, mode=[3]) // self.teams * cute.size(gD, mode=[4])
        everybody, my_pair = None, None
        if cutlass.const_expr(self.ctas * self.teams > 1):
            everybody = (1 << self.ctas * self.teams) - 1
        if cutlass.const_expr(self.pair):
            my_pair = cutlass.Int16(3) << cutlass.Int16(2 * team)
        group = tcgen05.CtaGroup.TWO if cutlass.const_expr(self.pair) else tcgen05.CtaGroup.ONE
        step = cutlass.Int32(0)
        mine = cutlass.Int32(0)
        for _ in cutlass.range(cluster, tiles, self.clusters):
            which, turn = mine % RESULTS, mine // RESULTS
            cute.arch.mbarrier_wait(storage.result_taken.data_ptr() + which, turn % 2 ^ 1)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(cute.size(gA, mode=[4])):
                stage = step % STAGES
                cute.arch.mbarrier_wait(storage.inputs_arrived.data_ptr() + stage, step // STAGES % 2)
                for block in cutlass.range_constexpr(TILE_K // 16):
                    c = tC[None, None, None, which]
                    cute.gemm(mma, c, rA[None, None, block, stage], rB[None, None, block, stage], c)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(storage.inputs_consumed.data_ptr() + stage, everybody, group)
                step += 1
            with cute.arch.elect_one():
                tcgen05.commit(storage.result_ready.data_ptr() + which, my_pair, group)
            mine += 1

    @cute.jit
    def store(self, storage, tC, gD, place):
        cluster, team = place
        thread, _, _ = cute.arch.thread_idx()
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
        copy = tcgen05.make_tmem_copy(atom, tC[(None, None), 0, 0, 0]).get_slice(thread)
        source = copy.partition_S(tC[(None, None), 0, 0, None])
        target = copy.partition_D(gD[(None, None), 0, 0, None, None])
        registers = cute.make_rmem_tensor(target[None, None, None, 0, 0].shape, cutlass.Float32)
        tiles_m, tiles_n = cute.size(gD, mode=[3]), cute.size(gD, mode=[4])
        mine = cutlass.Int32(0)
        rows = tiles_m // self.teams
        for tile in cutlass.range(cluster, rows * tiles_n, self.clusters):
            which, turn = mine % RESULTS, mine // RESULTS
            cute.arch.mbarrier_wait(storage.result_ready.data_ptr() + which, turn % 2)
            cute.copy(copy, source[None, None, None, which], registers)
            cute.arch.fence_view_async_tmem_load()
            with cute.arch.elect_one():
                if cutlass.const_expr(self.pair):
                    cute.arch.mbarrier_arrive(storage.result_taken.data_ptr() + which, 2 * team)
                else:
                    cute.arch.mbarrier_arrive(storage.result_taken.data_ptr() + which)
            row = tile % rows * self.teams + team
            cute.autovec_copy(registers, target[None, None, None, row, tile // rows])
            mine += 1


@cache
def compiled(m: int, n: int, k: int, pair: bool = False, tile_n: int = 64, teams: int = 1, clusters: int = 1):
    """A TinyGemm for a size, with PTX and host code; float16 operands, float32 result."""
    shapes = ((m, k, OPERAND), (n, k, OPERAND), (m, n, cutlass.Float32))
    arguments = [
        make_fake_compact_tensor(dtype, (rows, columns), stride_order=(1, 0), assumed_align=16)
        for rows, columns, dtype in shapes
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {os.path.abspath(folder)}"
        return cute.compile(TinyGemm(tile_n, pair, teams, clusters), *arguments, options=options)


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random a and b, and a result of NaN."""
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=random).half()
    b = torch.randn(n, k, generator=random).half()
    return a, b, torch.full((m, n), float("nan"))
