"""Who has heard of what: agents, their epochs, and the vectors that barriers carry from warp to warp.

Every agent (a warp; its MMAs; its TMA stores, as readers of shared memory and as writers of global memory;
a TMA load) has an epoch, every warp a vector of the epochs it has heard of. Barriers carry vectors from those
who arrive to those who wait. What lanes write (generic proxy) is seen by TMA and tensor cores (async proxy)
only after fence.proxy.async, so each warp keeps a second vector: what it knows to be visible to them. A third
one is of mbarriers that were initialised: fence.mbarrier_init makes those known, even to those who meet
without release and acquire.

What is ``relaxed`` carries nothing but what its warp knew at its last fence before, and what a warp learns
that way it knows only after its next fence.
"""

from typing import Any

import numpy as np

from cutegemm.emulator.values import Lanes

LOADS = 32  # TMA loads of a CTA that are told apart
LANES_OF, MMAS_OF, STORES_OF, STORED_BY = range(4)  # agents of a warp, as in Agents.kinds
NOBODY = 0  # the agent that wrote what nobody has written
FENCED_BARRIERS = 2  # row of Knowledge


class Knowledge:
    """What a warp has heard of.

    rows      (3, agents of its cluster): epochs that are over; those over for the async proxy; those whose
              mbarriers are initialised. They differ only for what lanes do
    foreign   epochs that are over in other clusters, by the cluster's number
    """

    def __init__(self, rows: Lanes, foreign: dict[int, Lanes]) -> None:
        self.rows = rows
        self.foreign = foreign

    @property
    def over(self) -> Lanes:
        """Epochs that are over, by agent."""
        return self.rows[0]

    def seen(self, asynchronous: bool) -> Lanes:
        """Epochs whose writes can be read, by agent."""
        return self.rows[1 if asynchronous else 0]

    def copy(self) -> "Knowledge":
        """An independent copy."""
        return Knowledge(self.rows.copy(), self.foreign.copy())

    def join(self, other: "Knowledge | None") -> None:
        """Learns what another warp of the cluster knows."""
        if other is not None:
            np.maximum(self.rows, other.rows, out=self.rows)
            for cluster, epochs in other.foreign.items():
                self.join_foreign(cluster, epochs)

    def join_foreign(self, cluster: int, epochs: Lanes) -> None:
        """Learns what is over in another cluster."""
        known = self.foreign.get(cluster)
        self.foreign[cluster] = epochs if known is None else np.maximum(known, epochs)

    def fence(self) -> None:
        """fence.proxy.async: all that is over is over for the async proxy too."""
        self.rows[1] = self.rows[0]

    def fence_barriers(self) -> None:
        """fence.mbarrier_init: barriers initialised in what is over can be used."""
        np.maximum(self.rows[FENCED_BARRIERS], self.rows[0], out=self.rows[FENCED_BARRIERS])

    def barriers_only(self) -> "Knowledge":
        """What is known where nothing is released: initialised barriers."""
        rows = np.zeros_like(self.rows)
        rows[FENCED_BARRIERS] = self.rows[FENCED_BARRIERS]
        return Knowledge(rows, {})


class Agents:
    """Agents of a cluster, their epochs and what its warps know; ``number`` is that of the cluster.

    fenced      what each warp knew at its last fence, of the whole GPU (True) or of its cluster (False)
    overheard   what relaxed accesses told a warp since
    Numbers of agents: NOBODY; then for each CTA, kind after kind, the agents of its warps, and its TMA loads.
    """

    kinds: tuple[str, ...] = ("{}", "an MMA of {}", "a TMA store of {}", "a TMA store of {}")

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.number = cluster.ctas[0].number
        self.warps = len(cluster.ctas[0].warps)
        self.per_cta = len(self.kinds) * self.warps + LOADS
        count = 1 + self.per_cta * len(cluster.ctas)
        self.epochs = np.ones(count, dtype=np.int32)
        self.loads = [0] * len(cluster.ctas)
        self.known: dict[Any, Knowledge] = {}
        self.fenced: dict[tuple[Any, bool], Knowledge] = {}
        self.overheard: dict[tuple[Any, bool], Knowledge] = {}
        for cta in cluster.ctas:
            for warp in cta.warps:
                rows = np.zeros((3, count), dtype=np.int32)
                rows[0, self.agent(warp)] = 1
                self.known[warp] = Knowledge(rows, {})

    def agent(self, warp: Any, kind: int = LANES_OF) -> int:
        """An agent of a warp."""
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

    def next_epoch(self, agent: int) -> int:
        """Begins an epoch of an asynchronous agent."""
        self.epochs[agent] += 1
        return int(self.epochs[agent])

    def release(self, warp: Any) -> Knowledge:
        """What a warp knows, to be passed on; what it does from now on is not part of it."""
        knows = self.known[warp]
        passed = knows.copy()
        knows.rows[0, self.agent(warp)] += 1
        return passed

    def released(self, warp: Any, relaxed: bool, gpu: bool = False) -> Knowledge:
        """What an arrival or a store passes on; ``gpu``: to other clusters."""
        if not relaxed:
            return self.release(warp)
        passed = self.known[warp].barriers_only()
        passed.join(self.fenced.get((warp, gpu)))
        return passed

    def learner(self, warp: Any, relaxed: bool, gpu: bool = False) -> Knowledge:
        """What is added to by what a warp waited for or read: its knowledge now, or that after a fence."""
        if not relaxed:
            return self.known[warp]
        if (warp, gpu) not in self.overheard:
            self.overheard[warp, gpu] = Knowledge(np.zeros_like(self.known[warp].rows), {})
        return self.overheard[warp, gpu]

    def fence(self, warp: Any, gpu: bool) -> None:
        """fence.acq_rel, fence.sc or membar; ``gpu``: for the whole GPU."""
        for wide in (False, True)[: 1 + gpu]:
            self.known[warp].join(self.overheard.pop((warp, wide), None))
        passed = self.release(warp)
        for wide in (False, True)[: 1 + gpu]:
            self.fenced[warp, wide] = passed
