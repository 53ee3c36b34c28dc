"""Waves as a picture: the grid of C with A beside it and B above, the bands of one wave marked.

    figure = plot(TileScheduler(GroupedM(4)), 8, 8, 8, tile_m=128, tile_n=128, k=4096, dtype="bfloat16")
    figure.savefig("waves.png")

Needs matplotlib (the extra ``plot``).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cutegemm.errors import ConfigError, MissingDependencyError
from cutegemm.scheduler.analysis import Summary, Wave, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cutegemm.scheduler import TileScheduler

A_COLOUR = "#1f77b4"
B_COLOUR = "#d9534f"
EMPTY = "#eef0f3"
MARK = "#1b1f24"
NUMBERED_TILES = 16  # along a side: up to here each tile has its place in the order written in it
PATH_TILES = 48  # along a side: up to here the order is drawn as a line
MIB = 2**20


def plot(
    scheduler: "TileScheduler",
    tiles_m: int,
    tiles_n: int,
    workers: int,
    *,
    tile_m: int,
    tile_n: int,
    k: int,
    dtype: object,
    cluster: tuple[int, int] = (1, 1),
    wave: int = 0,
) -> "Figure":
    """The waves of a grid, coloured from the first to the last, and what wave number ``wave`` reads.

    Arguments as for TileScheduler.waves; ``wave`` counts from 0, or from the end if negative. The figure
    belongs to no window: save it with ``savefig``.
    Raises MissingDependencyError without matplotlib, ConfigError for a wave that does not exist, and what
    TileScheduler.waves raises.
    """
    figure_class = _figure_class()
    waves = scheduler.waves(
        tiles_m, tiles_n, workers, tile_m=tile_m, tile_n=tile_n, k=k, dtype=dtype, cluster=cluster
    )
    if not isinstance(wave, int) or not -len(waves) <= wave < len(waves):
        raise ConfigError(f"wave={wave!r}: there are {len(waves)} waves, the first is 0")
    number = wave % len(waves)
    summary = summarise(waves, workers * cluster[0] * cluster[1])

    # C's tiles are squares; the shorter side is never so thin that nothing can be seen.
    width, height = _fit(tiles_n, tiles_m)
    band = 0.16 * max(width, height)
    figure = figure_class(figsize=(width + band + 1.5, height + band + 2.1), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(band, width), height_ratios=(band, height))
    c = figure.add_subplot(grid[1, 1])
    _draw_c(c, waves, number, (tiles_m, tiles_n))
    _draw_a(figure.add_subplot(grid[1, 0]), waves[number], tiles_m)
    _draw_b(figure.add_subplot(grid[0, 1]), waves[number], tiles_n)
    _write_facts(figure.add_subplot(grid[0, 0]), waves[number], number)
    figure.suptitle(_title(scheduler, (tiles_m, tiles_n), workers, summary), fontsize=9, linespacing=1.5)
    return figure


def _figure_class() -> Any:
    """matplotlib's Figure itself rather than pyplot's: no window, and no backend to be chosen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a picture needs matplotlib, which is not installed; install it with: pip install matplotlib"
        ) from error
    return Figure


def _fit(columns: int, rows: int, longest: float = 6.0, shortest: float = 1.6) -> tuple[float, float]:
    """Inches for a grid: square tiles unless one side would be too thin."""
    scale = longest / max(columns, rows)
    return max(columns * scale, shortest), max(rows * scale, shortest)


def _draw_c(axes: "Axes", waves: Sequence[Wave], number: int, shape: tuple[int, int]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    tiles_m, tiles_n = shape
    in_wave = np.zeros(shape)
    for k, wave in enumerate(waves):
        for tile in wave.tiles:
            in_wave[tile.m, tile.n] = k
    colours = colormaps["viridis"].resampled(256)
    scale = max(len(waves) - 1, 1)
    # Pale, so that numbers, lines and the marked wave stand out; every other wave paler, so that
    # neighbours can be told apart however many there are.
    strength = np.where(in_wave % 2 == 0, 0.65, 0.4)[..., np.newaxis]
    image = 1 - strength * (1 - colours(in_wave / scale)[..., :3])
    axes.imshow(image, aspect="auto", interpolation="nearest")
    _lines_between_tiles(axes, tiles_m, tiles_n)
    for tile in waves[number].tiles:
        axes.add_patch(
            Rectangle(
                (tile.n - 0.5, tile.m - 0.5),
                1,
                1,
                fill=False,
                edgecolor=MARK,
                linewidth=_stroke(shape),
                zorder=4,
            )
        )
    in_order = [tile for wave in waves for tile in wave.tiles]
    if max(shape) <= PATH_TILES:
        axes.plot(
            [tile.n for tile in in_order],
            [tile.m for tile in in_order],
            color="white",
            linewidth=1.6,
            zorder=2,
        )
        axes.plot(
            [tile.n for tile in in_order],
            [tile.m for tile in in_order],
            color="#59636e",
            linewidth=0.7,
            zorder=3,
        )
    if max(shape) <= NUMBERED_TILES:
        for place, tile in enumerate(in_order):
            axes.text(
                tile.n - 0.42, tile.m - 0.38, str(place), ha="left", va="top",
                fontsize=80 / max(*shape, 12), color=MARK, zorder=5,
            )  # fmt: skip
    axes.set_xlim(-0.5, tiles_n - 0.5)
    axes.set_ylim(tiles_m - 0.5, -0.5)
    axes.yaxis.tick_right()
    axes.set_xlabel(
        f"C, {tiles_m} x {tiles_n} tiles: {_waves(len(waves))}, the first dark, the last bright", fontsize=8
    )
    axes.tick_params(labelsize=7)
    _whole_numbers(axes)


def _draw_a(axes: "Axes", wave: Wave, tiles_m: int) -> None:
    _draw_bands(axes, {tile.m for tile in wave.tiles}, tiles_m, A_COLOUR, "y")
    axes.set_ylim(tiles_m - 0.5, -0.5)
    axes.set_xlabel("A, K across", fontsize=8)
    axes.set_ylabel("bands of A (tile rows)", fontsize=8)


def _draw_b(axes: "Axes", wave: Wave, tiles_n: int) -> None:
    _draw_bands(axes, {tile.n for tile in wave.tiles}, tiles_n, B_COLOUR, "x")
    axes.set_xlim(-0.5, tiles_n - 0.5)
    axes.set_ylabel("B, K down", fontsize=8)
    axes.set_title("bands of B (tile columns)", fontsize=8)


def _draw_bands(axes: "Axes", used: set[int], count: int, colour: str, along: str) -> None:
    """Stripes across the axes, one a band, those in use in colour."""
    span = axes.axhspan if along == "y" else axes.axvspan
    axes.set_facecolor(EMPTY)
    for band in used:
        span(band - 0.5, band + 0.5, color=colour, linewidth=0)
    if count <= PATH_TILES:
        line = axes.axhline if along == "y" else axes.axvline
        for edge in range(1, count):
            line(edge - 0.5, color="white", linewidth=1)
    axes.set_xticks([])
    axes.set_yticks([])


def _write_facts(axes: "Axes", wave: Wave, number: int) -> None:
    axes.axis("off")
    lines = (
        (0.95, f"wave {number}: {len(wave.tiles)} tiles", MARK),
        (0.68, f"A: {_bands(wave.a_bands)}, {wave.a_bytes / MIB:.4g} MiB", A_COLOUR),
        (0.41, f"B: {_bands(wave.b_bands)}, {wave.b_bytes / MIB:.4g} MiB", B_COLOUR),
        (0.14, f"together {wave.working_set_bytes / MIB:.4g} MiB", MARK),
    )
    for height, text, colour in lines:
        axes.text(
            1, height, text, ha="right", va="center", fontsize=7.5, color=colour, transform=axes.transAxes
        )


def _title(scheduler: "TileScheduler", shape: tuple[int, int], workers: int, summary: Summary) -> str:
    return (
        f"{scheduler}, {shape[0]} x {shape[1]} tiles, {workers} workers\n"
        f"{_waves(summary.waves)}, {summary.efficiency:.1%} of their slots used, "
        f"working set {summary.mean_bytes / MIB:.4g} MiB on average, {summary.max_bytes / MIB:.4g} at most"
    )


def _lines_between_tiles(axes: "Axes", tiles_m: int, tiles_n: int) -> None:
    if max(tiles_m, tiles_n) > 2 * PATH_TILES:
        return
    width = min(1.0, 30 / max(tiles_m, tiles_n))
    for edge in range(1, tiles_m):
        axes.axhline(edge - 0.5, color="white", linewidth=width, zorder=1)
    for edge in range(1, tiles_n):
        axes.axvline(edge - 0.5, color="white", linewidth=width, zorder=1)


def _stroke(shape: tuple[int, int]) -> float:
    return max(0.5, min(2.2, 40 / max(shape)))


def _whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _bands(count: int) -> str:
    return f"{count} band{'' if count == 1 else 's'}"


def _waves(count: int) -> str:
    return f"{count} wave{'' if count == 1 else 's'}"
