"""Compiled kernels kept on disk and in memory, each under a key of everything that shapes it.

One directory per kernel below ``cache_dir()/kernels``, named by the key: the files the builder made and a
``meta.json`` with the size and SHA-256 of each and the key in readable form. A directory is written under a
temporary name and renamed, so a reader sees a whole entry or none. A lock file per key (an OS lock: a
killed process lets go of it) makes processes that start together compile once. Nothing here can make a
kernel wrong or a call fail: whatever goes amiss on disk ends in a fresh build and at most one warning.
"""

import contextlib
import errno
import functools
import hashlib
import json
import multiprocessing.util
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from cutegemm.errors import BuildError, CacheWarning, ConfigError
from cutegemm.fingerprint import KernelKey, dsl_version, kernel_key, source_hash, sources

__all__ = [
    "CacheStats",
    "Entry",
    "EntryInfo",
    "KernelCache",
    "KernelKey",
    "cache_dir",
    "default_cache",
    "dsl_version",
    "file_path",
    "kernel_key",
    "private_directory",
    "process_lock",
    "source_hash",
    "warn_caller",
]

OBJECT_FILE = "kernel.o"
META_FILE = "meta.json"
FACTS_FILE = "facts.json"
STALE_SECONDS = 600.0
"""Age from which a temporary directory is the remains of a killed process (writing takes milliseconds)."""

_KEY = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


def cache_dir() -> Path:
    """The folder of the cache: ``$CUTEGEMM_CACHE_DIR``, or the user's cache folder of this system.

    Raises ConfigError if the variable begins with a home folder that does not exist.
    """
    chosen = os.environ.get("CUTEGEMM_CACHE_DIR")
    if not chosen:
        return Path(platformdirs.user_cache_dir("cutegemm"))
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"CUTEGEMM_CACHE_DIR={chosen} begins with the home folder of a user this system does not know; "
            "write the folder's full path"
        ) from error


# --- a folder of this process alone ------------------------------------------------------------------------

_private: tuple[int, Path] | None = None
_private_lock = threading.Lock()


def private_directory() -> Path:
    """A temporary folder that only this process uses, removed when the process exits."""
    global _private
    with _private_lock:
        if _private is None or _private[0] != os.getpid():  # a forked child gets its own
            _private = os.getpid(), Path(tempfile.mkdtemp(prefix="cutegemm-"))
            # Not atexit, which neither runs in a multiprocessing child nor tells a fork from its parent.
            multiprocessing.util.Finalize(
                None, shutil.rmtree, args=(_private[1],), kwargs={"ignore_errors": True}, exitpriority=0
            )
        return _private[1]


# --- entries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """The files of one kernel.

    `directory` is where they lie on disk, None if they could not be kept there. `from_disk` says that
    nothing was compiled for this entry in this process; `build_seconds` is what compiling took, here or in
    the process that did it.
    """

    key: str
    files: dict[str, bytes]
    directory: Path | None
    from_disk: bool
    build_seconds: float

    @property
    def object_path(self) -> Path:
        """Path of the host object: in the cache, or a private copy if it is not (or no longer) there."""
        return file_path(self.files, self.directory, OBJECT_FILE)


def file_path(files: Mapping[str, bytes], directory: Path | None, name: str) -> Path:
    """Path under which ``files[name]`` can be read: in `directory`, else in a private folder.

    Raises BuildError if neither exists nor can be written.
    """
    if directory is not None and (directory / name).is_file():
        return directory / name
    content = files[name]
    try:
        path = private_directory() / f"{hashlib.sha256(content).hexdigest()}-{name}"
        if not path.exists():
            unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
    except OSError as error:
        raise BuildError(
            "a compiled kernel can be written neither to the cache nor to the temporary folder "
            f"({error}); free some space, or set TMPDIR to a folder that can be written"
        ) from error
    return path


@dataclass(frozen=True)
class EntryInfo:
    """One line of a listing: `size` in bytes, `created` in seconds since the epoch.

    `description` is the readable text of the key, empty if the key was made without kernel_key(); `facts`
    is what the builder said about the kernel, empty if it said nothing.
    """

    key: str
    size: int
    created: float
    build_seconds: float
    description: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheStats:
    """What the requests of one cache came to, each request counted once."""

    compiled: int = 0
    from_disk: int = 0
    from_memory: int = 0


class _DamagedEntry(Exception):
    """An entry on disk that is not what its meta.json says; the text is the reason."""


def _read_entry(directory: Path, key: str) -> Entry | None:
    """The verified entry in `directory`, None if there is none to be seen. Raises _DamagedEntry."""
    try:
        meta = json.loads((directory / META_FILE).read_bytes())
        if meta["key"] != key:
            raise _DamagedEntry("it belongs to another key")
        files = {}
        for name, expected in meta["files"].items():
            files[name] = (directory / name).read_bytes()
            if hashlib.sha256(files[name]).hexdigest() != expected["sha256"]:
                raise _DamagedEntry(f"{name} is not what was written")
        return Entry(key, files, directory, from_disk=True, build_seconds=float(meta["build_seconds"]))
    except PermissionError:
        return None  # somebody else's: not ours to judge or replace
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.lexists(directory):
            return None
        if not directory.is_dir():
            raise _DamagedEntry("it is a file, not a folder") from error
        raise _DamagedEntry(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise _DamagedEntry(f"it cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedEntry(f"{META_FILE} cannot be understood") from error


def _write_entry(directory: Path, entry: Entry) -> None:
    directory.mkdir()
    for name, content in entry.files.items():
        (directory / name).write_bytes(content)
    meta = {
        "key": entry.key,
        "description": getattr(entry.key, "text", ""),
        "created": time.time(),
        "build_seconds": entry.build_seconds,
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in entry.files.items()
        },
    }
    (directory / META_FILE).write_text(json.dumps(meta, indent=1))


# --- the cache ---------------------------------------------------------------------------------------------

_warned_unwritable: set[Path] = set()
_caches: "weakref.WeakSet[KernelCache]" = weakref.WeakSet()


class KernelCache:
    """Kernels by key, in this process's memory and below one folder. Safe to share between threads and forks.

    Args:
        root: the folder; `cache_dir()` if None. Made when the first kernel is stored.
        lock_timeout: seconds to wait for another process that builds the same kernel, before building here.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, lock_timeout: float = 60.0):
        self.root = Path(root).absolute() if root is not None else cache_dir()
        self.lock_timeout = lock_timeout
        self._memory: dict[str, Entry] = {}
        self._counts = {"compiled": 0, "from_disk": 0, "from_memory": 0}
        self._fresh_locks()
        _caches.add(self)

    def _fresh_locks(self) -> None:
        self._state_lock = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = {}

    def get_or_build(self, key: str, build: Callable[[], Mapping[str, bytes]]) -> Entry:
        """The entry of `key`: from memory, else from disk, else `build()` (file name -> content), then kept.

        Of all threads and processes asking at once for one key, one builds and the others get its files. What
        `build` raises is passed on and nothing is kept. A second request in the same process returns the same
        `Entry` object.

        Raises:
            ValueError: `key` is not 64 hex digits.
            StaleSourceError: something must be built, but the package's sources changed under this process.
        """
        entry = self._memory.get(key)
        if entry is None:
            if not _KEY.fullmatch(key):
                raise ValueError(f"a cache key is 64 hex digits, as kernel_key() makes it, not {key!r}")
            with self._state_lock:
                key_lock = self._key_locks.setdefault(key, threading.Lock())
            with key_lock:
                entry = self._memory.get(key)
                if entry is None:
                    entry = self._from_disk_or_build(key, build)
                    self._memory[key] = entry
                    self._count("from_disk" if entry.from_disk else "compiled")
                    return entry
        self._count("from_memory")
        return entry

    def holds(self, key: str) -> bool:
        """Whether `key` is in memory or appears to be on disk (contents are not verified)."""
        return key in self._memory or (self._kernels / key).is_dir()

    def stats(self) -> CacheStats:
        """How many requests of this process were compiled, read from disk, or answered from memory."""
        with self._state_lock:
            return CacheStats(**self._counts)

    def entries(self) -> list[EntryInfo]:
        """The readable entries on disk, newest first (contents are not verified)."""
        found = []
        for directory in self._listing(_KEY):
            try:
                meta = json.loads((directory / META_FILE).read_bytes())
                size = sum(file["bytes"] for file in meta["files"].values())
                facts = {}
                if FACTS_FILE in meta["files"]:
                    facts = dict(json.loads((directory / FACTS_FILE).read_bytes()))
                info = EntryInfo(
                    directory.name, size, meta["created"], meta["build_seconds"], meta["description"], facts
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # damaged or just being cleared: replaced when it is next asked for
            found.append(info)
        return sorted(found, key=lambda info: info.created, reverse=True)

    def size(self) -> int:
        """Bytes of all files below the cache's folder, leftovers included."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue  # removed while we counted
        return total

    def clear(self) -> int:
        """Remove every entry, leftover and lock file, and forget the kernels in memory.

        Returns the number of entries removed. Only what this class made is touched. Kernels already loaded
        keep working.
        """
        with self._state_lock:
            self._memory.clear()
        removed = 0
        for directory in self._listing(_KEY):
            shutil.rmtree(directory, ignore_errors=True)
            removed += not directory.exists()
        for directory in self._listing(_TEMPORARY):
            shutil.rmtree(directory, ignore_errors=True)
        for lock in self.locks.glob("*.lock"):
            # Whoever holds or awaits this lock keeps the unlinked file: at worst a kernel is built twice.
            lock.unlink(missing_ok=True)
        return removed

    @property
    def locks(self) -> Path:
        """The folder of the lock files; it may not exist yet."""
        return self.root / "locks"

    # -- inside --

    @property
    def _kernels(self) -> Path:
        return self.root / "kernels"

    def _listing(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in self._kernels.iterdir() if pattern.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _count(self, outcome: str) -> None:
        with self._state_lock:
            self._counts[outcome] += 1

    def _from_disk_or_build(self, key: str, build: Callable[[], Mapping[str, bytes]]) -> Entry:
        directory = self._kernels / key
        try:
            entry = _read_entry(directory, key)
        except _DamagedEntry:
            entry = None  # perhaps another process is just replacing it: judged again under the lock
        if entry is not None:
            return entry
        # Without the lock the same kernel may be built twice, nothing worse: entries appear by a rename.
        with process_lock(self.locks / f"{key}.lock", self.lock_timeout, "compiling"):
            try:
                entry = _read_entry(directory, key)
            except _DamagedEntry as damage:
                warn_caller(f"the cached kernel {directory} is damaged ({damage}); compiling it again")
            if entry is not None:
                return entry
            sources.check()
            started = time.perf_counter()
            files = {name: bytes(content) for name, content in build().items()}
            built = Entry(key, files, directory, from_disk=False, build_seconds=time.perf_counter() - started)
            return self._store(built)

    def _store(self, built: Entry) -> Entry:
        """Put `built` on disk; the entry as it can be used, whether or not that worked."""
        temporary = self._kernels / f"{built.key}.{secrets.token_hex(8)}.tmp"
        final = self._kernels / built.key
        try:
            self._kernels.mkdir(parents=True, exist_ok=True)
            _write_entry(temporary, built)
            self._sweep(now=temporary.stat().st_mtime)
            self._publish(temporary, final)
            return built
        except OSError as error:
            if self.root not in _warned_unwritable:
                _warned_unwritable.add(self.root)
                warn_caller(
                    f"the kernel cache {self.root} cannot be written ({error}); kernels are kept for this "
                    "process only. Free some space, or point CUTEGEMM_CACHE_DIR to a writable folder"
                )
            return Entry(built.key, built.files, None, from_disk=False, build_seconds=built.build_seconds)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already if it was renamed

    @staticmethod
    def _publish(temporary: Path, final: Path) -> None:
        """Rename `temporary` to `final`; replaces a damaged entry, yields to a good one. Raises OSError."""
        for _ in range(2):
            try:
                os.rename(temporary, final)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                obstacle = error
            try:
                if _read_entry(final, final.name) is not None:
                    return  # another process was faster; its files serve later processes as well as ours
            except _DamagedEntry:
                aside = temporary.with_name(f"{final.name}.{secrets.token_hex(8)}.tmp")
                os.rename(final, aside)
                if aside.is_dir():
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    aside.unlink()
        raise obstacle

    def _sweep(self, now: float) -> None:
        """Remove what killed processes left. `now` is by the file server's clock, which may not be ours."""
        for directory in self._listing(_TEMPORARY):
            try:
                abandoned = now - directory.stat().st_mtime > STALE_SECONDS
            except FileNotFoundError:
                continue
            if abandoned:
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def process_lock(path: Path, timeout: float, what: str) -> Iterator[None]:
    """Hold the lock file `path` against other processes, or go on without it where that cannot be had.

    Waits at most `timeout` seconds for whoever holds it, then warns that `what` ("compiling") goes on.
    """
    lock = filelock.FileLock(path)
    held = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout, poll_interval=0.02)
        held = True
    except filelock.Timeout:
        warn_caller(
            f"another process has held {lock.lock_file} for {timeout:g} s; {what} without waiting any longer"
        )
    except (OSError, NotImplementedError):
        held = False  # unwritable, or a file system without locks; storing will find out and say so
    try:
        yield
    finally:
        if held:
            lock.release()


def warn_caller(message: str) -> None:
    """A CacheWarning at the line that called into the package."""
    inside = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CacheWarning, stacklevel=level)


@functools.cache
def _cache_at(root: Path) -> KernelCache:
    return KernelCache(root)


def default_cache() -> KernelCache:
    """The cache of this process at `cache_dir()`; another one if CUTEGEMM_CACHE_DIR has changed since."""
    return _cache_at(cache_dir())


def _after_fork_in_child() -> None:
    """Locks held by threads that do not exist in the child would never be released there."""
    global _private_lock
    _private_lock = threading.Lock()
    for cache in list(_caches):
        cache._fresh_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)
