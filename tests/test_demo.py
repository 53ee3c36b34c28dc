"""The demo: what it shows without a GPU, and that a wrong result is not passed over."""

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from cutegemm.errors import DeviceError
from cutegemm.hardware import gpu_by_name


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
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
    monkeypatch.setattr(module, "EMULATED", (256, 256, 128))
    monkeypatch.setattr(module, "TIMELINE", tmp_path / "demo" / "timeline.png")
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


def without_a_gpu(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the demo find none."""

    def no_gpu() -> None:
        raise DeviceError("there is none")

    monkeypatch.setattr(demo, "current_gpu", no_gpu)


def test_without_a_gpu_it_compiles_emulates_and_draws(
    demo: ModuleType, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    without_a_gpu(demo, monkeypatch)
    assert demo.main() == 0
    text = text_of(console)
    for word in ("compiled for sm_90a", "registers", "WGMMA", "compiled for sm_100a"):
        assert word in text
    assert "256 x 256 x 128 on the emulator" in text
    assert "not timed: there is none" in text
    assert "float64: right" in text
    assert f"what CTA 0 did when: {demo.TIMELINE}" in text
    assert demo.TIMELINE.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_that_nothing_is_drawn(
    demo: ModuleType, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_gpu(demo, monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert demo.main() == 0
    text = text_of(console)
    assert "float64: right" in text
    assert "no timeline drawn: " in text
    assert not demo.TIMELINE.exists()


def test_a_wrong_emulated_result_is_a_failure(
    demo: ModuleType, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_gpu(demo, monkeypatch)
    monkeypatch.setattr(demo, "run_on_cpu", lambda *_: False)
    assert demo.main() == 1


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
