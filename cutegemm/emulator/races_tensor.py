"""Looks for accesses to tensor memory that nothing orders, and for reads of cells nobody wrote.

As in races.py, with more agents: a warp's MMAs are over for those who waited for a barrier they were
committed to; its loads and stores of tensor memory once it has waited for them itself. Where the code has
tcgen05.fence at all, knowledge of tensor memory passes between threads only through it: before what one
thread signals by, and after what the other waits for.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cutegemm.emulator import tcgen05, tmem
from cutegemm.emulator.faults import RaceError, UninitializedReadError
from cutegemm.emulator.knowledge import LANES_OF, MMAS_OF, STORED_BY, Knowledge
from cutegemm.emulator.mbarrier import Mbarrier, Rendezvous
from cutegemm.emulator.races import Access, CheckedEngines, ClusterChecker
from cutegemm.emulator.tensor_core import TensorEngines, queue_of
from cutegemm.emulator.values import Lanes

ROWS = 16  # lanes of a column that are watched together
MMAS, LOADING, STORING = MMAS_OF, STORED_BY + 1, STORED_BY + 2  # kinds of agents that touch tensor memory

Cells = tuple[slice, slice]  # columns, groups of lanes


class TensorShadow:
    """For each cell: who wrote it last and when, and by reader, when it did."""

    shape = (tmem.COLUMNS, tmem.ROWS // ROWS)

    def __init__(self) -> None:
        self.writer, self.epoch, self.site = (np.zeros(self.shape, dtype=np.int32) for _ in range(3))
        self.reads: dict[int, Lanes] = {}

    def note_read(self, agent: int, epoch: int, cells: Cells) -> None:
        """An agent reads cells."""
        if agent not in self.reads:
            self.reads[agent] = np.zeros(self.shape, dtype=np.int32)
        self.reads[agent][cells] = epoch

    def clear(self, start: int, columns: int) -> None:
        """Columns become nobody's."""
        for table in (self.writer, self.epoch, self.site, *self.reads.values()):
            table[start : start + columns] = 0


@dataclass(frozen=True)
class TensorAccess:
    """One access under examination; ``over``: what its warp knows to be over; ``heard``: without fences."""

    agent: int
    epoch: int
    over: Lanes
    heard: Lanes
    what: object


class TensorChecker(ClusterChecker):
    """Agents and shadows of one cluster, tensor memory included.

    after_fence  what each warp knew at its last tcgen05.fence::after_thread_sync
    announced    epochs of a warp's own loads and stores that were over at its last ::before_thread_sync
    loaded       epoch of a warp's last load by each statement
    """

    kinds = (
        *ClusterChecker.kinds,
        "a load from tensor memory of {}",
        "a store to tensor memory of {}",
    )

    def __init__(self, cluster: Any) -> None:
        super().__init__(cluster)
        self.tensor_shadows = [TensorShadow() for _ in cluster.ctas]
        self.after_fence: dict[Any, Lanes] = {warp: knows.over.copy() for warp, knows in self.known.items()}
        self.announced: dict[Any, dict[int, int]] = {}
        self.loaded: dict[tuple[Any, int], int] = {}

    def own(self, warp: Any) -> list[int]:
        """Agents of a warp's own loads and stores of tensor memory."""
        return [self.agent(warp, LOADING), self.agent(warp, STORING)]

    # --- accesses --------------------------------------------------------------------------------------

    def read_tensor(self, access: TensorAccess, cta: Any, cells: Cells) -> None:
        """A read of cells. Raises RaceError, UninitializedReadError."""
        shadow = self.tensor_shadows[cta.rank]
        empty = shadow.writer[cells] == 0
        if empty.any():
            raise UninitializedReadError(
                f"{access.what} reads tensor memory of CTA {cta.number} at {_place(cells, empty)}, which "
                "nobody has written"
            )
        self._writers(access, cta, cells, "read-after-write")
        shadow.note_read(access.agent, access.epoch, cells)
        self.read_sites[access.agent] = access.what

    def write_tensor(self, access: TensorAccess, cta: Any, cells: Cells) -> None:
        """A write of cells. Raises RaceError."""
        shadow = self.tensor_shadows[cta.rank]
        self.unused(access, cta, cells, "write", "writes")
        shadow.writer[cells] = access.agent
        shadow.epoch[cells] = access.epoch
        shadow.site[cells] = self.site(access.what)

    def unused(self, access: TensorAccess, cta: Any, cells: Cells, act: str, verb: str) -> None:
        """Raises RaceError unless all earlier accesses to cells are over."""
        self._writers(access, cta, cells, f"{act}-after-write")
        for reader, row in self.tensor_shadows[cta.rank].reads.items():
            late = row[cells] > access.over[reader]
            if reader != access.agent and late.any():
                raise RaceError(
                    f"{act}-after-read in tensor memory of CTA {cta.number}, {_place(cells, late)}: "
                    f"{access.what} {verb} what {self.name(reader)} may still be reading "
                    f"({self.read_sites.get(reader, 'earlier')}); {self._why(access, reader, 'the read')}"
                )

    def _writers(self, access: TensorAccess, cta: Any, cells: Cells, kind: str) -> None:
        shadow = self.tensor_shadows[cta.rank]
        writers, epochs = shadow.writer[cells], shadow.epoch[cells]
        late = (epochs > access.over[writers]) & (writers != access.agent)
        if not late.any():
            return
        at = tuple(np.argwhere(late)[0])
        writer = int(writers[at])
        raise RaceError(
            f"{kind} in tensor memory of CTA {cta.number}, {_place(cells, late)}: {access.what} meets the "
            f"write of {self.name(writer)} ({self.sites[int(shadow.site[cells][at])]}); "
            f"{self._why(access, writer, 'the write', int(epochs[at]))}"
        )

    def _why(self, access: TensorAccess, agent: int, what: str, epoch: int | None = None) -> str:
        kind = (agent - 1) % self.per_cta // self.warps
        if epoch is not None and access.heard[agent] >= epoch:
            return (
                f"{what} is over, but tcgen05.fence::after_thread_sync is missing after the wait that says so"
            )
        if kind == MMAS:
            return (
                "nothing the warp waited for says that the MMA is done: no tcgen05.commit after it led here"
            )
        wait = "ld" if kind == LOADING else "st"
        return (
            f"nothing the warp waited for says that {what} is over: tcgen05.wait::{wait} and then an arrival "
            "(with tcgen05.fence::before_thread_sync where fences are used) must lead here"
        )


def _place(cells: Cells, where: Lanes) -> str:
    """The first cell of a mask, for messages."""
    column, group = (int(i) for i in np.argwhere(where)[0])
    lane = (cells[1].start + group * (cells[1].step or 1)) * ROWS
    return f"column {cells[0].start + column}, lanes {lane}..{lane + ROWS - 1}"


def cells_of_result(mma: tcgen05.Mma) -> Cells:
    """Cells of D in each CTA."""
    i = mma.instruction
    columns = slice(mma.column, mma.column + i.columns)
    if i.rows == tmem.ROWS or i.folded:
        return columns, slice(0, 8)
    return columns, slice(mma.lane // ROWS, 8, 2)


@lru_cache(maxsize=1024)
def _unique_units(phase: int, layout: tuple[int, int, int, int, int, bool]) -> Lanes:
    return np.unique(tcgen05.unit_indices(phase, *layout))


def cells_of_operand(operand: tcgen05.Operand) -> Lanes:
    """Cells of shared memory an operand lies in."""
    phase = operand.start % tcgen05.PAGE
    return _unique_units(phase, operand.layout) + ((operand.start - phase) >> 4)


class CheckedTensorEngines(CheckedEngines, TensorEngines):
    """Engines with tensor memory that tell the checker of every access and of everything that orders them."""

    checker_of = TensorChecker

    def _tensor_checker(self, warp: Any) -> TensorChecker:
        checker: Any = self._checker(warp)  # made by checker_of
        found: TensorChecker = checker
        return found

    def _access(self, warp: Any, kind: int, what: object = None) -> TensorAccess:
        checker = self._tensor_checker(warp)
        agent = checker.agent(warp, kind)
        knows = checker.known[warp].over
        over = knows
        if self.machine.program.fences_tensor_memory:
            over = checker.after_fence[warp].copy()
            mine = [checker.agent(warp, k) for k in (MMAS, LOADING, STORING)]
            over[mine] = knows[mine]
        return TensorAccess(agent, int(checker.epochs[agent]), over, knows, what or warp.site())

    # --- what orders -----------------------------------------------------------------------------------

    def _release(self, warp: Any, barrier: Mbarrier | Rendezvous, relaxed: bool) -> None:
        if not self.machine.program.fences_tensor_memory or relaxed:
            super()._release(warp, barrier, relaxed)
            return
        checker = self._tensor_checker(warp)
        knows = checker.known[warp].over
        announced = checker.announced.get(warp, {})
        actual = {agent: int(knows[agent]) for agent in checker.own(warp)}
        for agent in actual:
            knows[agent] = announced.get(agent, 0)
        super()._release(warp, barrier, relaxed)
        for agent, epoch in actual.items():
            knows[agent] = epoch

    def fence_tensor(self, warp: Any, after: bool) -> None:
        """See TensorEngines."""
        checker = self._tensor_checker(warp)
        knows = checker.known[warp].over
        if after:
            checker.after_fence[warp] = knows.copy()
        else:
            checker.announced[warp] = {agent: int(knows[agent]) for agent in checker.own(warp)}

    def commit_mmas_to(self, warp: Any, targets: list[tuple[Any, Mbarrier]]) -> None:
        """See TensorEngines."""
        for _, barrier in targets:
            self.check_known(warp, barrier, asynchronous=True)
        super().commit_mmas_to(warp, targets)

    def commit_begins(self, warp: Any) -> Knowledge:
        """See TensorEngines."""
        checker = self._tensor_checker(warp)
        agent = checker.agent(warp, MMAS)
        knows = checker.release(warp)
        knows.rows[:, agent] = checker.epochs[agent]
        checker.next_epoch(agent)
        return knows

    def use_loads(self, warp: Any, loads: tuple[int, ...]) -> None:
        """See TensorEngines; loads are done in order, so those before are over too."""
        checker = self._tensor_checker(warp)
        agent = checker.agent(warp, LOADING)
        epoch = max(checker.loaded.get((warp, load), 0) for load in loads)
        checker.known[warp].rows[:, agent] = max(epoch, int(checker.known[warp].over[agent]))

    def wait_loads(self, warp: Any) -> None:
        """See TensorEngines."""
        checker = self._tensor_checker(warp)
        agent = checker.agent(warp, LOADING)
        checker.known[warp].rows[:, agent] = checker.epochs[agent] - 1

    def wait_stores_to_tensor(self, warp: Any) -> None:
        """See TensorEngines."""
        super().wait_stores_to_tensor(warp)
        checker = self._tensor_checker(warp)
        agent = checker.agent(warp, STORING)
        checker.known[warp].rows[:, agent] = checker.epochs[agent]
        checker.next_epoch(agent)

    # --- accesses --------------------------------------------------------------------------------------

    def issue_mma(self, warp: Any, ctas: tuple[Any, ...], mma: tcgen05.Mma) -> None:
        """See TensorEngines."""
        checker = self._tensor_checker(warp)
        what = mma.where
        access = self._access(warp, MMAS, what)
        shared = Access(access.agent, access.epoch, checker.known[warp], True, what)
        cells = cells_of_result(mma)
        queue = queue_of(warp)
        following = (
            queue.open and queue.ctas == ctas and mma.accumulate and queue.open[-1].series == mma.series
        )
        for cta in ctas:
            for operand in (mma.a_operand, mma.b_operand):
                if operand is not None:
                    units = cells_of_operand(operand)
                    cta.shared.check(int(units.min()) * 16, int(units.max()) * 16 + 16, what)
                    checker.read(shared, cta, units)
            if mma.a is None:
                columns = slice(mma.a_column, mma.a_column + tcgen05.STEP_BYTES // 4)
                checker.read_tensor(access, cta, (columns, slice(0, 8)))
            if not following:  # else these cells have just been looked at
                if mma.accumulate:
                    checker.read_tensor(access, cta, cells)
                checker.write_tensor(access, cta, cells)
        super().issue_mma(warp, ctas, mma)

    def load_tensor(self, warp: Any, slots: tuple[int, ...], window: tmem.Window) -> None:
        """See TensorEngines."""
        warp.cta.sm.memory.check(warp.cta, window.column, window.columns, warp.site())
        checker, access = self._tensor_checker(warp), self._access(warp, LOADING)
        checker.read_tensor(access, warp.cta, _cells_of(window))
        checker.loaded[warp, warp.current] = access.epoch
        checker.next_epoch(access.agent)
        super().load_tensor(warp, slots, window)

    def store_tensor(self, warp: Any, block: Lanes, window: tmem.Window) -> None:
        """See TensorEngines."""
        warp.cta.sm.memory.check(warp.cta, window.column, window.columns, warp.site())
        self._tensor_checker(warp).write_tensor(self._access(warp, STORING), warp.cta, _cells_of(window))
        super().store_tensor(warp, block, window)

    def freed(self, warp: Any, start: int, columns: int) -> None:
        """See TensorEngines."""
        checker = self._tensor_checker(warp)
        if start >= 0 and start + columns <= tmem.COLUMNS:
            cells = (slice(start, start + columns), slice(0, 8))
            access = self._access(warp, LANES_OF)
            # Freeing is no asynchronous instruction: it needs no fence after what its warp waited for.
            access = replace(access, over=access.heard)
            checker.unused(access, warp.cta, cells, "free", "frees")
            checker.tensor_shadows[warp.cta.rank].clear(start, columns)
        super().freed(warp, start, columns)

    def warp_exits(self, warp: Any) -> None:
        """See TensorEngines."""
        if queue_of(warp).uncommitted:
            raise RaceError(
                f"{warp.name} exits after MMAs that no tcgen05.commit follows: nobody can know when they are "
                "done"
            )
        super().warp_exits(warp)


def _cells_of(window: tmem.Window) -> Cells:
    first = window.lane // ROWS
    return (
        slice(window.column, window.column + window.columns),
        slice(first, first + window.lanes // ROWS),
    )
