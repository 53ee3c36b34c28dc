"""Looks for accesses to shared memory that nothing orders, and for reads of what nobody wrote.

An access is in order if the warp that makes or issues it has heard of the earlier access; see knowledge.py.
Not looked at: fences between reads of one proxy and writes of the other, but for the answers of cluster
launch control, where the documentation asks for them. Global memory: global_races.py.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cutegemm.emulator import mma as mmas
from cutegemm.emulator.engines import Engines
from cutegemm.emulator.faults import RaceError, UninitializedReadError
from cutegemm.emulator.global_races import GlobalChecker, RegionShadow
from cutegemm.emulator.knowledge import (
    FENCED_BARRIERS,
    MMAS_OF,
    NOBODY,
    STORED_BY,
    STORES_OF,
    Agents,
    Knowledge,
)
from cutegemm.emulator.mbarrier import Mbarrier, Rendezvous
from cutegemm.emulator.memory import SHARED_BASE
from cutegemm.emulator.tma import TensorMap
from cutegemm.emulator.values import Lanes
from cutegemm.emulator.wgmma import Footprint

CELL = 16  # bytes of shared memory that are watched together


class Shadow:
    """For each cell of a CTA's shared memory: who wrote it last and when, and when each reader read it.

    reads    by agent: its epoch at the last read of each cell
    latest   by agent: its last epoch with a read
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.writer = np.zeros(cells, dtype=np.int32)
        self.epoch = np.ones(cells, dtype=np.int32)  # of NOBODY, whose epochs are never over
        self.site = np.zeros(cells, dtype=np.int32)
        self.reads: dict[int, Lanes] = {}
        self.latest: dict[int, int] = {}

    def note_read(self, agent: int, epoch: int, cells: Any) -> None:
        """An agent reads cells."""
        row = self.reads.get(agent)
        if row is None:
            row = self.reads[agent] = np.zeros(self.cells, dtype=np.int32)
        row[cells] = epoch
        self.latest[agent] = epoch


@dataclass(frozen=True)
class Access:
    """One access under examination; ``what`` becomes text only in a report."""

    agent: int
    epoch: int
    knows: Knowledge
    asynchronous: bool
    what: Any


class ClusterChecker(Agents):
    """Agents and shadows of one cluster.

    loading   the TMA load that was issued last, as an access
    """

    def __init__(self, cluster: Any) -> None:
        super().__init__(cluster)
        self.loading: Access | None = None
        self.shadows = [Shadow(len(cta.shared.data) // CELL) for cta in cluster.ctas]
        self.sites: list[Any] = [""]
        self.site_numbers: dict[Any, int] = {"": 0}
        self.read_sites: dict[int, Any] = {}

    def site(self, place: Any) -> int:
        """Number of a place in the code."""
        if place not in self.site_numbers:
            self.site_numbers[place] = len(self.sites)
            self.sites.append(place)
        return self.site_numbers[place]

    def readable(self, access: Access, cta: Any, cells: Any) -> bool:
        """Whether all cells are written and every write is seen by who reads them."""
        shadow = self.shadows[cta.rank]
        heard = access.knows.seen(access.asynchronous)[shadow.writer[cells]]
        return not (shadow.epoch[cells] > heard).any()

    def note_read(self, access: Access, cta: Any, cells: Any) -> None:
        """Remembers a read."""
        self.shadows[cta.rank].note_read(access.agent, access.epoch, cells)
        self.read_sites[access.agent] = access.what

    def read(self, access: Access, cta: Any, cells: Any) -> None:
        """A read of cells. Raises RaceError, UninitializedReadError."""
        if not self.readable(access, cta, cells):
            self._report_writer(access, cta, cells, "read-after-write")
        self.note_read(access, cta, cells)

    def write(self, access: Access, cta: Any, cells: Any, after_reads: bool = False) -> None:
        """A write of cells. after_reads: those of lanes must be over for the writer's proxy too.

        Raises RaceError.
        """
        shadow = self.shadows[cta.rank]
        writers = shadow.writer[cells]
        late = shadow.epoch[cells] > access.knows.seen(access.asynchronous)[writers]
        if (late & (writers != NOBODY)).any():
            self._report_writer(access, cta, cells, "write-after-write")
        over = access.knows.seen(after_reads)
        for reader, row in shadow.reads.items():
            heard = over[reader]
            if shadow.latest[reader] > heard and (row[cells] > heard).any():
                self._report_reader(access, cta, cells, reader, over)
        shadow.writer[cells] = access.agent
        shadow.epoch[cells] = access.epoch
        shadow.site[cells] = self.site(access.what)

    def _report_reader(self, access: Access, cta: Any, cells: Any, reader: int, over: Lanes) -> None:
        epochs = self.shadows[cta.rank].reads[reader][cells]
        place = int((epochs > over[reader]).argmax())
        why = (
            "the read is over, but no fence.proxy.async between it and the barrier keeps what is written by "
            "the async proxy behind it"
            if access.knows.over[reader] >= epochs[place]
            else "nothing the writer waited for says that the read is over"
        )
        raise RaceError(
            f"write-after-read in shared memory of CTA {cta.number}, offset {_offset(cells, place)}: "
            f"{access.what} writes what {self.name(reader)} may still be reading "
            f"({self.read_sites.get(reader, 'earlier')}); {why}"
        )

    def _report_writer(self, access: Access, cta: Any, cells: Any, kind: str) -> None:
        shadow, knows = self.shadows[cta.rank], access.knows
        writers, epochs = shadow.writer[cells], shadow.epoch[cells]
        late = epochs > knows.seen(access.asynchronous)[writers]
        if kind == "write-after-write":
            late &= writers != NOBODY
        row = int(late.argmax())
        writer, epoch = int(writers[row]), int(epochs[row])
        if writer == NOBODY:
            raise UninitializedReadError(
                f"{access.what} reads shared memory of CTA {cta.number} at offset {_offset(cells, row)}, "
                "which nobody has written"
            )
        why = (
            "the write is over, but no fence.proxy.async between it and the barrier makes it visible to TMA "
            "and tensor cores"
            if knows.over[writer] >= epoch
            else "nothing the warp waited for says that the write is over"
        )
        raise RaceError(
            f"{kind} in shared memory of CTA {cta.number}, offset {_offset(cells, row)}: {access.what} meets "
            f"the write of {self.name(writer)} ({self.sites[int(shadow.site[cells][row])]}); {why}"
        )


def _offset(cells: Any, row: int) -> int:
    first = cells.start + row if isinstance(cells, slice) else int(cells[row])
    return first * CELL - SHARED_BASE


class CheckedEngines(Engines):
    """Engines that tell the checkers of every access and of everything that orders them."""

    def __init__(self, machine: Any, trace: Any, seed: int | None) -> None:
        super().__init__(machine, trace, seed)
        self.global_memory = GlobalChecker(machine.memory)

    def global_shadows(self) -> dict[tuple[int, int], RegionShadow]:
        """Who accessed which element of a region, by its first and last address."""
        return self.global_memory.shadows

    checker_of = ClusterChecker

    def _checker(self, warp: Any) -> ClusterChecker:
        cluster = warp.cta.cluster
        if cluster.checker is None:
            cluster.checker = self.checker_of(cluster)
        checker: ClusterChecker = cluster.checker
        return checker

    # --- what orders -----------------------------------------------------------------------------------

    def _release(self, warp: Any, barrier: Mbarrier | Rendezvous, relaxed: bool) -> None:
        self._give(barrier, self._checker(warp).released(warp, relaxed))

    def made_mbarrier(self, warp: Any, barrier: Mbarrier) -> None:
        """See Engines."""
        access = self._by_lanes(warp)
        barrier.made = access.agent, access.epoch, access.what

    def check_known(self, warp: Any, barrier: Mbarrier, asynchronous: bool = False) -> None:
        """Raises RaceError unless the user of an mbarrier knows that it is initialised.

        asynchronous: it is TMA or a tensor core on behalf of the warp
        """
        if (warp, asynchronous) in barrier.users or barrier.made is None:
            return
        agent, epoch, where = barrier.made
        knows = self._checker(warp).known[warp]
        if max(knows.rows[FENCED_BARRIERS, agent], knows.seen(asynchronous)[agent]) < epoch:
            missing = (
                "fence.mbarrier_init or fence.proxy.async is missing after it, or a barrier behind that"
                if asynchronous
                else "a barrier that releases is missing between the two, or fence.mbarrier_init before one"
            )
            raise RaceError(
                f"{warp.here()} uses the {barrier.name}, and may find it as it was before its initialisation "
                f"({where}): {missing}"
            )
        barrier.users.add((warp, asynchronous))

    @staticmethod
    def _give(barrier: Mbarrier | Rendezvous, knows: Knowledge) -> None:
        """Adds to what a barrier passes on; ``knows`` is the barrier's from now on."""
        if barrier.next_release is None:
            barrier.next_release = knows
        else:
            barrier.next_release.join(knows)

    def arrive(
        self, warp: Any, barrier: Rendezvous, threads: int, expected: int, relaxed: bool = False
    ) -> int:
        """See Engines."""
        self._release(warp, barrier, relaxed)
        return super().arrive(warp, barrier, threads, expected)

    def acquire(self, warp: Any, barrier: Rendezvous) -> None:
        """See Engines."""
        self._checker(warp).known[warp].join(barrier.release)
        super().acquire(warp, barrier)

    def arrive_mbarrier(self, warp: Any, barrier: Mbarrier, count: int, relaxed: bool = False) -> None:
        """See Engines."""
        self.check_known(warp, barrier)
        self._release(warp, barrier, relaxed)
        super().arrive_mbarrier(warp, barrier, count)

    def acquire_mbarrier(self, warp: Any, barrier: Mbarrier, relaxed: bool = False) -> None:
        """See Engines."""
        self.check_known(warp, barrier)
        self._checker(warp).learner(warp, relaxed).join(barrier.release)
        super().acquire_mbarrier(warp, barrier)

    def proxy_fence(self, warp: Any) -> None:
        """See Engines."""
        self._checker(warp).known[warp].fence()

    def barrier_fence(self, warp: Any) -> None:
        """See Engines."""
        self._checker(warp).known[warp].fence_barriers()

    def memory_fence(self, warp: Any, gpu: bool) -> None:
        """See Engines."""
        self._checker(warp).fence(warp, gpu)

    def release_global(self, warp: Any, addresses: Lanes, relaxed: bool) -> None:
        """See Engines."""
        checker = self._checker(warp)
        self.global_memory.release(checker, checker.released(warp, relaxed, gpu=True), addresses)

    def acquire_global(self, warp: Any, addresses: Lanes, relaxed: bool) -> None:
        """See Engines."""
        checker = self._checker(warp)
        self.global_memory.acquire(checker, checker.learner(warp, relaxed, gpu=True), addresses)

    # --- accesses --------------------------------------------------------------------------------------

    def _by_lanes(self, warp: Any) -> Access:
        checker = self._checker(warp)
        agent, knows = checker.agent(warp), checker.known[warp]
        return Access(agent, int(knows.over[agent]), knows, False, warp.site())

    def _asynchronous(self, warp: Any, agent: int, epoch: int) -> Access:
        return Access(agent, epoch, self._checker(warp).known[warp], True, warp.site())

    def load(self, warp: Any, cta: Any, offsets: Lanes, width: int) -> Lanes:
        """See Engines."""
        values = super().load(warp, cta, offsets, width)
        self._checker(warp).read(self._by_lanes(warp), cta, offsets // CELL)
        return values

    def store(self, warp: Any, cta: Any, offsets: Lanes, values: Lanes, width: int) -> None:
        """See Engines."""
        super().store(warp, cta, offsets, values, width)
        self._checker(warp).write(self._by_lanes(warp), cta, offsets // CELL)

    def load_global(self, warp: Any, addresses: Lanes, width: int) -> Lanes:
        """See Engines."""
        values = super().load_global(warp, addresses, width)
        access = self._by_lanes(warp)
        self.global_memory.read_lanes(self._checker(warp), access, addresses, width)
        return values

    def store_global(self, warp: Any, addresses: Lanes, values: Lanes, width: int) -> None:
        """See Engines."""
        super().store_global(warp, addresses, values, width)
        access = self._by_lanes(warp)
        self.global_memory.write_lanes(self._checker(warp), access, addresses, width)

    def tma_load(
        self,
        warp: Any,
        tensor_map: TensorMap,
        coordinates: tuple[int, ...],
        offset: int,
        targets: list[tuple[Any, Mbarrier]],
    ) -> None:
        """See Engines."""
        super().tma_load(warp, tensor_map, coordinates, offset, targets)
        checker = self._checker(warp)
        self.global_memory.read_box(checker, checker.loading, tensor_map, coordinates)

    def load_begins(
        self,
        warp: Any,
        size: int,
        offset: int,
        targets: list[tuple[Any, Mbarrier]],
        asynchronous: bool = True,
        after_reads: bool = False,
    ) -> Knowledge:
        """See Engines."""
        checker = self._checker(warp)
        agent = checker.next_load(warp)
        issued = self._asynchronous(warp, agent, checker.next_epoch(agent))
        access = checker.loading = replace(issued, asynchronous=asynchronous)
        cells = slice(offset // CELL, -(-(offset + size) // CELL))
        for cta, barrier in targets:
            self.check_known(warp, barrier, asynchronous)
            cta.shared.check(offset, offset + size, access.what)
            checker.write(access, cta, cells, after_reads)
        knows = access.knows.copy()
        knows.rows[:, agent] = access.epoch
        return knows

    def load_ends(self, barrier: Mbarrier, token: Any) -> None:
        """See Engines."""
        self._give(barrier, token.copy())

    def tma_store(self, warp: Any, tensor_map: TensorMap, coordinates: tuple[int, ...], offset: int) -> None:
        """See Engines."""
        checker = self._checker(warp)
        reader, writer = checker.agent(warp, STORES_OF), checker.agent(warp, STORED_BY)
        access = self._asynchronous(warp, reader, int(checker.epochs[reader]))
        warp.cta.shared.check(offset, offset + tensor_map.box_bytes, access.what)
        cells = slice(offset // CELL, (offset + tensor_map.box_bytes) // CELL)
        checker.read(access, warp.cta, cells)
        writing = self._asynchronous(warp, writer, int(checker.epochs[writer]))
        self.global_memory.write_box(checker, writing, tensor_map, coordinates)
        super().tma_store(warp, tensor_map, coordinates, offset)

    def commit_stores(self, warp: Any) -> None:
        """See Engines."""
        checker = self._checker(warp)
        for kind in (STORES_OF, STORED_BY):
            checker.next_epoch(checker.agent(warp, kind))
        super().commit_stores(warp)

    def wait_stores(self, warp: Any, pending: int) -> None:
        """See Engines."""
        super().wait_stores(warp, pending)
        self._stores_over(warp, STORES_OF)

    def stores_written(self, warp: Any) -> None:
        """See Engines."""
        self._stores_over(warp, STORED_BY)

    def _stores_over(self, warp: Any, kind: int) -> None:
        checker = self._checker(warp)
        agent = checker.agent(warp, kind)
        # Epoch e is the e-th group; those committed are epochs 1 .. current - 1.
        over = int(checker.epochs[agent]) - 1 - len(self._stores(warp).groups)
        checker.known[warp].rows[:, agent] = over

    def warp_exits(self, warp: Any) -> None:
        """See Engines."""
        stores = self._stores(warp)
        if stores.open or any(stores.groups):
            raise RaceError(
                f"{warp.name} exits while its TMA stores may still be reading shared memory, which ends with "
                "the CTA; cp.async.bulk.wait_group.read 0 is missing"
            )
        mma = next(iter(mmas.queue_of(warp).open), None)
        if mma is not None:
            raise RaceError(
                f"{warp.name} exits after {mma.where}, which no wgmma.commit_group follows: nobody can know "
                "when it is done"
            )
        super().warp_exits(warp)

    def fence_mmas(self, warp: Any) -> None:
        """See Engines."""
        queue = mmas.queue_of(warp)
        queue.fenced = warp.r.copy()
        for slots, values in queue.before.items():
            for slot, value in zip(slots, values, strict=True):
                queue.fenced[slot] = value

    def _check_fenced(self, warp: Any, queue: mmas.MmaQueue) -> None:
        """MMAs add to what was in registers at the last wgmma.fence, or to what earlier MMAs left there.

        Copies and constants are let pass: compilers put them anywhere, and the assembler removes them.
        """
        fenced = queue.fenced
        for mma in queue.open:
            if fenced is None:
                raise RaceError(f"{mmas.Issue(mma.where, warp)} comes before any wgmma.fence of its warp")
            if not mma.accumulate or mma.slots in queue.blocks or queue.as_left(mma.slots) is not None:
                continue
            held = zip(mma.slots, queue.before[mma.slots], strict=True)
            values = [value for slot, value in held if value is not fenced[slot]]
            changed = {id(value) for value in values if isinstance(value, np.ndarray)}
            left = (row for _, rows in queue.settled.values() for row in rows)
            if changed and changed - {id(value) for value in fenced} - {id(row) for row in left}:
                raise RaceError(
                    f"{mmas.Issue(mma.where, warp)} adds to registers written after the last wgmma.fence; it "
                    "may find in them what was there before"
                )

    def commit_mmas(self, warp: Any, queue: mmas.MmaQueue) -> None:
        """See Engines."""
        self._check_fenced(warp, queue)
        checker = self._checker(warp)
        agent = checker.agent(warp, MMAS_OF)
        epoch = checker.next_epoch(agent)
        series: dict[mmas.Kind, list[mmas.Mma]] = {}
        for mma in queue.open:
            series.setdefault(mma.kind, []).append(mma)
        for alike in series.values():
            access = Access(agent, epoch, checker.known[warp], True, mmas.Issue(alike[0].where, warp))
            for quarter, place in self._operands(warp, alike):
                warp.cta.shared.check(place.low * CELL, place.high * CELL, access.what)
                if not checker.readable(access, warp.cta, place.cells(quarter)):
                    self._read_each(access, warp, alike)
                checker.note_read(access, warp.cta, place.cells(quarter))
        super().commit_mmas(warp, queue)
        if queue.groups:
            queue.groups[-1].release = epoch

    def _read_each(self, access: Access, warp: Any, alike: list[mmas.Mma]) -> None:
        """Finds the MMA whose operands are not there. Raises what ``ClusterChecker.read`` raises."""
        for mma in alike:
            single = replace(access, what=mmas.Issue(mma.where, warp))
            for quarter, place in self._operands(warp, [mma]):
                self._checker(warp).read(single, warp.cta, place.cells(quarter))

    @staticmethod
    def _operands(warp: Any, alike: list[mmas.Mma]) -> list[tuple[int | None, Footprint]]:
        """Places of MMAs' operands in shared memory, of A the warp's own quarter."""
        kind = alike[0].kind
        a = kind.a_of(alike)
        return ([] if a is None else [(warp.index % 4, a)]) + [(None, kind.b_of(alike))]

    def wait_mmas(self, warp: Any, queue: mmas.MmaQueue, pending: int) -> list[mmas.MmaGroup]:
        """See Engines."""
        complete = super().wait_mmas(warp, queue, pending)
        if complete and complete[-1].release is not None:
            checker = self._checker(warp)
            checker.known[warp].rows[:, checker.agent(warp, MMAS_OF)] = complete[-1].release
        return complete
