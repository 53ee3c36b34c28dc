"""What is in this machine: driver, GPUs, packages, cache. Facts only; doctor.py judges them.

Nothing here raises for what is missing: an absent driver or package is a fact like any other. Nothing here
imports the DSL into this process either, so that a broken install can still be described.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutegemm.errors import ConfigError, MissingDependencyError
from cutegemm.hardware import BUILT_TARGETS
from cutegemm.loader import c_compiler, why_not_linked

#: Distributions whose presence and version matter.
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvidia-cutlass",
    "cutlass",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "cuda-python",
    "nvidia-cuda-nvdisasm",
)


@dataclass(frozen=True)
class Process:
    """Another process that holds memory on a GPU."""

    pid: int
    name: str
    memory_mib: int | None


@dataclass(frozen=True)
class GpuState:
    """One GPU as the driver reports it."""

    index: int
    name: str
    capability: tuple[int, int] | None  # None: the driver is too old to say
    memory_mib: int
    used_mib: int = 0
    compute_mode: str = "Default"
    smem_per_block: int | None = None  # opt-in maximum, bytes, where torch tells
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class TorchState:
    """The torch installed here."""

    version: str | None  # None: there is none
    cuda: str | None = None  # the CUDA it was built with; None for a CPU build
    gpus: int = 0  # how many it can use


@dataclass(frozen=True)
class DslState:
    """The CuTe DSL as Python would find it."""

    origin: str | None  # folder of the module `cutlass`; None if there is none
    has_cute: bool = False  # whether that module is the DSL
    import_error: str | None = None  # last line of what `import cutlass.cute` said, if it failed
    clashing_files: int = 0  # files that two of its installed parts both own
    arch_variable: str | None = None  # CUTE_DSL_ARCH


@dataclass(frozen=True)
class CacheState:
    """The folder of compiled kernels."""

    folder: str
    error: str | None = None  # why nothing can be written there
    used_bytes: int = 0
    entries: int = 0
    free_bytes: int | None = None
    unknown: str | None = None  # why it is not known which folder that is


@dataclass(frozen=True)
class Machine:
    """Everything doctor judges."""

    python: tuple[int, int, int]
    system: str
    processor: str
    torch: TorchState
    dsl: DslState
    cache: CacheState
    packages: Mapping[str, str] = field(default_factory=dict)  # distribution -> version
    driver: str | None = None  # "580.159.04"
    driver_cuda: tuple[int, int] | None = None  # newest CUDA the driver supports
    gpus: tuple[GpuState, ...] = ()
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    nvdisasm: str | None = None
    c_compiler: str | None = None  # links kernels into libraries that load without the DSL
    link_error: str | None = None  # why it cannot, if it was tried in vain
    built_targets: tuple[str, ...] = BUILT_TARGETS  # those this version has kernels for


def inspect_machine() -> Machine:
    """Gather the facts; a few seconds, most of it importing torch and the DSL."""
    driver, gpus = gpus_of_nvidia_smi()
    torch_state, torch_gpus = torch_and_its_gpus()
    if gpus:
        limits = {gpu.name: gpu.smem_per_block for gpu in torch_gpus}
        gpus = tuple(_with_limit(gpu, limits.get(gpu.name)) for gpu in gpus)
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        system=platform.system(),
        processor=platform.machine(),
        torch=torch_state,
        dsl=dsl_state(),
        cache=cache_state(),
        packages=installed_versions(),
        driver=driver,
        driver_cuda=cuda_of_driver(),
        gpus=gpus or torch_gpus,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        nvdisasm=nvdisasm_path(),
        c_compiler=c_compiler(),
        link_error=link_error(),
        built_targets=BUILT_TARGETS,
    )


def _with_limit(gpu: GpuState, smem_per_block: int | None) -> GpuState:
    return GpuState(**{**gpu.__dict__, "smem_per_block": smem_per_block})


def _output(command: list[str], timeout_s: float = 60.0) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus_of_nvidia_smi() -> tuple[str | None, tuple[GpuState, ...]]:
    """(driver version, GPUs) from nvidia-smi; (None, ()) where there is no such tool or no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, ()
    fields = "driver_version,uuid,index,name,compute_cap,memory.total,memory.used,compute_mode"
    table = _output([tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if table is None:
        return None, ()
    users = _output(
        [tool, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    )
    return parse_nvidia_smi(table, users or "")


def parse_nvidia_smi(table: str, users: str) -> tuple[str | None, tuple[GpuState, ...]]:
    """Read nvidia-smi's two CSV tables; a figure it does not know ("[N/A]") becomes 0 or None."""
    holders: dict[str, list[Process]] = {}
    for line in filter(str.strip, users.splitlines()):
        uuid, pid, *words, memory = (part.strip() for part in line.split(","))
        if int(pid) != os.getpid():
            holders.setdefault(uuid, []).append(Process(int(pid), ",".join(words), _whole(memory)))
    driver, gpus = None, []
    for line in filter(str.strip, table.splitlines()):
        driver, uuid, index, name, capability, total, used, mode = (part.strip() for part in line.split(","))
        gpus.append(
            GpuState(
                index=int(index),
                name=name,
                capability=_capability(capability),
                memory_mib=_whole(total) or 0,
                used_mib=_whole(used) or 0,
                compute_mode=mode,
                processes=tuple(holders.get(uuid, ())),
            )
        )
    return driver, tuple(gpus)


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA version the driver supports, asked of libcuda itself; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def torch_and_its_gpus() -> tuple[TorchState, tuple[GpuState, ...]]:
    """What torch is, and the GPUs it can use."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # there is one, and it lacks a package of its own
        return TorchState(None), ()
    if torch.version.cuda is None or not torch.cuda.is_available():
        return TorchState(torch.__version__, torch.version.cuda), ()
    gpus = []
    for index in range(torch.cuda.device_count()):
        found: Any = torch.cuda.get_device_properties(index)
        gpus.append(
            GpuState(
                index=index,
                name=found.name,
                capability=(found.major, found.minor),
                memory_mib=found.total_memory >> 20,
                smem_per_block=getattr(found, "shared_memory_per_block_optin", None),
            )
        )
    return TorchState(torch.__version__, torch.version.cuda, len(gpus)), tuple(gpus)


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that matter, of those installed."""
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def dsl_state() -> DslState:
    """Where `cutlass` comes from, whether it is the DSL, and whether a fresh process can import it."""
    arch = os.environ.get("CUTE_DSL_ARCH")
    spec = importlib.util.find_spec("cutlass")
    if spec is None:
        return DslState(None, arch_variable=arch)
    folders = list(spec.submodule_search_locations or ())
    origin = folders[0] if folders else str(spec.origin)
    has_cute = any((Path(folder) / "cute").is_dir() for folder in folders)
    error = None
    if has_cute:
        try:
            trial = subprocess.run(
                [sys.executable, "-c", "import cutlass.cute"],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as failure:
            error = str(failure)
        else:
            if trial.returncode != 0:
                said = trial.stderr.strip().splitlines()
                error = said[-1] if said else f"the process ended with status {trial.returncode}"
    return DslState(origin, has_cute, error, clashing_files(), arch)


def clashing_files() -> int:
    """How many files two of the DSL's installed parts both claim; the one installed last has won them all."""
    owners: Counter[str] = Counter()
    for name in DISTRIBUTIONS:
        if not name.startswith("nvidia-cutlass-dsl-libs"):
            continue
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        owners.update({str(file) for file in files})
    return sum(1 for count in owners.values() if count > 1)


def cache_state() -> CacheState:
    """The cache folder, whether it can be written, and what is in it. Creates nothing that stays."""
    from cutegemm.cache import KernelCache, cache_dir

    try:
        folder = cache_dir()
    except ConfigError as refusal:
        return CacheState("", unknown=str(refusal))
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    error = None
    try:
        with tempfile.TemporaryFile(dir=existing):
            error = None
    except OSError as failure:
        error = failure.strerror or str(failure)
    free = shutil.disk_usage(existing).free
    if not folder.is_dir():
        return CacheState(str(folder), error, free_bytes=free)
    cache = KernelCache()
    return CacheState(str(folder), error, cache.size(), len(cache.entries()), free)


def link_error() -> str | None:
    """What is in the way of linking kernels: None if an empty library can be linked here as a kernel's is."""
    try:
        with tempfile.TemporaryDirectory(prefix="cutegemm-") as folder:
            return why_not_linked([], Path(folder) / "trial.so")
    except (OSError, MissingDependencyError) as error:
        return str(error)


def nvdisasm_path() -> str | None:
    """The disassembler that `inspect` would use, or None."""
    from cutegemm.cubin import find_nvdisasm

    try:
        return str(find_nvdisasm())
    except MissingDependencyError:
        return None
