"""Loads of operands whose lines begin anywhere: one line in eight at a time, then shifted into place.

A line is what is contiguous in memory: a row of a K-major operand, the M or N of one k of the others. TMA
moves 16-byte units: it wants a tensor that begins on one, lines a multiple of 16 bytes apart, and a box
whose first element begins a unit. For elements of 2 bytes every eighth line is a multiple of 16 bytes from
the next, whatever the pitch: the lines c, c + 8, c + 16, ... of a class c are a matrix TMA can address from
the unit in which line c begins, and all of them begin at the same element of their first unit. So eight
descriptors cover the operand, each with exact bounds: beyond the end of a line and beyond the last line
there are zeros, and nothing is read.

A class's box is a unit longer than the lines of the tile, since these begin within the first unit and end
within the last. Movers read it from the staging buffer, shift it by what the class begins late, and write
it where, and swizzled as, MMAs read it.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from cutegemm.parts.feed import Feed
from cutegemm.parts.limits import ALIGNMENT, TMA_ALIGNMENT
from cutegemm.parts.lines import LINE_CLASSES, UNIT, LineBox, LineBoxes
from cutegemm.parts.ring import StageCursor, StageRing

LANES_OF_LINE = 8  # of a warp, side by side: they read and write a whole line of 128 bytes without conflicts
LINES_OF_WARP = 4
AT_ONCE = 4  # pieces of 16 bytes, and what they are shifted from, that fit a moving thread's registers

Tile: TypeAlias = tuple[Int32, Int32, Int32]  # (m, n, l)


@dataclass(frozen=True)
class LineLoads:
    """Host-made: the TMA descriptors of an operand, one for each class of lines.

    coordinates   of each class, (rows, K, L); the mode across lines counts the lines of the class
    first, step   elements by which line 0 begins late in its unit, and by which each further line does more
    box           the lines of one class in a tile
    """

    atoms: tuple[cute.CopyAtom, ...]
    coordinates: tuple[cute.Tensor, ...]
    first: Int32
    step: Int32
    box: cutlass.Constexpr[LineBox]

    def prefetch(self) -> None:
        """See TmaProducer.prefetch."""
        for atom in self.atoms:
            cpasync.prefetch_descriptor(atom)


@dataclass(frozen=True)
class LineLoader:
    """Device side: loads of one operand into its staging buffer, an array of classes for each stage."""

    loads: LineLoads
    buffer: cute.Pointer
    stages: cutlass.Constexpr[int]
    operand: cutlass.Constexpr[int]

    def load(self, barrier: cute.Pointer, stage: Int32, k_tile: Int32, tile: Tile) -> None:
        """Starts the loads of one stage; their bytes count on ``barrier``."""
        box = self.loads.box
        shape = box.modes(box.lines, box.loaded)
        rows_and_k = box.modes(tile[self.operand] * box.lines, k_tile * box.length)
        if not box.k_major:
            rows_and_k = box.modes(k_tile * box.lines, tile[self.operand] * box.length)
        stages = cute.make_layout(self.stages, stride=LINE_CLASSES * box.class_elements)
        layout = cute.append(_box_layout(box), stages)
        for c, (atom, mX) in enumerate(zip(self.loads.atoms, self.loads.coordinates, strict=True)):
            sX = cute.make_tensor(self.buffer + c * box.class_elements, layout)
            # Boxes overlap by a unit: each is a window of its own rather than a tile of the tensor.
            gX = cute.local_tile(cute.domain_offset((*rows_and_k, tile[2]), mX), (*shape, 1), (0, 0, 0))
            tXsX, tXgX = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(sX, 0, 2),
                cute.group_modes(gX[None, None, 0], 0, 2),
            )
            cute.copy(atom, tXgX, tXsX[None, stage], tma_bar_ptr=barrier)


def make_line_loads(mX: cute.Tensor, box: LineBox) -> LineLoads:
    """Host side: descriptors of the eight classes of mX (rows, K, L)."""
    found = [_class_of_lines(mX, box, c) for c in range(LINE_CLASSES)]
    _, first = _unit_of(mX.iterator.toint(), mX.element_type)
    step = Int32(Int64(mX.stride[0] if box.k_major else mX.stride[1]) % UNIT)
    return LineLoads(tuple(atom for atom, _ in found), tuple(mX for _, mX in found), first, step, box)


def _unit_of(address: Int64, dtype: Any) -> tuple[Int64, Int32]:
    """Address of the 16-byte unit an element lies in, and its index there."""
    past = address % TMA_ALIGNMENT
    return address - past, Int32(past // (dtype.width // 8))


def _class_of_lines(mX: cute.Tensor, box: LineBox, c: int) -> tuple[Any, Any]:
    """The TMA atom of class ``c``, and its coordinates."""
    rows, k, batch = mX.shape
    lines, length = (rows, k) if box.k_major else (k, rows)
    pitch = Int64(mX.stride[0] if box.k_major else mX.stride[1])
    element = mX.element_type.width // 8
    start, late = _unit_of(mX.iterator.toint() + c * element * pitch, mX.element_type)
    count = (lines + (LINE_CLASSES - 1 - c)) // LINE_CLASSES
    extent = Int32(length) + late
    across = LINE_CLASSES * pitch
    if c > 0:
        # A descriptor has a line at least. A class without one is given an element of line 0, which no box
        # holds: its lines are counted from 1.
        empty = count == 0
        start = cutlass.select_(empty, _unit_of(mX.iterator.toint(), mX.element_type)[0], start)
        count = cutlass.max(count, Int32(1))
        offset = empty.to(Int32)
    else:
        offset = Int32(0)
    layout = cute.make_layout(
        (*box.modes(count, extent), batch), stride=(*box.modes(across, 1), mX.stride[2])
    )
    pointer = cute.make_ptr(mX.element_type, start, cute.AddressSpace.gmem, assumed_align=TMA_ALIGNMENT)
    op = cpasync.CopyBulkTensorTileG2SOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(
        op, cute.make_tensor(pointer, layout), _box_layout(box), box.modes(box.lines, box.loaded)
    )
    return atom, cute.domain_offset((*box.modes(offset, Int32(0)), Int32(0)), coordinates)


def _box_layout(box: LineBox) -> cute.Layout:
    """One class in the staging buffer, (rows, K): line after line."""
    return cute.make_layout(box.modes(box.lines, box.loaded), stride=box.modes(box.loaded, 1))


@dataclass(frozen=True)
class Staging:
    """The staging buffer of one CTA, its ring, and the warps that empty it.

        lines_arrived[s]   completes when every byte of stage s has landed
        lines_taken[s]     completes when every mover has read it

    The ring has as many stages as the operands', so that one cursor counts both.
    buffers   of the operands that are staged, A's before B's
    movers    warps
    """

    lines_arrived: cute.Pointer
    lines_taken: cute.Pointer
    buffers: tuple[cute.Pointer | None, cute.Pointer | None]
    stages: cutlass.Constexpr[int]
    movers: cutlass.Constexpr[int]

    def init(self) -> None:
        """Sets the arrival counts; one thread of the CTA calls this before anyone waits."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.lines_arrived + stage, 1)
            cute.arch.mbarrier_init(self.lines_taken + stage, self.movers)

    def wait_taken(self, cursor: StageCursor) -> None:
        """Producer: until the stage's lines have been moved."""
        cute.arch.mbarrier_wait(self.lines_taken + cursor.stage, cursor.parity ^ 1)


@dataclass(frozen=True)
class Mover:
    """A moving thread's view of one operand.

    buffer       the staging buffer, as 32-bit words
    placed       (vector, row or vector of rows, k or vector of k, stage): where MMAs read
    first, step  see LineLoads
    warp         which of the movers; they take the classes in turn
    line, lane   which of the warp's lines, and which of its vectors
    movers       warps
    """

    buffer: cute.Pointer
    placed: cute.Tensor
    first: Int32
    step: Int32
    warp: Int32
    line: Int32
    lane: Int32
    box: cutlass.Constexpr[LineBox]
    movers: cutlass.Constexpr[int]

    @cute.jit
    def move(self, stage: Int32) -> None:
        """This warp's classes of one stage."""
        for turn in cutlass.range(LINE_CLASSES // self.movers, unroll=1):
            c = turn * self.movers + self.warp
            late = (self.first + c * self.step) % UNIT
            # The same for all lanes of the warp.
            for elements in cutlass.range_constexpr(UNIT):
                if late == elements:
                    self._move_class(stage, c, elements)

    def _move_class(self, stage: Int32, c: Int32, late: int) -> None:
        """The lines of class ``c``, which begin ``late`` elements late.

        Some pieces are read before any is written: the compiler cannot know that what is written is not
        what is read next, and would wait for each.
        """
        box = self.box
        corner = self.buffer + (stage * LINE_CLASSES + c) * (box.class_elements // 2)
        pieces = [
            (group * LINES_OF_WARP + self.line, first + self.lane)
            for group in range(box.lines // LINES_OF_WARP)
            for first in range(0, box.length // UNIT, LANES_OF_LINE)
        ]
        for some in range(0, len(pieces), AT_ONCE):
            batch = pieces[some : some + AT_ONCE]
            held = [
                self._units(corner + (line * (box.loaded // 2) + vector * (UNIT // 2)), late)
                for line, vector in batch
            ]
            for (line, vector), units in zip(batch, held, strict=True):
                where = box.modes(line * LINE_CLASSES + c, vector)
                place = self.placed[(None, *where, stage)]
                cute.autovec_copy(cute.recast_tensor(_shifted(units, late), place.element_type), place)

    def _units(self, source: cute.Pointer, late: int) -> cute.Tensor:
        """The words of the unit at ``source``, and of the next if any of it is needed."""
        words = UNIT // 2
        units = cute.make_rmem_tensor(2 * words, Uint32)
        for i in range(1 + (late > 0)):
            unit = cute.make_tensor(source + i * words, cute.make_layout(words))
            cute.autovec_copy(unit, cute.make_tensor(units.iterator + i * words, cute.make_layout(words)))
        return units


def _shifted(units: cute.Tensor, late: int) -> cute.Tensor:
    """The words that begin ``late`` elements after the first of two units."""
    found = cute.make_rmem_tensor(UNIT // 2, Uint32)
    for i in range(UNIT // 2):
        low = units[i + late // 2]
        found[i] = (low >> 16) | (units[i + late // 2 + 1] << 16) if late % 2 else low
    return found


@dataclass(frozen=True)
class Movers:
    """The role of the moving warps, as one of their threads sees it.

    Each warp arrives on ``inputs_arrived`` of a stage when its share of the lines is in place.
    """

    ring: StageRing
    staging: Staging
    operands: tuple[Mover, ...]

    @cute.jit
    def move_all(self, feed: Feed, tasks: Int32) -> StageCursor:
        """Every stage of every tile of this worker, as its lines arrive. Returns the stage after the last."""
        cursor = self.ring.start()
        position = feed.first()
        while position.task < tasks:
            for _ in cutlass.range(feed.span(position).k_count, unroll=1):
                self.move(cursor)
                cursor = self.ring.advanced(cursor)
            position = feed.next(position)
        return cursor

    @cute.jit
    def move(self, cursor: StageCursor) -> None:
        """One stage: waits for its lines and for its place, moves them, and passes both on."""
        cute.arch.mbarrier_wait(self.staging.lines_arrived + cursor.stage, cursor.parity)
        self.ring.wait_consumed(cursor)
        for operand in self.operands:
            operand.move(cursor.stage)
        # MMAs read through the asynchronous proxy what was written here.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.ring.arrive(cursor)
            cute.arch.mbarrier_arrive(self.staging.lines_taken + cursor.stage)


def make_staging(
    boxes: LineBoxes, stages: int, dtype: Any, smem: Any, barriers: cute.Pointer
) -> Staging | None:
    """Device side: allocates the staging buffer, if there is one.

    stages     of the operands, of that dtype
    barriers   room for the staging buffer's ring
    """
    if not boxes.movers:
        return None

    def buffer(box: LineBox | None) -> cute.Pointer | None:
        if box is None:
            return None
        elements = stages * LINE_CLASSES * box.class_elements
        return smem.allocate_array(dtype, elements, byte_alignment=ALIGNMENT)

    a, b = (buffer(box) for box in boxes.both)
    return Staging(barriers, barriers + stages, (a, b), stages, boxes.movers)


def make_movers(
    staging: Staging,
    ring: StageRing,
    operands: tuple[tuple[Any, cute.Tensor], tuple[Any, cute.Tensor]],
) -> Movers:
    """Device side: the calling thread's part; its warp, and those around it, move lines.

    operands: how A and B are loaded, and where MMAs read them, (rows, tile_k, stage).
    """
    movers = tuple(
        _mover(loads, buffer, sX, staging.movers)
        for (loads, sX), buffer in zip(operands, staging.buffers, strict=True)
        if buffer is not None
    )
    return Movers(ring, staging, movers)


def _mover(loads: LineLoads, buffer: cute.Pointer, sX: cute.Tensor, movers: int) -> Mover:
    box = loads.box
    vectors = cute.flat_divide(sX, box.modes(1, UNIT))
    lane = cute.arch.lane_idx()
    return Mover(
        cute.recast_ptr(buffer, dtype=Uint32),
        cute.group_modes(vectors, 0, 2),
        loads.first,
        loads.step,
        cute.arch.make_warp_uniform(cute.arch.warp_idx() % movers),
        lane // LANES_OF_LINE,
        lane % LANES_OF_LINE,
        box,
        movers,
    )
