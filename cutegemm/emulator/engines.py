"""The asynchronous side of an SM: TMA, tensor cores, and what their completion tells to whom.

In the plain mode a copy or a multiplication is done where it is issued (MMAs where they are committed).
With a seed it is done as late as chance and the waits of the program allow, and try_wait fails now and then.
Costs are counted in cycles by a simple model: a TMA unit and a tensor core per CTA that serve in order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cutegemm.emulator import mma as mmas
from cutegemm.emulator.faults import OutOfBoundsError
from cutegemm.emulator.global_races import RegionShadow
from cutegemm.emulator.mbarrier import Mbarrier, Rendezvous
from cutegemm.emulator.tma import TensorMap, put_box, read_box, take_box, write_box
from cutegemm.emulator.trace import Trace
from cutegemm.emulator.values import Lanes

# Cycles of the cost model, about those of an H200: latency of a TMA load, bytes per cycle and SM from the
# second-level cache, cycles of an instruction that synchronises.
LOAD_LATENCY = 600
LOAD_BYTES_PER_CYCLE = 32
SYNC_CYCLES = 20
SPURIOUS = 0.2  # share of try_waits that fail for no reason, with a seed
LATE = 0.7  # chance that a piece of asynchronous work is left for later once more


@dataclass
class StoreQueue:
    """A warp's TMA stores: those of the open group, and the groups not waited for."""

    open: list["Task"] = field(default_factory=list)
    groups: list[list["Task"]] = field(default_factory=list)


@dataclass
class Task:
    """A piece of asynchronous work. Tasks of one lane are done in order."""

    lane: object
    work: Callable[[], None]
    done: bool = False

    def run(self) -> None:
        """Does it, once."""
        if not self.done:
            self.done = True
            self.work()


class Engines:
    """Carries out what the instructions ask for; ``machine`` is the one they run on."""

    bytes_per_cycle = LOAD_BYTES_PER_CYCLE

    def __init__(self, machine: Any, trace: Trace, seed: int | None) -> None:
        self.machine = machine
        self.trace = trace
        self.chance = None if seed is None else random.Random(seed)
        self.tasks: list[Task] = []

    # --- chance ----------------------------------------------------------------------------------------

    def spurious_failure(self) -> bool:
        """Whether a try_wait fails although it might succeed."""
        return self.chance is not None and self.chance.random() < SPURIOUS

    def start(self, task: Task) -> None:
        """Work that may be done from now on."""
        if self.chance is None:
            task.run()
        else:
            self.tasks.append(task)

    def complete_some(self) -> bool:
        """Does a few of the waiting tasks, by chance; whether there were any."""
        if self.chance is None or not self.tasks:
            return False
        found = False
        for task in self.tasks[:]:
            if not task.done and self.chance.random() > LATE:
                self._run_up_to(task)
                found = True
        self.tasks = [task for task in self.tasks if not task.done]
        return found

    def complete_one(self) -> bool:
        """Does one waiting task if there is any: nothing else can go on."""
        self.tasks = [task for task in self.tasks if not task.done]
        if not self.tasks or self.chance is None:
            return False
        self._run_up_to(self.chance.choice(self.tasks))
        return True

    def _run_up_to(self, task: Task) -> None:
        for other in self.tasks:
            if other.lane is task.lane:
                other.run()
            if other is task:
                return

    # --- barriers --------------------------------------------------------------------------------------

    def arrive(
        self, warp: Any, barrier: Rendezvous, threads: int, expected: int, relaxed: bool = False
    ) -> int:
        """A warp's threads arrive at a barrier that counts threads."""
        self.machine.events += 1
        return barrier.arrive(threads, expected, warp, warp.site(), warp.clock)

    def acquire(self, warp: Any, barrier: Rendezvous) -> None:
        """A warp leaves such a barrier."""
        warp.clock = max(warp.clock, barrier.clock) + SYNC_CYCLES

    def made_mbarrier(self, warp: Any, barrier: Mbarrier) -> None:
        """A warp has initialised an mbarrier."""

    def arrive_mbarrier(self, warp: Any, barrier: Mbarrier, count: int, relaxed: bool = False) -> None:
        """``count`` arrivals of a warp."""
        self.machine.events += 1
        warp.clock += SYNC_CYCLES
        barrier.arrive(count, warp, warp.site(), warp.clock)

    def expect(self, warp: Any, barrier: Mbarrier, tx: int) -> None:
        """A warp announces bytes."""
        barrier.expect(tx)

    def acquire_mbarrier(self, warp: Any, barrier: Mbarrier, relaxed: bool = False) -> None:
        """A warp passes an mbarrier."""
        if barrier.clock > warp.clock:
            self.trace.add(warp, "wait", barrier.name, warp.clock, barrier.clock)
            warp.clock = barrier.clock
        warp.clock += SYNC_CYCLES

    def proxy_fence(self, warp: Any) -> None:
        """fence.proxy.async: without effect where everything is visible at once."""

    def barrier_fence(self, warp: Any) -> None:
        """fence.mbarrier_init, likewise."""

    def memory_fence(self, warp: Any, gpu: bool) -> None:
        """fence.acq_rel, fence.sc, membar, likewise; ``gpu``: for the whole GPU."""

    # --- shared memory ---------------------------------------------------------------------------------

    def load(self, warp: Any, cta: Any, offsets: Lanes, width: int) -> Lanes:
        """Lanes read shared memory."""
        return cta.shared.load(offsets, width, warp.site())

    def store(self, warp: Any, cta: Any, offsets: Lanes, values: Lanes, width: int) -> None:
        """Lanes write shared memory."""
        cta.shared.store(offsets, values, width, warp.site())
        self.machine.events += 1

    # --- global memory ---------------------------------------------------------------------------------

    def load_global(self, warp: Any, addresses: Lanes, width: int) -> Lanes:
        """Lanes read global memory."""
        values: Lanes = self.machine.memory.load(addresses, width, warp.site())
        return values

    def store_global(self, warp: Any, addresses: Lanes, values: Lanes, width: int) -> None:
        """Lanes write global memory."""
        self.machine.memory.store(addresses, values, width, warp.site())
        self.machine.events += 1

    def release_global(self, warp: Any, addresses: Lanes, relaxed: bool) -> None:
        """Lanes are about to write words by which others may learn that they are this far."""

    def acquire_global(self, warp: Any, addresses: Lanes, relaxed: bool) -> None:
        """Lanes have read such words."""

    def global_shadows(self) -> dict[tuple[int, int], RegionShadow]:
        """Who accessed which element of a region, by its first and last address; nothing without checks."""
        return {}

    # --- TMA -------------------------------------------------------------------------------------------

    def tma_load(
        self,
        warp: Any,
        tensor_map: TensorMap,
        coordinates: tuple[int, ...],
        offset: int,
        targets: list[tuple[Any, Mbarrier]],
    ) -> None:
        """A box to the same offset in each target CTA; each target's barrier gets its bytes."""
        where = warp.site()
        begin = max(warp.clock, warp.cta.tma_free)
        warp.cta.tma_free = begin + tensor_map.box_bytes // self.bytes_per_cycle
        finish = warp.cta.tma_free + LOAD_LATENCY
        token = self.load_begins(warp, tensor_map.box_bytes, offset, targets)
        self.trace.add(
            warp, "load", f"{tensor_map.box_bytes} B at {coordinates}", begin, finish, engine="TMA load"
        )
        warp.clock += SYNC_CYCLES
        boxes: list[Lanes] = []  # read once for all targets, when the first of them gets it

        def deliver(cta: Any, barrier: Mbarrier) -> None:
            if all(other.done for other in cta.warps):
                raise OutOfBoundsError(f"{where}: the load arrives in CTA {cta.number} after that has exited")
            if not boxes:
                boxes.append(read_box(tensor_map, coordinates, self.machine.memory, where))
            put_box(tensor_map, boxes[0], cta.shared, offset, where)
            self.machine.events += 1
            self.load_ends(barrier, token)
            barrier.complete(tensor_map.box_bytes, warp, finish)

        for target in targets:
            self.start(Task(object(), partial(deliver, *target)))

    def load_begins(
        self,
        warp: Any,
        size: int,
        offset: int,
        targets: list[tuple[Any, Mbarrier]],
        asynchronous: bool = True,
        after_reads: bool = False,
    ) -> Any:
        """``size`` bytes are on their way; what is returned is given to ``load_ends``. Nothing to do here.

        asynchronous: whether they are written by the async proxy
        after_reads: whether lanes that have read what was there need a fence between the proxies
        """
        return None

    def load_ends(self, barrier: Mbarrier, token: Any) -> None:
        """A TMA load has arrived at one of its targets, whose barrier is about to be told."""

    def tma_store(self, warp: Any, tensor_map: TensorMap, coordinates: tuple[int, ...], offset: int) -> None:
        """A box from shared memory; it is read at some time before the wait for its group."""
        where = warp.site()
        cta = warp.cta

        def work() -> None:
            box = take_box(tensor_map, cta.shared, offset, where)
            write_box(tensor_map, coordinates, box, self.machine.memory, where)
            self.machine.events += 1

        task = Task(work, work)
        self._stores(warp).open.append(task)
        begin = max(warp.clock, cta.store_free)
        cta.store_free = begin + tensor_map.box_bytes // self.bytes_per_cycle
        self.trace.add(
            warp,
            "store",
            f"{tensor_map.box_bytes} B at {coordinates}",
            begin,
            cta.store_free,
            engine="TMA store",
        )
        self.start(task)

    def commit_stores(self, warp: Any) -> None:
        """Closes a group of stores."""
        stores = self._stores(warp)
        stores.groups.append(stores.open)
        stores.open = []

    def wait_stores(self, warp: Any, pending: int) -> None:
        """All but the latest ``pending`` groups have read their shared memory."""
        stores = self._stores(warp)
        split = max(0, len(stores.groups) - pending)
        for group in stores.groups[:split]:
            for task in group:
                task.run()
        stores.groups = stores.groups[split:]

    def stores_written(self, warp: Any) -> None:
        """After ``wait_stores``: those groups have arrived in global memory. Here they always have."""

    def _stores(self, warp: Any) -> StoreQueue:
        stores = warp.engines.get("store")
        if stores is None:
            stores = warp.engines["store"] = StoreQueue()
        return stores

    def warp_exits(self, warp: Any) -> None:
        """A warp ends. Its stores are done: a CTA's shared memory ends with it."""
        stores = warp.engines.get("store")
        if stores is not None:
            for group in (*stores.groups, stores.open):
                for task in group:
                    task.run()

    # --- tensor core -----------------------------------------------------------------------------------

    def fence_mmas(self, warp: Any) -> None:
        """wgmma.fence: without effect where MMAs find registers as they are."""

    def commit_mmas(self, warp: Any, queue: mmas.MmaQueue) -> None:
        """A group of MMAs is issued."""
        if not queue.open:
            queue.groups.append(mmas.MmaGroup([], set(), done=True, finish=warp.clock))
            return
        group = mmas.commit(queue)
        cta = warp.cta
        # A quarter of the SM's tensor cores serves each warp of a warpgroup: N / 8 cycles for a step of K.
        quarter = warp.index % 4
        begin = max(warp.clock, cta.tensor_free[quarter])
        group.finish = begin + sum(mma.kind.n // 2 for mma in group.mmas)
        cta.tensor_free[quarter] = group.finish
        first = group.mmas[0]
        self.trace.add(
            warp,
            "mma",
            f"{len(group.mmas)} x {first.label}",
            begin,
            group.finish,
            engine="tensor core",
        )
        warp.clock += SYNC_CYCLES
        lane = queue

        def work() -> None:
            mmas.run(warp, queue, group)

        self.start(Task(lane, work))

    def wait_mmas(self, warp: Any, queue: mmas.MmaQueue, pending: int) -> list[mmas.MmaGroup]:
        """At most ``pending`` groups are unfinished; the registers of the others can be read."""
        complete = mmas.wait(warp, queue, pending)
        for group in complete:
            warp.clock = max(warp.clock, group.finish)
        return complete
