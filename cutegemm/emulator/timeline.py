"""What one CTA did when, as a picture: a lane for each role and engine, time in the cost model's cycles.

    result = gemm.emulate(a, b)
    timeline(result.trace, division_of(gemm, k)).savefig("timeline.png")

Needs matplotlib (the extra ``plot``).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutegemm.emulator.trace import Event, Trace
from cutegemm.errors import MissingDependencyError, ProblemError
from cutegemm.problem import dtype_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cutegemm.gemm import Gemm

FORMATS = (".png", ".svg", ".pdf")  # of the files a timeline can be saved in
WARPGROUP = 4  # warps
WIDTH = 14.0  # inches of the picture
ROW = 0.42  # inches of a row
FONT = 7.0  # points, in the bars
LETTER = 0.62 * FONT / 72  # inches a letter takes
WAIT, LOAD, STORE, TILE = "wait", "load", "store", "tile"
TENSOR, READ = "tensor", "read"
# By kind, and every other tile a little lighter, so that it shows where the next one begins.
COLOURS = {
    WAIT: ("#d5d9de", "#d5d9de"),
    LOAD: ("#2f6fb0", "#6fa3d4"),
    "mma 0": ("#2e8b57", "#6dbb8c"),
    "mma 1": ("#8e5aa8", "#b995cb"),
    TENSOR: ("#2e8b57", "#6dbb8c"),
    READ: ("#8e5aa8", "#b995cb"),
    STORE: ("#d9772b", "#ecaa75"),
    TILE: ("#f3e3b3", "#fbf4dc"),
}
NAMES = {
    WAIT: "waits for a barrier",
    LOAD: "TMA load, latency included",
    "mma 0": "WGMMA of consumer 0",
    "mma 1": "WGMMA of consumer 1",
    TENSOR: "MMAs of the tensor core",
    READ: "load from tensor memory",
    STORE: "TMA store",
    TILE: "a tile, until its last store",
}
DARK = {LOAD, "mma 0", "mma 1", TENSOR, READ, STORE}  # kinds whose text is white on the darker colour


@dataclass(frozen=True)
class Division:
    """How the work of a CTA divides, which numbers the bars.

    stages      of the operand ring
    steps       steps of K that a CTA does for each tile
    step_bytes  bytes a CTA asks TMA for in each step
    teams       warpgroups that take tiles in turn: 2 for ping-pong, else 1
    """

    stages: int
    steps: int
    step_bytes: int
    teams: int = 1

    def place(self, step: int) -> tuple[int, int]:
        """(tile, stage) of a CTA's ``step``-th step of K."""
        return step // self.steps, step % self.stages


@dataclass(frozen=True)
class Bar:
    """One bar of a lane."""

    kind: str
    begin: int
    end: int
    text: str = ""
    tile: int = 0


@dataclass
class Lane:
    """A named lane; bars that overlap lie in rows below each other, tiles above the rest."""

    name: str
    bars: list[Bar] = field(default_factory=list)

    def rows(self) -> list[list[Bar]]:
        """The bars in rows without overlaps."""
        tiles = [bar for bar in self.bars if bar.kind == TILE]
        return _packed(tiles) + _packed([bar for bar in self.bars if bar.kind != TILE])


def _packed(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Bars in as few rows as there are of them at one time."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin, bar.end)):
        row = next((row for row in rows if row[-1].end <= bar.begin), None)
        if row is None:
            rows.append([bar])
        else:
            row.append(bar)
    return rows


def division_of(gemm: "Gemm", k: int, cta: int = 0) -> Division:
    """How a CTA's work divides in an emulated call of K = ``k``."""
    config, splits = gemm.config, gemm.scheduler.splits
    steps = -(-k // config.tile_k)
    # CTAs that share a tile's K get equal numbers of steps, the first ones one more, and none goes without.
    steps = max(1, steps // splits + (cta % splits < steps % splits))
    problem = gemm.problem.swapped() if config.swap_ab else gemm.problem
    a = config.tile_m // config.mma_ctas * dtype_bytes(problem.a_dtype) // config.cluster_n
    b = config.tile_n * dtype_bytes(problem.b_dtype) // config.cluster_m
    teams = 2 if config.schedule == "pingpong" else 1
    return Division(gemm.resources.stages, steps, (a + b) * config.tile_k, teams)


def timeline(trace: Trace, division: Division | None = None, *, cta: int = 0, title: str = "") -> "Figure":
    """The picture of one CTA; it belongs to no window: save it with ``savefig``.

    division   what numbers the bars; None: only what the trace itself says
    title      a line or two over it
    Raises MissingDependencyError without matplotlib, ProblemError for a CTA that did nothing.
    """
    figure_class = _figure_class()
    found = lanes(trace, division, cta)
    if not found:
        ctas = sorted({event.cta for event in trace.events})
        raise ProblemError(
            f"CTA {cta} left nothing to draw"
            + (f"; those that did are {ctas[0]} to {ctas[-1]}" if ctas else "")
        )
    rows = sum(len(lane.rows()) for lane in found)
    figure = figure_class(
        figsize=(WIDTH, 1.7 + ROW * (rows + 0.35 * len(found))), dpi=150, layout="constrained"
    )
    axes = figure.add_subplot()
    _draw(axes, found)
    _legend(figure, {bar.kind for lane in found for bar in lane.bars})
    figure.suptitle(title or f"CTA {cta}", fontsize=10, linespacing=1.5)
    return figure


def lanes(trace: Trace, division: Division | None, cta: int) -> list[Lane]:
    """The lanes of a CTA that have bars, in the order of the data's way through it."""
    mine = [event for event in trace.events if event.cta == cta]
    if any(event.kind in (READ, "mma") and event.role != "consumer" for event in mine):
        return _tensor_lanes(mine, division)
    groups = sorted({event.warp // WARPGROUP for event in mine if event.role == "consumer"})
    producer = [event for event in mine if event.role != "consumer"]
    loads = Lane("TMA load", list(_load_bars(producer, division)))
    tensor, store = Lane("tensor core"), Lane("TMA store")
    consumers = []
    for number, group in enumerate(groups):
        first = group * WARPGROUP
        events = [event for event in mine if event.warp // WARPGROUP == group]
        # One warp stands for its warpgroup: all four do the same, each on a quarter of the tensor cores.
        bars = _consumer_bars([e for e in events if e.warp == first or e.kind == "store"], number, division)
        lane = Lane(f"consumer {number}\n(warp {first})")
        for bar in bars:
            {"store": store, f"mma {number % 2}": tensor}.get(bar.kind, lane).bars.append(bar)
        consumers.append(lane)
    waits = Lane("producer", [_wait_bar(event) for event in producer if event.kind == "wait"])
    return [lane for lane in (waits, loads, *consumers, tensor, store) if lane.bars]


def _tensor_lanes(mine: Sequence[Event], division: Division | None) -> list[Lane]:
    """Lanes of a CTA with tensor memory: one warp loads, one issues MMAs, others read the results.

    One reading warp stands for all. A tile begins where MMAs put their product instead of adding it; readers
    and stores take as many turns for each tile.
    """
    mmas = [event for event in mine if event.kind == "mma"]
    starts = [" put " in event.detail for event in mmas]
    tiles = max(1, sum(starts))
    tensor = Lane("tensor core")
    for number, event in enumerate(mmas):
        text = "" if division is None else str(number % division.stages)
        tensor.bars.append(Bar(TENSOR, event.begin, event.end, text, sum(starts[: number + 1]) - 1))
    readers = sorted({event.warp for event in mine if event.kind == READ})
    done = [
        event
        for kind in (READ, STORE)
        for event in mine
        if event.kind == kind and (kind == STORE or event.warp == readers[0])
    ]
    reading, store = Lane(f"results\n(warp {readers[0] if readers else 0})"), Lane("TMA store")
    spans: dict[int, tuple[int, int]] = {}
    for kind, lane in ((READ, reading), (STORE, store)):
        events = [event for event in done if event.kind == kind]
        for number, event in enumerate(events):
            tile = number * tiles // len(events)
            lane.bars.append(Bar(kind, event.begin, event.end, "", tile))
            begin, end = spans.get(tile, (event.begin, event.end))
            spans[tile] = (min(begin, event.begin), max(end, event.end))
    reading.bars += [Bar(TILE, *span, f"tile {tile}", tile) for tile, span in spans.items()]
    waits = {"producer": Lane("producer"), "MMA": Lane("MMA warp")}
    roles = {event.warp: event.role for event in mine if event.role}
    for event in mine:
        if event.kind == WAIT and roles.get(event.warp) in waits:
            waits[roles[event.warp]].bars.append(_wait_bar(event))
        elif event.kind == WAIT and readers and event.warp == readers[0]:
            reading.bars.append(_wait_bar(event))
    loads = Lane("TMA load", list(_load_bars(mine, division)))
    order = (waits["producer"], loads, waits["MMA"], tensor, reading, store)
    return [lane for lane in order if lane.bars]


def _load_bars(events: Sequence[Event], division: Division | None) -> Iterator[Bar]:
    """Loads with the stage they fill, found by counting bytes."""
    asked = 0
    for event in events:
        if event.kind != "load":
            continue
        tile, text = 0, ""
        if division is not None:
            tile, stage = division.place(asked // division.step_bytes)
            text = str(stage)
        size = re.match(r"(\d+) B", event.detail)
        asked += int(size[1]) if size else 0
        yield Bar(LOAD, event.begin, event.end, text, tile)


def _wait_bar(event: Event) -> Bar:
    stage = re.search(r"\[(\d+)\]", event.detail)
    return Bar(WAIT, event.begin, event.end, stage[1] if stage else "")


def _consumer_bars(events: Sequence[Event], number: int, division: Division | None) -> Iterator[Bar]:
    """Waits, MMAs, stores and tiles of one warpgroup, from its events in the order of its program."""
    teams = 1 if division is None else division.teams
    spans: dict[int, tuple[int, int]] = {}
    count = tile = 0
    for event in events:
        kind, text = event.kind, ""
        if kind == "wait":
            yield _wait_bar(event)
            continue
        if kind == "mma":
            kind = f"mma {number % 2}"
            if division is not None:
                # Teams take tiles in turn; in between, the ring's stages went to the other one.
                tile = number % teams + teams * (count // division.steps)
                text = str(division.place(tile * division.steps + count % division.steps)[1])
            count += 1
        elif division is not None:
            text = f"tile {tile}"
        begin, end = spans.get(tile, (event.begin, event.end))
        spans[tile] = (min(begin, event.begin), max(end, event.end))
        yield Bar(kind, event.begin, event.end, text, tile)
    if division is not None:
        for tile, (begin, end) in spans.items():
            yield Bar(TILE, begin, end, f"tile {tile}", tile)


# --- drawing -------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raises MissingDependencyError if no timeline can be drawn here."""
    _figure_class()


def _figure_class() -> Any:
    """matplotlib's Figure itself rather than pyplot's: no window, and no backend to be chosen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a timeline needs matplotlib, which is not installed; install it with: pip install matplotlib"
        ) from error
    return Figure


def _draw(axes: "Axes", found: Sequence[Lane]) -> None:
    end = max(bar.end for lane in found for bar in lane.bars)
    inches = 0.86 * WIDTH / end  # of a cycle; the rest is margin
    top, ticks, names = 0.0, [], []
    for lane in found:
        rows = lane.rows()
        for i, row in enumerate(rows):
            for bar in row:
                _draw_bar(axes, bar, (top + i + 0.1, 0.8), inches)
        ticks.append(top + len(rows) / 2)
        names.append(lane.name)
        top += len(rows)
        axes.axhline(top + 0.17, color="#b8bec5", linewidth=0.6)
        top += 0.35
    axes.set_ylim(top - 0.15, -0.2)
    axes.set_xlim(0, end * 1.005)
    axes.set_yticks(ticks, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(
        "cycles of the emulator's cost model; numbers in the bars: stages of the ring", fontsize=8
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: "Axes", bar: Bar, place: tuple[float, float], inches: float) -> None:
    """A bar at (top, height), with its text if there is room for it."""
    from matplotlib.patches import Rectangle

    top, height = place
    colour = COLOURS[bar.kind][bar.tile % 2]
    width = max(bar.end - bar.begin, 1)
    axes.add_patch(
        Rectangle(
            (bar.begin, top),
            width,
            height,
            facecolor=colour,
            edgecolor="#c9b87a" if bar.kind == TILE else "white",
            linewidth=0.5 if width * inches > 0.03 else 0,
        )
    )
    if not bar.text or width * inches < LETTER * len(bar.text) + 0.03:
        return
    white = bar.kind in DARK and bar.tile % 2 == 0
    axes.text(
        bar.begin + width / 2,
        top + height / 2,
        bar.text,
        ha="center",
        va="center",
        fontsize=FONT,
        color="white" if white else "#1b1f24",
    )


def _legend(figure: "Figure", kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=COLOURS[kind][0], label=NAMES[kind]) for kind in COLOURS if kind in kinds],
        loc="outside lower center",
        ncols=len(kinds),
        frameon=False,
        fontsize=8,
    )
