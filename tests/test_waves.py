"""Waves: what runs together and what it reads; the default order; schedulers as text; the picture."""

import builtins
import importlib.util
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cutegemm import cli
from cutegemm.config import GemmConfig
from cutegemm.errors import ConfigError, MissingDependencyError, OperandTypeError, ProblemError
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import (
    Blocked,
    Dynamic,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    Persistent,
    RowMajor,
    Static,
    StreamK,
    Tile,
    TileScheduler,
    Wave,
    default_order,
    summarise,
)
from cutegemm.scheduler.notation import parse_assignment, parse_order
from cutegemm.scheduler.report import report

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SQUARE = {"tile_m": 128, "tile_n": 128, "k": 4096, "dtype": "bfloat16"}  # a band is 1 MiB
SIDES = st.integers(1, 40)
CLUSTERS = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
ORDERS = st.sampled_from(
    [RowMajor(), GroupedM(4), GroupedM(8), GroupedN(3), Blocked(3, 4), Morton(4), Hilbert(4)]
)
ASSIGNMENTS = st.sampled_from([Static(), Persistent(), Persistent(5), Dynamic(), StreamK(3)])


def waves_of(order: Any, tiles_m: int, tiles_n: int, workers: int, **changes: Any) -> list[Wave]:
    """The waves of an order and persistent workers, in square tiles."""
    return TileScheduler(order).waves(tiles_m, tiles_n, workers, **(SQUARE | changes))


# --- waves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assignment", [Persistent(), Static(), Persistent(8), Dynamic(), StreamK()])
def test_a_strip_of_four_rows_and_eight_workers(assignment: Any) -> None:
    """128 x 128 tiles, K = 4096, bfloat16, 8 x 8 grid: 4 bands of A and 2 of B, 4 MiB and 2 MiB."""
    waves = TileScheduler(GroupedM(4), assignment).waves(8, 8, 8, **SQUARE)
    assert len(waves) == 8
    for wave in waves:
        assert (wave.a_bands, wave.b_bands) == (4, 2)
        assert (wave.a_bytes, wave.b_bytes) == (4 * MIB, 2 * MIB)
        assert wave.working_set_bytes == 6 * MIB
    assert waves[0].tiles == tuple(Tile(m, n) for n in (0, 1) for m in range(4))
    assert waves[4].tiles[0] == Tile(4, 0)
    whole = summarise(waves, 8)
    assert (whole.waves, whole.tiles, whole.efficiency) == (8, 64, 1.0)
    assert whole.mean_bytes == whole.max_bytes == 6 * MIB


def test_rows_one_after_another_read_more() -> None:
    (first, *_) = waves_of(RowMajor(), 8, 8, 8)
    assert (first.a_bands, first.b_bands) == (1, 8)
    assert first.working_set_bytes == 9 * MIB


@given(ORDERS, ASSIGNMENTS, SIDES, SIDES, st.integers(1, 70), CLUSTERS, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_every_tile_is_in_one_wave(
    order: Any,
    assignment: Any,
    tiles_m: int,
    tiles_n: int,
    workers: int,
    cluster: tuple[int, int],
    batch: int,
) -> None:
    waves = TileScheduler(order, assignment).waves(
        tiles_m, tiles_n, workers, **SQUARE, cluster=cluster, batch=batch
    )
    found = [tile for wave in waves for tile in wave.tiles]
    assert sorted(found) == [
        (m, n, product) for m in range(tiles_m) for n in range(tiles_n) for product in range(batch)
    ]
    for wave in waves:
        assert 1 <= len(wave.tiles) <= workers * cluster[0] * cluster[1]
        assert wave.a_bands == len({(tile.batch, tile.m) for tile in wave.tiles})
        assert wave.b_bands == len({(tile.batch, tile.n) for tile in wave.tiles})


@given(ORDERS, SIDES, SIDES, st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_one_worker_for_each_tile_runs_in_the_same_waves_as_persistent_workers(
    order: Any, tiles_m: int, tiles_n: int, workers: int
) -> None:
    static = TileScheduler(order, Static()).waves(tiles_m, tiles_n, workers, **SQUARE)
    assert static == TileScheduler(order, Persistent()).waves(tiles_m, tiles_n, workers, **SQUARE)


@pytest.mark.parametrize(
    ("tiles", "waves", "efficiency"),
    [(131, 1, 131 / 132), (132, 1, 1.0), (133, 2, 133 / 264), (264, 2, 1.0), (265, 3, 265 / 396)],
)
def test_a_tile_too_many_costs_a_wave(tiles: int, waves: int, efficiency: float) -> None:
    whole = summarise(waves_of(GroupedM(8), 1, tiles, 132), 132)
    assert whole.waves == waves
    assert whole.efficiency == pytest.approx(efficiency)


def test_clusters_are_walked_whole_and_cut_at_the_edge() -> None:
    (wave,) = waves_of(GroupedM(8), 3, 1, 4, cluster=(2, 1))
    assert wave.tiles == (Tile(0, 0), Tile(1, 0), Tile(2, 0))
    assert (wave.a_bands, wave.b_bands) == (3, 1)
    assert summarise([wave], slots=8).efficiency == 3 / 8


def test_products_of_a_batch_share_no_bands() -> None:
    (wave,) = waves_of(GroupedM(8), 2, 2, 8, batch=2)
    assert [tile.batch for tile in wave.tiles] == [0] * 4 + [1] * 4
    assert (wave.a_bands, wave.b_bands) == (4, 4)


def test_bytes_follow_tile_depth_and_dtype() -> None:
    (wave,) = waves_of(RowMajor(), 1, 2, 2, tile_m=64, tile_n=256, k=1000, dtype=torch.float32)
    assert (wave.a_bytes, wave.b_bytes) == (64 * 1000 * 4, 2 * 256 * 1000 * 4)


def test_an_operand_that_outgrows_l2_is_read_in_strips() -> None:
    """M = N = 16384, K = 4096 on an H200: row by row a wave needs all of B, twice its L2."""
    l2 = 60 * MIB
    by_rows = summarise(waves_of(RowMajor(), 128, 128, 132), 132)
    by_strips = summarise(waves_of(GroupedM(8), 128, 128, 132), 132)
    assert by_rows.mean_bytes > 2 * l2
    assert by_strips.max_bytes < l2


def test_a_wave_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        waves_of(RowMajor(), 1, 1, 1)[0].a_bands = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile_m": 0},
        {"tile_n": -1},
        {"k": 0},
        {"k": 2.5},
        {"batch": 0},
        {"cluster": (0, 1)},
        {"cluster": (1, True)},
    ],
)
def test_sizes_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be an integer of at least 1"):
        waves_of(RowMajor(), 2, 2, 2, **wrong)


def test_workers_grids_and_dtypes_that_are_none() -> None:
    with pytest.raises(ConfigError, match="workers=0 must be an integer of at least 1"):
        waves_of(RowMajor(), 2, 2, 0)
    with pytest.raises(ConfigError, match="tiles_m=0"):
        waves_of(RowMajor(), 0, 2, 1)
    with pytest.raises(OperandTypeError, match="int7"):
        waves_of(RowMajor(), 2, 2, 1, dtype="int7")


@dataclass(frozen=True)
class Forgetful:
    """An assignment that takes each task ``step`` after the last: 2 leaves tasks out, 0 repeats them."""

    step: int

    def workers(self, tasks: int, resident: int) -> int:
        return 1

    def first(self, worker: int) -> int:
        return 0

    def next(self, task: int, workers: int) -> int:
        return task + self.step


def test_assignments_that_lose_or_repeat_tasks() -> None:
    with pytest.raises(ConfigError, match=r"Forgetful\(step=2\) leaves some of 9 tasks to none of 1 workers"):
        TileScheduler(RowMajor(), Forgetful(2)).waves(3, 3, 4, **SQUARE)
    with pytest.raises(ConfigError, match=r"Forgetful\(step=0\) gives some of 9 tasks to more than one"):
        TileScheduler(RowMajor(), Forgetful(0)).waves(3, 3, 4, **SQUARE)


# --- the default order -------------------------------------------------------------------------------------


def test_strips_follow_the_operand_that_is_multicast() -> None:
    sides = {"tile_m": 128, "tile_n": 128, "workers": 66}
    assert default_order(64, 64, 2, 1, **sides) == GroupedM(4)
    assert default_order(64, 64, 1, 2, **sides) == GroupedN(4)


def test_the_width_is_the_one_with_the_smaller_working_set() -> None:
    """66 clusters of 128 rows: 4 of them across and 17 along, or 8 across and 9 along; 4 if equal."""
    for tile_n, width in ((32, 4), (64, 4), (128, 8), (256, 8)):
        four, eight = 4 * 128 + 17 * tile_n, 8 * 128 + 9 * tile_n
        assert (width == 8) == (eight < four)
        found = default_order(64, 64, 2, 1, tile_m=64, tile_n=tile_n, workers=66)
        assert found == GroupedM(width)


def test_without_multicast_the_strips_run_where_less_is_read() -> None:
    assert default_order(64, 64, 1, 1, tile_m=128, tile_n=256, workers=132) == GroupedN(8)
    assert default_order(64, 64, 1, 1, tile_m=256, tile_n=128, workers=132) == GroupedM(8)
    assert default_order(64, 64, 1, 1, tile_m=128, tile_n=128, workers=132) == GroupedM(8)


@given(SIDES, SIDES, CLUSTERS, st.sampled_from([(64, 256), (128, 128), (256, 128)]), st.integers(1, 140))
@settings(max_examples=100, deadline=None)
def test_the_default_is_one_of_few(
    tiles_m: int, tiles_n: int, cluster: tuple[int, int], tile: tuple[int, int], workers: int
) -> None:
    order = default_order(tiles_m, tiles_n, *cluster, tile_m=tile[0], tile_n=tile[1], workers=workers)
    across = cluster[0] if isinstance(order, GroupedM) else cluster[1]
    assert order.group in {-(-width // across) for width in (8, 16)}
    assert order == default_order(tiles_m, tiles_n, *cluster, tile_m=tile[0], tile_n=tile[1], workers=workers)


@pytest.mark.parametrize("tile", [(128, 256), (256, 128), (128, 128), (64, 256)], ids=str)
@pytest.mark.parametrize("grid", [(64, 32), (128, 128), (17, 90)], ids=str)
def test_the_default_reads_less_than_rows_and_columns(grid: tuple[int, int], tile: tuple[int, int]) -> None:
    sides = {"tile_m": tile[0], "tile_n": tile[1]}
    order = default_order(*grid, 1, 1, **sides, workers=132)
    chosen = summarise(waves_of(order, *grid, 132, **sides), 132).mean_bytes
    by_rows = summarise(waves_of(RowMajor(), *grid, 132, **sides), 132).mean_bytes
    assert chosen < by_rows


# --- text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("GroupedM(4)", GroupedM(4)),
        (" GroupedN( group = 3 ) ", GroupedN(3)),
        ("Blocked(2, cols=3)", Blocked(2, 3)),
        ("Hilbert", Hilbert()),
        ("Morton()", Morton()),
        ("RowMajor", RowMajor()),
    ],
)
def test_orders_as_text(text: str, order: Any) -> None:
    assert parse_order(text) == order


def test_assignments_as_text() -> None:
    assert parse_assignment("Static") == Static()
    assert parse_assignment("Persistent(max_workers=7)") == Persistent(7)
    assert parse_assignment("Dynamic(7)") == Dynamic(7)
    assert parse_assignment("StreamK(ordered=False)") == StreamK(ordered=False)


@pytest.mark.parametrize(
    "text",
    [
        "", "GroupedM(", "Grouped(8)", "TileOrder", "TileScheduler()", "Static", "GroupedM('8')",
        "GroupedM(8.0)", "GroupedM(True)", "GroupedM(*[8])", "GroupedM(**{})", "GroupedM(group=x)",
        "GroupedM(8).group", "8", "__import__('os').system('true')", "GroupedM(__import__('os').getpid())",
        "scheduler.GroupedM(8)", "GroupedM\x00", "lambda: 0", "GroupedM(8); x", "(" * 300,
    ],
)  # fmt: skip
def test_other_text_is_refused_and_nothing_is_run(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood; write one of Blocked, ColumnMajor, GroupedM"):
        parse_order(text)


def test_wrong_arguments_are_refused_by_the_class() -> None:
    with pytest.raises(ConfigError, match=r"GroupedM\(-8\): the strip width"):
        parse_order("GroupedM(-8)")
    with pytest.raises(ConfigError, match=r"order 'GroupedM\(1, 2\)': .*positional argument"):
        parse_order("GroupedM(1, 2)")
    with pytest.raises(ConfigError, match=r"order 'GroupedM\(width=2\)': .*'width'"):
        parse_order("GroupedM(width=2)")


# --- the report and the command line -----------------------------------------------------------------------


def explain(*words: str) -> int:
    """`python -m cutegemm explain ... --target sm_90a` in this process; the exit code."""
    return cli.main(["explain", *words, "--target", "sm_90a"])


def test_the_command_line_prints_the_waves(capsys: pytest.CaptureFixture[str]) -> None:
    words = "1024 1024 4096 --tile 128x128x64 --schedule GroupedM(4) --workers 8"
    assert explain(*words.split()) == 0
    out = capsys.readouterr().out
    assert "GroupedM(group=4) x Persistent(max_workers=None): 8 x 8 tiles; 8 workers" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert ["0", "8", "4", "2", "4.0", "2.0", "6.0"] in rows
    assert "8 waves of 8 slots, 100.0% of them used" in out
    assert "6.0 MiB on average, 6.0 at most" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("64 64 64 --schedule Grouped", "order 'Grouped' is not understood"),
        ("64 64 64 --schedule GroupedM(0)", "GroupedM(0): the strip width"),
        ("64 64 64 --schedule Hilbert --assignment Hilbert", "assignment 'Hilbert' is not understood"),
        ("64 64 64 --schedule Hilbert --workers 0", "workers=0"),
        ("64 ? 64 --schedule Hilbert", "N=?: waves need a size"),
        ("64 64 64 --workers 8", "--workers is about waves"),
        ("64 64 64 --plot x.png", "--plot is about waves"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_a_schedule_explain_is_about_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("64", "64", "64") == 0
    assert "configuration" in capsys.readouterr().out


def test_many_waves_are_abridged(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(
        TileScheduler(Hilbert()), GemmProblem(8192, 8192, 8192), GemmConfig(128, 128), "sm_90a", workers=32
    )
    found.render(Console(width=100))
    lines = capsys.readouterr().out.splitlines()
    assert len(found.waves) == 128
    assert sum(line.strip() == "..." for line in lines) == 1
    assert len(lines) < 25


def test_a_swapped_problem_is_shown_as_the_kernel_sees_it() -> None:
    config = GemmConfig(128, 64, swap_ab=True)
    found = report(TileScheduler(RowMajor()), GemmProblem(100, 1000, 512), config, "sm_90a")
    assert (found.grid.tiles_m, found.grid.tiles_n) == (8, 2)


@pytest.mark.parametrize(
    ("config", "workers"), [(GemmConfig(128, 128), 132), (GemmConfig(128, 128, cluster_m=2), 66)]
)
def test_workers_fill_the_gpu(config: GemmConfig, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutegemm.hardware import gpu_by_name
    from cutegemm.scheduler import report as module

    monkeypatch.setattr(module, "current_gpu", lambda: gpu_by_name("H200"))
    problem = GemmProblem(4096, 4096, 64)
    assert report(TileScheduler(), problem, config, "sm_90a").workers == workers


def test_an_empty_product_has_no_waves() -> None:
    with pytest.raises(ProblemError, match="K=0: waves need a size of at least 1"):
        report(TileScheduler(), GemmProblem(8, 8, 0), GemmConfig(64, 8, consumers=1), "sm_90a")


# --- the picture -------------------------------------------------------------------------------------------


def figure_of(order: Any, tiles_m: int, tiles_n: int, workers: int, **changes: Any) -> Any:
    """The figure of an order; skips without matplotlib."""
    pytest.importorskip("matplotlib")
    from cutegemm.scheduler.plot import plot

    return plot(TileScheduler(order), tiles_m, tiles_n, workers, **(SQUARE | changes))


def texts(figure: Any) -> str:
    """All words of a figure."""
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_the_picture_marks_what_a_wave_reads() -> None:
    from matplotlib.patches import Rectangle

    figure = figure_of(GroupedM(4), 8, 8, 8, wave=5)
    c, a, b, facts = figure.axes
    framed = {(p.get_x() + 0.5, p.get_y() + 0.5) for p in c.patches if isinstance(p, Rectangle)}
    assert framed == {(n, m) for n in (2, 3) for m in (4, 5, 6, 7)}
    assert {(p.get_y() + 0.5) for p in a.patches} == {4, 5, 6, 7}
    assert {(p.get_x() + 0.5) for p in b.patches} == {2, 3}
    assert "wave 5: 8 tiles" in texts(figure)
    assert "A: 4 bands, 4 MiB" in texts(figure)
    assert "B: 2 bands, 2 MiB" in texts(figure)
    # Each wave has a colour of its own.
    image = c.images[0].get_array()
    assert len({tuple(image[m, n]) for m in range(8) for n in range(8)}) == 8
    assert not facts.axison


@pytest.mark.parametrize(
    ("grid", "cluster"),
    [((1, 1), (1, 1)), ((1, 90), (1, 1)), ((120, 7), (2, 1)), ((33, 60), (2, 2))],
    ids=str,
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_of_all_shapes(
    grid: tuple[int, int], cluster: tuple[int, int], suffix: str, tmp_path: Path
) -> None:
    figure = figure_of(Hilbert(), *grid, 17, cluster=cluster, wave=-1)
    path = tmp_path / f"waves.{suffix}"
    figure.savefig(path, dpi=60)
    assert path.stat().st_size > 3000


def test_a_wave_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="wave=8: there are 8 waves, the first is 0"):
        figure_of(GroupedM(4), 8, 8, 8, wave=8)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutegemm.scheduler.plot import plot

    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        plot(TileScheduler(), 2, 2, 2, **SQUARE)


def test_the_command_line_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "waves.png"
    assert explain("512", "512", "64", "--schedule", "Morton", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().err
    assert explain("512", "512", "64", "--schedule", "Morton", "--plot", str(tmp_path / "waves.nothing")) == 2
    assert "is not supported" in capsys.readouterr().err


# --- the example -------------------------------------------------------------------------------------------


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_scheduler.py")],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Snake(group=8) visits every tile once on 6 grids" in done.stdout
    assert "compiled for sm_90a" in done.stdout


def test_the_document_s_order_is_the_example_s() -> None:
    spec = importlib.util.spec_from_file_location(
        "custom_scheduler", ROOT / "examples" / "custom_scheduler.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_scheduler"] = module
    spec.loader.exec_module(module)
    blocks = (ROOT / "docs" / "schedules.md").read_text().split("```python\n")
    names: dict[str, Any] = {"__name__": "documented"}
    exec(blocks[2].split("```")[0], names)
    ours, theirs = names["Snake"](3), module.Snake(3)
    assert [ours.tile(i, 7, 5) for i in range(35)] == [theirs.tile(i, 7, 5) for i in range(35)]
