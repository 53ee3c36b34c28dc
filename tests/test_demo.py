"""The demo: what it shows without a GPU, and that a wrong result is not passed over."""

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from cutegemm.errors import DeviceError
from cutegemm.hardware import gpu_by_name


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/demo.py as a module."""
    path = Path(__file__).resolve().parent.parent / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Small, so that a GPU test is quick; the kernel is the same for every size.
    monkeypatch.setattr(module, "M", 512)
    monkeypatch.setattr(module, "N", 768)
    monkeypatch.setattr(module, "K", 1024)
    return module


@pytest.fixture
def console(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Console:
    """The console the demo prints on, readable afterwards."""
    written = Console(file=io.StringIO(), width=300)
    monkeypatch.setattr(demo, "Console", lambda: written)
    return written


def text_of(console: Console) -> str:
    """What was printed."""
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_gpu_it_compiles_and_says_what_it_did_not_do(
    demo: ModuleType, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> None:
        raise DeviceError("there is none")

    monkeypatch.setattr(demo, "current_gpu", no_gpu)
    assert demo.main() == 0
    text = text_of(console)
    for word in ("compiled for sm_90a", "registers", "WGMMA", "compiled for sm_100a"):
        assert word in text
    assert "not run, not checked, not timed: there is none" in text


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_a_wrong_result_is_a_failure(
    demo: ModuleType, console: Console, monkeypatch: pytest.MonkeyPatch, right: bool, code: int
) -> None:
    monkeypatch.setattr(demo, "current_gpu", lambda: gpu_by_name("H200"))
    monkeypatch.setattr(demo, "run_on_gpu", lambda _: right)
    assert demo.main() == code
    assert "on the H200 (132 SMs, sm_90a)" in text_of(console)


def test_the_error_is_relative_to_the_truth(demo: ModuleType) -> None:
    truth = torch.tensor([[3.0, 4.0]])
    assert demo.relative_error(truth, truth) == 0
    assert demo.relative_error(torch.tensor([[3.0, 3.0]]), truth) == pytest.approx(0.2)
    assert demo.relative_error(torch.tensor([[float("nan"), 4.0]]), truth) != 0


@pytest.mark.gpu
def test_on_the_gpu_it_is_right(demo: ModuleType, console: Console) -> None:
    assert demo.main() == 0, text_of(console)
    text = text_of(console)
    assert "right" in text
    assert "TFLOP/s" in text
