"""`python -m cutegemm emulate`: what it prints, writes and answers, and what a timeline shows."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import GPU, kernel, replaced
from gpu_checks import Case
from rich.console import Console
from rich.text import Text

import cutegemm
from cutegemm import GemmConfig, cli, emulation
from cutegemm.emulation import Verdict, Wish, operands, seconds_expected
from cutegemm.emulator import Emulation, Progress, Trace, machine, product
from cutegemm.emulator.product import Circumstances
from cutegemm.emulator.timeline import TILE, Division, division_of, lanes, timeline
from cutegemm.errors import MissingDependencyError, ProblemError
from cutegemm.gemm import Gemm
from cutegemm.inspection import Request
from cutegemm.scheduler import SplitK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

ROOT = Path(__file__).resolve().parent.parent
SMALL = "emulate 200 136 192 --tile 128x128x64 --resident 1"


def ran(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, what was printed, and what went to stderr; the first without line ends."""
    code = cli.main(words.split())
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


# --- the command ---------------------------------------------------------------------------------------


def test_a_product_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [*SMALL.split(), "--trace", str(tmp_path / "t.json"), "--timeline", str(tmp_path / "t.png")]
    done = subprocess.run(
        [sys.executable, "-m", "cutegemm", *words, "--check", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "200x136x192 bfloat16",
        "128x128x64, cluster 1x1",
        "grid 1x1x1 in clusters of 1x1x1: 1 CTA of 384 threads",
        "warp instructions in",
        "against float64: right",
        "no race",
    ):
        assert said in done.stdout
    assert "takes about" in done.stderr
    for name in ("t.json", "t.png"):
        assert str(tmp_path / name) in done.stderr
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {row["name"] for row in rows if row["ph"] == "X"} >= {"load", "mma", "store"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--schedule Hilbert --schedule pingpong --tile 64x64x64 --resident 2", "pingpong, "),
        ("--schedule Hilbert --tile 64x64x64 --resident 2", "Hilbert"),
        ("--assignment SplitK(2) --tile 64x64x64", "clusters of 2x1x1"),
        ("--batch 2 --tile 64x64x64 --a-major m --b-major n --out-major m", "D m-major"),
        ("--dtype fp16 --out-dtype fp32 --tile 64x32x64 --swap-ab --consumers 1", "float16 -> float32"),
        ("--tile 64x64x64 --cluster 2x1", "clusters of 2x1x1"),
    ],
)
def test_what_is_asked_is_what_runs(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(f"emulate 72 104 136 {words}", capsys)
    assert code == 0, err
    assert said in out
    assert "float64: right" in out


def test_a_line_that_tma_cannot_take_as_it_is_gets_padded(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran("emulate 65 63 101 --tile 64x64x64", capsys)
    assert code == 0, err
    assert "float64: right" in out


@pytest.mark.parametrize("seed", [None, 1])
def test_progress_is_told(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SECONDS_BETWEEN_REPORTS", 0.0)
    case = Case(200, 264, 136)
    gemm = kernel(GemmConfig(64, 64), case)
    told: list[Progress] = []
    a, b = torch.randn(case.m, case.k).bfloat16(), torch.randn(case.n, case.k).bfloat16().t()
    result = gemm.emulate(a, b, seed=seed, progress=told.append)
    assert len(told) > 20
    assert all(x.ended <= y.ended and x.instructions <= y.instructions for x, y in pairwise(told))
    assert told[0].ended == 0
    assert told[-1] == Progress(20, 20, result.instructions)


def test_a_bar_shows_ctas_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SECONDS_BETWEEN_REPORTS", 0.0)
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    wish = Wish(Request((128, 192, 64), config={"tile_m": 64, "tile_n": 64}))
    emulation.emulate(wish.gemm(), wish, screen)
    assert isinstance(screen.file, io.StringIO)
    shown = Text.from_ansi(screen.file.getvalue()).plain
    assert re.search(r"emulating .*\b6/6 CTAs, [\d,]+ instructions", shown)
    silent = Console(file=io.StringIO(), force_terminal=False, width=100)
    emulation.emulate(wish.gemm(), wish, silent)
    assert isinstance(silent.file, io.StringIO)
    assert "CTAs" not in silent.file.getvalue()


def test_no_products_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran("emulate 16 8 0", capsys)
    assert code == 0
    assert "launched nothing" in out
    assert "relative error 0.00e+00" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("emulate 16 ? 8", "a size is ?"),
        ("emulate 16 16 8 --resident 0", "--resident 0: at least 1"),
        ("emulate 16 16 8 --timeline x.bmp", ".png, .svg, .pdf"),
        ("emulate 16 16 8 --trace /no/such/folder/x.json", "no folder /no/such/folder"),
        ("emulate 16 16 8 --schedule Zigzag", "Zigzag"),
        ("emulate 16 16 8 --assignment Nobody", "Nobody"),
        ("emulate 16 16 8 --schedule Hilbert --schedule Morton", "twice: Hilbert and Morton"),
        ("emulate 16 16 8 --schedule pingpong", "schedule given without a tile"),
        ("emulate 16 16 8 --target sm_120a", "sm_120a"),
        ("emulate 16 16 8 --tile 100x100x64", "100"),
    ],
)
def test_refusals_are_one_line_and_come_before_the_work(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Gemm, "emulate", lambda *_, **__: pytest.fail("it ran"))
    code, out, err = ran(words, capsys)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("cutegemm: ")
    assert said in line


def test_a_fault_of_the_kernel_is_a_report_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_giving_back(self: Gemm, a: Any, b: Any, *, out: Any, **_: object) -> Emulation:
        # The consumers never tell the producer that a stage is free.
        ptx = replaced(self.ptx, r"^.*mbarrier\.arrive\.shared.*$", "")
        return product.emulate(self._kernels, GPU, (a, b, out), Circumstances(resident=1, ptx=ptx))

    monkeypatch.setattr(Gemm, "emulate", without_giving_back)
    code, out, err = ran("emulate 128 128 512 --tile 128x128x64 --stages 3", capsys)
    assert (code, out) == (1, "")
    assert "128x128x64" in err
    assert "DeadlockError: 9 warp(s) wait for what nobody left can supply\n" in err
    assert "\n  producer warp 0 of CTA 0 at mbarrier.try_wait" in err
    assert "waits for inputs_consumed[0]" in err
    assert "Traceback" not in err


def test_a_wrong_result_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Gemm.emulate

    def one_element_off(self: Gemm, *args: Any, out: torch.Tensor, **options: Any) -> object:
        result = honest(self, *args, out=out, **options)
        out[3, 5] += 1
        return result

    monkeypatch.setattr(Gemm, "emulate", one_element_off)
    code, out, _ = ran(SMALL, capsys)
    assert code == 1
    assert "WRONG in 1 of 27,200 elements" in out


def test_a_cta_that_is_not_there_has_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = ran(f"{SMALL} --timeline {tmp_path / 't.svg'} --cta 5", capsys)
    assert code == 2
    assert "float64: right" in out
    assert "CTA 5 left nothing to draw" in err
    assert not (tmp_path / "t.svg").exists()


def test_without_matplotlib_it_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = ran(f"{SMALL} --timeline {tmp_path / 't.png'}", capsys)
    assert (code, out) == (2, "")
    assert "pip install matplotlib" in err
    with pytest.raises(MissingDependencyError):
        timeline(Trace())


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t.json"
    folder.mkdir()
    code, _, err = ran(f"{SMALL} --trace {folder}", capsys)
    assert code == 2
    assert "cannot be written" in err


def test_operands_that_do_not_fit_into_memory() -> None:
    problem = cutegemm.GemmProblem(2**26, 2**26, 2**26)
    with pytest.raises(ProblemError, match="do not fit into memory"):
        operands(problem, 0)


# --- judging and estimating ----------------------------------------------------------------------------


def test_the_verdict_finds_what_rounding_does_not_explain() -> None:
    a, b = torch.randn(32, 64).bfloat16(), torch.randn(64, 16).bfloat16()
    exact = (a.double() @ b.double()).to(torch.bfloat16)
    assert Verdict.of(exact, a, b).right
    for wrong in (float("nan"), float("inf"), 0.0):
        changed = exact.clone()
        changed.view(-1)[exact.abs().argmax()] = wrong
        verdict = Verdict.of(changed, a, b)
        assert verdict.wrong == 1
        assert "WRONG in 1 of 512 elements" in str(verdict)
    truncated = (exact.view(torch.int16) & ~7).view(torch.bfloat16)
    assert Verdict.of(truncated, a, b).wrong > 100


def test_the_same_seed_gives_the_same_operands() -> None:
    problem = cutegemm.GemmProblem(24, 17, 9, a_major="m", b_major="n")
    a, b, out = operands(problem, 5)
    again = operands(problem, 5)
    assert torch.equal(a, again[0])
    assert torch.equal(b, again[1])
    assert not torch.equal(a, operands(problem, 6)[0])
    assert out.isnan().all()
    assert (a.shape, b.shape, out.shape) == ((24, 9), (9, 17), (24, 17))


def test_the_estimate_grows_with_the_work_and_is_of_the_right_order() -> None:
    def gemm(*shape: int, **options: Any) -> Gemm:
        return cutegemm.compile(shape, "bfloat16", target="sm_90a", config=GemmConfig(128, 128), **options)

    base = seconds_expected(gemm(512, 512, 512))
    assert 0.1 < base < 5
    for larger in ((1024, 512, 512), (512, 1024, 512), (512, 512, 1024), (2, 512, 512, 512)):
        assert seconds_expected(gemm(*larger)) > base
    assert seconds_expected(gemm(512, 512, 512), check=True) > base
    assert seconds_expected(gemm(512, 512, 512), adverse=True) > base
    split = gemm(512, 512, 512, scheduler=TileScheduler(assignment=SplitK(2)))
    assert seconds_expected(split) > base
    assert [emulation._about(s) for s in (0.4, 12.3, 300, 90000)] == [
        "about a second",
        "about 12 s",
        "about 5 minutes",
        "about 25 hours",
    ]


# --- the timeline --------------------------------------------------------------------------------------


def emulated(config: GemmConfig, m: int, n: int, k: int, resident: int = 1) -> tuple[Gemm, Trace]:
    """A gemm and the trace of one product."""
    gemm = kernel(config, Case(m, n, k))
    result = gemm.emulate(torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16().t(), resident=resident)
    return gemm, result.trace


def bars(trace: Trace, division: Division | None, name: str) -> list[Any]:
    """The bars of one lane of CTA 0."""
    (lane,) = (lane for lane in lanes(trace, division, 0) if lane.name.startswith(name))
    return lane.bars


@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
def test_tiles_and_stages_are_counted_as_the_kernel_takes_them(schedule: Any) -> None:
    config = GemmConfig(64, 64, stages=3, schedule=schedule)
    gemm, trace = emulated(config, 128, 192, 256)
    division = division_of(gemm, 256)
    assert division == Division(3, 4, 2 * 64 * 64 * 2, 2 if schedule == "pingpong" else 1)
    steps = [(step // 4, str(step % 3)) for step in range(6 * 4)]
    loads = [(bar.tile, bar.text) for bar in bars(trace, division, "TMA load")]
    assert loads == [step for step in steps for _ in "ab"]
    mma = {(bar.tile, bar.text) for bar in bars(trace, division, "tensor core")}
    assert mma == set(steps)
    for number in (0, 1):
        tiles = [bar.tile for bar in bars(trace, division, f"consumer {number}") if bar.kind == TILE]
        assert tiles == (list(range(number, 6, 2)) if schedule == "pingpong" else list(range(6)))
    # The stage counted is the stage the program waited for.
    for number in (0, 1):
        waited = [bar.text for bar in bars(trace, division, f"consumer {number}") if bar.kind == "wait"]
        assert set(waited) <= {"0", "1", "2"}
    assert {bar.text for bar in bars(trace, division, "TMA store")} == {f"tile {i}" for i in range(6)}


def test_a_cluster_and_a_split_divide_the_work() -> None:
    gemm, trace = emulated(GemmConfig(64, 64, cluster_m=2), 256, 64, 128)
    division = division_of(gemm, 128)
    assert division.step_bytes == (64 + 64 // 2) * 64 * 2
    assert [bar.tile for bar in bars(trace, division, "TMA load")] == [0] * 4 + [1] * 4
    split = cutegemm.compile(
        (64, 64, 320),
        "bfloat16",
        target="sm_90a",
        config=GemmConfig(64, 64),
        scheduler=TileScheduler(assignment=SplitK(4)),
    )
    assert [division_of(split, 320, cta).steps for cta in range(4)] == [2, 1, 1, 1]
    assert [division_of(split, 128, cta).steps for cta in range(4)] == [1, 1, 1, 1]


def test_bars_of_a_row_do_not_overlap() -> None:
    _, trace = emulated(GemmConfig(128, 128), 256, 256, 576)
    found = lanes(trace, None, 0)
    assert [lane.name.split("\n")[0] for lane in found] == [
        "producer",
        "TMA load",
        "consumer 0",
        "consumer 1",
        "tensor core",
        "TMA store",
    ]
    for lane in found:
        rows = lane.rows()
        assert sum(map(len, rows)) == len(lane.bars)
        for row in rows:
            assert all(one.end <= two.begin for one, two in pairwise(row))


def test_the_picture_says_what_ran() -> None:
    pytest.importorskip("matplotlib")
    import matplotlib.text
    from matplotlib.patches import Rectangle

    gemm, trace = emulated(GemmConfig(128, 128), 256, 256, 576)
    figure = timeline(trace, division_of(gemm, 576), title="the title")
    texts = {text.get_text() for text in figure.findobj(matplotlib.text.Text)}
    assert {"the title", "producer", "TMA load", "tensor core", "TMA store", "tile 0"} <= texts
    assert "TMA load, latency included" in texts
    drawn = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(drawn) == sum(len(lane.bars) for lane in lanes(trace, division_of(gemm, 576), 0))


def test_nothing_to_draw() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ProblemError, match="nothing to draw"):
        timeline(Trace())


def test_a_wish_is_checked_without_the_command() -> None:
    wish = Wish(Request((16, None, 8)))
    with pytest.raises(ProblemError, match=r"a size is \?"):
        wish.gemm()
    gemm = replace(wish, request=Request((16, 16, 8))).gemm()
    outcome = emulation.emulate(gemm, wish, Console(quiet=True))
    assert outcome.verdict.right
