"""The command line: what is parsed, what is refused and how, and `inspect` on a really compiled kernel."""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import cutegemm
from cutegemm import cli, inspection
from cutegemm.dependencies import REQUIREMENTS
from cutegemm.errors import BuildError, ConfigError, ProblemError, TargetError
from cutegemm.inspection import Report, Request, histogram_table

ROOT = Path(__file__).resolve().parent.parent


def request_of(*words: str) -> Request:
    """The Request that a command line comes to."""
    return cli._request(cli.parser().parse_args(words))


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m cutegemm WORDS` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cutegemm", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def run_without(modules: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m cutegemm WORDS` where importing one of ``modules`` (with commas) fails."""
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({modules.split(",")!r}))
sys.argv[1:] = {list(words)!r}
runpy.run_module("cutegemm", run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("words", ["inspect 8 8 8", "explain 8 8 8", "bench --quick", "bench --help"])
def test_without_torch_a_command_says_what_to_install(words: str) -> None:
    done = run_without("torch", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("cutegemm: the module torch cannot be imported")
    assert 'pip install --force-reinstall "torch>=2.9"' in line


def test_without_torch_doctor_looks_at_the_rest() -> None:
    done = run_without("torch", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert "no module `torch`" in findings["torch"]["sentence"]
    assert findings["torch"]["remedy"] == 'pip install "torch>=2.9"'
    assert findings["dsl"]["state"] == "ok"


@pytest.mark.parametrize("module", ["tvm_ffi", "cutlass"])
def test_without_a_part_of_the_compiler_inspect_says_what_to_install(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    done = run_without(module, "inspect", "8", "8", "8", "--target", "sm_90a")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"the module {module}" in line
    assert f'pip install --force-reinstall "{REQUIREMENTS[module]}"' in line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cutegemm {cutegemm.__version__}\n"


def test_help_names_the_targets_there_are_kernels_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["inspect", "--help"])
    assert "sm_90a or sm_100a" in capsys.readouterr().out


def test_sizes_and_the_rest_reach_the_request() -> None:
    assert request_of("explain", "64", "?", "7168") == Request((64, None, 7168))
    words = "inspect 8 16 32 --batch 4 --dtype fp16 --out-dtype fp32 --a-major m --b-major n --out-major m"
    words += " --target sm_100a --tile 128x256x64 --cluster 2x1 --stages 4 --store-stages 2"
    words += " --consumers 2 --mma-ctas 2 --schedule pingpong --swap-ab"
    assert request_of(*words.split()) == Request(
        (4, 8, 16, 32),
        dtype="fp16",
        out_dtype="fp32",
        majors=("m", "n", "m"),
        target="sm_100a",
        config={
            "tile_m": 128,
            "tile_n": 256,
            "tile_k": 64,
            "cluster_m": 2,
            "cluster_n": 1,
            "stages": 4,
            "store_stages": 2,
            "consumers": 2,
            "mma_ctas": 2,
            "schedule": "pingpong",
            "swap_ab": True,
        },
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("inspect 8 16", "K"),
        ("inspect 8 16 x", "'x' is no size"),
        ("inspect 8 16 3.5", "'3.5' is no size"),
        ("inspect 8 16 32 --tile 128x256", "'128x256' is not of the form 128x256x64"),
        ("inspect 8 16 32 --cluster 2", "'2' is not of the form 2x1"),
        ("inspect 8 16 32 --tile axbxc", "not of the form"),
        ("inspect 8 16 32 --a-major n", "--a-major"),
        ("inspect 8 16 32 --ptx --sass", "not allowed with"),
        ("nonsense", "nonsense"),
        ("", "COMMAND"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_form(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words.split())
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("inspect 64 64 64 --target sm_90", "write 'sm_90a'"),
        ("inspect 64 64 64 --target sm_120a", "consumer Blackwell"),
        ("inspect 64 64 64 --target sm_90a --stages 3", "stages given without a tile"),
        ("inspect 64 64 -5 --target sm_90a", "-5"),
        ("explain 64 64 64 --target sm_90a --dtype int8", "int8"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_no_traceback(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("cutegemm: ")
    assert said in line


def test_a_refusal_of_several_lines_is_still_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BuildError("the compiler said\n  no")

    monkeypatch.setattr(cutegemm, "compile", refuse)
    assert cli.main(["inspect", "64", "64", "64", "--target", "sm_90a"]) == 2
    assert capsys.readouterr().err == "cutegemm: the compiler said no\n"


def test_half_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster_m, cluster_n given without a tile"):
        request_of("inspect", "8", "16", "32", "--cluster", "2x1").gemm_config()


def test_without_a_gpu_the_target_is_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert Request((1, 2, 3)).resolved_target == "sm_90a"
    assert Request((1, 2, 3), target="sm_100a").resolved_target == "sm_100a"
    with pytest.raises(TargetError):
        _ = Request((1, 2, 3), target="sm_100").resolved_target


def shown(renderable: object) -> str:
    """What rich prints of it."""
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_histogram_leaves_out_what_does_not_occur_and_sorts_the_rest() -> None:
    lines = shown(histogram_table({"a": 5, "b": 0, "c": 50, "d": 7})).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["c", "50"], ["d", "7"], ["a", "5"]]
    assert "62 instructions" in lines[-1]
    assert "b" not in [line.split()[0] for line in lines]


@pytest.mark.parametrize(
    ("encoding", "bar"), [("utf-8", "\u2588" * 40), ("ascii", "#" * 40), ("latin-1", "#" * 40)]
)
def test_bars_are_drawn_in_characters_the_encoding_has(encoding: str, bar: str) -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=output, width=100).print(histogram_table({"a": 1, "b": 50}))
    output.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    assert bar in lines[1]
    assert len(lines[2].split()[-1]) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_a_poor_encoding(encoding: str, tmp_path: Path) -> None:
    here = {"PYTHONIOENCODING": encoding, "CUTEGEMM_CACHE_DIR": str(tmp_path / "\u2713")}
    done = run("inspect", "64", "64", "64", "--target", "sm_90a", **here)
    assert (done.returncode, done.stderr) == (0, "")
    assert "###" in done.stdout
    listed = run("cache", **here)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "\\u2713" in listed.stdout


def test_an_empty_histogram_is_no_error() -> None:
    assert "0 instructions" in shown(histogram_table({"a": 0}))


def report_of(histogram: dict[str, int] | None, spills: int = 0) -> Report:
    """A report on a kernel that never was."""
    artifact = SimpleNamespace(
        resources=SimpleNamespace(registers=168, spills=spills, smem_bytes=230_000, stages=4, threads=384),
        kernel_name="gemm_0",
        from_cache=False,
        build_seconds=0.9,
        cubin=b"1234",
        ptx=".version",
        sass="HGMMA;",
    )
    return Report("the problem", "the [config]", "A tma", "sm_90a", artifact, histogram, "no nvdisasm here")  # type: ignore[arg-type]


def test_the_report_names_every_resource() -> None:
    console = Console(file=io.StringIO(), width=200)
    report_of({"WGMMA": 3}, spills=16).render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "the problem",
        "the [config]",
        "gemm_0 for sm_90a, compiled in 0.90 s",
        "168 per thread, 384 threads",
    ):
        assert part in text
    assert "16 bytes per thread" in text
    assert "230,000 bytes, 4 stages" in text
    assert "WGMMA" in text


def test_without_a_disassembler_the_rest_is_still_shown(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    report = report_of(None)
    report.render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no nvdisasm here" in text
    assert "none" in text
    assert [path.name for path in inspection.save(report, tmp_path / "new")] == ["kernel.ptx", "kernel.cubin"]


def test_save_into_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ProblemError, match=r"cannot be saved in .*; name a folder"):
            inspection.save(report_of(None), target)


def test_save_writes_all_three(tmp_path: Path) -> None:
    paths = inspection.save(report_of({"WGMMA": 1}), tmp_path)
    assert {path.name: path.read_bytes() for path in paths} == {
        "kernel.ptx": b".version",
        "kernel.cubin": b"1234",
        "kernel.sass": b"HGMMA;",
    }


def test_inspect_compiles_and_shows_a_hopper_kernel(tmp_path: Path) -> None:
    done = run("inspect", "4096", "4096", "7168", "--target", "sm_90a", "--save", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("registers", "spills", "shared memory", "WGMMA", "TMA load", "mbarrier", "sm_90a"):
        assert word in done.stdout
    assert "spills         none" in done.stdout
    assert ".target sm_90a" in (tmp_path / "kernel.ptx").read_text()
    assert (tmp_path / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "HGMMA" in (tmp_path / "kernel.sass").read_text()


def test_ptx_alone_goes_to_standard_output_and_the_reader_may_leave() -> None:
    words = "inspect 512 512 512 --target sm_90a --tile 128x128x64 --ptx"
    command = f"{sys.executable} -m cutegemm {words} | head -n 3"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_explain_for_a_gpu_that_is_not_here() -> None:
    done = run("explain", "4096", "576", "7168", "--target", "sm_90a", "--gpu", "h20")
    assert (done.returncode, "on H20 (78 SMs, sm_90a)" in done.stdout) == (0, True)
    done = run("explain", "64", "64", "64", "--target", "sm_90a", "--gpu", "H20", "--schedule", "RowMajor")
    assert (done.returncode, "say how many --workers" in done.stderr) == (2, True)


def test_explain_says_why() -> None:
    done = run("explain", "4096", "576", "7168", "--target", "sm_90a")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 3


def test_cache_lists_and_clears(tmp_path: Path) -> None:
    here = {"CUTEGEMM_CACHE_DIR": str(tmp_path), "COLUMNS": "200"}
    assert "0 kernels" in run("cache", **here).stdout
    assert run("inspect", "256", "256", "256", "--target", "sm_90a", **here).returncode == 0
    listed = run("cache", **here).stdout
    assert "1 kernel," in listed
    words = ("sm_90a", "bfloat16 -> bfloat16", "A k-major", "stages", "Persistent")
    assert [word for word in words if word not in " ".join(listed.split())] == []
    assert "1 kernel removed" in run("cache", "--clear", **here).stdout
    assert "0 kernels" in run("cache", **here).stdout


def test_bench_takes_its_own_arguments_and_its_exit_code_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cutegemm.bench

    seen = []

    def run_bench(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 3

    monkeypatch.setattr(cutegemm.bench, "main", run_bench)
    assert cli.main(["bench", "64", "128", "256", "--quick"]) == 3
    assert seen[0].sizes == [64, 128, 256]
    assert seen[0].quick is True
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "--suite" in capsys.readouterr().out


def test_doctor_in_json() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[-1]["subject"] == "in short"


def test_importing_the_package_imports_neither_the_dsl_nor_a_library_it_is_compared_with() -> None:
    code = (
        "import sys, cutegemm, cutegemm.cli, cutegemm.doctor, cutegemm.bench; "
        "unwanted = {'cutlass', 'quack', 'deep_gemm'} & {name.split('.')[0] for name in sys.modules}; "
        "sys.exit(', '.join(unwanted) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
