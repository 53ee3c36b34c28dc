"""How the consumer warpgroups of a CTA divide its tiles: one team, or two that take turns.

A team is the set of warpgroups that work on one tile. The consumer loop asks its team where to begin,
when it may use the tensor cores, and what comes next; it does not know which team it has.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass.cute as cute
from cutlass import Int32

from cutegemm.hopper.plan import HopperPlan
from cutegemm.parts.feed import Feed, Position
from cutegemm.parts.limits import WARPGROUP_THREADS
from cutegemm.parts.ring import StageCursor, StageRing


class NamedBarrier(IntEnum):
    """Hardware barriers in use; 0 belongs to whole-CTA synchronisation."""

    STORE = 1  # + consumer: its 128 threads agree that an output buffer is free or filled
    TURN = 3  # + team: both teams meet here, one waiting for its turn, the other granting it


@dataclass(frozen=True)
class Member:
    """A consumer thread: which consumer warpgroup of the CTA it is in, and 0..127 within that."""

    consumer: Int32
    thread: Int32


@dataclass(frozen=True)
class Steps:
    """What moving on means: to the worker's next task, and past the stages of a tile."""

    feed: Feed
    ring: StageRing

    def past(self, position: Position, cursor: StageCursor) -> StageCursor:
        """The cursor after the stages of a position."""
        return self.ring.skipped(cursor, self.feed.span(position).k_count)


@dataclass(frozen=True)
class Cooperative:
    """One team of all consumers: every tile is split among them."""

    def member(self, consumer: Int32) -> Int32:
        """Which share of its team's tile a consumer has."""
        return consumer

    def first(
        self, consumer: Int32, position: Position, cursor: StageCursor, steps: Steps
    ) -> tuple[Position, StageCursor]:
        """Where a consumer begins, given the worker's first task and stage."""
        return position, cursor

    def wait_turn(self, consumer: Int32) -> None:
        """Until the tensor cores are this team's."""

    def pass_turn(self, consumer: Int32) -> None:
        """This team's MMAs are issued; the tensor cores go to the next team."""

    def following(
        self, position: Position, cursor: StageCursor, steps: Steps
    ) -> tuple[Position, StageCursor]:
        """The team's next task and its first stage."""
        return steps.feed.next(position), cursor


@dataclass(frozen=True)
class PingPong:
    """Two teams of one warpgroup: while one runs its main loop, the other stores its tile."""

    def member(self, consumer: Int32) -> Int32:
        """See Cooperative.member."""
        return Int32(0)

    @cute.jit
    def first(
        self, consumer: Int32, position: Position, cursor: StageCursor, steps: Steps
    ) -> tuple[Position, StageCursor]:
        """See Cooperative.first: the second team begins one tile later and grants the first its turn."""
        if consumer == 1:
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN, number_of_threads=2 * WARPGROUP_THREADS)
            cursor = steps.past(position, cursor)
            position = steps.feed.next(position)
        return position, cursor

    def wait_turn(self, consumer: Int32) -> None:
        """See Cooperative.wait_turn."""
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + consumer, number_of_threads=2 * WARPGROUP_THREADS)

    def pass_turn(self, consumer: Int32) -> None:
        """See Cooperative.pass_turn."""
        cute.arch.barrier_arrive(
            barrier_id=NamedBarrier.TURN + 1 - consumer, number_of_threads=2 * WARPGROUP_THREADS
        )

    def following(
        self, position: Position, cursor: StageCursor, steps: Steps
    ) -> tuple[Position, StageCursor]:
        """See Cooperative.following: the tile in between is the other team's."""
        others = steps.feed.next(position)
        return steps.feed.next(others), steps.past(others, cursor)


def make_team(plan: HopperPlan) -> Cooperative | PingPong:
    """The team a plan asks for."""
    return PingPong() if plan.teams == 2 else Cooperative()
