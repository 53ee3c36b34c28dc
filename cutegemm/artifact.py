"""One compiled kernel: PTX, cubin, SASS, what it uses, and the callable made from it.

`compile_to_files` is the only place that runs the kernel compiler; `Artifact` reads what it wrote, whether
that was just now or is out of the cache.
"""

import gc
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cutegemm.cache import FACTS_FILE, OBJECT_FILE, Entry, dsl_version
from cutegemm.complaint import first_complaint
from cutegemm.cubin import CubinKernel, disassemble, instruction_histogram, only_kernel
from cutegemm.errors import BuildError, CutegemmError
from cutegemm.loader import LIBRARY_FILE, link_library, load

__all__ = [
    "Artifact",
    "Resources",
    "compile_lock",
    "compile_to_files",
    "instruction_histogram",
    "launched_smem_bytes",
]

PTX_FILE = "kernel.ptx"
CUBIN_FILE = "kernel.cubin"
HOST_FILE = "host.mlir"
BUILD_BYTES = 4 << 20
"""Room in the temporary folder that the compiler's files of one kernel are sure to fit in."""
REQUIRED_FACTS = ("smem_bytes", "stages", "threads")
LARGE_TEXT = 64 * 1024
"""Bytes from which the host code is stored compressed, as host.mlir.gz."""

compile_lock = threading.RLock()
"""Held by whoever is in the kernel compiler: two threads in it at once can abort the process.

A fork waits for it too, so that a child never inherits a compiler in the middle of its work.
"""
os.register_at_fork(
    before=compile_lock.acquire,
    after_in_parent=compile_lock.release,
    after_in_child=compile_lock.release,
)


@dataclass(frozen=True)
class Resources:
    """What one launch of a kernel takes.

    Attributes:
        registers: per thread, as allocated at launch (before warps trade registers among themselves).
        spills: bytes of local memory (stack and spilled registers) a thread uses; should be 0.
        smem_bytes: shared memory of one CTA, static and dynamic together.
        stages: depth of the operand pipeline.
        threads: per CTA.
    """

    registers: int
    spills: int
    smem_bytes: int
    stages: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.spills} bytes spilled, {self.smem_bytes} bytes of shared "
            f"memory, {self.stages} stages, {self.threads} threads"
        )


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel. Everything but `load` works without a GPU.

    Attributes:
        files: what the builder made, by file name.
        directory: where they lie on disk, None if only in memory.
        from_cache: nothing was compiled for it in this process.
        build_seconds: what compiling took, here or in the process that did it.
    """

    files: Mapping[str, bytes] = field(repr=False)
    directory: Path | None = None
    from_cache: bool = False
    build_seconds: float = 0.0

    @classmethod
    def from_entry(cls, entry: Entry) -> "Artifact":
        """The artifact of a cache entry that compile_to_files filled."""
        return cls(entry.files, entry.directory, entry.from_disk, entry.build_seconds)

    @cached_property
    def ptx(self) -> str:
        """The PTX text."""
        return self.files[PTX_FILE].decode()

    @property
    def cubin(self) -> bytes:
        """The device code, an ELF file."""
        return self.files[CUBIN_FILE]

    @property
    def object(self) -> bytes:
        """The host object: cubin, launch code and the TVM-FFI entry."""
        return self.files[OBJECT_FILE]

    @cached_property
    def host_mlir(self) -> str:
        """The compiler's representation of the host side: descriptors, grid, launch."""
        if HOST_FILE in self.files:
            return self.files[HOST_FILE].decode()
        return gzip.decompress(self.files[f"{HOST_FILE}.gz"]).decode()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the builder said about the kernel: entry, target, smem_bytes, stages, threads and more."""
        facts: dict[str, Any] = json.loads(self.files[FACTS_FILE])
        return facts

    @cached_property
    def kernel(self) -> CubinKernel:
        """The kernel as the cubin describes it."""
        return only_kernel(self.cubin)

    @property
    def kernel_name(self) -> str:
        """The kernel's symbol in PTX and cubin."""
        return self.kernel.name

    @cached_property
    def sass(self) -> str:
        """The disassembly. Raises MissingDependencyError if there is no nvdisasm."""
        return disassemble(self.cubin)

    @cached_property
    def resources(self) -> Resources:
        """Registers and spills as the cubin has them, the rest as the builder said."""
        facts = {name: int(self.facts[name]) for name in REQUIRED_FACTS}
        return Resources(self.kernel.registers, self.kernel.stack_bytes, **facts)

    def load(self) -> Callable[..., Any]:
        """The TVM-FFI function of the host entry; made once per process for equal objects.

        It takes torch tensors and launches on the current stream; the GPU is first touched when it is called.
        Raises BuildError if it cannot be loaded, MissingDependencyError without the DSL.
        """
        return self._function

    @cached_property
    def _function(self) -> Callable[..., Any]:
        digest = hashlib.sha256(self.object).digest()
        with compile_lock:
            if digest not in _loaded:
                _loaded[digest] = load(self.files, self.directory, self.facts["entry"])
            return _loaded[digest]


_loaded: dict[bytes, Callable[..., Any]] = {}

# --- compiling ---------------------------------------------------------------------------------------------


def compile_to_files(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    target: str,
    entry: str = "gemm",
    facts: Mapping[str, Any],
    options: str = "",
) -> dict[str, bytes]:
    """Compile a @cute.jit host function that launches exactly one kernel, for `target`, without a GPU.

    Args:
        function: the host function.
        args: what it is traced with: fake tensors, numbers, a fake stream.
        target: full architecture name, e.g. "sm_90a".
        entry: name of the TVM-FFI entry in the object.
        facts: what `Artifact` cannot read from the code: at least smem_bytes, stages and threads (ints).
        options: further compiler options, e.g. "--generate-line-info".

    Returns kernel.ptx, kernel.cubin, kernel.o, host.mlir (host.mlir.gz if large), facts.json, and kernel.so
    where a C compiler is there to link it.

    Raises BuildError with the compiler's first complaint and the original exception as its cause;
    errors of cutegemm raised while tracing pass through unchanged.
    """
    for name in REQUIRED_FACTS:
        if not isinstance(facts.get(name), int):
            raise BuildError(f"facts must give {name} as an int, not {facts.get(name)!r}")
    dsl_version()
    import cutlass.cute as cute

    with (
        compile_lock,
        _cycles_uncollected(),
        _scratch_folder() as scratch,
    ):
        flags = (
            f"--gpu-arch {target} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {shlex.quote(scratch)}"
        )
        try:
            compiled = cute.compile(function, *args, options=f"{flags} {options}".rstrip())
            if compiled is None:
                raise BuildError(f"the compiler returned no kernel for {target}{_compiler_variables()}")
            ptx, cubin, host = compiled.__ptx__, compiled.__cubin__, str(compiled.ir_module).encode()
            compiled.export_to_c(os.path.join(scratch, OBJECT_FILE), function_name=entry)
            host_object = Path(scratch, OBJECT_FILE).read_bytes()
            library = link_library(Path(scratch, OBJECT_FILE))
        except CutegemmError:
            raise
        except Exception as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            why = first_complaint(error) + _shortage(scratch)
            raise BuildError(f"compiling {name} for {target} failed: {why}") from error
    if not isinstance(ptx, str) or ".version" not in ptx or not isinstance(cubin, bytes):
        raise BuildError(
            f"the compiler produced no device code for {target}: the host function launches no kernel, or "
            f"the temporary folder {tempfile.gettempdir()} is full{_compiler_variables()}"
        )
    check_kernel(only_kernel(cubin), ptx, host.decode(), facts)
    host_files = (
        {HOST_FILE: host} if len(host) < LARGE_TEXT else {f"{HOST_FILE}.gz": gzip.compress(host, mtime=0)}
    )
    described = {**facts, "entry": entry, "target": target}
    return {
        PTX_FILE: ptx.encode(),
        CUBIN_FILE: cubin,
        OBJECT_FILE: host_object,
        FACTS_FILE: json.dumps(described, indent=1, sort_keys=True).encode(),
        **host_files,
        **({LIBRARY_FILE: library} if library else {}),
    }


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """A temporary folder for the compiler's files. Raises BuildError if none can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="cutegemm-build-")
    except OSError as error:
        raise BuildError(
            f"the compiler needs a temporary folder and none can be made ({error}); free some space, or set "
            "TMPDIR to a folder that can be written"
        ) from error
    with folder as path:
        yield path


def _shortage(folder: str) -> str:
    """What to do if a file may not have fitted into ``folder``, as the end of a sentence; else empty."""
    free = shutil.disk_usage(folder).free
    if free > BUILD_BYTES:
        return ""
    return (
        f"; the temporary folder {os.path.dirname(folder)} has {free // 1000} kB left: free some space, or "
        "set TMPDIR to a folder that has more"
    )


def _compiler_variables() -> str:
    """The environment variables that may have changed what the compiler does, as the end of a sentence."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CUTE_DSL_")]
    return f"; the environment sets {', '.join(found)}: unset what you do not need" if found else ""


@contextmanager
def _cycles_uncollected() -> Iterator[None]:
    """Pauses the cyclic collector: tracing makes many objects that all live on, and each collection walks
    those of torch and the compiler again. The caller holds ``compile_lock``."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def check_kernel(kernel: CubinKernel, ptx: str, host: str, facts: Mapping[str, Any]) -> None:
    """Raise BuildError unless cubin, PTX, host code and facts speak of the same kernel."""
    if ptx_entries(ptx) != [kernel.name]:
        raise BuildError(f"the cubin holds the kernel {kernel.name}, the PTX {ptx_entries(ptx)}")
    if kernel.threads is not None and kernel.threads != facts["threads"]:
        raise BuildError(
            f"{kernel.name} is launched with {kernel.threads} threads, its builder says {facts['threads']}"
        )
    dynamic = launched_smem_bytes(host)
    if dynamic is not None and dynamic > facts["smem_bytes"]:
        raise BuildError(
            f"{kernel.name} is launched with {dynamic} bytes of shared memory, its builder says "
            f"{facts['smem_bytes']}"
        )


# The launch configuration in the host code: grid, block, shared memory, stream, attributes, their count.
_LAUNCH = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SMEM_FIELD = re.compile(
    rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : .*{_LAUNCH}\s+llvm\.store (%\d+), \1 : i64"
)


def launched_smem_bytes(host: str) -> int | None:
    """Bytes of dynamic shared memory the host code launches its kernel with, None if it is not a constant."""
    for function in host.split("llvm.func ")[1:]:  # value names are local to a function
        if store := _SMEM_FIELD.search(function):
            constant = re.search(rf"{store[2]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            return int(constant[1]) if constant else None
    return None


def ptx_entries(ptx: str) -> list[str]:
    """Names of the kernels in a PTX text."""
    return re.findall(r"^\s*\.visible\s+\.entry\s+([\w$.]+)", ptx, re.MULTILINE)
