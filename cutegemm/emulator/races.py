"""Looks for accesses to shared memory that nothing orders, and for reads of what nobody wrote.

Every agent (a warp; its MMAs; its TMA stores; a TMA load) has an epoch, every warp a vector of the epochs it
has heard of. Barriers carry vectors from those who arrive to those who wait. An access is in order if the
warp that makes or issues it has heard of the earlier access. What lanes write (generic proxy) is seen by TMA
and tensor cores (async proxy) only after fence.proxy.async, so each warp keeps a second vector: what it knows
to be visible to them.

Not looked at: global memory, and fences between reads of one proxy and writes of the other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cutegemm.emulator import mma as mmas
from cutegemm.emulator.engines import Engines
from cutegemm.emulator.faults import RaceError, UninitializedReadError
from cutegemm.emulator.mbarrier import Mbarrier, Rendezvous
from cutegemm.emulator.memory import SHARED_BASE
from cutegemm.emulator.tma import TensorMap
from cutegemm.emulator.values import Lanes

CELL = 16  # bytes of shared memory that are watched together
LOADS = 32  # TMA loads of a CTA that are told apart


@dataclass
class Knowledge:
    """What a warp has heard of, by agent: epochs that are over, and those visible to the async proxy."""

    over: Lanes
    visible: Lanes

    def copy(self) -> "Knowledge":
        """An independent copy."""
        return Knowledge(self.over.copy(), self.visible.copy())

    def join(self, other: "Knowledge | None") -> None:
        """Learns what the other knows."""
        if other is not None:
            np.maximum(self.over, other.over, out=self.over)
            np.maximum(self.visible, other.visible, out=self.visible)


class Shadow:
    """For each cell of a CTA's shared memory: who wrote it last and when, and when each agent read it."""

    def __init__(self, cells: int, agents: int) -> None:
        self.writer = np.zeros(cells, dtype=np.int32)
        self.epoch = np.zeros(cells, dtype=np.int32)
        self.site = np.zeros(cells, dtype=np.int32)
        self.read = np.zeros((cells, agents), dtype=np.int32)


@dataclass(frozen=True)
class Access:
    """One access under examination."""

    agent: int
    epoch: int
    knows: Knowledge
    asynchronous: bool
    what: Any


class ClusterChecker:
    """Agents and shadows of one cluster.

    Agents of a CTA, one block after another: its warps, their MMAs, their TMA stores (and what else ``kinds``
    names), its TMA loads.
    """

    kinds: tuple[str, ...] = ("{}", "an MMA of {}", "a TMA store of {}")

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.warps = len(cluster.ctas[0].warps)
        self.per_cta = len(self.kinds) * self.warps + LOADS
        count = 1 + self.per_cta * len(cluster.ctas)
        self.epochs = np.ones(count, dtype=np.int32)
        self.generic = np.zeros(count, dtype=bool)
        self.shadows = [Shadow(len(cta.shared.data) // CELL, count) for cta in cluster.ctas]
        self.sites: list[Any] = [""]
        self.site_numbers: dict[Any, int] = {"": 0}
        self.read_sites: dict[int, Any] = {}
        self.loads = [0] * len(cluster.ctas)
        self.known: dict[Any, Knowledge] = {}
        for cta in cluster.ctas:
            for warp in cta.warps:
                agent = self.agent(warp)
                self.generic[agent] = True
                self.known[warp] = Knowledge(np.zeros(count, np.int32), np.zeros(count, np.int32))
                self.known[warp].over[agent] = 1

    def agent(self, warp: Any, kind: int = 0) -> int:
        """A warp's agent: 0 itself, 1 its MMAs, 2 its TMA stores, and so on as in ``kinds``."""
        return int(1 + warp.cta.rank * self.per_cta + kind * self.warps + warp.index)

    def next_load(self, warp: Any) -> int:
        """The agent of a CTA's next TMA load."""
        rank = warp.cta.rank
        self.loads[rank] += 1
        return int(1 + rank * self.per_cta + len(self.kinds) * self.warps + self.loads[rank] % LOADS)

    def name(self, agent: int) -> str:
        """Who an agent is."""
        rank, place = divmod(agent - 1, self.per_cta)
        cta = self.cluster.ctas[rank]
        kind, index = divmod(place, self.warps)
        if kind >= len(self.kinds):
            return f"a TMA load of CTA {cta.number}"
        return self.kinds[kind].format(cta.warps[index].name)

    def site(self, place: Any) -> int:
        """Number of a place in the code."""
        if place not in self.site_numbers:
            self.site_numbers[place] = len(self.sites)
            self.sites.append(place)
        return self.site_numbers[place]

    # --- accesses --------------------------------------------------------------------------------------

    def read(self, access: Access, cta: Any, cells: Any) -> None:
        """A read of cells. Raises RaceError, UninitializedReadError."""
        shadow = self.shadows[cta.rank]
        self._check_written(access, cta, shadow, cells)
        self._check_writers(access, cta, shadow, cells, "read-after-write")
        shadow.read[cells, access.agent] = access.epoch
        self.read_sites[access.agent] = access.what

    def write(self, access: Access, cta: Any, cells: Any) -> None:
        """A write of cells. Raises RaceError."""
        shadow = self.shadows[cta.rank]
        self._check_writers(access, cta, shadow, cells, "write-after-write")
        late = shadow.read[cells] > access.knows.over[None, :]
        late[:, access.agent] = False
        if late.any():
            row, reader = (int(i) for i in np.argwhere(late)[0])
            raise RaceError(
                f"write-after-read in shared memory of CTA {cta.number}, offset {self._offset(cells, row)}: "
                f"{access.what} writes what {self.name(reader)} may still be reading "
                f"({self.read_sites.get(reader, 'earlier')}); nothing the writer waited for says that the "
                "read is over"
            )
        shadow.writer[cells] = access.agent
        shadow.epoch[cells] = access.epoch
        shadow.site[cells] = self.site(access.what)

    def _check_written(self, access: Access, cta: Any, shadow: Shadow, cells: Any) -> None:
        empty = shadow.writer[cells] == 0
        if empty.any():
            raise UninitializedReadError(
                f"{access.what} reads shared memory of CTA {cta.number} at offset "
                f"{self._offset(cells, int(empty.argmax()))}, which nobody has written"
            )

    def _check_writers(self, access: Access, cta: Any, shadow: Shadow, cells: Any, kind: str) -> None:
        writers, epochs = shadow.writer[cells], shadow.epoch[cells]
        knows = access.knows
        heard = knows.over[writers]
        if access.asynchronous:
            heard = np.where(self.generic[writers], np.minimum(knows.visible[writers], heard), heard)
        late = (epochs > heard) & (writers != access.agent)
        if not late.any():
            return
        row = int(late.argmax())
        writer, epoch = int(writers[row]), int(epochs[row])
        ordered = knows.over[writer] >= epoch
        why = (
            "the write is over, but no fence.proxy.async between it and the barrier makes it visible to TMA "
            "and tensor cores"
            if ordered
            else "nothing the warp waited for says that the write is over"
        )
        raise RaceError(
            f"{kind} in shared memory of CTA {cta.number}, offset {self._offset(cells, row)}: {access.what} "
            f"meets the write of {self.name(writer)} ({self.sites[int(shadow.site[cells][row])]}); {why}"
        )

    @staticmethod
    def _offset(cells: Any, row: int) -> int:
        first = cells.start + row if isinstance(cells, slice) else int(cells[row])
        return first * CELL - SHARED_BASE


class CheckedEngines(Engines):
    """Engines that tell the checker of every access and of everything that orders them."""

    checker_of = ClusterChecker

    def _checker(self, warp: Any) -> ClusterChecker:
        cluster = warp.cta.cluster
        if cluster.checker is None:
            cluster.checker = self.checker_of(cluster)
        checker: ClusterChecker = cluster.checker
        return checker

    # --- what orders -----------------------------------------------------------------------------------

    def _release(self, warp: Any, barrier: Mbarrier | Rendezvous) -> None:
        checker = self._checker(warp)
        knows = checker.known[warp]
        self._give(barrier, knows)
        agent = checker.agent(warp)
        knows.over[agent] += 1

    @staticmethod
    def _give(barrier: Mbarrier | Rendezvous, knows: Knowledge) -> None:
        if barrier.next_release is None:
            barrier.next_release = knows.copy()
        else:
            barrier.next_release.join(knows)

    def arrive(self, warp: Any, barrier: Rendezvous, threads: int, expected: int) -> int:
        """See Engines."""
        self._release(warp, barrier)
        return super().arrive(warp, barrier, threads, expected)

    def acquire(self, warp: Any, barrier: Rendezvous) -> None:
        """See Engines."""
        self._checker(warp).known[warp].join(barrier.release)
        super().acquire(warp, barrier)

    def arrive_mbarrier(self, warp: Any, barrier: Mbarrier, count: int) -> None:
        """See Engines."""
        self._release(warp, barrier)
        super().arrive_mbarrier(warp, barrier, count)

    def acquire_mbarrier(self, warp: Any, barrier: Mbarrier) -> None:
        """See Engines."""
        self._checker(warp).known[warp].join(barrier.release)
        super().acquire_mbarrier(warp, barrier)

    def proxy_fence(self, warp: Any) -> None:
        """See Engines."""
        knows = self._checker(warp).known[warp]
        np.maximum(knows.visible, knows.over, out=knows.visible)

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
        self._checker(warp).read(self._by_lanes(warp), cta, np.unique(offsets // CELL))
        return values

    def store(self, warp: Any, cta: Any, offsets: Lanes, values: Lanes, width: int) -> None:
        """See Engines."""
        super().store(warp, cta, offsets, values, width)
        self._checker(warp).write(self._by_lanes(warp), cta, np.unique(offsets // CELL))

    def load_begins(
        self, warp: Any, size: int, offset: int, targets: list[tuple[Any, Mbarrier]]
    ) -> Knowledge:
        """See Engines."""
        checker = self._checker(warp)
        agent = checker.next_load(warp)
        checker.epochs[agent] += 1
        epoch = int(checker.epochs[agent])
        for cta, _ in targets:
            cta.shared.check(offset, offset + size, warp.site())
            cells = slice(offset // CELL, (offset + size) // CELL)
            checker.write(self._asynchronous(warp, agent, epoch), cta, cells)
        knows = checker.known[warp].copy()
        knows.over[agent] = epoch
        return knows

    def load_ends(self, barrier: Mbarrier, token: Any) -> None:
        """See Engines."""
        self._give(barrier, token)

    def tma_store(self, warp: Any, tensor_map: TensorMap, coordinates: tuple[int, ...], offset: int) -> None:
        """See Engines."""
        checker = self._checker(warp)
        agent = checker.agent(warp, 2)
        warp.cta.shared.check(offset, offset + tensor_map.box_bytes, warp.site())
        cells = slice(offset // CELL, (offset + tensor_map.box_bytes) // CELL)
        checker.read(self._asynchronous(warp, agent, int(checker.epochs[agent])), warp.cta, cells)
        super().tma_store(warp, tensor_map, coordinates, offset)

    def commit_stores(self, warp: Any) -> None:
        """See Engines."""
        checker = self._checker(warp)
        checker.epochs[checker.agent(warp, 2)] += 1
        super().commit_stores(warp)

    def wait_stores(self, warp: Any, pending: int) -> None:
        """See Engines."""
        super().wait_stores(warp, pending)
        checker = self._checker(warp)
        agent = checker.agent(warp, 2)
        waiting = len(self._stores(warp).groups)
        # Epoch e is the e-th group; those committed are epochs 1 .. current - 1.
        checker.known[warp].over[agent] = int(checker.epochs[agent]) - 1 - waiting

    def warp_exits(self, warp: Any) -> None:
        """See Engines."""
        stores = self._stores(warp)
        if stores.open or any(stores.groups):
            raise RaceError(
                f"{warp.name} exits while its TMA stores may still be reading shared memory, which ends with "
                "the CTA; cp.async.bulk.wait_group.read 0 is missing"
            )
        super().warp_exits(warp)

    def commit_mmas(self, warp: Any, queue: mmas.MmaQueue) -> None:
        """See Engines."""
        checker = self._checker(warp)
        agent = checker.agent(warp, 1)
        checker.epochs[agent] += 1
        epoch = int(checker.epochs[agent])
        for mma in queue.open:
            access = Access(agent, epoch, checker.known[warp], True, f"{mma.where} by {warp.name}")
            for units in (mma.kind.a_of([mma]).quarter(warp.index % 4), mma.kind.b_of([mma]).units):
                cells = np.unique(units)
                warp.cta.shared.check(int(cells[0]) * CELL, (int(cells[-1]) + 1) * CELL, access.what)
                checker.read(access, warp.cta, cells)
        super().commit_mmas(warp, queue)
        if queue.groups:
            queue.groups[-1].release = epoch

    def wait_mmas(self, warp: Any, queue: mmas.MmaQueue, pending: int) -> list[mmas.MmaGroup]:
        """See Engines."""
        complete = super().wait_mmas(warp, queue, pending)
        if complete and complete[-1].release is not None:
            checker = self._checker(warp)
            checker.known[warp].over[checker.agent(warp, 1)] = complete[-1].release
        return complete
