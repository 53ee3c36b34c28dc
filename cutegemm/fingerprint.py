"""What a compiled kernel depends on, boiled down to one key: package sources, tool versions, target, spec."""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from cutegemm.errors import BuildError, MissingDependencyError, StaleSourceError

FORMAT = 1
"""Version of the cache's layout on disk; part of every key, so two layouts never meet in one entry."""


@dataclass(frozen=True)
class _SourceFile:
    mtime_ns: int
    size: int
    digest: str


def _read_source(path: Path) -> _SourceFile:
    text, status = path.read_bytes(), path.stat()
    return _SourceFile(status.st_mtime_ns, status.st_size, hashlib.sha256(text).hexdigest())


class SourceWatch:
    """What the ``.py`` files of a package were when the process imported it.

    The DSL reads a kernel's source again when it compiles it, which may be long after the import; if the file
    was replaced in between it gets lines of another version.
    """

    def __init__(self, package: Path):
        self.package = package
        self._files = {path: _read_source(path) for path in sorted(package.rglob("*.py"))}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the relative paths and contents of all files, as they were at import."""
        if not self._files:
            raise BuildError(
                f"no .py file found in {self.package}: kernels are compiled from their Python source, "
                "so install cutegemm unpacked and with its sources"
            )
        lines = [f"{path.relative_to(self.package)} {file.digest}\n" for path, file in self._files.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check(self) -> None:
        """Raise StaleSourceError if the file of an imported module of the package is not what it was."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != self.package.name or not getattr(module, "__file__", None):
                continue
            path = Path(str(module.__file__))
            seen = self._files.get(path)
            if seen is not None and not self._unchanged(path, seen):
                raise StaleSourceError(
                    f"{path} changed on disk after this process imported {self.package.name}, so a kernel "
                    "compiled now could mix two versions; restart the Python process"
                )

    @staticmethod
    def _unchanged(path: Path, seen: _SourceFile) -> bool:
        try:
            status = path.stat()
            if (status.st_mtime_ns, status.st_size) == (seen.mtime_ns, seen.size):
                return True
            return _read_source(path).digest == seen.digest  # merely touched, or written back as it was
        except OSError:
            return False


sources = SourceWatch(Path(__file__).parent)
"""The package itself, as it was when this module was imported."""


def source_hash() -> str:
    """SHA-256 hex of all ``.py`` files of the package as they were when it was imported."""
    return sources.digest


class KernelKey(str):
    """A cache key: 64 hex digits, with the text it is the SHA-256 of in ``.text`` (kept in ``meta.json``)."""

    text: str

    def __new__(cls, value: str, text: str = "") -> "KernelKey":
        """The key `value`, remembering that it was made from `text`."""
        key = super().__new__(cls, value)
        key.text = text
        return key

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """What pickling must give back to __new__."""
        return str(self), self.text


@functools.cache
def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def dsl_version() -> str:
    """Installed version of nvidia-cutlass-dsl.

    Raises MissingDependencyError if it is not installed or not of the tested range (4.8.x).
    """
    version = _installed("nvidia-cutlass-dsl")
    remedy = 'install it with: pip install "nvidia-cutlass-dsl==4.8.*"'
    if version is None:
        raise MissingDependencyError(f"nvidia-cutlass-dsl, the kernel compiler, is not installed; {remedy}")
    if not re.match(r"4\.8(\.|$)", version):
        raise MissingDependencyError(
            f"nvidia-cutlass-dsl {version} is installed, cutegemm is tested with 4.8.x; {remedy}"
        )
    return version


@functools.cache
def _toolchain() -> dict[str, str]:
    """Everything outside the package that decides what the compiler emits and who can load it."""
    names = "base", "core", "cu12", "cu13"
    libraries = {name: _installed(f"nvidia-cutlass-dsl-libs-{name}") for name in names}
    return {
        "nvidia-cutlass-dsl": dsl_version(),
        "nvidia-cutlass-dsl-libs": " ".join(
            f"{name}={version}" for name, version in libraries.items() if version
        ),
        "apache-tvm-ffi": _installed("apache-tvm-ffi") or "none",
        "python": str(sysconfig.get_config_var("SOABI")),
        "platform": sysconfig.get_platform(),
    }


def kernel_key(spec: str, target: str) -> KernelKey:
    """The cache key of one kernel.

    `spec` is the canonical text of everything that shapes the kernel (configuration, dtypes, majors,
    scheduler and epilogue with their source if they are the user's); `target` the full architecture, e.g.
    "sm_90a". The key adds the package's sources, the versions of compiler and FFI, Python ABI, platform and
    the CUTE_DSL_* environment variables, which change the code the compiler emits.

    Raises MissingDependencyError as dsl_version() does.
    """
    parts = {
        "format": FORMAT,
        "target": target,
        "spec": spec,
        "sources": source_hash(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")},
        **_toolchain(),
    }
    text = json.dumps(parts, sort_keys=True)
    return KernelKey(hashlib.sha256(text.encode()).hexdigest(), text)
