"""Shared pytest set-up: a test marked ``gpu`` is skipped, with the reason, where no supported GPU is."""

import os
import tempfile
from functools import cache
from pathlib import Path

import hypothesis
import pytest

# A machine that is busy with something else makes no test wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@cache
def _why_no_gpu() -> str | None:
    """The reason why GPU tests cannot run on this machine, or None if they can."""
    from cutegemm.compile import BUILT_TARGETS
    from cutegemm.errors import DeviceError, TargetError
    from cutegemm.hardware import current_gpu

    try:
        gpu = current_gpu()
    except (DeviceError, TargetError) as error:
        return str(error)
    return None if gpu.target in BUILT_TARGETS else f"there are no {gpu.target} kernels to run on {gpu.name}"


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
