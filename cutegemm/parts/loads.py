"""Loads of a stage of A and B into shared memory, by the warp that starts them.

An operand TMA can address lands in its place at once. One whose pitch is no multiple of 16 bytes comes by
way of a staging buffer (realign.py), and the loader has a second ring to fill.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.parts.realign import Staging, Tile
from cutegemm.parts.ring import StageCursor, StageRing


@dataclass(frozen=True)
class TmaProducer:
    """Host-made: how A and B are loaded, LineLoads or an architecture's descriptors for loads in place."""

    a: Any
    b: Any

    def prefetch(self) -> None:
        """Fetches the descriptors, so that the first load does not wait for them."""
        self.a.prefetch()
        self.b.prefetch()


class OperandLoader(Protocol):
    """Device side: the loads of one operand."""

    def load(self, barrier: cute.Pointer, stage: Int32, k_tile: Int32, tile: Tile) -> None:
        """Starts the loads of one stage; their bytes count on ``barrier``."""


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
        """See OperandLoader.load."""
        cute.copy(
            self.atom,
            self.tXgX[None, tile[self.operand], k_tile, tile[2]],
            self.tXsX[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=self.mask,
        )


@dataclass(frozen=True)
class PlaceLoader:
    """The producer's view of one CTA: loads into the operands' places."""

    ring: StageRing
    operands: tuple[OperandLoader, ...]
    stage_bytes: cutlass.Constexpr[int]

    def load(self, cursor: StageCursor, k_tile: Int32, tile: Tile) -> None:
        """Once the stage is free: announces its bytes and starts its loads.

        The announced bytes are those of the whole stage: a multicast peer's slices count here too.
        """
        self.ring.wait_consumed(cursor)
        barrier = self.ring.inputs_arrived + cursor.stage
        self._announce(barrier)
        for operand in self.operands:
            operand.load(barrier, cursor.stage, k_tile, tile)

    def _announce(self, barrier: cute.Pointer) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)


@dataclass(frozen=True)
class StagingLoader:
    """Loads into the staging buffer, and then those of the other operand, if it goes to its place."""

    staging: Staging
    operands: tuple[OperandLoader, ...]
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


def multicast_mask(count: int, step: int, first: Int32) -> Int32:
    """Bits of the CTAs first, first + step, ...; 0 when there is nobody to share with."""
    if count == 1:
        return Int32(0)
    bits = sum(1 << (i * step) for i in range(count))
    return Int32(bits) << first
