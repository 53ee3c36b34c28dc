"""The TMA producer: brings one stage of A and B from global to shared memory.

An operand TMA can address lands in its place at once. One whose pitch is no multiple of 16 bytes comes by
way of a staging buffer (realign.py), and the loader has a second ring to fill.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.hopper.layouts import Layouts
from cutegemm.hopper.plan import HopperPlan, LineBox
from cutegemm.hopper.realign import LineLoader, LineLoads, Staging, Tile, make_line_loads
from cutegemm.parts.grid import Place
from cutegemm.parts.ring import StageCursor, StageRing


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
        """Fetches the descriptor, so that the first load does not wait for it."""
        cpasync.prefetch_descriptor(self.atom)

    def slices(self, operand: int, sX: cute.Tensor, share: Int32, mask: Int32) -> "TileSlices":
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


@dataclass(frozen=True)
class TileSlices:
    """Device side: tXsX (tma, stage), tXgX (tma, row tile, k tile, l), and the CTAs that get it.

    operand   0 for A, 1 for B: which mode of a Tile counts its rows
    """

    atom: cute.CopyAtom
    tXsX: cute.Tensor
    tXgX: cute.Tensor
    mask: Int32
    operand: cutlass.Constexpr[int]

    def load(self, barrier: cute.Pointer, stage: Int32, k_tile: Int32, tile: Tile) -> None:
        """Starts the load of one stage; its bytes count on ``barrier``."""
        cute.copy(
            self.atom,
            self.tXgX[None, tile[self.operand], k_tile, tile[2]],
            self.tXsX[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=self.mask,
        )


@dataclass(frozen=True)
class TmaProducer:
    """Host-made: how A and B are loaded."""

    a: TileLoads | LineLoads
    b: TileLoads | LineLoads

    def prefetch(self) -> None:
        """Fetches the descriptors."""
        self.a.prefetch()
        self.b.prefetch()


@dataclass(frozen=True)
class PlaceLoader:
    """The producer's view of one CTA: loads into the operands' places."""

    ring: StageRing
    operands: tuple[TileSlices, ...]
    stage_bytes: cutlass.Constexpr[int]

    def load(self, cursor: StageCursor, k_tile: Int32, tile: Tile) -> None:
        """Once the stage is free: announces its bytes and starts its loads.

        The announced bytes are those of the whole stage: a multicast peer's slices count here too.
        """
        self.ring.wait_consumed(cursor)
        barrier = self.ring.inputs_arrived + cursor.stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
        for operand in self.operands:
            operand.load(barrier, cursor.stage, k_tile, tile)


@dataclass(frozen=True)
class StagingLoader:
    """Loads into the staging buffer, and then those of the other operand, if it goes to its place."""

    staging: Staging
    operands: tuple[LineLoader, ...]
    staged_bytes: cutlass.Constexpr[int]
    others: PlaceLoader | None

    def load(self, cursor: StageCursor, k_tile: Int32, tile: Tile) -> None:
        """See PlaceLoader.load; what has the longer way to go starts first."""
        self.staging.wait_taken(cursor)
        barrier = self.staging.lines_arrived + cursor.stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.staged_bytes)
        for operand in self.operands:
            operand.load(barrier, cursor.stage, k_tile, tile)
        if self.others is not None:
            self.others.load(cursor, k_tile, tile)


Loader: TypeAlias = PlaceLoader | StagingLoader


def make_producer(
    mA_mkl: cute.Tensor, mB_nkl: cute.Tensor, layouts: Layouts, plan: HopperPlan
) -> TmaProducer:
    """Host side: the TMA descriptors of A and B."""
    config = plan.config
    a_box, b_box = plan.line_boxes
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
        _multicast_mask(config.cluster_n, config.cluster_m, place.cta_m),
        _multicast_mask(config.cluster_m, 1, place.cta_n * config.cluster_m),
    )
    both = (producer.a, producer.b)
    in_place = tuple(
        loads.slices(operand, places[operand], shares[operand], masks[operand])
        for operand, loads in enumerate(both)
        if isinstance(loads, TileLoads)
    )
    others = PlaceLoader(ring, in_place, plan.in_place_bytes)
    if staging is None:
        return others
    staged = tuple(
        LineLoader(loads, staging.buffers[operand], plan.stages, operand)
        for operand, loads in enumerate(both)
        if isinstance(loads, LineLoads)
    )
    return StagingLoader(staging, staged, plan.staged_bytes, others if in_place else None)


def _multicast_mask(count: int, step: int, first: Int32) -> Int32:
    """Bits of the CTAs first, first + step, ...; 0 when there is nobody to share with."""
    if count == 1:
        return Int32(0)
    bits = sum(1 << (i * step) for i in range(count))
    return Int32(bits) << first
