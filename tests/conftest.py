"""Shared pytest set-up: a test marked ``gpu`` is skipped, with the reason, where no supported GPU is."""

import os
import tempfile
from functools import cache
from pathlib import Path

import pytest


@cache
def _why_no_gpu() -> str | None:
    """The reason why GPU tests cannot run on this machine, or None if they can."""
    import torch

    if torch.version.cuda is None:
        return f"needs a GPU: this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a GPU: torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) not in {(9, 0), (10, 0)}:
        return f"needs a GPU of compute capability 9.0 or 10.0: this one is {major}.{minor}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every ``gpu`` test where there is no GPU that could run it."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    reason = _why_no_gpu()
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_run() -> object:
    """A kernel cache of this run's own, so that tests neither read nor fill the user's."""
    before = os.environ.get("CUTEGEMM_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="cutegemm-tests-") as folder:
        os.environ["CUTEGEMM_CACHE_DIR"] = str(Path(folder) / "cache")
        yield
        if before is None:
            del os.environ["CUTEGEMM_CACHE_DIR"]
        else:
            os.environ["CUTEGEMM_CACHE_DIR"] = before
