"""The TMA producer: brings one stage of A and B from global to shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.hopper.layouts import Layouts
from cutegemm.hopper.plan import HopperPlan


@dataclass(frozen=True)
class TmaProducer:
    """TMA descriptors of A and B and the coordinates they are loaded by.

    mA_mkl, mB_nkl are TMA coordinate tensors (M, K, L) and (N, K, L). With clusters each CTA loads
    a slice of the tile it shares and multicasts it to the CTAs beside it.
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

    tAsA (tma, stage), tAgA (tma, tile_m, tile_k, l) and the same for B.
    """

    producer: TmaProducer
    tAsA: cute.Tensor
    tAgA: cute.Tensor
    tBsB: cute.Tensor
    tBgB: cute.Tensor
    mask_a: Int32
    mask_b: Int32
    stage_bytes: cutlass.Constexpr[int]

    def load(
        self, barrier: cute.Pointer, stage: Int32, k_tile: Int32, tile: tuple[Int32, Int32, Int32]
    ) -> None:
        """Starts the loads of one stage and announces their bytes on ``barrier``.

        The announced bytes are those of the whole stage: a multicast peer's slices count here too.
        """
        m, n, l = tile  # noqa: E741
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
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
    mA_mkl: cute.Tensor, mB_nkl: cute.Tensor, layouts: Layouts, plan: HopperPlan
) -> TmaProducer:
    """Host side: the TMA descriptors of A and B."""
    config = plan.config
    # A is shared along N (same rows), B along M (same columns).
    atom_a, tma_a = _load_atom(mA_mkl, layouts.a_stage, (config.tile_m, config.tile_k), config.cluster_n)
    atom_b, tma_b = _load_atom(mB_nkl, layouts.b_stage, (config.tile_n, config.tile_k), config.cluster_m)
    return TmaProducer(atom_a, tma_a, atom_b, tma_b)


def make_loader(
    producer: TmaProducer,
    sA: cute.Tensor,
    sB: cute.Tensor,
    plan: HopperPlan,
    cta_m: Int32,
    cta_n: Int32,
) -> TileLoader:
    """Device side: partitions the stages and the global tiles for this CTA's share of the loads."""
    config = plan.config
    gA_mkl = cute.local_tile(producer.mA_mkl, (config.tile_m, config.tile_k), (None, None, None))
    gB_nkl = cute.local_tile(producer.mB_nkl, (config.tile_n, config.tile_k), (None, None, None))
    tAsA, tAgA = cpasync.tma_partition(
        producer.atom_a,
        cta_n,
        cute.make_layout(config.cluster_n),
        cute.group_modes(sA, 0, 2),
        cute.group_modes(gA_mkl, 0, 2),
    )
    tBsB, tBgB = cpasync.tma_partition(
        producer.atom_b,
        cta_m,
        cute.make_layout(config.cluster_m),
        cute.group_modes(sB, 0, 2),
        cute.group_modes(gB_nkl, 0, 2),
    )
    # Ranks run along M first. A goes to the CTAs of this row of the cluster, B to those of this column.
    mask_a = _multicast_mask(config.cluster_n, config.cluster_m, cta_m)
    mask_b = _multicast_mask(config.cluster_m, 1, cta_n * config.cluster_m)
    return TileLoader(producer, tAsA, tAgA, tBsB, tBgB, mask_a, mask_b, plan.stage_bytes)


def _multicast_mask(count: int, step: int, first: Int32) -> Int32:
    """Bits of the CTAs first, first + step, ...; 0 when there is nobody to share with."""
    if count == 1:
        return Int32(0)
    bits = sum(1 << (i * step) for i in range(count))
    return Int32(bits) << first


def _load_atom(tensor: cute.Tensor, stage: Any, tile: tuple[int, int], multicast: int) -> Any:
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(op, tensor, stage, tile, num_multicast=multicast)
