"""The environment set-up's decisions, without making an environment."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def setup_venv() -> ModuleType:
    """tools/setup_venv.py as a module; it is a script and no part of the package."""
    path = Path(__file__).resolve().parent.parent / "tools" / "setup_venv.py"
    spec = importlib.util.spec_from_file_location("setup_venv", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_venv"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_torch_is_chosen_by_what_the_machine_has(setup_venv: ModuleType) -> None:
    cuda_torch = setup_venv.HostTorch("2.11.0+cu130", "13.0", "/site")
    cpu_torch = setup_venv.HostTorch("2.13.0+cpu", None, "/site")
    assert setup_venv.choose_torch(gpu=False, host=None) == "cpu"
    assert setup_venv.choose_torch(gpu=False, host=cuda_torch) == "cpu"
    assert setup_venv.choose_torch(gpu=True, host=cuda_torch) == "host"
    assert setup_venv.choose_torch(gpu=True, host=cpu_torch) == "cuda"
    assert setup_venv.choose_torch(gpu=True, host=None) == "cuda"


def test_a_cpu_build_is_asked_for_by_name_before_anything_larger(setup_venv: ModuleType) -> None:
    first, second, last = setup_venv.cpu_torch_attempts("x86_64")
    assert first == [f"torch=={setup_venv.TORCH_VERSION}+cpu"]
    assert second[0] == first[0]
    assert setup_venv.CPU_INDEX in second
    assert last == [f"torch=={setup_venv.TORCH_VERSION}"]
    assert setup_venv.cpu_torch_attempts("aarch64") == [last]


def test_the_torch_of_this_interpreter_is_found(setup_venv: ModuleType) -> None:
    import torch

    host = setup_venv.host_torch(sys.executable)
    assert host == setup_venv.HostTorch(
        torch.__version__, torch.version.cuda, str(Path(torch.__file__).parent.parent)
    )
    assert setup_venv.host_torch("/no/such/python") is None


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", True),
        ("echo 'No devices found.'", False),
        ("exit 9", False),
    ],
)
def test_a_gpu_is_what_nvidia_smi_lists(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert setup_venv.has_nvidia_gpu() is found


def test_without_nvidia_smi_there_is_no_gpu(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_venv.has_nvidia_gpu() is False


def test_the_hosts_torch_is_linked_by_a_path_file(setup_venv: ModuleType, tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    host = setup_venv.HostTorch("2.11.0+cu130", "13.0", "/opt/torch/site-packages")
    setup_venv.install_torch("host", host, tmp_path, [], tmp_path / "log")
    linked = (site / setup_venv.HOST_TORCH_PTH).read_text()
    assert linked == "import site; site.addsitedir('/opt/torch/site-packages')\n"
    with pytest.raises(setup_venv.SetupError, match="cannot import torch"):
        setup_venv.install_torch("host", None, tmp_path, [], tmp_path / "log")


def test_packages_of_the_host_are_seen_from_the_environment(setup_venv: ModuleType, tmp_path: Path) -> None:
    """A real environment without pip, and a host whose one package lies behind a path file of its own."""
    host_site = tmp_path / "host"
    (host_site / "inner").mkdir(parents=True)
    (host_site / "outer_module.py").write_text("")
    (host_site / "inner" / "inner_module.py").write_text("")
    (host_site / "inner.pth").write_text("inner\n")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    host = setup_venv.HostTorch("2.11.0+cu130", "13.0", str(host_site))
    setup_venv.install_torch("host", host, venv, [], tmp_path / "log")
    subprocess.run(
        [str(venv / "bin" / "python"), "-c", "import outer_module, inner_module"], check=True, timeout=60
    )


def fake_pip(folder: Path, succeeds_at: int) -> list[str]:
    """A pip that notes each call and succeeds from the given call on."""
    script = folder / "pip.sh"
    script.write_text(f'echo "$@" >> {folder}/calls\n[ $(wc -l < {folder}/calls) -ge {succeeds_at} ]\n')
    return ["sh", str(script)]


def test_the_next_source_is_tried_when_one_has_no_cpu_build(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_venv.platform, "machine", lambda: "x86_64")
    setup_venv.install_torch("cpu", None, tmp_path, fake_pip(tmp_path, 2), tmp_path / "log")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0] == f"install torch=={setup_venv.TORCH_VERSION}+cpu"
    assert setup_venv.CPU_INDEX in calls[1]


def test_when_no_source_has_it_the_error_shows_why(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_venv.platform, "machine", lambda: "x86_64")
    with pytest.raises(setup_venv.SetupError, match=r"(?s)failed: sh .*whole output is in .*log"):
        setup_venv.install_torch("cpu", None, tmp_path, fake_pip(tmp_path, 99), tmp_path / "log")


def test_a_failed_step_shows_the_end_of_its_output(
    setup_venv: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with pytest.raises(setup_venv.SetupError, match="a reason") as caught:
        setup_venv.run_step("step", ["sh", "-c", "echo a reason; exit 3"], log=log)
    assert str(log) in str(caught.value)
    setup_venv.run_step("step", ["sh", "-c", "echo fine"], log=log)
    assert "fine" in log.read_text()
    said = capsys.readouterr().out
    assert "step: failed" in said
    assert "step: done" in said


def test_a_half_made_environment_is_made_anew(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/no/such/python")
    (venv / "left-over").write_text("")
    steps = []

    def note(title: str, command: list[str], *, log: Path) -> None:
        steps.append(title)
        if title == "create":
            subprocess.run([*command, "--without-pip"], check=True, timeout=120)

    monkeypatch.setattr(setup_venv, "run_step", note)
    setup_venv.make_venv(venv, "cpu")
    assert steps == ["create", "pip", "torch for the CPU", "cutegemm and what it needs"]
    assert not (venv / "left-over").exists()


def test_an_unsuitable_python_is_refused(
    setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_venv.sys, "version_info", (3, 13, 0))
    assert setup_venv.main([]) == 1
    assert "needs Python 3.11 or 3.12" in capsys.readouterr().err
