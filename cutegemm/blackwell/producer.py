"""The TMA producer: brings one CTA's part of a stage of A and B from global to shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.blackwell.layouts import Layouts, cta_group
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.parts.grid import Place


@dataclass(frozen=True)
class TmaProducer:
    """TMA descriptors of A and B and the coordinates they are loaded by.

    mA_mkl, mB_nkl are TMA coordinate tensors (M, K, L) and (N, K, L). Of a tile that several tiles of the
    cluster share each CTA loads a slice and multicasts it to the CTAs of the same rank in the others.
    """

    atom_a: cute.CopyAtom
    mA_mkl: cute.Tensor
    atom_b: cute.CopyAtom
    mB_nkl: cute.Tensor

    def prefetch(self) -> None:
        """Fetches both descriptors, so that the first load does not wait for them."""
        cpasync.prefetch_descriptor(self.atom_a)
        cpasync.prefetch_descriptor(self.atom_b)


@dataclass(frozen=True)
class TileLoader:
    """The producer's view of one CTA: shared-memory stages and the global tiles that fill them.

    tAsA (tma, stage), tAgA (tma, tile_m, tile_k, l) and the same for B. leads: whether this CTA announces
    the bytes, of its own part and its peer's: those of a pair arrive at one barrier.
    """

    producer: TmaProducer
    tAsA: cute.Tensor
    tAgA: cute.Tensor
    tBsB: cute.Tensor
    tBgB: cute.Tensor
    mask_a: Int16
    mask_b: Int16
    leads: cutlass.Boolean
    plan: cutlass.Constexpr[BlackwellPlan]

    @cute.jit
    def load(
        self, barrier: cute.Pointer, stage: Int32, k_tile: Int32, tile: tuple[Int32, Int32, Int32]
    ) -> None:
        """Starts the loads of one stage and announces their bytes on ``barrier``, in a pair on the leader's.

        The announced bytes are those of the whole stage: a multicast peer's slices count here too.
        """
        m, n, l = tile  # noqa: E741
        if self.leads:
            with cute.arch.elect_one():
                stage_bytes = self.plan.stage_bytes * self.plan.config.mma_ctas
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, stage_bytes)
        cute.copy(
            self.producer.atom_a,
            self.tAgA[None, m, k_tile, l],
            self.tAsA[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=self.mask_a,
        )
        cute.copy(
            self.producer.atom_b,
            self.tBgB[None, n, k_tile, l],
            self.tBsB[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=self.mask_b,
        )


def make_producer(
    mA_mkl: cute.Tensor, mB_nkl: cute.Tensor, layouts: Layouts, plan: BlackwellPlan
) -> TmaProducer:
    """Host side: the TMA descriptors of A and B."""
    config = plan.config
    tile = (config.tile_m, config.tile_n, config.tile_k)
    cluster = cute.tiled_divide(
        cute.make_layout((config.cluster_m, config.cluster_n, 1)), (layouts.tiled_mma.thr_id,)
    ).shape
    stage = [0, 1, 2]
    # A is shared along N (same rows), B along M (same columns).
    atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(
        _load_op(plan, config.cluster_n),
        mA_mkl,
        cute.select(layouts.a_staged, mode=stage),
        tile,
        layouts.tiled_mma,
        cluster,
    )
    atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(
        _load_op(plan, plan.teams_m),
        mB_nkl,
        cute.select(layouts.b_staged, mode=stage),
        tile,
        layouts.tiled_mma,
        cluster,
    )
    return TmaProducer(atom_a, tma_a, atom_b, tma_b)


def make_loader(
    producer: TmaProducer,
    stages: tuple[cute.Tensor, cute.Tensor],
    tiled_mma: cute.TiledMma,
    plan: BlackwellPlan,
    place: Place,
) -> TileLoader:
    """Device side: partitions the stages and the global tiles for this CTA's share of the loads."""
    config = plan.config
    sA, sB = stages
    rank = place.cta_m % config.mma_ctas  # in the pair
    team_m = place.cta_m // config.mma_ctas
    mma = tiled_mma.get_slice(rank)
    gA_mkl = cute.local_tile(producer.mA_mkl, (config.tile_m, config.tile_k), (None, None, None))
    gB_nkl = cute.local_tile(producer.mB_nkl, (config.tile_n, config.tile_k), (None, None, None))
    tAsA, tAgA = cpasync.tma_partition(
        producer.atom_a,
        place.cta_n,
        cute.make_layout(config.cluster_n),
        cute.group_modes(sA, 0, 3),
        cute.group_modes(mma.partition_A(gA_mkl), 0, 3),
    )
    tBsB, tBgB = cpasync.tma_partition(
        producer.atom_b,
        team_m,
        cute.make_layout(plan.teams_m),
        cute.group_modes(sB, 0, 3),
        cute.group_modes(mma.partition_B(gB_nkl), 0, 3),
    )
    # Ranks run along M first. A goes to the CTAs of this row of the cluster, B to those of this column whose
    # rank in their pair is this CTA's.
    mask_a = multicast_mask(config.cluster_n, config.cluster_m, place.cta_m)
    mask_b = multicast_mask(plan.teams_m, config.mma_ctas, place.cta_n * config.cluster_m + rank)
    return TileLoader(producer, tAsA, tAgA, tBsB, tBgB, mask_a, mask_b, rank == 0, plan)


def multicast_mask(count: int, step: int, first: Int32) -> Int16:
    """Bits of the CTAs first, first + step, ...; 0 when there is nobody to share with."""
    if count == 1:
        return Int16(0)
    bits = sum(1 << (i * step) for i in range(count))
    return Int16(Int32(bits) << first)


def _load_op(plan: BlackwellPlan, multicast: int) -> Any:
    if multicast == 1:
        return cpasync.CopyBulkTensorTileG2SOp(cta_group(plan))
    return cpasync.CopyBulkTensorTileG2SMulticastOp(cta_group(plan))
