"""The kernel cache: one build per key whatever happens at once, and right files whatever happens on disk."""

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
from cache_worker import (
    FILES,
    PROCESSES,
    ROUNDS,
    UNLOCKED_ROUNDS,
    Watch,
    a_key,
    ask_in_rounds,
    tell_private_directory,
)

from cutegemm import cache as cache_module
from cutegemm.cache import KernelCache, KernelKey, cache_dir, default_cache
from cutegemm.errors import BuildError, CacheWarning, ConfigError, StaleSourceError

ROOT = Path(__file__).parent.parent
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"


def not_called() -> dict[str, bytes]:
    """A build that must not happen."""
    raise AssertionError("the kernel was built although it should have been found")


@contextlib.contextmanager
def no_warnings():
    """Turn every warning inside into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    monkeypatch.setattr(cache_module, "_warned_unwritable", set())
    monkeypatch.setattr(cache_module, "sources", Watch(stale=False))


def leftovers(root: Path) -> list[str]:
    """Names below kernels/ that are no entries."""
    return [path.name for path in (root / "kernels").glob("*") if not (path / "meta.json").exists()]


# --- one process -------------------------------------------------------------------------------------------


def test_built_once_then_from_memory_then_from_disk(tmp_path):
    first = KernelCache(tmp_path)
    entry = first.get_or_build(a_key(), lambda: FILES)
    assert entry.files == FILES
    assert not entry.from_disk
    assert first.get_or_build(a_key(), not_called) is entry
    assert first.stats() == cache_module.CacheStats(compiled=1, from_memory=1)

    second = KernelCache(tmp_path)
    found = second.get_or_build(a_key(), not_called)
    assert (found.files, found.from_disk, found.build_seconds) == (FILES, True, entry.build_seconds)
    assert found.object_path.read_bytes() == FILES["kernel.o"]
    assert found.object_path.parent == tmp_path / "kernels" / a_key()
    assert second.stats() == cache_module.CacheStats(from_disk=1)
    assert leftovers(tmp_path) == []


def test_a_failed_build_is_passed_on_and_not_kept(tmp_path):
    cache = KernelCache(tmp_path)

    def fails():
        raise BuildError("no")

    for _ in range(2):
        with pytest.raises(BuildError, match=r"^no$"):
            cache.get_or_build(a_key(), fails)
    assert cache.get_or_build(a_key(), lambda: FILES).files == FILES
    assert cache.stats() == cache_module.CacheStats(compiled=1)


@pytest.mark.parametrize("key", ["", "abc", "../" + "0" * 61, "A" * 64, "0" * 65])
def test_keys_that_are_none(tmp_path, key):
    with pytest.raises(ValueError, match="64 hex digits"):
        KernelCache(tmp_path).get_or_build(key, not_called)


def test_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "one"))
    assert cache_dir() == tmp_path / "one"
    one = default_cache()
    assert (one.root, default_cache()) == (tmp_path / "one", one)
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "two"))
    assert default_cache().root == tmp_path / "two"
    monkeypatch.delenv("CUTEGEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "cutegemm"


def test_list_size_and_clear(tmp_path):
    cache = KernelCache(tmp_path)
    assert (cache.entries(), cache.size(), cache.clear()) == ([], 0, 0)
    key = KernelKey(a_key(1), '{"spec": "tile 128x256"}')
    cache.get_or_build(key, lambda: FILES)
    cache.get_or_build(a_key(2), lambda: FILES)
    foreign = tmp_path / "kernels" / "notes.txt"
    foreign.write_text("mine")
    newest, oldest = cache.entries()
    assert (newest.key, oldest.key) == (a_key(2), a_key(1))
    assert (oldest.size, oldest.description) == (sum(map(len, FILES.values())), key.text)
    assert time.time() - 60 < oldest.created <= newest.created <= time.time()
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert cache.size() == on_disk > 2 * oldest.size

    assert cache.clear() == 2
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]
    assert cache.entries() == []
    assert not cache.get_or_build(key, lambda: FILES).from_disk
    assert cache.stats().compiled == 3


def test_a_cleared_kernel_can_still_be_loaded_from_a_private_copy(tmp_path):
    cache = KernelCache(tmp_path)
    entry = cache.get_or_build(a_key(), lambda: FILES)
    cache.clear()
    path = entry.object_path
    assert path.read_bytes() == FILES["kernel.o"]
    assert path.parent == cache_module.private_directory()
    assert path.parent.stat().st_mode & 0o077 == 0


def test_eight_threads_build_once(tmp_path):
    cache, start, builds, entries = KernelCache(tmp_path), threading.Barrier(8), [], []

    def build():
        builds.append(1)
        time.sleep(0.2)
        return FILES

    def ask():
        start.wait()
        entries.append(cache.get_or_build(a_key(), build))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len({id(entry) for entry in entries}) == 1
    assert cache.stats() == cache_module.CacheStats(compiled=1, from_memory=7)


# --- many processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """Folder and answers of PROCESSES processes going through all rounds together."""
    root = tmp_path_factory.mktemp("shared")
    spawn = multiprocessing.get_context("spawn")
    start, answers = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [spawn.Process(target=ask_in_rounds, args=(root, start, answers)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    collected = [answers.get(timeout=120) for _ in range((ROUNDS + UNLOCKED_ROUNDS) * PROCESSES)]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return root, collected


def test_eight_processes_get_right_kernels_and_leave_nothing_behind(side_by_side):
    root, answers = side_by_side
    assert all(right for _, right, *_ in answers)
    assert [warning for *_, caught in answers for warning in caught] == []
    assert leftovers(root) == []
    assert len(KernelCache(root).entries()) == ROUNDS + UNLOCKED_ROUNDS


def test_eight_processes_build_once(side_by_side):
    root, answers = side_by_side
    compiled, found = Counter(), Counter()
    for number, _, built, from_disk, _ in answers:
        compiled[number] += built
        found[number] += from_disk
    assert {compiled[number] for number in range(ROUNDS)} == {1}
    assert {found[number] for number in range(ROUNDS)} == {PROCESSES - 1}
    assert [len((root / f"{n}.log").read_text().split()) for n in range(ROUNDS)] == [1] * ROUNDS


def test_without_the_lock_there_are_more_builds(side_by_side):
    """Shows that the count above is the lock's doing; losing the race to rename is harmless all the same."""
    _, answers = side_by_side
    unlocked = [built for number, _, built, *_ in answers if number >= ROUNDS]
    assert sum(unlocked) > 2 * UNLOCKED_ROUNDS


def killed_process(tmp_path: Path, code: str) -> None:
    """Run `code` until it prints "ready", then kill it with SIGKILL."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import time, bare_package\nfrom cutegemm.cache import *\n{code}",
        ],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "CUTEGEMM_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()


def test_killed_while_building(tmp_path):
    killed_process(
        tmp_path,
        f"KernelCache().get_or_build({a_key()!r}, lambda: print('ready', flush=True) or time.sleep(100))",
    )
    started = time.monotonic()
    with no_warnings():
        assert KernelCache(tmp_path).get_or_build(a_key(), lambda: FILES).files == FILES
    assert time.monotonic() - started < 5, "the lock of the killed process was not released"


def test_killed_in_the_middle_of_writing(tmp_path):
    killed_process(
        tmp_path,
        "from pathlib import Path\n"
        "write = Path.write_bytes\n"
        "def half(path, content):\n"
        "    write(path, content[: len(content) // 2])\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(100)\n"
        "Path.write_bytes = half\n"
        f"KernelCache().get_or_build({a_key()!r}, lambda: {FILES!r})\n",
    )
    (abandoned,) = leftovers(tmp_path)
    with no_warnings():
        assert KernelCache(tmp_path).get_or_build(a_key(), lambda: FILES).files == FILES
        assert KernelCache(tmp_path).get_or_build(a_key(), not_called).files == FILES
        assert leftovers(tmp_path) == [abandoned], "it might be another process's, still at work"
        long_ago = time.time() - cache_module.STALE_SECONDS - 60
        os.utime(tmp_path / "kernels" / abandoned, (long_ago, long_ago))
        KernelCache(tmp_path).get_or_build(a_key(1), lambda: FILES)
    assert leftovers(tmp_path) == []


def test_waits_no_longer_than_the_limit_for_another_process(tmp_path):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, filelock\n"
            "with filelock.FileLock(sys.argv[1]):\n    print('ready', flush=True); time.sleep(60)",
            str(tmp_path / "locks" / f"{a_key()}.lock"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    (tmp_path / "locks").mkdir()
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        cache = KernelCache(tmp_path, lock_timeout=0.3)
        started = time.monotonic()
        with pytest.warns(CacheWarning, match=r"has held .*\.lock for 0.3 s") as caught:
            assert cache.get_or_build(a_key(), lambda: FILES).files == FILES
        assert 0.3 <= time.monotonic() - started < 5
        assert [warning.filename for warning in caught] == [__file__]
        assert KernelCache(tmp_path).get_or_build(a_key(), not_called).from_disk
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_a_fork_answers_from_memory_and_builds(tmp_path):
    cache = KernelCache(tmp_path)
    cache.get_or_build(a_key(1), lambda: FILES)
    child = os.fork()
    if child == 0:
        known = cache.get_or_build(a_key(1), not_called).files == FILES
        new = cache.get_or_build(a_key(2), lambda: FILES).files == FILES
        os._exit(0 if known and new and cache.stats().compiled == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.get_or_build(a_key(2), not_called).from_disk


def test_a_fork_while_another_thread_builds_gets_its_kernel(tmp_path):
    cache, building = KernelCache(tmp_path), threading.Event()

    def build():
        building.set()
        time.sleep(0.5)
        return FILES

    thread = threading.Thread(target=cache.get_or_build, args=(a_key(), build))
    thread.start()
    building.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if cache.get_or_build(a_key(), not_called).from_disk else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_private_folder_goes_with_its_process(tmp_path):
    code = (
        "import os, sys, bare_package\nfrom cutegemm.cache import private_directory\n"
        "folder = private_directory()\n"
        "(folder / 'x').write_text('x')\nchild = os.fork()\n"
        "if child == 0:\n    sys.exit(7 if private_directory() == folder else 0)\n"
        "assert os.waitpid(child, 0)[1] == 0\nassert (folder / 'x').exists()\nprint(folder)\n"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_private_folder_goes_with_a_worker_process(method):
    context = multiprocessing.get_context(method)
    mine = cache_module.private_directory()
    told = context.SimpleQueue()
    worker = context.Process(target=tell_private_directory, args=(told,))
    worker.start()
    theirs = told.get()
    worker.join(timeout=60)
    assert worker.exitcode == 0
    assert theirs != mine
    assert not theirs.exists()
    assert mine.exists()


# --- damage ------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def rewrite_key(meta: Path) -> None:
    """Make an entry claim to be another key's."""
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "key": a_key(9)}))


DAMAGES = {
    "flipped": (lambda entry: flip(entry / "kernel.cubin"), "kernel.cubin is not what was written"),
    "truncated": (lambda entry: os.truncate(entry / "kernel.o", 3), "kernel.o is not what was written"),
    "empty": (lambda entry: os.truncate(entry / "kernel.ptx", 0), "kernel.ptx is not what was written"),
    "missing": (lambda entry: (entry / "kernel.o").unlink(), "kernel.o is missing"),
    "no meta": (lambda entry: (entry / "meta.json").unlink(), "meta.json is missing"),
    "half meta": (lambda entry: os.truncate(entry / "meta.json", 40), "meta.json cannot be understood"),
    "meta of another shape": (lambda entry: (entry / "meta.json").write_text("[1]"), "cannot be understood"),
    "another key": (lambda entry: rewrite_key(entry / "meta.json"), "it belongs to another key"),
    "a file": (lambda entry: (shutil.rmtree(entry), entry.write_text("x")), "it is a file, not a folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt_with_one_warning(tmp_path, damage):
    KernelCache(tmp_path).get_or_build(a_key(), lambda: FILES)
    spoil, reason = DAMAGES[damage]
    spoil(tmp_path / "kernels" / a_key())
    cache = KernelCache(tmp_path)
    with pytest.warns(CacheWarning, match=reason) as caught:
        assert cache.get_or_build(a_key(), lambda: FILES).files == FILES
    assert [warning.filename for warning in caught] == [__file__]  # the caller's line, not the package's
    assert cache.stats().compiled == 1
    with no_warnings():
        assert KernelCache(tmp_path).get_or_build(a_key(), not_called).files == FILES
    assert leftovers(tmp_path) == []


def test_an_empty_directory_is_replaced(tmp_path):
    (tmp_path / "kernels" / a_key()).mkdir(parents=True)
    with pytest.warns(CacheWarning, match=r"meta\.json is missing"):
        KernelCache(tmp_path).get_or_build(a_key(), lambda: FILES)
    assert KernelCache(tmp_path).get_or_build(a_key(), not_called).files == FILES


# --- disks that do not take it -----------------------------------------------------------------------------


def check_degraded(cache: KernelCache, reason: str) -> None:
    """Two kernels come out right with one warning, are kept in memory and can be loaded."""
    with pytest.warns(CacheWarning, match=reason) as caught:
        entries = [cache.get_or_build(a_key(n), lambda: FILES) for n in range(2)]
    assert [warning.filename for warning in caught] == [__file__]
    assert cache.get_or_build(a_key(0), not_called) is entries[0]
    for entry in entries:
        assert entry.files == FILES
        assert entry.directory is None
        assert entry.object_path.read_bytes() == FILES["kernel.o"]
    assert cache.stats() == cache_module.CacheStats(compiled=2, from_memory=1)


def test_full_disk(tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if tmp_path in path.parents:
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    check_degraded(KernelCache(tmp_path), "cannot be written .*No space left on device")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        (disk / "filler").write_bytes(bytes(24 * 1024))
        check_degraded(KernelCache(disk / "cache"), "No space left on device")
        (disk / "filler").unlink()
        with no_warnings():
            KernelCache(disk / "cache").get_or_build(a_key(), lambda: FILES)
            assert KernelCache(disk / "cache").get_or_build(a_key(), not_called).files == FILES
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_home_folder_of_nobody(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", "~no-such-user-here/x")
    with pytest.raises(ConfigError, match=r"^CUTEGEMM_CACHE_DIR=~no-such-user-here/x begins .* full path$"):
        cache_module.default_cache()


def test_a_listing_carries_what_the_builder_said(tmp_path):
    cache = KernelCache(tmp_path)
    cache.get_or_build(a_key(0), lambda: FILES)
    cache.get_or_build(a_key(1), lambda: {**FILES, "facts.json": b'{"config": "64x8x64"}'})
    facts = {entry.key: entry.facts for entry in cache.entries()}
    assert facts == {a_key(0): {}, a_key(1): {"config": "64x8x64"}}


def test_a_folder_that_cannot_exist(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file" / "cache")
    check_degraded(cache, "CUTEGEMM_CACHE_DIR to a writable folder")
    assert (cache.entries(), cache.size(), cache.clear()) == ([], 0, 0)


@contextlib.contextmanager
def unprivileged():
    """Without the rights of root, for which no folder is read-only."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_folder_still_serves_what_it_has(monkeypatch):
    monkeypatch.setattr(cache_module, "_private", None)  # root may have made it
    root = Path(tempfile.mkdtemp(prefix="cutegemm-read-only-"))
    try:
        KernelCache(root).get_or_build(a_key(7), lambda: FILES)
        for folder in (root, root / "kernels", root / "locks"):
            folder.chmod(0o555)
        with unprivileged():
            with no_warnings():
                assert KernelCache(root).get_or_build(a_key(7), not_called).from_disk
            check_degraded(KernelCache(root), "Permission denied")
    finally:
        for folder in (root, root / "kernels", root / "locks"):
            folder.chmod(0o755)
        shutil.rmtree(root)


def test_a_folder_of_somebody_else():
    root = Path(tempfile.mkdtemp(prefix="cutegemm-others-"))
    try:
        KernelCache(root).get_or_build(a_key(0), lambda: FILES)
        root.chmod(0)
        with unprivileged():
            with pytest.warns(CacheWarning, match="Permission denied") as caught:
                entry = KernelCache(root).get_or_build(a_key(0), lambda: FILES)
            assert (entry.files, len(caught)) == (FILES, 1)
    finally:
        root.chmod(0o755)
        shutil.rmtree(root)


def test_no_room_anywhere_is_a_clear_error(tmp_path, monkeypatch):
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(CacheWarning):
        entry = KernelCache(tmp_path).get_or_build(a_key(), lambda: {"kernel.o": os.urandom(8)})
    with pytest.raises(BuildError, match=r"neither to the cache nor to the temporary folder .*set TMPDIR"):
        _ = entry.object_path


def test_rename_refused(tmp_path, monkeypatch):
    def busy(source, target):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))

    monkeypatch.setattr(os, "rename", busy)
    check_degraded(KernelCache(tmp_path), "Device or resource busy")
    assert leftovers(tmp_path) == []


def test_the_winner_of_the_race_cannot_be_seen_yet(tmp_path, monkeypatch):
    """As on a network file system: the name is taken, but reading says there is nothing."""

    def taken(source, target):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(source))

    monkeypatch.setattr(os, "rename", taken)
    check_degraded(KernelCache(tmp_path), "Directory not empty")
    assert leftovers(tmp_path) == []


def test_the_winner_of_the_race_is_kept(tmp_path):
    def loses():
        KernelCache(tmp_path, lock_timeout=0).get_or_build(
            a_key(), lambda: {**FILES, "kernel.ptx": b"winner"}
        )
        return FILES

    with pytest.warns(CacheWarning, match="compiling without waiting"):
        mine = KernelCache(tmp_path).get_or_build(a_key(), loses)
    assert mine.files == FILES
    assert KernelCache(tmp_path).get_or_build(a_key(), not_called).files["kernel.ptx"] == b"winner"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")]
)
def test_a_file_system_without_locks(tmp_path, monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(cache_module.filelock.FileLock, "acquire", refuse)
    with no_warnings():
        KernelCache(tmp_path).get_or_build(a_key(), lambda: FILES)
        assert KernelCache(tmp_path).get_or_build(a_key(), not_called).files == FILES


def test_a_kernel_already_cached_needs_no_sources(tmp_path, monkeypatch):
    KernelCache(tmp_path).get_or_build(a_key(), lambda: FILES)
    monkeypatch.setattr(cache_module, "sources", Watch(stale=True))
    cache = KernelCache(tmp_path)
    assert cache.get_or_build(a_key(), not_called).files == FILES
    with pytest.raises(StaleSourceError):
        cache.get_or_build(a_key(1), not_called)
