"""The checks: each takes the facts (machine.Machine) and returns findings; none looks at the machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cutegemm.dependencies import REQUIREMENTS
from cutegemm.doctor.machine import DslState, GpuState, Machine
from cutegemm.hardware import SMEM_PER_BLOCK, SUPPORTED_TARGETS, target_of_capability
from cutegemm.inspection import kernels

State = Literal["ok", "note", "problem"]
Prevents = Literal["nothing", "running", "compiling"]

DSL_MINOR = "4.8"
DSL_INSTALL = f'pip install "{REQUIREMENTS["cutlass"]}"'
DSL_REINSTALL = (
    "pip uninstall -y nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core "
    f"nvidia-cutlass-dsl-libs-cu12 nvidia-cutlass-dsl-libs-cu13, then {DSL_INSTALL}"
)
# The driver that NVIDIA documents for the DSL's CUDA 12.9 libraries. Older 12.x drivers mostly work.
DOCUMENTED_CUDA = (12, 9)
# First CUDA that knows the architecture; a driver below it cannot load its code at all.
FIRST_CUDA = {"sm_90a": (11, 8), "sm_100a": (12, 8)}
# A kernel file is tens of kilobytes; below this much room, saving one may fail.
ENOUGH_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it stands, in a sentence, and what to do if it is not well."""

    subject: str
    state: State
    sentence: str
    remedy: str = ""
    prevents: Prevents = "nothing"


def check_python(machine: Machine) -> list[Finding]:
    """The interpreter and platform."""
    version = ".".join(map(str, machine.python))
    where = f"Python {version} on {machine.system} {machine.processor}"
    if not (3, 11) <= machine.python[:2] < (3, 13):
        return [
            Finding(
                "python",
                "problem",
                f"{where}; cutegemm is tested with 3.11 and 3.12.",
                "Use Python 3.12.",
                "compiling",
            )
        ]
    if machine.system != "Linux":
        return [Finding("python", "note", f"{where}; cutegemm is tested on Linux only.", "Use Linux.")]
    return [Finding("python", "ok", f"{where}.")]


def check_dsl(machine: Machine) -> list[Finding]:
    """Whether the compiler is there, the right one, of a tested version, and in one piece."""
    dsl, packages = machine.dsl, machine.packages
    version = packages.get("nvidia-cutlass-dsl")
    if not dsl.has_cute:
        return [_missing_dsl(machine)]
    findings = []
    if version is None:
        findings.append(
            Finding(
                "dsl",
                "note",
                f"`cutlass` is the DSL ({dsl.origin}) but no installed package owns it.",
                DSL_INSTALL,
            )
        )
    elif version != DSL_MINOR and not version.startswith(f"{DSL_MINOR}."):
        findings.append(
            Finding(
                "dsl",
                "problem",
                f"nvidia-cutlass-dsl {version} is installed; cutegemm is tested with {DSL_MINOR}.x and other "
                "releases have other language rules.",
                DSL_INSTALL,
                "compiling",
            )
        )
    findings += _mixed_dsl(machine)
    if dsl.import_error is not None:
        findings.append(
            Finding(
                "dsl", "problem", f"Importing the DSL fails: {dsl.import_error}", DSL_REINSTALL, "compiling"
            )
        )
    if not findings:
        parts = [name.removeprefix("nvidia-cutlass-dsl-libs-") for name in packages if "-libs-cu" in name]
        findings.append(Finding("dsl", "ok", f"CuTe DSL {version} ({', '.join(parts)}) imports."))
    return findings + _arch_variable(dsl)


def _missing_dsl(machine: Machine) -> Finding:
    origin, packages = machine.dsl.origin, machine.packages
    if origin is None:
        other = [name for name in ("nvidia-cutlass", "cutlass") if name in packages]
        also = f" ({' and '.join(other)} is installed, but that is another package)" if other else ""
        return Finding("dsl", "problem", f"There is no module `cutlass`{also}.", DSL_INSTALL, "compiling")
    culprit = [name for name in ("cutlass", "nvidia-cutlass") if name in packages]
    remedy = (
        f"pip uninstall -y {' '.join(culprit)}, then {DSL_INSTALL}"
        if culprit
        else f"Move it away, then {DSL_INSTALL}"
    )
    return Finding(
        "dsl",
        "problem",
        f"The module `cutlass` at {origin} is not the CuTe DSL: it has no cute.",
        remedy,
        "compiling",
    )


def _mixed_dsl(machine: Machine) -> list[Finding]:
    packages = machine.packages
    version = packages.get("nvidia-cutlass-dsl")
    libraries = {name: v for name, v in packages.items() if name.startswith("nvidia-cutlass-dsl-libs-")}
    variants = [name.rpartition("-")[2] for name in libraries if "-libs-cu" in name]
    findings = []
    odd = {name: v for name, v in libraries.items() if version is not None and v != version}
    if odd:
        listed = ", ".join(f"{name} {v}" for name, v in odd.items())
        findings.append(
            Finding(
                "dsl",
                "problem",
                f"Parts of the DSL are of different versions: nvidia-cutlass-dsl {version} with {listed}.",
                DSL_REINSTALL,
                "compiling",
            )
        )
    elif machine.dsl.clashing_files:
        findings.append(
            Finding(
                "dsl",
                "problem",
                f"Installed parts of the DSL ({', '.join(libraries)}) own {machine.dsl.clashing_files} files "
                "in common; whichever was installed last has overwritten the others.",
                DSL_REINSTALL,
                "compiling",
            )
        )
    elif len(variants) > 1:
        findings.append(
            Finding(
                "dsl",
                "note",
                f"The DSL's libraries for {' and '.join(variants)} are both installed; it takes the newest "
                "that the driver supports, so a driver update may change the compiler; and kernels from the "
                "cache load the slow way, through the DSL.",
                "Keep one: pip uninstall one of nvidia-cutlass-dsl-libs-cu12 and -cu13.",
            )
        )
    needed = min((int(v[2:]) for v in variants if v[2:].isdigit()), default=None)
    if needed is not None and machine.driver_cuda is not None and machine.driver_cuda[0] < needed:
        findings.append(
            Finding(
                "dsl",
                "problem",
                f"The DSL's libraries are for CUDA {needed}, the driver supports CUDA "
                f"{_dotted(machine.driver_cuda)}; the DSL refuses to load.",
                f"Update the driver, or {DSL_INSTALL}",
                "compiling",
            )
        )
    return findings


def _arch_variable(dsl: DslState) -> list[Finding]:
    if dsl.arch_variable is None or dsl.arch_variable in SUPPORTED_TARGETS:
        return []
    return [
        Finding(
            "dsl",
            "note",
            f"CUTE_DSL_ARCH={dsl.arch_variable} is set; cutegemm passes its own target, but other CuTe code "
            "is compiled for that one, which lacks the tensor-core instructions if its final 'a' is missing.",
            "Unset it.",
        )
    ]


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def check_tvm_ffi(machine: Machine) -> list[Finding]:
    """The launch path's packages."""
    version = machine.packages.get("apache-tvm-ffi")
    if version is None:
        return [
            Finding(
                "tvm-ffi",
                "problem",
                "apache-tvm-ffi, through which kernels are called, is missing.",
                f'pip install "{REQUIREMENTS["tvm_ffi"]}"',
                "compiling",
            )
        ]
    return [Finding("tvm-ffi", "ok", f"apache-tvm-ffi {version}.")]


def check_driver(machine: Machine) -> list[Finding]:
    """The NVIDIA driver, against what the GPUs and the DSL need."""
    cuda = machine.driver_cuda
    if cuda is None and machine.driver is None:
        return [
            Finding(
                "driver",
                "note",
                "No NVIDIA driver: kernels cannot run on this machine.",
                "Where there is a GPU, install NVIDIA driver 575.51.03 or newer (pass it to a container).",
                "running",
            )
        ]
    said = f"driver {machine.driver or 'of unknown version'}"
    if cuda is None:
        return [
            Finding(
                "driver",
                "problem",
                f"nvidia-smi reports {said}, but libcuda.so.1 cannot be loaded.",
                "In a container, pass the driver's libraries through (NVIDIA container toolkit).",
                "running",
            )
        ]
    said = f"{said}, CUDA up to {_dotted(cuda)}"
    for gpu in machine.gpus:
        target = target_of_capability(*gpu.capability) if gpu.capability else None
        if target is not None and cuda < FIRST_CUDA[target]:
            return [
                Finding(
                    "driver",
                    "problem",
                    f"{said}: too old for {gpu.name}, whose {target} code needs "
                    f"CUDA {_dotted(FIRST_CUDA[target])}.",
                    "Install driver 575.51.03 or newer.",
                    "running",
                )
            ]
    if cuda < DOCUMENTED_CUDA:
        return [
            Finding(
                "driver",
                "note",
                f"{said}: the DSL documents CUDA {_dotted(DOCUMENTED_CUDA)} as its minimum.",
                "Install driver 575.51.03 or newer if a launch reports an insufficient driver.",
            )
        ]
    return [Finding("driver", "ok", f"{said}.")]


def check_torch(machine: Machine) -> list[Finding]:
    """Whether torch can use the GPUs that are there."""
    torch = machine.torch
    if torch.version is None:
        return [
            Finding(
                "torch", "problem", "There is no module `torch`; cutegemm takes and returns its tensors.",
                f'pip install "{REQUIREMENTS["torch"]}"', "compiling",
            )
        ]  # fmt: skip
    if not machine.gpus or torch.gpus:
        build = f"CUDA {torch.cuda}" if torch.cuda else "a CPU build"
        return [Finding("torch", "ok", f"torch {torch.version} ({build}).")]
    here = f"The driver sees {len(machine.gpus)} GPU(s), torch {torch.version} none"
    if torch.cuda is None:
        return [
            Finding(
                "torch", "problem", f"{here}: it is a CPU build.", "Install a CUDA build of torch.", "running"
            )
        ]
    if machine.visible_devices is not None:
        return [
            Finding(
                "torch",
                "problem",
                f"{here}: CUDA_VISIBLE_DEVICES is {machine.visible_devices!r}.",
                "Unset it, or name a GPU that exists.",
                "running",
            )
        ]
    needs = tuple(int(part) for part in torch.cuda.split(".")[:2])
    if machine.driver_cuda is not None and machine.driver_cuda[0] < needs[0]:
        return [
            Finding(
                "torch",
                "problem",
                f"{here}: it was built with CUDA {torch.cuda}, the driver supports "
                f"{_dotted(machine.driver_cuda)}.",
                "Update the driver, or install a torch built with an older CUDA.",
                "running",
            )
        ]
    return [
        Finding(
            "torch",
            "problem",
            f"{here}, although it is built with CUDA {torch.cuda}.",
            "Run `python -c 'import torch; torch.zeros(1).cuda()'` to see the driver's own message.",
            "running",
        )
    ]


def check_gpus(machine: Machine) -> list[Finding]:
    """Each GPU: which target it runs, who else is on it."""
    findings = []
    for gpu in machine.gpus:
        findings.append(_architecture(gpu, machine.built_targets))
        findings += _other_users(gpu)
        if gpu.smem_per_block is not None and gpu.smem_per_block < SMEM_PER_BLOCK:
            findings.append(
                Finding(
                    f"gpu {gpu.index}",
                    "problem",
                    f"A block may use {gpu.smem_per_block:,} bytes of shared memory here; the kernels are "
                    f"planned for {SMEM_PER_BLOCK:,}.",
                    "Use a whole GPU, or a GemmConfig with fewer stages.",
                    "running",
                )
            )
    return findings


def _architecture(gpu: GpuState, built: Sequence[str]) -> Finding:
    subject, memory = f"gpu {gpu.index}", f"{gpu.memory_mib / 1024:.0f} GiB"
    if gpu.capability is None:
        return Finding(
            subject,
            "problem",
            f"{gpu.name}, {memory}: the driver does not tell its compute capability.",
            "Install driver 575.51.03 or newer.",
            "running",
        )
    capability = _dotted(gpu.capability)
    target = target_of_capability(*gpu.capability)
    if target is not None and target not in built:
        return Finding(
            subject,
            "problem",
            f"{gpu.name}, compute capability {capability}: this cutegemm has no {target} kernels yet.",
            f"Use a GPU that runs {' or '.join(built)}, or a later version.",
            "running",
        )
    if target is not None:
        return Finding(
            subject, "ok", f"{gpu.name}, {memory}, compute capability {capability}: runs {target} kernels."
        )
    runs = " or ".join(f"{_dotted(SUPPORTED_TARGETS[target])} ({target})" for target in built)
    return Finding(
        subject,
        "problem",
        f"{gpu.name}, compute capability {capability}: no cutegemm kernel runs on it (a launch would say "
        "'no kernel image').",
        f"Use a GPU of compute capability {runs}; compiling for those works here.",
        "running",
    )


def _other_users(gpu: GpuState) -> list[Finding]:
    subject = f"gpu {gpu.index}"
    if gpu.compute_mode == "Prohibited":
        return [
            Finding(
                subject,
                "problem",
                "Its compute mode is Prohibited: no process may use it.",
                "An administrator can set it back with `nvidia-smi -c DEFAULT`.",
                "running",
            )
        ]
    holders = ", ".join(
        f"{process.name} (pid {process.pid}"
        + (f", {process.memory_mib} MiB)" if process.memory_mib is not None else ")")
        for process in gpu.processes
    )
    if gpu.processes and gpu.compute_mode.startswith("Exclusive"):
        return [
            Finding(
                subject,
                "problem",
                f"Held by {holders}, and its compute mode, {gpu.compute_mode}, allows one process.",
                "Wait for it or stop it.",
                "running",
            )
        ]
    if gpu.processes:
        return [
            Finding(
                subject,
                "note",
                f"In use by {holders}; timings taken now are not to be trusted.",
                "Wait for it before measuring.",
            )
        ]
    if gpu.memory_mib and gpu.used_mib > gpu.memory_mib * 0.5:
        return [
            Finding(
                subject,
                "note",
                f"{gpu.used_mib / 1024:.0f} of {gpu.memory_mib / 1024:.0f} GiB are taken by processes that "
                "cannot be seen from here (another container, perhaps).",
                "Look on the host with `nvidia-smi`.",
            )
        ]
    return []


def check_cache(machine: Machine) -> list[Finding]:
    """The folder of compiled kernels."""
    cache = machine.cache
    if cache.unknown is not None:
        remedy = "Set CUTEGEMM_CACHE_DIR to the folder's full path, or unset it."
        return [Finding("cache", "problem", f"{cache.unknown}.", remedy, "compiling")]
    held = f"{kernels(cache.entries)}, {cache.used_bytes / 1e6:.1f} MB"
    if cache.error is not None:
        return [
            Finding(
                "cache",
                "note",
                f"{cache.folder} cannot be written ({cache.error}): every process compiles for itself.",
                "Make it writable, or set CUTEGEMM_CACHE_DIR to a folder that is.",
            )
        ]
    if cache.free_bytes is not None and cache.free_bytes < ENOUGH_FREE_BYTES:
        return [
            Finding(
                "cache",
                "note",
                f"{cache.folder} ({held}) has {cache.free_bytes / 1e6:.0f} MB left on its disk.",
                "Free some room, `python -m cutegemm cache --clear`, or set CUTEGEMM_CACHE_DIR.",
            )
        ]
    return [Finding("cache", "ok", f"{cache.folder}: writable, {held}.")]


def check_nvdisasm(machine: Machine) -> list[Finding]:
    """The disassembler."""
    if machine.nvdisasm is None:
        return [
            Finding(
                "nvdisasm",
                "note",
                "No nvdisasm: gemm.sass and the instruction histogram are not available, all else is.",
                "pip install nvidia-cuda-nvdisasm",
            )
        ]
    return [Finding("nvdisasm", "ok", f"{machine.nvdisasm}.")]


def check_loading(machine: Machine) -> list[Finding]:
    """Whether kernels from the cache load the quick way."""
    if machine.c_compiler is None:
        return [
            Finding(
                "loading",
                "note",
                "No C compiler: a process that finds its kernels in the cache still imports the whole DSL to "
                "load them, half a second once.",
                "Install one (the Debian package is gcc).",
            )
        ]
    if machine.link_error is not None:
        return [
            Finding(
                "loading",
                "note",
                f"{machine.c_compiler} cannot link kernels ({machine.link_error}): a process that finds its "
                "kernels in the cache still imports the whole DSL to load them, half a second once.",
                "Solve what is said of the DSL, or install a working C compiler (the Debian package is gcc).",
            )
        ]
    return [Finding("loading", "ok", f"{machine.c_compiler} links kernels, which then load without the DSL.")]


CHECKS: tuple[Callable[[Machine], list[Finding]], ...] = (
    check_python,
    check_torch,
    check_dsl,
    check_tvm_ffi,
    check_driver,
    check_gpus,
    check_cache,
    check_loading,
    check_nvdisasm,
)


def diagnose(machine: Machine) -> list[Finding]:
    """Every check's findings, and a last one that sums up which targets run here and which only compile."""
    findings = [finding for check in CHECKS for finding in check(machine)]
    return [*findings, _summary(machine, findings)]


def _summary(machine: Machine, findings: Sequence[Finding]) -> Finding:
    if any(finding.prevents == "compiling" for finding in findings):
        return Finding(
            "in short", "problem", "Nothing can be compiled here until the problems above are solved."
        )
    running = {target_of_capability(*gpu.capability) for gpu in machine.gpus if gpu.capability}
    # A fault of one GPU does not stop another; a fault of driver or torch stops all.
    if any(f.prevents == "running" and not f.subject.startswith("gpu") for f in findings):
        running = set()
    runs = [target for target in machine.built_targets if target in running]
    compiles = [target for target in machine.built_targets if target not in running]
    words = []
    if runs:
        words.append(f"Runs {' and '.join(runs)} kernels")
    if compiles:
        words.append(f"{'only ' if runs else 'Only '}compiles {' and '.join(compiles)} kernels")
    return Finding("in short", "ok" if runs else "note", f"{', '.join(words)}.")
