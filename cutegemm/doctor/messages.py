"""Error messages met in the field, what is behind each and what to do."""

from dataclasses import dataclass

from cutegemm.doctor.checks import DSL_INSTALL
from cutegemm.hardware import SMEM_PER_BLOCK


@dataclass(frozen=True)
class KnownError:
    """An error message met in the field, what is behind it and what to do."""

    signs: tuple[str, ...]  # any of these in the message, in lower case
    cause: str
    remedy: str


KNOWN_ERRORS: tuple[KnownError, ...] = (
    KnownError(
        ("unsupported .arch", "expects arch to be sm_", "requires .target sm_", "not supported on .target"),
        "The code was compiled for an architecture name without its final 'a'; WGMMA exists only in sm_90a "
        "and tcgen05 only in sm_100a.",
        "Compile with target='sm_90a', or leave it out on a Hopper machine.",
    ),
    KnownError(
        (
            "no kernel image",
            "cuda_error_no_binary_for_gpu",
            "compiled for a different architecture",
            "error 209",
        ),
        "The kernel was compiled for another architecture than the GPU it is launched on; an sm_90a kernel "
        "runs on compute capability 9.0 only, an sm_100a kernel on 10.0 only.",
        "Leave target out so that the GPU at hand decides, or pass the target that `doctor` lists for it.",
    ),
    KnownError(
        ("shared memory", "cudafuncsetattribute", "too many resources requested", "out of resources", "smem"),
        f"The configuration asks for more than a block may have: {SMEM_PER_BLOCK:,} bytes of shared memory, "
        "or more registers than an SM has for its threads.",
        "Take fewer stages or a smaller tile in GemmConfig, or leave config out; `inspect` shows the needs.",
    ),
    KnownError(
        (
            "driver version is insufficient",
            "insufficient driver",
            "unsupported toolchain",
            "error 35",
            "error 222",
        ),
        "The NVIDIA driver is older than the CUDA that the code was made with.",
        "Install driver 575.51.03 or newer (CUDA 12.9), or libraries for an older CUDA.",
    ),
    KnownError(
        ("all cuda-capable devices are busy", "devices are busy or unavailable", "error 46"),
        "Another process holds the GPU and its compute mode allows only one.",
        "See who it is with `nvidia-smi`; wait, stop it, or have the mode set back to Default.",
    ),
    KnownError(
        ("out of memory", "error 2:"),
        "The GPU's memory is full, often because of another process.",
        "See who uses it with `nvidia-smi`; `doctor` lists the processes.",
    ),
    KnownError(
        ("no module named 'cutlass'", "no module named 'cutlass.cute'", "toolkit flavors", "ctk flavor"),
        "The CuTe DSL (module `cutlass`, package nvidia-cutlass-dsl) is missing, or another took its name.",
        DSL_INSTALL,
    ),
)


def explain_error(message: str) -> KnownError | None:
    """What is known about an error message, or None."""
    plain = message.lower()
    for known in KNOWN_ERRORS:
        if any(sign in plain for sign in known.signs):
            return known
    return None
