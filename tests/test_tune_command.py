"""`python -m cutegemm tune`, and what `cache` says of its results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tuning_fakes import Machine, install

from cutegemm import GemmProblem, cli
from cutegemm.errors import BuildError
from cutegemm.hardware import gpu_by_name
from cutegemm.tuning import tuner
from cutegemm.tuning.candidates import candidates

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A GPU of a test's own, and an empty cache, where the command line finds them."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "_known", {})
    return install(Machine(), monkeypatch)


def test_every_shape_gets_a_table_and_a_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    fast = candidates(GemmProblem(48, 64, 96), gpu_by_name("H200"), None)[2]
    machine.cost = lambda variant: 5.0 if variant.config == fast.config else 10.0
    assert cli.main(["tune", "48", "64", "96", "32", "64", "96", "--top", "4"]) == 0
    said = capsys.readouterr()
    tables, summary = re.split(r"^tuned *$", said.out, flags=re.MULTILINE)
    rows = [line for line in tables.splitlines() if "winner" in line]
    assert len(rows) == 2
    assert fast.name in rows[0]
    assert f"{fast.predicted_us:.2f}" in rows[0]
    assert "5.00" in rows[0]
    assert "-50.0 %" in rows[0]
    assert sum("heuristic's choice" in line for line in tables.splitlines()) == 2
    (line,) = [line for line in summary.splitlines() if line.lstrip("│ ").startswith("48x64x96")]
    assert str(fast.config) in line
    assert "100.0 %" in line
    assert "geomean" in summary
    assert said.err == ""  # no terminal, no bar


def test_what_was_tuned_before_is_not_measured_again(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("tune 48 64 96 --top 3", "tune 48 64 96 --top 3", "tune 48 64 96 --top 3 --again --quiet"):
        assert cli.main(words.split()) == 0
    assert len(machine.measured) == 4
    assert capsys.readouterr().out.count("tuned before") == 1


def test_the_dtypes_and_majors_reach_the_problem(machine: Machine) -> None:
    words = "tune 48 64 96 --top 2 --dtype fp16 --out-dtype fp32 --a-major m --b-major n"
    assert cli.main(words.split()) == 0
    problem = machine.measured[0].case.problem
    assert (problem.a_dtype, problem.out_dtype) == ("float16", "float32")
    assert (problem.a_major, problem.b_major) == ("m", "n")


def test_a_suite_can_be_tuned(machine: Machine, tmp_path: Path) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text('{"shapes": [{"m": 24, "n": 64, "k": 64}, {"m": 16, "n": 64, "k": 64}]}')
    assert cli.main(["tune", "--suite", str(suite), "--top", "2"]) == 0
    assert [job.case.m for job in machine.measured[::2]] == [24, 16]


def test_a_shape_that_cannot_be_tuned_is_said_and_the_next_one_is_tuned(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails = lambda variant: BuildError("it spills") if len(machine.built) <= 30 else None
    assert cli.main(["tune", "48", "64", "96", "32", "64", "96", "--top", "16", "--quiet"]) == 1
    said = capsys.readouterr()
    assert "48x64x96: none of" in said.err
    assert "it spills" in said.err
    assert "32x64x96" in said.out


def test_bad_arguments_are_one_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "48", "64"]) == cli.EXIT_REFUSED
    assert "a shape is three, M N K" in capsys.readouterr().err
    assert cli.main(["tune", "48", "64", "96", "--top", "0"]) == cli.EXIT_REFUSED
    assert "top=0" in capsys.readouterr().err


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cutegemm", "tune", "64", "64", "64"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (cli.EXIT_REFUSED, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("cutegemm: tuning measures kernels on a GPU, and there is none to use here")


def test_cache_shows_and_clears_what_was_tuned(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["cache"])
    assert "tuned" not in capsys.readouterr().out
    cli.main(["tune", "48", "64", "96", "--top", "2", "--quiet"])
    capsys.readouterr()
    cli.main(["cache"])
    said = capsys.readouterr().out
    assert "tuned, newest first" in said
    assert "48x64x96" in said
    cli.main(["cache", "--clear"])
    assert "0 kernels and 1 tuning result removed" in capsys.readouterr().out
    tuner._known.clear()
    cli.main(["tune", "48", "64", "96", "--top", "2", "--quiet"])
    assert len(machine.measured) == 4
