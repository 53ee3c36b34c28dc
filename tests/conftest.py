"""Shared pytest set-up.

A test marked ``gpu`` is skipped, with the reason, where no supported GPU is. Of a test marked ``sample(n)``
every n-th of its parameters is run, which for stacked lists still shows all values of each; all of them are
run with CUTEGEMM_EVERY_TEST=1, or where the test is named. For nearly every parameter a kernel is compiled,
which is what a run's time is made of.
"""

import gc
import os
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

# As many processes of tests as CPUs: torch's threads would only get in each other's way. Read at the import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

EVERY_TEST = os.environ.get("CUTEGEMM_EVERY_TEST", "0") not in ("", "0")

# The files that take longest, the longest first: a process that began one of them last would end long after
# the others. pytest-xdist hands out whole files, in this order with --no-loadscope-reorder.
LONG_FILES = (
    "test_epilogue_emulated.py",
    "test_legal_space.py",
    "test_blackwell.py",
    "test_emulator_fuzz.py",
    "test_epilogue_library.py",
    "test_blackwell_schedules.py",
    "test_blackwell_epilogue.py",
    "test_realigned.py",
    "test_artifact.py",
    "test_blackwell_code.py",
    "test_epilogue_random.py",
    "test_fuzz.py",
    "test_order_code.py",
    "test_feeds.py",
    "test_emulator_processes.py",
    "test_emulate_command.py",
    "test_cli.py",
    "test_sweep_programs.py",
)

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is sampled, skips what needs a GPU where there is none, puts long files first."""
    _leave_out_what_is_sampled(config, items)
    _skip_without_a_gpu(items)
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def _leave_out_what_is_sampled(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)
    if EVERY_TEST or named:  # who names a test gets it
        return
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and item.get_closest_marker("gpu") is None:
            function = item.nodeid.partition("[")[0]
            number, seen[function] = seen[function], seen[function] + 1
            every, first = (*mark.args, 0)[:2]
            if number % every != first:
                left_out.append(item)
                continue
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _skip_without_a_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    reason = _why_no_gpu()
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What is there now stays: the collector need not walk torch and the compiler again and again."""
    gc.collect()
    gc.freeze()


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
