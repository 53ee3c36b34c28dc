"""The bench's results, suites and command line, on a fake GPU."""

import argparse
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import QUICK, FakeGemm, FakeGpu, sample_report
from rich.console import Console

from cutegemm.bench import Case, Method, Report, add_arguments, command, hostcost, main, parse_config, peers
from cutegemm.bench.report import print_report
from cutegemm.bench.result import geomean
from cutegemm.bench.suite import DEFAULT_SUITE, load_suite
from cutegemm.config import GemmConfig
from cutegemm.errors import ConfigError, CutegemmError, DeviceError, ProblemError

# Results


def test_json_round_trip() -> None:
    report = sample_report()
    text = json.dumps(report.to_json())
    again = Report.from_json(json.loads(text))
    assert again == report
    assert json.dumps(again.to_json()) == text


def test_json_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema 99 is not 1"):
        Report.from_json({**sample_report().to_json(), "schema": 99})


def test_geomeans_leave_out_what_failed() -> None:
    report = sample_report()
    assert report.geomean_speedup("cutegemm") == pytest.approx(2.0)
    assert report.geomean_speedup("triton") == pytest.approx(0.5)
    assert geomean([]) is None
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert report.failures(ours=True) == ["cutegemm on 128x128x128: RuntimeError: no [red]luck[/red]"]
    assert report.failures(ours=False) == []


def test_printed_report_has_the_numbers_and_the_failures() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(sample_report(), console)
    text = console.export_text()
    assert "quack was not measured" in text
    assert "failed: cutegemm on 128x128x128: RuntimeError: no [red]luck[/red]" in text
    line = next(line for line in text.splitlines() if "32x48x64" in line)
    for cell in ("2.00", "4.00", "2.000", "0.500", "0.25", "1.0e-03"):
        assert cell in line
    assert "warm L2" in text
    assert "5.50 us" in text
    assert text.rstrip().splitlines()[-2].split()[1] == "geomean"


# Suites and the command line


def test_the_default_suite_is_there() -> None:
    cases = load_suite(DEFAULT_SUITE, "bfloat16")
    assert len(cases) == 21
    assert len({case.shape for case in cases}) == 21
    assert all(case.label for case in cases)
    assert cases[0].shape == "4096x4096x4096"


@pytest.mark.parametrize("text", ["", "[]", '{"shapes": [{"m": 1}]}', '{"shapes": 3}'])
def test_a_file_that_is_no_suite(tmp_path: Path, text: str) -> None:
    path = tmp_path / "suite.json"
    path.write_text(text)
    with pytest.raises(ProblemError, match="is no suite"):
        load_suite(path, "bfloat16")


def test_a_missing_suite() -> None:
    with pytest.raises(ProblemError, match=r"cannot read the suite nowhere\.json: No such file"):
        load_suite(Path("nowhere.json"), "bfloat16")


def test_configurations_as_text() -> None:
    assert parse_config("128x256") == ("128x256", GemmConfig(128, 256))
    assert parse_config("heuristic") == ("heuristic", None)
    name, config = parse_config(
        "wide: 256x128x64, cluster=2x1 consumers=2 stages=4 schedule=pingpong swap_ab=true"
    )
    assert name == "wide"
    assert config == GemmConfig(256, 128, 64, 2, 1, 2, "pingpong", 4, swap_ab=True)
    assert parse_config("tile_m=64 tile_n=64 stages=none")[1] == GemmConfig(64, 64)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("128", "tile '128' is unreadable"),
        ("128x", "tile '128x' is unreadable"),
        ("128x128 cluster=2x1x1", "cluster '2x1x1' is unreadable"),
        ("128x128 stage=4", "'stage' is no field of a configuration; there are cluster_m"),
        ("stages=4", "lacks tile_m, tile_n"),
        ("128x128 schedule=fast", "schedule='fast' is unknown"),
    ],
)
def test_unreadable_configurations(text: str, sentence: str) -> None:
    with pytest.raises(CutegemmError, match=re.escape(sentence)):
        parse_config(text)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_dtypes_have_short_names() -> None:
    parsed = arguments("64", "64", "64", "--dtype", "FP16", "--out-dtype", "fp32")
    assert (parsed.dtype, parsed.out_dtype) == ("float16", "float32")


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> dict[Any, FakeGemm]:
    """What compiling a configuration gives, in this process; every other configuration works."""
    known: dict[Any, FakeGemm] = {}

    def compile_case(case: Case, config: Any = None, target: str | None = None) -> FakeGemm:
        return known.get(config, FakeGemm(config or "chosen"))

    for module in (peers, hostcost):
        monkeypatch.setattr(module, "compile_case", compile_case)
    for name in ("FULL", "QUICK"):
        monkeypatch.setattr(command, name, QUICK)
    monkeypatch.setattr(command, "first_call_seconds", lambda case: {"cold": 1.0, "from disk": 0.1})
    return known


def run(*words: str, gpu: FakeGpu | None = None) -> int:
    return main(arguments(*words, "--peers", "cublas", "--rounds", "2"), make_gpu=lambda: gpu or FakeGpu())


def small(tmp_path: Path) -> list[str]:
    return ["32", "32", "512", "16", "64", "512", "--json", str(tmp_path / "out" / "result.json")]


def test_command_measures_prints_and_writes(
    tmp_path: Path, gemms: dict[Any, FakeGemm], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(*small(tmp_path), "--config", "heuristic", "--config", "wide: 128x256", gpu=FakeGpu())
    assert code == 0
    printed = capsys.readouterr()
    assert "32x32x512" in printed.out
    assert printed.err.count("32x32x512: ") == 1
    report = Report.from_json(json.loads((tmp_path / "out" / "result.json").read_text()))
    assert report.ours == ["heuristic", "wide"]
    assert [result.case.shape for result in report.results] == ["32x32x512", "16x64x512"]
    assert set(report.host_us) == {
        "gemm(a, b, out=d)",
        "gemm(a, b)",
        "torch.mm(a, b, out=d)",
        "torch.mm(a, b)",
    }
    assert report.first_call_s == {"cold": 1.0, "from disk": 0.1}
    assert report.method["rounds"] == 2
    wide = report.results[0].row("wide")
    assert wide is not None
    assert wide.config == str(GemmConfig(128, 256))


def test_ours_failing_is_exit_code_1(tmp_path: Path, gemms: dict[Any, FakeGemm]) -> None:
    gemms[None] = FakeGemm(failure=RuntimeError("no kernel image"))
    assert run(*small(tmp_path), "--quick") == 1


def test_ours_wrong_is_exit_code_1(
    tmp_path: Path, gemms: dict[Any, FakeGemm], capsys: pytest.CaptureFixture[str]
) -> None:
    gemms[None] = FakeGemm(spoil=lambda out: out.mul_(1.02))
    assert run(*small(tmp_path), "--quick") == 1
    assert (
        "failed: cutegemm on 32x32x512: WrongResultError: wrong result: relative error"
        in capsys.readouterr().out
    )


def test_quick_leaves_out_the_costs(tmp_path: Path, gemms: dict[Any, FakeGemm]) -> None:
    assert run(*small(tmp_path), "--quick") == 0
    report = Report.from_json(json.loads((tmp_path / "out" / "result.json").read_text()))
    assert not report.host_us
    assert not report.first_call_s


def test_costs_that_cannot_be_measured_are_a_note(
    tmp_path: Path, gemms: dict[Any, FakeGemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(case: Case) -> dict[str, float]:
        raise RuntimeError("the worker process died")

    monkeypatch.setattr(command, "first_call_seconds", fail)
    assert run(*small(tmp_path)) == 0
    report = Report.from_json(json.loads((tmp_path / "out" / "result.json").read_text()))
    assert report.notes == ("first-call times were not measured: the worker process died",)
    assert report.host_us


def test_a_hang_leaves_what_was_measured(
    tmp_path: Path, gemms: dict[Any, FakeGemm], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = FakeGpu()

    def lose_on_second_shape(out: torch.Tensor) -> None:
        gpu.lost = out.shape[0] == 16

    gemms[None] = FakeGemm(spoil=lose_on_second_shape)
    left: list[int] = []
    code = main(arguments(*small(tmp_path), "--peers", ""), make_gpu=lambda: gpu, leave=left.append)
    assert code == 3
    assert left == [3]
    printed = capsys.readouterr()
    assert "error: cutegemm: a kernel did not finish" in printed.err
    assert "32x32x512" in printed.out
    report = Report.from_json(json.loads((tmp_path / "out" / "result.json").read_text()))
    assert [result.case.shape for result in report.results] == ["32x32x512"]


@pytest.mark.parametrize(
    ("words", "error", "sentence"),
    [
        (["1", "2"], ProblemError, "2 sizes were given; a shape is three, M N K"),
        (["1", "2", "3", "--suite", "x.json"], ProblemError, "not both"),
        (["8", "8", "8", "--peers", "cutlas"], ProblemError, "peer 'cutlas' is unknown"),
        (["8", "8", "8", "--rounds", "0"], ProblemError, "rounds must be at least 1"),
        (["8", "8", "8", "--config", "cublas: 64x64"], ConfigError, "names must differ"),
        (["8", "8", "8", "--config", "64x64", "--config", "64x64"], ConfigError, "names must differ"),
        (["0", "8", "8"], ProblemError, "each at least 1"),
    ],
)
def test_bad_arguments_are_one_sentence(words: list[str], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        main(arguments(*words), make_gpu=FakeGpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_sentence_names_what_is_needed() -> None:
    with pytest.raises(DeviceError, match=r"measuring needs an NVIDIA GPU .* doctor"):
        main(arguments("64", "64", "64"))


def test_method_is_printable_and_checked() -> None:
    assert "9 rounds" in str(Method())
    assert math.isclose(Method().replay_ms, 10.0)
    with pytest.raises(ProblemError, match="rounds must be at least 1"):
        Method(rounds=0)
