"""The examples of epilogues run, here on the emulator, and find their results right."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def loaded(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["fused_mlp", "dropout_residual", "row_amax"])
def test_the_example_finds_its_results_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert loaded(name).main() == 0
    assert "error" in capsys.readouterr().out


def test_an_example_would_notice_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = loaded("fused_mlp")
    monkeypatch.setattr(mlp.library, "swiglu_keeping", mlp.library.geglu_keeping)
    assert mlp.main() == 1
