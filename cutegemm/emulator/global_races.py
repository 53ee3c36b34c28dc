"""Looks for accesses to global memory that nothing orders: two CTAs that write the same element of the
output, or one that reads what another one writes.

Plain loads and stores and TMA copies are looked at. Atomics and accesses with an order of their own are not:
by those others learn how far a warp is. Who reads such a word with ``acquire`` has heard of all that was done
before by those who wrote it with ``release``; relaxed and volatile accesses need fences of the GPU as well.
For each element the last reader is known, not all of them.
"""

from typing import Any, NamedTuple

import numpy as np

from cutegemm.emulator.faults import RaceError
from cutegemm.emulator.knowledge import Agents, Knowledge
from cutegemm.emulator.memory import GlobalMemory, Region
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.tma import TensorMap, Window, window_of
from cutegemm.emulator.values import Lanes


class Deed(NamedTuple):
    """Something that was done to global memory, and by which agent of which cluster in which epoch."""

    cluster: int
    agent: int
    epoch: int
    name: str
    statement: Statement


class RegionShadow:
    """For each element of a region: numbers of the deeds that wrote and read it last, 0 for none."""

    def __init__(self, region: Region) -> None:
        self.first = region.first
        self.unit = region.unit
        count = -(-(region.end - region.first) // self.unit)
        self.writes = np.zeros(count, dtype=np.int32)
        self.reads = np.zeros(count, dtype=np.int32)

    def part(self, deeds: Lanes, window: Window) -> Lanes:
        """Those of a window's elements."""
        start = (window.low - self.first) // self.unit
        *outer, inner = window.inside
        shape = (*(part.stop - part.start for part in outer), -(-(inner.stop - inner.start) // self.unit))
        strides = (*(stride // self.unit * deeds.itemsize for stride in window.strides[:-1]), deeds.itemsize)
        return np.ndarray(shape, deeds.dtype, deeds, start * deeds.itemsize, strides)

    def nth(self, places: Lanes | Window, position: int) -> int:
        """The element at a position of a window or of a list, counted in memory from the region's first."""
        if not isinstance(places, Window):
            return int(places[position])
        everywhere = np.arange(len(self.writes), dtype=np.int64)
        return int(self.part(everywhere, places).flat[position])

    def number(self, addresses: Lanes) -> Lanes:
        """Elements at addresses."""
        elements: Lanes = (addresses.astype(np.int64) - self.first) // self.unit
        return elements


def _elements(addresses: Lanes, width: int, unit: int) -> Lanes:
    """Addresses of all elements that accesses of ``width`` bytes touch."""
    if width <= unit:
        return addresses
    return (addresses[:, None] + np.arange(0, width, unit, dtype=addresses.dtype)).ravel()


class GlobalChecker:
    """All regions of one launch."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.shadows: dict[tuple[int, int], RegionShadow] = {}
        self.deeds: list[Deed | None] = [None]
        self.numbers: dict[tuple[int, int, int, int], int] = {}
        self.published: dict[int, dict[int, Lanes]] = {}

    # --- synchronisation -------------------------------------------------------------------------------

    def release(self, agents: Agents, passed: Knowledge, addresses: Lanes) -> None:
        """What a warp passes on becomes known through these words."""
        everything = {**passed.foreign, agents.number: passed.over}
        for address in set(addresses.tolist()):
            known = self.published.setdefault(address, {})
            for cluster, epochs in everything.items():
                known[cluster] = np.maximum(known[cluster], epochs) if cluster in known else epochs

    def acquire(self, agents: Agents, knows: Knowledge, addresses: Lanes) -> None:
        """What was published through these words is added to what a warp knows."""
        for address in set(addresses.tolist()):
            for cluster, epochs in self.published.get(address, {}).items():
                if cluster == agents.number:
                    np.maximum(knows.over, epochs, out=knows.rows[0])
                else:
                    knows.join_foreign(cluster, epochs)

    # --- accesses --------------------------------------------------------------------------------------

    def read_lanes(self, agents: Agents, access: Any, addresses: Lanes, width: int) -> None:
        """Lanes read elements. Raises RaceError."""
        region = self.memory.find(int(addresses.min()), int(addresses.max()) + width)
        if region is not None:
            shadow = self._shadow(region)
            places = shadow.number(_elements(addresses, width, region.unit))
            self._check(agents, access, region, (shadow.writes[places], places), "read-after-write")
            shadow.reads[places] = self._number(agents, access)

    def write_lanes(self, agents: Agents, access: Any, addresses: Lanes, width: int) -> None:
        """Lanes write elements. Raises RaceError."""
        region = self.memory.find(int(addresses.min()), int(addresses.max()) + width)
        if region is not None:
            shadow = self._shadow(region)
            places = shadow.number(_elements(addresses, width, region.unit))
            self._check(agents, access, region, (shadow.writes[places], places), "write-after-write")
            self._check(agents, access, region, (shadow.reads[places], places), "write-after-read")
            shadow.writes[places] = self._number(agents, access)

    def read_box(
        self, agents: Agents, access: Any, tensor_map: TensorMap, coordinates: tuple[int, ...]
    ) -> None:
        """A TMA load reads a box. Raises RaceError."""
        window = window_of(tensor_map, coordinates)
        region = None if window is None else self.memory.find(window.low, window.high)
        if window is not None and region is not None:
            shadow = self._shadow(region)
            written = shadow.part(shadow.writes, window)
            self._check(agents, access, region, (written, window), "read-after-write")
            shadow.part(shadow.reads, window)[...] = self._number(agents, access)

    def write_box(
        self, agents: Agents, access: Any, tensor_map: TensorMap, coordinates: tuple[int, ...]
    ) -> None:
        """A TMA store writes a box. Raises RaceError."""
        window = window_of(tensor_map, coordinates)
        region = None if window is None else self.memory.find(window.low, window.high)
        if window is not None and region is not None:
            shadow = self._shadow(region)
            written, read = shadow.part(shadow.writes, window), shadow.part(shadow.reads, window)
            self._check(agents, access, region, (written, window), "write-after-write")
            self._check(agents, access, region, (read, window), "write-after-read")
            written[...] = self._number(agents, access)

    def _shadow(self, region: Region) -> RegionShadow:
        key = (region.first, region.end)
        if key not in self.shadows:
            self.shadows[key] = RegionShadow(region)
        return self.shadows[key]

    def _number(self, agents: Agents, access: Any) -> int:
        """Of a deed, entered now if it is new."""
        warp, pc = access.what
        key = (agents.number, access.agent, access.epoch, pc)
        if key not in self.numbers:
            self.numbers[key] = len(self.deeds)
            name, statement = agents.name(access.agent), warp.program.statement(pc)
            self.deeds.append(Deed(*key[:3], name, statement))
        return self.numbers[key]

    def _check(
        self, agents: Agents, access: Any, region: Region, earlier: tuple[Lanes, Lanes | Window], kind: str
    ) -> None:
        """Raises RaceError unless whoever did the earlier deeds is known to be done with them.

        earlier: numbers of deeds, and the elements they were done to
        """
        numbers, places = earlier
        if not numbers.any():
            return
        for number in np.unique(numbers).tolist():
            deed = self.deeds[number]
            if deed is None:
                continue
            knows = access.knows
            known = knows.over if deed.cluster == agents.number else knows.foreign.get(deed.cluster)
            if known is None or known[deed.agent] < deed.epoch:
                element = self._shadow(region).nth(places, int((numbers == number).argmax()))
                raise RaceError(
                    f"{kind} in global memory, element {element} of {region.name}: {access.what} meets the "
                    f"{'read' if kind == 'write-after-read' else 'write'} of {deed.name} at "
                    f"{deed.statement.where}; nothing orders the two"
                )
