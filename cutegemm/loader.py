"""From the host object of a kernel to a callable: through a shared library if there is one, else the DSL.

Both give the same TVM-FFI function. The library loads in some 30 ms; loading the object imports the whole DSL
first, which takes half a second. So where a C compiler is found, a library is linked when the kernel is
compiled and kept beside the object.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cutegemm.cache import OBJECT_FILE, file_path
from cutegemm.complaint import first_complaint
from cutegemm.dependencies import missing_dependency
from cutegemm.errors import BuildError
from cutegemm.fingerprint import dsl_version

LIBRARY_FILE = "kernel.so"
RUNTIME = "libcute_dsl_runtime.so"
"""What the launch code of every kernel calls; part of the DSL's packages."""


def load(files: Mapping[str, bytes], directory: Path | None, entry: str) -> Callable[..., Any]:
    """The TVM-FFI function `entry` of a compiled kernel whose files lie in `directory` or only in memory.

    Call it under artifact.compile_lock. Raises BuildError if it cannot be loaded, MissingDependencyError
    without the DSL.
    """
    dsl_version()
    if LIBRARY_FILE in files:
        function = load_library(file_path(files, directory, LIBRARY_FILE), entry)
        if function is not None:
            return function
    return load_object(file_path(files, directory, OBJECT_FILE), entry)


def load_object(path: Path, entry: str) -> Callable[..., Any]:
    """The function `entry` of a host object, through the DSL. Raises BuildError."""
    import cutlass.cute as cute

    try:
        function: Callable[..., Any] = getattr(
            cute.runtime.load_module(str(path), enable_tvm_ffi=True), entry
        )
    except Exception as error:
        raise BuildError(f"the compiled kernel {path} cannot be loaded: {first_complaint(error)}") from error
    return function


def load_library(path: Path, entry: str) -> Callable[..., Any] | None:
    """The function `entry` of a linked kernel, None where it cannot be used and the object must do.

    That is so if the folder forbids executable files, the DSL's runtime library is not found, or there is
    more than one of it to choose from, as the DSL does by rules of its own.
    """
    runtime = runtime_library()
    if runtime is None:
        return None
    tvm_ffi = _tvm_ffi()
    try:
        # The library names its runtime without a path: the loader takes the one already in the process.
        ctypes.CDLL(str(runtime))
        function: Callable[..., Any] = getattr(tvm_ffi.load_module(str(path)), entry)
    except (OSError, RuntimeError, AttributeError):
        return None
    return function


def _tvm_ffi() -> Any:
    try:
        import tvm_ffi
    except ModuleNotFoundError as error:
        raise missing_dependency(error) from error
    return tvm_ffi


def runtime_library() -> Path | None:
    """The DSL's runtime library; None if there is none, there are several, or CUTE_DSL_LIBS names another."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or os.environ.get("CUTE_DSL_LIBS"):
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    found = [path for folder in folders for path in folder.glob(f"*/lib/{RUNTIME}")]
    return found[0] if len(found) == 1 else None


def c_compiler() -> str | None:
    """The C compiler that links kernels, None if there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def link_library(host_object: Path) -> bytes | None:
    """The shared library of a host object, None where no C compiler can link it."""
    library = host_object.with_name(LIBRARY_FILE)
    try:
        return library.read_bytes() if why_not_linked([host_object], library) is None else None
    except OSError:
        return None  # the object loads without it


def why_not_linked(objects: Sequence[Path], library: Path) -> str | None:
    """Links host objects, and what every kernel calls, into ``library``: None if done, else the reason."""
    compiler, runtime = c_compiler(), runtime_library()
    if compiler is None:
        return "there is no C compiler"
    if runtime is None:
        return "the DSL's runtime library is missing, or not the only one"
    tvm_ffi = _tvm_ffi()
    # -Bsymbolic: every kernel has the same internal names, and each must find its own.
    command = [
        compiler,
        "-shared",
        "-Wl,-Bsymbolic",
        "-o",
        library,
        *objects,
        runtime,
        tvm_ffi.libinfo.find_libtvm_ffi(),
    ]
    try:
        linked = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} cannot be started, or hangs: {error}"
    if linked.returncode == 0:
        return None
    said = linked.stderr.decode(errors="replace").strip().splitlines()
    return said[0] if said else f"{compiler} ended with status {linked.returncode}"
