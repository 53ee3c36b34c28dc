"""benchmarks/make_readme_table.py: the table, the markers, --check."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from bench_fakes import sample_report

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "make_readme_table.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_readme_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()
README = f"# Title\n\n{script.BEGIN}\nold\n{script.END}\n\nend\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """(result, README)."""
    result, readme = tmp_path / "result.json", tmp_path / "README.md"
    result.write_text(json.dumps(sample_report().to_json()))
    readme.write_text(README)
    return result, readme


def test_the_table_is_written_and_then_current(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result, readme = files
    words = [str(result), "--readme", str(readme)]
    assert script.main([*words, "--check"]) == 1
    assert readme.read_text() == README
    assert "is not what result.json says" in capsys.readouterr().out
    assert script.main(words) == 0
    assert script.main([*words, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith("\n\nend\n")
    assert "old" not in text
    assert script.main(words) == 0
    assert readme.read_text() == text


def test_rows_of_the_table() -> None:
    lines = script.table(sample_report().to_json()).splitlines()
    assert lines[0].startswith(
        "NVIDIA H200, driver 1.2, 2026-11-30; bfloat16 in, bfloat16 out, A k-major, B k-major."
    )
    assert "4.14 TB/s" in lines[0]
    assert "830 TFLOP/s" in lines[0]
    assert "Largest relative error against float32: 1.0e-03." in lines[0]
    table = lines[2:]
    assert table[0].split(" | ")[1:4] == ["µs", "TFLOP/s", "GB/s"]
    assert table[2] == "| 32 x 48 x 64 | 2.00 | 0 | 7 | 25% | 4.00 | 2.000 | 0.500 |"
    assert table[3] == "| 128 x 128 x 128 | failed | failed | failed | failed | 4.00 | failed | - |"
    assert table[4] == "| **geomean** |  |  |  |  |  | 2.000 | 0.500 |"
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("readme", ["no markers", f"{script.END}{script.BEGIN}", README + README])
def test_a_readme_without_its_markers(
    files: tuple[Path, Path], readme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result, path = files
    path.write_text(readme)
    assert script.main([str(result), "--readme", str(path)]) == 2
    assert "the README must hold" in capsys.readouterr().err
    assert path.read_text() == readme


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"shapes": []}'])
def test_a_file_that_is_no_result(files: tuple[Path, Path], text: str) -> None:
    result, path = files
    result.write_text(text)
    assert script.main([str(result), "--readme", str(path)]) == 2
    assert path.read_text() == README


def test_a_missing_result(files: tuple[Path, Path]) -> None:
    result, path = files
    result.unlink()
    assert script.main([str(result), "--readme", str(path), "--check"]) == 2
