"""The TMA producer: brings one stage of A and B from global to shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.hopper.layouts import Layouts
from cutegemm.hopper.plan import HopperPlan
from cutegemm.parts.grid import Place
from cutegemm.parts.lines import LineBox
from cutegemm.parts.loads import Loader, PlaceLoader, StagingLoader, TileSlices, TmaProducer, multicast_mask
from cutegemm.parts.realign import LineLoader, LineLoads, Staging, make_line_loads
from cutegemm.parts.ring import StageRing


@dataclass(frozen=True)
class TileLoads:
    """Host-made: the TMA descriptor of an operand that is loaded in place.

    mX       TMA coordinates (rows, K, L)
    shape    (rows, tile_k) of the operand's part of a tile
    sharers  CTAs of a cluster that load a slice of it each, and multicast it to one another
    """

    atom: cute.CopyAtom
    mX: cute.Tensor
    shape: cutlass.Constexpr[tuple[int, int]]
    sharers: cutlass.Constexpr[int]

    def prefetch(self) -> None:
        """See TmaProducer.prefetch."""
        cpasync.prefetch_descriptor(self.atom)

    def slices(self, operand: int, sX: cute.Tensor, share: Int32, mask: Int32) -> TileSlices:
        """Device side: one CTA's share of the loads into the stages sX (rows, tile_k, stage)."""
        gX = cute.local_tile(self.mX, self.shape, (None, None, None))
        tXsX, tXgX = cpasync.tma_partition(
            self.atom,
            share,
            cute.make_layout(self.sharers),
            cute.group_modes(sX, 0, 2),
            cute.group_modes(gX, 0, 2),
        )
        return TileSlices(self.atom, tXsX, tXgX, mask, operand)


def make_producer(
    mA_mkl: cute.Tensor, mB_nkl: cute.Tensor, layouts: Layouts, plan: HopperPlan
) -> TmaProducer:
    """Host side: the TMA descriptors of A and B."""
    config = plan.config
    a_box, b_box = plan.line_boxes.both
    # A is shared along N (same rows), B along M (same columns).
    return TmaProducer(
        _loads(mA_mkl, a_box, layouts.a_stage, (config.tile_m, config.tile_k), config.cluster_n),
        _loads(mB_nkl, b_box, layouts.b_stage, (config.tile_n, config.tile_k), config.cluster_m),
    )


def _loads(
    mX: cute.Tensor, box: LineBox | None, stage: Any, shape: tuple[int, int], sharers: int
) -> TileLoads | LineLoads:
    if box is not None:
        return make_line_loads(mX, box)
    op = cpasync.CopyBulkTensorTileG2SOp() if sharers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, mX, stage, shape, num_multicast=sharers)
    return TileLoads(atom, coordinates, shape, sharers)


def make_loader(
    producer: TmaProducer,
    ring: StageRing,
    staging: Staging | None,
    places: tuple[cute.Tensor, cute.Tensor],
    plan: HopperPlan,
    place: Place,
) -> Loader:
    """Device side: partitions the stages and the global tiles for this CTA's share of the loads.

    staging   None where both operands go to their places
    places    the stages of A and of B, (rows, tile_k, stage)
    """
    config = plan.config
    # Ranks run along M first. A goes to the CTAs of this row of the cluster, B to those of this column.
    shares = (place.cta_n, place.cta_m)
    masks = (
        multicast_mask(config.cluster_n, config.cluster_m, place.cta_m),
        multicast_mask(config.cluster_m, 1, place.cta_n * config.cluster_m),
    )
    both = (producer.a, producer.b)
    in_place = tuple(
        loads.slices(operand, places[operand], shares[operand], masks[operand])
        for operand, loads in enumerate(both)
        if isinstance(loads, TileLoads)
    )
    others = PlaceLoader(ring, in_place, plan.line_boxes.in_place_bytes)
    if staging is None:
        return others
    staged = tuple(
        LineLoader(loads, staging.buffers[operand], plan.stages, operand)
        for operand, loads in enumerate(both)
        if isinstance(loads, LineLoads)
    )
    return StagingLoader(staging, staged, plan.staged_bytes, others if in_place else None)
