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
from cutegemm.parts.loads import (
    Loader,
    OperandLoader,
    PlaceLoader,
    StagingLoader,
    TileSlices,
    TmaProducer,
    multicast_mask,
)
from cutegemm.parts.realign import LineLoader, LineLoads, Staging, Tile, make_line_loads
from cutegemm.parts.ring import StageRing


@dataclass(frozen=True)
class TileLoads:
    """Host-made: the TMA descriptor of an operand that is loaded in place.

    mX       TMA coordinates (rows, K, L)
    shape    (rows, tile_k) of the operand's part of a tile
    sharers  tiles of a cluster that have the same part: of it each CTA loads a slice and multicasts it to the
             CTAs of the same rank in the others
    """

    atom: cute.CopyAtom
    mX: cute.Tensor
    shape: cutlass.Constexpr[tuple[int, int]]
    sharers: cutlass.Constexpr[int]

    def prefetch(self) -> None:
        """See TmaProducer.prefetch."""
        cpasync.prefetch_descriptor(self.atom)

    def slices(self, operand: int, sX: cute.Tensor, thread_mma: Any, at: tuple[Int32, Int32]) -> TileSlices:
        """Device side: one CTA's share of the loads into the stages sX (mma, mma_rows, mma_k, stage).

        thread_mma   the CTA's part of the MMA; at: which of the slices it loads, and the CTAs that get it
        """
        share, mask = at
        gX = cute.local_tile(self.mX, self.shape, (None, None, None))
        partition = thread_mma.partition_A if operand == 0 else thread_mma.partition_B
        tXsX, tXgX = cpasync.tma_partition(
            self.atom,
            share,
            cute.make_layout(self.sharers),
            cute.group_modes(sX, 0, 3),
            cute.group_modes(partition(gX), 0, 3),
        )
        return TileSlices(self.atom, tXsX, tXgX, mask, operand)


@dataclass(frozen=True)
class PairPlaceLoader(PlaceLoader):
    """Of a pair: the bytes of both CTAs arrive at the leader's barrier, and the leader announces them all."""

    leads: cutlass.Boolean

    @cute.jit
    def _announce(self, barrier: cute.Pointer) -> None:
        if self.leads:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)


@dataclass(frozen=True)
class HalfLoader:
    """Of a pair: the lines of an operand that are this CTA's half of the tile."""

    lines: LineLoader
    rank: Int32

    def load(self, barrier: cute.Pointer, stage: Int32, k_tile: Int32, tile: Tile) -> None:
        """See OperandLoader.load. tile: of the pair"""
        m, n, l = tile  # noqa: E741
        self.lines.load(barrier, stage, k_tile, (2 * m + self.rank, 2 * n + self.rank, l))


def make_producer(
    mA_mkl: cute.Tensor, mB_nkl: cute.Tensor, layouts: Layouts, plan: BlackwellPlan
) -> TmaProducer:
    """Host side: the TMA descriptors of A and B."""
    # A is shared along N (same rows), B along M (same columns).
    a = _loads(mA_mkl, 0, layouts, plan, plan.config.cluster_n)
    return TmaProducer(a, _loads(mB_nkl, 1, layouts, plan, plan.teams_m))


def _loads(
    mX: cute.Tensor, operand: int, layouts: Layouts, plan: BlackwellPlan, sharers: int
) -> TileLoads | LineLoads:
    box = plan.line_boxes.both[operand]
    if box is not None:
        return make_line_loads(mX, box)
    config = plan.config
    cluster = cute.tiled_divide(
        cute.make_layout((config.cluster_m, config.cluster_n, 1)), (layouts.tiled_mma.thr_id,)
    ).shape
    make = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)[operand]
    atom, coordinates = make(
        _load_op(plan, sharers),
        mX,
        cute.select((layouts.a_staged, layouts.b_staged)[operand], mode=[0, 1, 2]),
        (config.tile_m, config.tile_n, config.tile_k),
        layouts.tiled_mma,
        cluster,
    )
    rows = (config.tile_m, config.tile_n)[operand]
    return TileLoads(atom, coordinates, (rows, config.tile_k), sharers)


def make_loader(
    producer: TmaProducer,
    ring: StageRing,
    staging: Staging | None,
    parts: tuple[tuple[cute.Tensor, cute.Tensor], cute.TiledMma],
    plan: BlackwellPlan,
    place: Place,
) -> Loader:
    """Device side: partitions the stages and the global tiles for this CTA's share of the loads.

    staging   None where both operands go to their places
    parts     the stages of A and B, (mma, mma_rows, mma_k, stage), and the MMA
    """
    config = plan.config
    places, tiled_mma = parts
    rank = place.cta_m % config.mma_ctas  # in the pair
    team_m = place.cta_m // config.mma_ctas
    # Ranks run along M first. A goes to the CTAs of this row of the cluster, B to those of this column whose
    # rank in their pair is this CTA's.
    at = (
        (place.cta_n, _mask(config.cluster_n, config.cluster_m, place.cta_m)),
        (team_m, _mask(plan.teams_m, config.mma_ctas, place.cta_n * config.cluster_m + rank)),
    )
    both = (producer.a, producer.b)
    in_place = tuple(
        loads.slices(operand, places[operand], tiled_mma.get_slice(rank), at[operand])
        for operand, loads in enumerate(both)
        if isinstance(loads, TileLoads)
    )
    others = _place_loader(ring, in_place, plan, rank)
    if staging is None:
        return others
    staged = tuple(
        _line_loader(LineLoader(loads, staging.buffers[operand], plan.stages, operand), plan, rank)
        for operand, loads in enumerate(both)
        if isinstance(loads, LineLoads)
    )
    return StagingLoader(staging, staged, plan.line_boxes.staged_bytes, others if in_place else None)


def _place_loader(
    ring: StageRing, operands: tuple[TileSlices, ...], plan: BlackwellPlan, rank: Int32
) -> PlaceLoader:
    bytes_ = plan.config.mma_ctas * plan.line_boxes.in_place_bytes
    if plan.config.mma_ctas == 1:
        return PlaceLoader(ring, operands, bytes_)
    return PairPlaceLoader(ring, operands, bytes_, rank == 0)


def _line_loader(lines: LineLoader, plan: BlackwellPlan, rank: Int32) -> OperandLoader:
    return lines if plan.config.mma_ctas == 1 else HalfLoader(lines, rank)


def _mask(count: int, step: int, first: Int32) -> Int16:
    return Int16(multicast_mask(count, step, first))


def _load_op(plan: BlackwellPlan, multicast: int) -> Any:
    if multicast == 1:
        return cpasync.CopyBulkTensorTileG2SOp(cta_group(plan))
    return cpasync.CopyBulkTensorTileG2SMulticastOp(cta_group(plan))
