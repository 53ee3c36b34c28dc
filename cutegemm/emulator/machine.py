"""The GPU of one launch: CTAs in their clusters, warps, memory, and who runs next."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cutegemm.emulator.decode import Program
from cutegemm.emulator.engines import Engines
from cutegemm.emulator.faults import MAX_WARPS_LISTED, DeadlockError, EmulationError, OutOfBoundsError, Stuck
from cutegemm.emulator.mbarrier import Mbarrier, Rendezvous
from cutegemm.emulator.memory import RANK_SHIFT, SHARED_BASE, GlobalMemory, SharedMemory
from cutegemm.emulator.processors import Sm, processors
from cutegemm.emulator.races import CheckedEngines
from cutegemm.emulator.races_tensor import CheckedTensorEngines
from cutegemm.emulator.tensor_core import TensorEngines
from cutegemm.emulator.trace import Trace
from cutegemm.emulator.values import LANE_NUMBERS, LANES
from cutegemm.emulator.warp import Warp

QUANTUM = 4096  # instructions a warp runs before others get their turn
LAZINESS = (0.0, 0.0, 0.0, 0.5, 0.97)  # with a seed: how often a warp or a whole CTA is passed over
SHORT_QUANTUM = 40  # with a seed: often enough that every order has a chance
SECONDS_BETWEEN_REPORTS = 0.1
# Instructions of a warp, and rounds, without an event after which nobody will ever write what is polled for:
# an epilogue may be some ten thousand instructions long, and signals nothing on the way.
STALE_INSTRUCTIONS, STALE_ROUNDS = 40_000, 50


@dataclass(frozen=True)
class LaunchRecord:
    """What the host code launches: sizes in CTAs and threads, bytes of dynamic shared memory, parameters."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: bytes


class Progress(NamedTuple):
    """How far a launch is: CTAs that have ended, all of them, warp instructions executed."""

    ended: int
    ctas: int
    instructions: int


class Turn(NamedTuple):
    """A cluster ran for a while: its number, where the trace ended then, ranks that exited meanwhile."""

    cluster: int
    events: int
    gone: tuple[int, ...]


class Cta:
    """One CTA: shared memory, barriers, warps."""

    def __init__(self, cluster: "Cluster", rank: int, coordinates: tuple[int, int, int], sm: Sm) -> None:
        machine = cluster.machine
        grid = machine.launch.grid
        self.machine = machine
        self.cluster = cluster
        self.rank = rank
        self.coordinates = coordinates
        x, y, z = coordinates
        self.number = x + grid[0] * (y + grid[1] * z)
        self.shared = SharedMemory(machine.shared_end, f"CTA {self.number}")
        self.mbarriers: dict[int, Mbarrier] = {}
        self.barriers: dict[int, Rendezvous] = {}
        self.operands: dict[Any, Any] = {}
        self.laziness = 0.0 if machine.chance is None else machine.chance.choice(LAZINESS)
        self.tma_free = self.store_free = 0
        self.tensor_free = [0, 0, 0, 0]
        self.sm = sm
        self.allocations: dict[int, Any] = {}
        self.requests: dict[int, Any] = {}
        self.relinquished = False
        sm.ctas.add(self)
        threads = int(np.prod(machine.launch.block))
        self.warps = [Warp(machine.program, self, index) for index in range(-(-threads // LANES))]
        for warp in self.warps:
            self._fill_specials(warp)

    def barrier(self, number: int) -> Rendezvous:
        """One of the CTA's numbered barriers."""
        if number not in self.barriers:
            if not 0 <= number < 16:
                raise OutOfBoundsError(f"CTA {self.number} uses barrier {number}; there are 0..15")
            self.barriers[number] = Rendezvous(f"barrier {number} of CTA {self.number}")
        return self.barriers[number]

    def live_threads(self) -> int:
        """Threads that have not exited."""
        return LANES * sum(not warp.done for warp in self.warps)

    def _fill_specials(self, warp: Warp) -> None:
        for name, slot in self.machine.program.specials.items():
            warp.r[slot] = self._special(name, warp.index)

    def _special(self, name: str, warp: int) -> Any:
        launch, cluster = self.machine.launch, self.cluster
        if name.startswith("shared+"):
            return self.rank << RANK_SHIFT | int(name[7:])
        base, _, axis = name.partition(".")
        i = "xyz".index(axis) if axis else 0
        block = launch.block
        linear = LANE_NUMBERS + np.uint32(warp * LANES)
        table = {
            "%tid": lambda: self._thread_index(linear, i),
            "%ntid": lambda: block[i],
            "%ctaid": lambda: self.coordinates[i],
            "%nctaid": lambda: launch.grid[i],
            "%laneid": lambda: LANE_NUMBERS,
            "%warpid": lambda: warp,
            "%clusterid": lambda: cluster.coordinates[i],
            "%nclusterid": lambda: launch.grid[i] // launch.cluster[i],
            "%cluster_ctaid": lambda: self.coordinates[i] % launch.cluster[i],
            "%cluster_nctaid": lambda: launch.cluster[i],
            "%cluster_ctarank": lambda: self.rank,
            "%cluster_nctarank": lambda: int(np.prod(launch.cluster)),
            "%smid": lambda: self.sm.number,
            "%nsmid": lambda: len(self.machine.processors.sms),
            "%lanemask_lt": lambda: (np.uint32(1) << LANE_NUMBERS) - np.uint32(1),
            "%lanemask_eq": lambda: np.uint32(1) << LANE_NUMBERS,
            "%dynamic_smem_size": lambda: launch.shared_bytes,
        }
        if base not in table:
            raise self.machine.unknown_special(name)
        return table[base]()

    def _thread_index(self, linear: Any, axis: int) -> Any:
        x, y, _ = self.machine.launch.block
        if axis == 0:
            return linear % np.uint32(x) if x % LANES or y > 1 else linear
        value = linear // np.uint32(x) % np.uint32(y) if axis == 1 else linear // np.uint32(x * y)
        return int(value[0]) if (value == value[0]).all() else value


class Cluster:
    """CTAs that reach each other's shared memory."""

    def __init__(self, machine: "Machine", coordinates: tuple[int, int, int], sms: list[Sm]) -> None:
        self.machine = machine
        self.gone: list[int] = []  # ranks that have exited
        self.coordinates = coordinates
        self.checker: Any = None
        sizes = machine.launch.cluster
        x0, y0, z0 = (c * s for c, s in zip(coordinates, sizes, strict=True))
        self.ctas = [
            Cta(self, rank, (x0 + x, y0 + y, z0 + z), sms[rank])
            for rank, (z, y, x) in enumerate(np.ndindex(sizes[2], sizes[1], sizes[0]))
        ]
        self.barrier = Rendezvous(f"the barrier of cluster {coordinates[0]}")
        self.threads = LANES * sum(len(cta.warps) for cta in self.ctas)

    def cta_of(self, rank: int, warp: Warp) -> Cta:
        """The CTA of a rank. Raises OutOfBoundsError if there is none, or it has exited."""
        if rank >= len(self.ctas):
            raise OutOfBoundsError(
                f"{warp.here()}: names rank {rank} of a cluster of {len(self.ctas)} CTA(s)"
            )
        cta = self.ctas[rank]
        if cta is not warp.cta and all(other.done for other in cta.warps):
            raise OutOfBoundsError(
                f"{warp.here()}: reaches into shared memory of CTA {cta.number}, which has exited"
            )
        return cta

    def take_apart(self) -> None:
        """Drops what refers to each other, so that nothing of an ended cluster waits for the collector."""
        self.checker = None
        for cta in self.ctas:
            for warp in cta.warps:
                warp.engines = {}
            cta.warps, cta.mbarriers = [], {}
        self.ctas = []

    @property
    def warps(self) -> list[Warp]:
        """All warps that have not exited."""
        return [warp for cta in self.ctas for warp in cta.warps if not warp.done]


def engines_for(program: Program, check: bool) -> type[Engines]:
    """The engines a program needs."""
    if program.uses_tensor_memory:
        return CheckedTensorEngines if check else TensorEngines
    return CheckedEngines if check else Engines


class Machine:
    """Runs one launch.

    events   counts everything that may let somebody go on: arrivals, stores, completed copies
    watch    is told of the progress a few times a second
    exact_sums   whether WGMMAs of 16-bit operands sum as the hardware does, bit by bit (see numerics.py)
    share    numbers of the clusters that run here, x first; None for all of the grid
    turns    the turns of its clusters, one after the other; kept for a share only
    """

    def __init__(
        self,
        program: Program,
        launch: LaunchRecord,
        memory: GlobalMemory,
        seed: int | None = None,
        check: bool = False,
        sms: int | None = None,
    ) -> None:
        self.program = program
        self.launch = launch
        self.memory = memory
        self.params = launch.params
        self.trace = Trace()
        self.hooks = engines_for(program, check)(self, self.trace, seed)
        self.chance = None if seed is None else random.Random(seed + 1)
        self.waiting: list[tuple[int, int, int]] = []
        self.events = 0
        self.instructions = 0
        self.ended = 0
        self.share: range | None = None
        self.turns: list[Turn] = []
        self.watch: Callable[[Progress], None] | None = None
        self.exact_sums = False
        self._last_told = 0.0
        self.barrier_labels: dict[int, str] = {}
        self.shared_end = program.static_shared_end + launch.shared_bytes
        threads = int(np.prod(launch.block))
        self.processors = processors(
            program.module.target, self.shared_end - SHARED_BASE, threads, sms, self.chance
        )

    def take_apart(self) -> None:
        """As for a cluster; the machine is of no use afterwards."""
        self.hooks.machine = None

    def unknown_special(self, name: str) -> Exception:
        """The error for a special register nobody filled."""
        from cutegemm.emulator.faults import UnknownInstructionError

        return UnknownInstructionError(f"the special register {name} is not known to this emulator")

    # --- running ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs every CTA of the grid, or of the machine's share, to its end. Raises EmulationError."""
        resident: list[Cluster] = []
        try:
            self._run(resident)
        finally:
            for cluster in resident:
                cluster.take_apart()

    def _run(self, resident: list[Cluster]) -> None:
        """``resident`` lists the clusters that are running, whatever comes of them."""
        sizes = [g // c for g, c in zip(self.launch.grid, self.launch.cluster, strict=True)]
        waiting = self.waiting = [(x, y, z) for z, y, x in np.ndindex(sizes[2], sizes[1], sizes[0])]
        numbers = {coordinates: number for number, coordinates in enumerate(waiting)}
        if self.share is not None:
            waiting[:] = [waiting[number] for number in self.share]
        waiting.reverse()
        ctas = int(np.prod(self.launch.cluster))
        stale = 0
        while waiting or resident:
            while waiting and (sms := self.processors.place(ctas)) is not None:
                resident.append(Cluster(self, waiting.pop(), sms))
            if not resident:
                raise EmulationError(
                    f"a cluster of {ctas} CTAs finds no room on {len(self.processors.sms)} SM(s)"
                )
            if self.chance is not None:
                self.chance.shuffle(resident)
            before = self.events
            progress = False
            for cluster in resident:
                gone = len(cluster.gone)
                progress |= self._turn(cluster)
                if self.share is not None:
                    left = tuple(cluster.gone[gone:])
                    self.turns.append(Turn(numbers[cluster.coordinates], len(self.trace.events), left))
            ended = [cluster for cluster in resident if not cluster.warps]
            resident[:] = [cluster for cluster in resident if cluster.warps]
            for cluster in ended:
                cluster.take_apart()
            if ended or self.events != before:
                stale = 0
                continue
            if self.hooks.complete_one():
                continue
            stale += 1
            quantum = QUANTUM if self.chance is None else SHORT_QUANTUM
            if not progress or stale > max(STALE_ROUNDS, STALE_INSTRUCTIONS // quantum):
                raise self._deadlock(resident, progress)
        while self.hooks.complete_one():
            continue
        self._last_told = 0.0
        self._tell()

    def _turn(self, cluster: Cluster) -> bool:
        """Lets a cluster run until it waits for somebody else; whether any warp did something."""
        anything = False
        quantum = QUANTUM if self.chance is None else SHORT_QUANTUM
        while True:
            before = self.events
            warps = cluster.warps
            eager = self._eager(warps)
            ran = self._run_each(eager, quantum)
            if not ran and len(eager) < len(warps):
                ran = self._run_each(warps, quantum)
            self.instructions += ran
            self._tell()
            anything |= ran > 0
            self.hooks.complete_some()
            if not ran or self.chance is not None or self.events == before:
                return anything

    def _tell(self) -> None:
        now = time.monotonic()
        if self.watch is not None and now - self._last_told > SECONDS_BETWEEN_REPORTS:
            self._last_told = now
            self.watch(Progress(self.ended, math.prod(self.launch.grid), self.instructions))

    def _eager(self, warps: list[Warp]) -> list[Warp]:
        """Those that get a turn: all, or with a seed those that chance does not hold back."""
        chance = self.chance
        if chance is None:
            return warps
        for warp in warps:
            if warp.laziness < 0:
                warp.laziness = max(warp.cta.laziness, chance.choice(LAZINESS))
        chosen = [warp for warp in warps if chance.random() >= warp.laziness]
        chance.shuffle(chosen)
        return chosen

    def _run_each(self, warps: list[Warp], quantum: int) -> int:
        """Runs every warp that can; returns the instructions executed."""
        ran = 0
        for warp in warps:
            if warp.wait is not None and not warp.wait.ready():
                continue
            ran += warp.run(quantum if self.chance is None else self.chance.randint(1, quantum))
            if warp.done:
                self._exited(warp)
        return ran

    def _exited(self, warp: Warp) -> None:
        self.events += 1
        self.hooks.warp_exits(warp)
        for barrier in warp.cta.barriers.values():
            barrier.others_exited(warp.cta.live_threads())
        if all(other.done for other in warp.cta.warps):
            self.processors.leave(warp.cta)
            self.ended += 1
            warp.cta.cluster.gone.append(warp.cta.rank)
            warp.cta.operands.clear()

    def _deadlock(self, clusters: list[Cluster], polling: bool) -> DeadlockError:
        warps = [warp for cluster in clusters for warp in cluster.warps]
        blocked = sum(warp.wait is not None for warp in warps)
        lines = []
        for warp in warps[:MAX_WARPS_LISTED]:
            what = f"waits for {warp.wait.describe()}" if warp.wait is not None else "polls"
            lines.append(f"  {warp.name} at {warp.where} {what}")
        return DeadlockError.of(Stuck(blocked, len(warps) - blocked, polling, tuple(lines)))
