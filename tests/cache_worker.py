"""What the processes of test_cache.py do that are started side by side."""

import contextlib
import multiprocessing
import os
import time
import warnings
from pathlib import Path

if multiprocessing.current_process().name != "MainProcess":
    import bare_package  # noqa: F401 - has to come before cutegemm

from cutegemm import cache as cache_module
from cutegemm.cache import KernelCache
from cutegemm.errors import StaleSourceError

PROCESSES = 8
ROUNDS = 50
UNLOCKED_ROUNDS = 10
FILES = {
    "kernel.ptx": b".version 8.8\n",
    "kernel.cubin": bytes(range(256)) * 50,
    "kernel.o": b"\x7fELF object",
}


def a_key(number: int = 0) -> str:
    """Some valid key."""
    return f"{number:064x}"


class Watch:
    """Stands in for the watch on the package's sources, which somebody may be editing while the tests run."""

    def __init__(self, stale: bool):
        self.stale = stale

    def check(self) -> None:
        """As SourceWatch.check."""
        if self.stale:
            raise StaleSourceError("changed")


def logged_build(log: Path, seconds: float) -> dict[str, bytes]:
    """Takes `seconds` and leaves one line per call in `log`."""
    with open(log, "ab", buffering=0) as file:
        file.write(f"{os.getpid()}\n".encode())
    time.sleep(seconds)
    return FILES


def ask_in_rounds(root, start, answers):
    """In every round, with the others: a fresh cache on the common folder, asked for that round's key.

    The last rounds go without the lock between processes.
    """
    cache_module.sources = Watch(stale=False)
    for number in range(ROUNDS + UNLOCKED_ROUNDS):
        if number >= ROUNDS:
            cache_module.process_lock = lambda path, timeout, what: contextlib.nullcontext()
        cache = KernelCache(root)
        start.wait(timeout=60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            entry = cache.get_or_build(a_key(number), lambda n=number: logged_build(root / f"{n}.log", 0.02))
        right = entry.files == FILES and entry.object_path.read_bytes() == FILES["kernel.o"]
        stats = cache.stats()
        answers.put((number, right, stats.compiled, stats.from_disk, [str(w.message) for w in caught]))


def tell_private_directory(queue):
    """Make this process's private folder and say where it is."""
    queue.put(cache_module.private_directory())
