"""The fifth-generation tensor core and its memory: MMAs in flight, loads, stores, and who hears of their end.

MMAs of a warp are done in order: in the plain mode where they are committed, with a seed between there and
the wait for their barrier. Stores to tensor memory are done where they are issued or where they are waited
for. Loads are done at once, but count as under way until they are waited for or one of their results is used:
the hardware makes a use wait. What tcgen05.wait::ld is needed for is to give tensor memory back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cutegemm.emulator import tcgen05, tmem
from cutegemm.emulator.engines import SYNC_CYCLES, Engines, Task
from cutegemm.emulator.faults import OutOfBoundsError
from cutegemm.emulator.mbarrier import Mbarrier
from cutegemm.emulator.tma import TensorMap
from cutegemm.emulator.values import Lanes

# Cost model, about that of a B200: multiply-adds of 16-bit operands per cycle and SM (of M = 128 at least);
# columns of 32 lanes that tensor memory reads or writes in a cycle for one warp.
MULTIPLY_ADDS = 4096
LOAD_BYTES_PER_CYCLE = 64  # from the second-level cache, per SM
COLUMNS_PER_CYCLE = 4
LOAD_CYCLES = 20


@dataclass
class TensorQueue:
    """A warp's tensor instructions.

    open     MMAs issued and neither committed nor started
    stores   to tensor memory, not done yet
    ctas     of the MMAs: one, or a pair
    begin, finish   cycles in which those are done that are open
    ways     of arrivals to other CTAs, by their rank
    """

    ctas: tuple[Any, ...] = ()
    open: list[tcgen05.Mma] = field(default_factory=list)
    uncommitted: bool = False
    stores: list[Callable[[], None]] = field(default_factory=list)
    begin: int = 0
    finish: int = 0
    ways: dict[int, object] = field(default_factory=dict)


def queue_of(warp: Any) -> TensorQueue:
    """The warp's queue."""
    queue: TensorQueue | None = warp.engines.get("tensor")
    if queue is None:
        queue = warp.engines["tensor"] = TensorQueue()
    return queue


class TensorEngines(Engines):
    """Engines of an SM with tensor memory."""

    bytes_per_cycle = LOAD_BYTES_PER_CYCLE

    # --- allocation ------------------------------------------------------------------------------------

    def allocated(self, warp: Any, request: tmem.AllocationRequest) -> None:
        """A warp has got the columns it asked for."""

    def freed(self, warp: Any, start: int, columns: int) -> None:
        """A warp is about to give columns back."""

    # --- TMA -------------------------------------------------------------------------------------------

    def tma_load(
        self,
        warp: Any,
        tensor_map: TensorMap,
        coordinates: tuple[int, ...],
        offset: int,
        targets: list[tuple[Any, Mbarrier]],
    ) -> None:
        """See Engines."""
        warp.does = warp.does or "producer"
        super().tma_load(warp, tensor_map, coordinates, offset, targets)

    # --- MMAs ------------------------------------------------------------------------------------------

    def issue_mma(self, warp: Any, ctas: tuple[Any, ...], mma: tcgen05.Mma) -> None:
        """A thread issues an MMA of its CTA or of a pair."""
        queue = queue_of(warp)
        warp.does = warp.does or "MMA"
        if queue.ctas != ctas and queue.open:
            self._start_mmas(warp, queue)
        queue.ctas = ctas
        queue.open.append(mma)
        queue.uncommitted = True
        instruction = mma.instruction
        rows = max(instruction.rows, tmem.ROWS)
        cycles = rows * instruction.n * instruction.k * instruction.element // 2 // MULTIPLY_ADDS
        begin = max(warp.clock, *(cta.tensor_free[0] for cta in ctas))
        if len(queue.open) == 1:
            queue.begin = begin
        queue.finish = begin + cycles
        for cta in ctas:
            cta.tensor_free[0] = queue.finish
        warp.clock += 1

    def _start_mmas(self, warp: Any, queue: TensorQueue) -> None:
        """What is open may be done from now on."""
        mmas, ctas, queue.open = queue.open, queue.ctas, []
        if mmas:
            first = mmas[0]
            what = "added to" if first.accumulate else "put"
            self.trace.add(
                warp,
                "mma",
                f"{len(mmas)} x {first.instruction}, {what} column {first.column}",
                queue.begin,
                queue.finish,
                engine="tensor core",
            )
            self.start(Task(queue, lambda: self._run_mmas(warp, ctas, mmas)))

    def _run_mmas(self, warp: Any, ctas: tuple[Any, ...], mmas: list[tcgen05.Mma]) -> None:
        for cta in ctas:
            if all(other.done for other in cta.warps):
                raise OutOfBoundsError(
                    f"{mmas[0].where}: the MMA is done after CTA {cta.number}, whose memory it uses, "
                    "has exited"
                )
            cta.sm.memory.check(cta, mmas[0].column, mmas[0].instruction.columns, mmas[0].where)
        tcgen05.run(ctas, mmas)
        self.machine.events += 1

    def commit_mmas_to(self, warp: Any, targets: list[tuple[Any, Mbarrier]]) -> None:
        """Each target's barrier gets an arrival once all MMAs issued so far are done."""
        queue = queue_of(warp)
        self._start_mmas(warp, queue)
        queue.uncommitted = False
        token = self.commit_begins(warp)
        where, finish = warp.site(), max(queue.finish, warp.clock)
        warp.clock += SYNC_CYCLES

        def arrive(cta: Any, barrier: Mbarrier) -> None:
            if all(other.done for other in cta.warps):
                raise OutOfBoundsError(f"{where}: arrives at the {barrier.name} after that CTA has exited")
            self.load_ends(barrier, token)
            self.machine.events += 1
            barrier.arrive(1, warp, where, finish, what="MMAs of ")

        def done() -> None:
            for cta, barrier in targets:
                # What goes to one CTA arrives in order; what goes to oneself, at once.
                lane = queue.ways.setdefault(cta.rank, object())
                task = Task(lane, partial(arrive, cta, barrier))
                if cta is warp.cta:
                    task.run()
                else:
                    self.start(task)

        self.start(Task(queue, done))

    def commit_begins(self, warp: Any) -> Any:
        """A commit is issued; what is returned is given to ``load_ends``."""
        return None

    # --- loads and stores ------------------------------------------------------------------------------

    def load_tensor(self, warp: Any, slots: tuple[int, ...], window: tmem.Window) -> None:
        """A warp loads registers from tensor memory."""
        memory, where = warp.cta.sm.memory, warp.site()
        memory.check(warp.cta, window.column, window.columns, where)
        warp.does = warp.does or "epilogue"
        begin = warp.clock
        cycles = LOAD_CYCLES + window.columns // COLUMNS_PER_CYCLE
        self.trace.add(warp, "read", f"{window}", begin, begin + cycles, engine="tensor memory")
        warp.clock += cycles
        for slot, row in zip(slots, window.read(memory), strict=True):
            warp.r[slot] = row

    def use_loads(self, warp: Any, loads: tuple[int, ...]) -> None:
        """Results of loads (statements by index) are used, which waits for them."""

    def wait_loads(self, warp: Any) -> None:
        """All loads of a warp are done."""

    def store_tensor(self, warp: Any, block: Lanes, window: tmem.Window) -> None:
        """A warp stores registers, (registers, lanes), to tensor memory."""
        memory, where = warp.cta.sm.memory, warp.site()
        memory.check(warp.cta, window.column, window.columns, where)
        warp.clock += window.columns // COLUMNS_PER_CYCLE
        if self.chance is not None and self.chance.random() < 0.5:
            queue_of(warp).stores.append(lambda: window.write(memory, block))
        else:
            window.write(memory, block)

    def wait_stores_to_tensor(self, warp: Any) -> None:
        """All stores of a warp to tensor memory are done."""
        queue = queue_of(warp)
        for write in queue.stores:
            write()
        queue.stores = []

    def fence_tensor(self, warp: Any, after: bool) -> None:
        """tcgen05.fence: without effect where everything is visible at once."""

    # --- the end ---------------------------------------------------------------------------------------

    def warp_exits(self, warp: Any) -> None:
        """See Engines; the last warp of a CTA must leave no tensor memory allocated."""
        super().warp_exits(warp)
        self.wait_stores_to_tensor(warp)
        cta = warp.cta
        if all(other.done for other in cta.warps):
            tmem.leave(cta)
