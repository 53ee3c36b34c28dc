"""doctor's checks on injected facts: no GPU, no driver and no broken installation needed."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cutegemm.doctor import checks, diagnose, doctor, exit_code, explain_error, machine, render, to_json
from cutegemm.doctor.checks import Finding
from cutegemm.doctor.machine import (
    CacheState,
    DslState,
    GpuState,
    Machine,
    Process,
    TorchState,
    parse_nvidia_smi,
)

H200 = GpuState(0, "NVIDIA H200", (9, 0), 143_771, smem_per_block=232_448)
PACKAGES = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-core": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    "apache-tvm-ffi": "0.1.15",
}
GOOD = Machine(
    python=(3, 12, 3),
    system="Linux",
    processor="x86_64",
    torch=TorchState("2.11.0+cu130", "13.0", 1),
    dsl=DslState("/site/cutlass", has_cute=True),
    cache=CacheState("/home/me/.cache/cutegemm", used_bytes=1_500_000, entries=12, free_bytes=1 << 40),
    packages=PACKAGES,
    driver="580.159.04",
    driver_cuda=(13, 0),
    gpus=(H200,),
    nvdisasm="/site/nvidia/cu13/bin/nvdisasm",
    built_targets=("sm_90a", "sm_100a"),
    c_compiler="/usr/bin/cc",
)
NO_GPU = replace(GOOD, torch=TorchState("2.13.0+cpu"), driver=None, driver_cuda=None, gpus=())


def problems(findings: list[Finding]) -> list[Finding]:
    """Those that are problems."""
    return [finding for finding in findings if finding.state == "problem"]


def test_a_good_machine_has_nothing_to_remedy() -> None:
    findings = diagnose(GOOD)
    assert [finding for finding in findings if finding.state != "ok"] == []
    assert {f.subject for f in findings} >= {"python", "torch", "dsl", "driver", "gpu 0", "cache", "nvdisasm"}
    assert findings[-1].sentence == "Runs sm_90a kernels, only compiles sm_100a kernels."
    assert exit_code(findings) == 0


def test_without_a_gpu_it_compiles_for_both_and_says_so() -> None:
    findings = diagnose(NO_GPU)
    assert problems(findings) == []
    assert findings[-1].sentence == "Only compiles sm_90a and sm_100a kernels."
    (driver,) = checks.check_driver(NO_GPU)
    assert (driver.state, driver.prevents) == ("note", "running")
    assert "cannot run on this machine" in driver.sentence
    assert exit_code(findings) == 0


# (what is changed, the check, state, what it prevents, in the sentence, in the remedy)
Case = tuple[Machine, Callable[[Machine], list[Finding]], str, str, str, str]
CASES: dict[str, Case] = {
    "python too new": (
        replace(GOOD, python=(3, 13, 1)),
        checks.check_python, "problem", "compiling", "3.13.1", "Python 3.12",
    ),
    "not linux": (replace(GOOD, system="Darwin"), checks.check_python, "note", "nothing", "Darwin", "Linux"),
    "cpu torch on a gpu machine": (
        replace(GOOD, torch=TorchState("2.13.0+cpu")),
        checks.check_torch, "problem", "running", "CPU build", "CUDA build of torch",
    ),
    "gpu hidden": (
        replace(GOOD, torch=TorchState("2.11.0", "13.0"), visible_devices=""),
        checks.check_torch, "problem", "running", "CUDA_VISIBLE_DEVICES is ''", "Unset",
    ),
    "driver too old for torch": (
        replace(GOOD, torch=TorchState("2.11.0", "13.0"), driver_cuda=(12, 9)),
        checks.check_torch, "problem", "running",
        "built with CUDA 13.0, the driver supports 12.9", "Update the driver",
    ),
    "torch sees none for no reason known": (
        replace(GOOD, torch=TorchState("2.11.0", "13.0")),
        checks.check_torch, "problem", "running", "torch 2.11.0 none", "cuda()",
    ),
    "no cutlass": (
        replace(GOOD, dsl=DslState(None), packages={}),
        checks.check_dsl, "problem", "compiling", "no module `cutlass`.", "nvidia-cutlass-dsl==4.8",
    ),
    "only nvidia-cutlass": (
        replace(GOOD, dsl=DslState(None), packages={"nvidia-cutlass": "4.2.0"}),
        checks.check_dsl, "problem", "compiling", "nvidia-cutlass is installed, but that is another package",
        "nvidia-cutlass-dsl==4.8",
    ),
    "another package named cutlass": (
        replace(GOOD, dsl=DslState("/site/cutlass"), packages={**PACKAGES, "cutlass": "0.1"}),
        checks.check_dsl, "problem", "compiling",
        "/site/cutlass is not the CuTe DSL", "pip uninstall -y cutlass",
    ),
    "a folder named cutlass": (
        replace(GOOD, dsl=DslState("/here/cutlass"), packages={}),
        checks.check_dsl, "problem", "compiling", "/here/cutlass is not the CuTe DSL", "Move it away",
    ),
    "untested dsl": (
        replace(GOOD, packages=dict.fromkeys(PACKAGES, "4.9.0")),
        checks.check_dsl, "problem", "compiling",
        "4.9.0 is installed; cutegemm is tested with 4.8", "==4.8.*",
    ),
    "4.80 is not 4.8": (
        replace(GOOD, packages=dict.fromkeys(PACKAGES, "4.80.0")),
        checks.check_dsl, "problem", "compiling", "4.80.0 is installed", "==4.8.*",
    ),
    "left-over part": (
        replace(GOOD, packages={**PACKAGES, "nvidia-cutlass-dsl-libs-cu13": "4.6.0"}),
        checks.check_dsl, "problem", "compiling", "with nvidia-cutlass-dsl-libs-cu13 4.6.0", "pip uninstall",
    ),
    "parts overwrite each other": (
        replace(GOOD, dsl=replace(GOOD.dsl, clashing_files=31)),
        checks.check_dsl, "problem", "compiling", "31 files in common", "pip uninstall",
    ),
    "both toolkits side by side": (
        replace(GOOD, packages={**PACKAGES, "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}),
        checks.check_dsl, "note", "nothing", "cu12 and cu13 are both installed", "Keep one",
    ),
    "libraries newer than the driver": (
        replace(
            GOOD,
            packages={k.replace("cu12", "cu13"): v for k, v in PACKAGES.items()},
            driver_cuda=(12, 9),
        ),
        checks.check_dsl, "problem", "compiling",
        "for CUDA 13, the driver supports CUDA 12.9", "Update the driver",
    ),
    "dsl does not import": (
        replace(GOOD, dsl=replace(GOOD.dsl, import_error="OSError: libcuda.so.1")),
        checks.check_dsl, "problem", "compiling", "OSError: libcuda.so.1", "pip uninstall",
    ),
    "arch variable without its a": (
        replace(GOOD, dsl=replace(GOOD.dsl, arch_variable="sm_90")),
        checks.check_dsl, "note", "nothing", "CUTE_DSL_ARCH=sm_90", "Unset",
    ),
    "no tvm-ffi": (
        replace(GOOD, packages={k: v for k, v in PACKAGES.items() if "tvm" not in k}),
        checks.check_tvm_ffi, "problem", "compiling", "is missing", "pip install",
    ),
    "driver without libcuda": (
        replace(GOOD, driver_cuda=None),
        checks.check_driver, "problem", "running", "libcuda.so.1 cannot be loaded", "container",
    ),
    "driver too old for Hopper": (
        replace(GOOD, driver="510.1", driver_cuda=(11, 6)),
        checks.check_driver, "problem", "running",
        "too old for NVIDIA H200, whose sm_90a code needs CUDA 11.8",
        "575.51.03",
    ),
    "driver too old for Blackwell": (
        replace(GOOD, driver_cuda=(12, 6), gpus=(replace(H200, name="NVIDIA B200", capability=(10, 0)),)),
        checks.check_driver, "problem", "running", "sm_100a code needs CUDA 12.8", "575.51.03",
    ),
    "driver older than documented": (
        replace(GOOD, driver_cuda=(12, 4)), checks.check_driver, "note", "nothing", "12.9", "575.51.03",
    ),
    "gpu of another architecture": (
        replace(GOOD, gpus=(replace(H200, name="NVIDIA L40S", capability=(8, 9)),)),
        checks.check_gpus, "problem", "running",
        "NVIDIA L40S, compute capability 8.9: no cutegemm kernel runs",
        "9.0 (sm_90a) or 10.0 (sm_100a)",
    ),
    "gpu that kernels are yet to be written for": (
        replace(
            GOOD, gpus=(replace(H200, name="NVIDIA B200", capability=(10, 0)),), built_targets=("sm_90a",)
        ),
        checks.check_gpus, "problem", "running", "has no sm_100a kernels yet", "sm_90a",
    ),
    "gpu of unknown capability": (
        replace(GOOD, gpus=(replace(H200, capability=None),)),
        checks.check_gpus, "problem", "running", "does not tell its compute capability", "driver",
    ),
    "little shared memory": (
        replace(GOOD, gpus=(replace(H200, smem_per_block=101_376),)),
        checks.check_gpus, "problem", "running", "101,376 bytes of shared memory", "fewer stages",
    ),
    "somebody else on the gpu": (
        replace(GOOD, gpus=(replace(H200, processes=(Process(4711, "python3", 30_000),)),)),
        checks.check_gpus, "note", "nothing", "python3 (pid 4711, 30000 MiB); timings", "before measuring",
    ),
    "exclusive and taken": (
        replace(
            GOOD,
            gpus=(
                replace(H200, compute_mode="Exclusive_Process", processes=(Process(4711, "python3", None),)),
            ),
        ),
        checks.check_gpus, "problem", "running", "python3 (pid 4711), and its compute mode", "stop it",
    ),
    "prohibited": (
        replace(GOOD, gpus=(replace(H200, compute_mode="Prohibited"),)),
        checks.check_gpus, "problem", "running", "no process may use it", "nvidia-smi -c",
    ),
    "taken from another container": (
        replace(GOOD, gpus=(replace(H200, used_mib=120_000),)),
        checks.check_gpus, "note", "nothing", "117 of 140 GiB", "nvidia-smi",
    ),
    "read-only cache": (
        replace(GOOD, cache=replace(GOOD.cache, error="Read-only file system")),
        checks.check_cache, "note", "nothing",
        "cannot be written (Read-only file system)", "CUTEGEMM_CACHE_DIR",
    ),
    "full disk": (
        replace(GOOD, cache=replace(GOOD.cache, free_bytes=5_000_000)),
        checks.check_cache, "note", "nothing", "has 5 MB left", "cache --clear",
    ),
    "no c compiler": (
        replace(GOOD, c_compiler=None),
        checks.check_loading, "note", "nothing", "No C compiler", "gcc",
    ),
    "a c compiler that does not link": (
        replace(GOOD, link_error="cc: error trying to exec 'collect2'"),
        checks.check_loading, "note", "nothing", "/usr/bin/cc cannot link kernels (cc: error trying", "gcc",
    ),
    "a cache folder of nobody": (
        replace(GOOD, cache=CacheState("", unknown="CUTEGEMM_CACHE_DIR=~nobody/x begins with ...")),
        checks.check_cache, "problem", "compiling", "CUTEGEMM_CACHE_DIR=~nobody/x begins", "full path",
    ),
    "no torch": (
        replace(GOOD, torch=TorchState(None), gpus=()),
        checks.check_torch, "problem", "compiling", "no module `torch`", 'pip install "torch>=',
    ),
    "no nvdisasm": (
        replace(GOOD, nvdisasm=None),
        checks.check_nvdisasm, "note", "nothing", "No nvdisasm", "pip install nvidia-cuda-nvdisasm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_trouble_is_named_with_its_remedy(case: Case) -> None:
    changed, check, state, prevents, sentence, remedy = case
    matching = [f for f in check(changed) if sentence in f.sentence]
    assert matching, [f.sentence for f in check(changed)]
    assert (matching[0].state, matching[0].prevents) == (state, prevents)
    assert remedy in matching[0].remedy
    assert [f for f in check(GOOD) if sentence in f.sentence] == [], "said of a good machine too"
    assert exit_code(check(changed)) == int(prevents == "compiling")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_whatever_is_not_well_has_a_remedy(case: Case) -> None:
    assert [f for f in diagnose(case[0])[:-1] if f.state != "ok" and not f.remedy] == []


def test_trouble_with_one_gpu_leaves_the_other() -> None:
    other = replace(H200, index=1, name="NVIDIA A100", capability=(8, 0))
    findings = diagnose(replace(GOOD, gpus=(other, replace(H200, index=0))))
    assert findings[-1].sentence.startswith("Runs sm_90a kernels")


def test_what_prevents_running_or_compiling_shows_in_the_summary() -> None:
    hidden = diagnose(CASES["gpu hidden"][0])
    assert hidden[-1].sentence == "Only compiles sm_90a and sm_100a kernels."
    broken = diagnose(CASES["no cutlass"][0])
    assert broken[-1].state == "problem"
    assert "Nothing can be compiled" in broken[-1].sentence
    unwritten = diagnose(CASES["gpu that kernels are yet to be written for"][0])
    assert unwritten[-1].sentence == "Only compiles sm_90a kernels."
    blackwell = replace(GOOD, gpus=(replace(H200, name="NVIDIA B200", capability=(10, 0)),))
    assert diagnose(blackwell)[-1].sentence == "Runs sm_100a kernels, only compiles sm_90a kernels."


@pytest.mark.parametrize(
    ("message", "cause", "remedy"),
    [
        ("ptxas fatal : Unsupported .arch 'sm_90'", "final 'a'", "sm_90a"),
        ("OpError: expects arch to be sm_90a, but got sm_90", "final 'a'", "sm_90a"),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "another architecture",
            "target",
        ),
        ("Function was compiled for a different architecture?", "another architecture", "target"),
        (
            "ptxas error: uses too much shared memory (0x4b000 bytes, 0x38c00 max)",
            "232,448 bytes",
            "fewer stages",
        ),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is older", "575.51.03"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "Another process", "nvidia-smi"),
        ("torch.OutOfMemoryError: CUDA out of memory", "memory is full", "nvidia-smi"),
        ("ModuleNotFoundError: No module named 'cutlass'", "nvidia-cutlass-dsl", "pip install"),
    ],
)
def test_known_messages_are_explained(message: str, cause: str, remedy: str) -> None:
    known = explain_error(message)
    assert known is not None
    assert cause in known.cause
    assert remedy in known.remedy


def test_an_unknown_message_is_not_explained_away() -> None:
    assert explain_error("ZeroDivisionError: division by zero") is None


SMI_GPUS = """\
580.159.04, GPU-aaaa, 0, NVIDIA H200, 9.0, 143771, 1234, Default
580.159.04, GPU-bbbb, 1, NVIDIA H200, 9.0, 143771, 0, Exclusive_Process
"""


def test_nvidia_smi_is_read_and_this_process_left_out() -> None:
    users = "GPU-bbbb, 4711, /usr/bin/python3, 512\nGPU-bbbb, 5, a, b, [N/A]\n"
    users += f"GPU-aaaa, {os.getpid()}, python, 700\n"
    driver, gpus = parse_nvidia_smi(SMI_GPUS, users)
    assert driver == "580.159.04"
    assert gpus[0] == GpuState(0, "NVIDIA H200", (9, 0), 143_771, used_mib=1234)
    assert gpus[1].compute_mode == "Exclusive_Process"
    assert gpus[1].processes == (Process(4711, "/usr/bin/python3", 512), Process(5, "a,b", None))


def test_figures_nvidia_smi_does_not_know_are_no_figures() -> None:
    _, gpus = parse_nvidia_smi("470.1, GPU-a, 0, Old Card, [N/A], [N/A], [N/A], Default\n", "")
    assert gpus == (GpuState(0, "Old Card", None, 0),)
    assert parse_nvidia_smi("", "") == (None, ())


def fake_tool(folder: Path, name: str, script: str) -> None:
    """An executable shell script on a PATH of its own."""
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(
        tmp_path,
        "nvidia-smi",
        f"""case "$1" in
--query-gpu=*) printf '%s' '{SMI_GPUS}' ;;
--query-compute-apps=*) echo 'GPU-aaaa, 99, x, 5' ;;
*) exit 1 ;;
esac""",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver, gpus = machine.gpus_of_nvidia_smi()
    assert driver == "580.159.04"
    assert [gpu.processes for gpu in gpus] == [(Process(99, "x", 5),), ()]


def test_a_failing_nvidia_smi_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.gpus_of_nvidia_smi() == (None, ())


def in_a_fresh_process(code: str, folder: Path) -> str:
    """What ``code`` prints in a new interpreter started in ``folder``, where it looks for modules first."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def test_a_package_that_took_the_dsls_name_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("")
    code = "from cutegemm.doctor.machine import dsl_state; s = dsl_state(); print(s.origin, s.has_cute)"
    assert in_a_fresh_process(code, tmp_path).split() == [str(tmp_path / "cutlass"), "False"]


def test_doctor_runs_where_the_dsl_does_not(tmp_path: Path) -> None:
    code = """
import sys
sys.path = [p for p in sys.path if "nvidia_cutlass_dsl" not in p]  # as if it had never been installed
from cutegemm.cli import main
print(main(["doctor", "--json"]))
"""
    *report, status = in_a_fresh_process(code, tmp_path).splitlines()
    assert status == "1"
    findings = [Finding(**entry) for entry in json.loads("".join(report))]
    assert [f.sentence for f in findings if f.subject == "dsl"] == ["There is no module `cutlass`."]
    assert "Nothing can be compiled" in findings[-1].sentence


def test_doctor_runs_where_the_dsl_is_of_another_release(tmp_path: Path) -> None:
    info = tmp_path / "nvidia_cutlass_dsl-4.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.9.0\n")
    code = "from cutegemm.cli import main; print(main(['doctor', '--json']))"
    *report, status = in_a_fresh_process(code, tmp_path).splitlines()
    assert status == "1"
    (finding,) = [
        entry
        for entry in json.loads("".join(report))
        if "is installed; cutegemm is tested" in entry["sentence"]
    ]
    assert finding["sentence"].startswith("nvidia-cutlass-dsl 4.9.0")


def test_the_dsl_here_is_found_whole() -> None:
    """This environment's own: the tests compile with it, so doctor must find nothing wrong with it."""
    state = machine.dsl_state()
    assert state.has_cute
    assert state.import_error is None
    assert state.clashing_files == 0
    assert machine.installed_versions()["nvidia-cutlass-dsl"].startswith("4.8")


def test_clashing_parts_are_counted(tmp_path: Path) -> None:
    for variant, own in (("cu12", "x12.so"), ("cu13", "x13.so")):
        info = tmp_path / f"nvidia_cutlass_dsl_libs_{variant}-4.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: nvidia-cutlass-dsl-libs-{variant}\nVersion: 4.2.0\n"
        )
        (info / "RECORD").write_text(f"dsl/shared.so,,\ndsl/{own},,\n")
    code = "from cutegemm.doctor.machine import clashing_files; print(clashing_files())"
    assert in_a_fresh_process(code, tmp_path).strip() == "1"


def test_the_cache_folder_is_looked_at_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there"
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(folder))
    state = machine.cache_state()
    assert (state.folder, state.error, state.entries) == (str(folder), None, 0)
    assert state.free_bytes
    assert not folder.parent.exists()


def test_a_cache_folder_that_is_a_file_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "file"))
    (finding,) = checks.check_cache(replace(GOOD, cache=machine.cache_state()))
    assert finding.state == "note"
    assert "cannot be written" in finding.sentence


def test_a_cache_folder_of_an_unknown_user_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", "~no-such-user-here/x")
    (finding,) = checks.check_cache(replace(GOOD, cache=machine.cache_state()))
    assert "CUTEGEMM_CACHE_DIR=~no-such-user-here/x" in finding.sentence


def test_linking_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.c_compiler() is not None:
        assert machine.link_error() is None
    fake_tool(tmp_path, "cc", "echo 'cc: no linker here' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.link_error() == "cc: no linker here"


def test_nothing_claims_that_kernels_compile_where_the_dsl_is_missing() -> None:
    without = replace(NO_GPU, dsl=DslState(None), packages={}, link_error="the DSL's runtime is missing")
    assert [f.sentence for f in diagnose(without) if "can compile" in f.sentence] == []


def test_the_report_shows_each_sentence_and_remedy() -> None:
    findings = diagnose(CASES["gpu of another architecture"][0])
    console = Console(file=io.StringIO(), width=400)
    render(findings, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for finding in findings:
        assert finding.sentence in shown
        assert finding.remedy in shown


def test_json_carries_everything() -> None:
    findings = diagnose(NO_GPU)
    assert [Finding(**entry) for entry in json.loads(to_json(findings))] == findings


def test_doctor_runs_on_this_machine() -> None:
    console = Console(file=io.StringIO(), width=200)
    assert doctor(as_json=True, console=console) == 0
    findings = json.loads(console.file.getvalue())  # type: ignore[attr-defined]
    assert findings[-1]["subject"] == "in short"
    assert "compiles" in findings[-1]["sentence"]


def test_doctor_explains_a_message() -> None:
    console = Console(file=io.StringIO(), width=400)
    assert doctor(error="no kernel image is available", console=console) == 0
    assert "another architecture" in console.file.getvalue()  # type: ignore[attr-defined]
    assert doctor(error="never heard of", console=console) == 1
