"""Operands that are loaded line class by line class: what a tile's lines are. No compiler needed.

See realign.py for the way they take, and the plans for what that costs a kernel.
"""

from dataclasses import dataclass
from typing import Any

from cutegemm.config import GemmConfig, check_one_of
from cutegemm.errors import ConfigError
from cutegemm.parts.paths import Paths
from cutegemm.problem import GemmProblem

INPUT_BYTES = 2  # of an element of A or B
LINE_CLASSES = 8  # of an operand whose pitch is no multiple of 16 bytes
UNIT = 8  # elements of the 16 bytes TMA moves at least
REALIGNED_SPAN = 64  # elements of a line that eight of their lanes take at once
REALIGNED_LINES = 32  # of a tile: four of each class, a warp's
MAX_BOX = 256  # elements of a TMA box along one mode
SMEM_UNIT = 128  # bytes: where TMA writes begins on one
ODD_PITCH = "an operand whose lines are not all on 16 bytes"


@dataclass(frozen=True)
class LineBox:
    """The lines of one class in a tile: every eighth.

    lines    of the class in a tile
    length   elements of a line that the tile needs
    """

    lines: int
    length: int
    k_major: bool

    @property
    def loaded(self) -> int:
        """Elements loaded for a line, which begins within the first unit and ends within the last."""
        return self.length + UNIT

    @property
    def bytes(self) -> int:
        """Bytes loaded for the class."""
        return self.lines * self.loaded * INPUT_BYTES

    @property
    def class_elements(self) -> int:
        """From one class to the next in the staging buffer."""
        return -(-self.bytes // SMEM_UNIT) * SMEM_UNIT // INPUT_BYTES

    def modes(self, across: Any, along: Any) -> tuple[Any, Any]:
        """Something of the mode across lines and something of the one along them, as (rows, K)."""
        return (across, along) if self.k_major else (along, across)


@dataclass(frozen=True)
class LineBoxes:
    """The boxes of A and of B in one CTA's part of a tile; None for an operand TMA puts in its place.

    rows     of the CTA's part of A and of B
    tile_k   of a stage
    warps    that move the lines, where there are any to move: a divisor of LINE_CLASSES
    """

    a: LineBox | None
    b: LineBox | None
    rows: tuple[int, int]
    tile_k: int
    warps: int

    @property
    def both(self) -> tuple[LineBox | None, LineBox | None]:
        """That of A and that of B."""
        return self.a, self.b

    @property
    def movers(self) -> int:
        """Warps that put lines in their place."""
        return self.warps if self.a or self.b else 0

    @property
    def staged_bytes(self) -> int:
        """Bytes of a stage that come by way of the staging buffer."""
        return sum(LINE_CLASSES * box.bytes for box in self.both if box)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the staging buffer for a stage."""
        return sum(LINE_CLASSES * box.class_elements * INPUT_BYTES for box in self.both if box)

    @property
    def moved_bytes(self) -> int:
        """Bytes of a stage that movers write where MMAs read them."""
        return sum(LINE_CLASSES * box.lines * box.length * INPUT_BYTES for box in self.both if box)

    @property
    def in_place_bytes(self) -> int:
        """Bytes of a stage that TMA puts in their place."""
        in_place = sum(size for size, box in zip(self.rows, self.both, strict=True) if not box)
        return in_place * self.tile_k * INPUT_BYTES


def line_boxes(config: GemmConfig, problem: GemmProblem, paths: Paths, warps: int) -> LineBoxes:
    """Those of a configuration's CTA, of operands loaded by these paths; ``warps`` can move lines.

    A CTA has all of a tile's rows of A and B, or with MMAs of two CTAs half of each.
    """

    def box(path: str, size: int, k_major: bool) -> LineBox | None:
        if path != "realigned":
            return None
        lines, length = (size, config.tile_k) if k_major else (config.tile_k, size)
        return LineBox(lines // LINE_CLASSES, length, k_major)

    rows = config.tile_m // config.mma_ctas, config.tile_n // config.mma_ctas
    a = box(paths.a, rows[0], problem.a_major == "k")
    return LineBoxes(a, box(paths.b, rows[1], problem.b_major == "k"), rows, config.tile_k, warps)


def check_lines(config: GemmConfig, problem: GemmProblem, paths: Paths) -> None:
    """Raises ConfigError for tiles that do not divide into what movers take at once.

    Nothing to check where TMA puts both operands in their places.
    """
    if "realigned" not in (paths.a, paths.b):
        return
    parts = config.mma_ctas
    if config.cluster_size > parts:
        raise ConfigError(
            f"cluster {config.cluster_m}x{config.cluster_n} with {ODD_PITCH}: its lines are put in place by "
            f"the CTA that needs them, and not multicast; use a cluster of {parts}x1"
        )
    check_one_of("tile_k", config.tile_k, (REALIGNED_SPAN,), ODD_PITCH)
    widest = (MAX_BOX - UNIT) // REALIGNED_SPAN * REALIGNED_SPAN
    along = tuple(range(parts * REALIGNED_SPAN, min(256, parts * widest) + 1, parts * REALIGNED_SPAN))
    across = tuple(range(parts * REALIGNED_LINES, 257, parts * REALIGNED_LINES))
    if paths.a == "realigned" and problem.a_major != "k":
        check_one_of("tile_m", config.tile_m, along, f"A m-major, {ODD_PITCH},")
    if paths.b == "realigned" and problem.b_major != "k":
        check_one_of("tile_n", config.tile_n, along, f"B n-major, {ODD_PITCH},")
    if paths.b == "realigned" and problem.b_major == "k":
        check_one_of("tile_n", config.tile_n, across, ODD_PITCH)
