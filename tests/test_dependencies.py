"""The table of required packages, and what is said of one that cannot be imported."""

import re
import tomllib
from pathlib import Path

import pytest

from cutegemm.dependencies import REQUIREMENTS, missing_dependency

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def test_the_table_agrees_with_the_package() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    declared = {*project["dependencies"], *project["optional-dependencies"]["fuzz"]}
    assert set(REQUIREMENTS.values()) <= declared


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REQUIREMENTS, "no_such_module", "no-such-package-of-cutegemm>=1")
    said = str(missing_dependency(ModuleNotFoundError("no", name="no_such_module.part")))
    assert re.fullmatch(
        r"no-such-package-of-cutegemm \(the module no_such_module\.part\) is not installed, .* "
        r'pip install "no-such-package-of-cutegemm>=1"',
        said,
    )


def test_a_package_that_is_installed_but_broken() -> None:
    said = str(missing_dependency(ModuleNotFoundError("no", name="torch")))
    assert "although torch 2" in said
    assert 'pip install --force-reinstall "torch>=2.9"' in said


def test_somebody_elses_module_is_not_ours_to_explain() -> None:
    error = ModuleNotFoundError("no", name="elsewhere")
    with pytest.raises(ModuleNotFoundError) as caught:
        missing_dependency(error)
    assert caught.value is error
