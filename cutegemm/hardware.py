"""The GPUs cutegemm knows, the targets it compiles for, and which of them is in this machine.

A target is an architecture name with its ``a`` suffix: WGMMA exists only in ``sm_90a`` and tcgen05 only in
``sm_100a``, so the plain names are refused rather than quietly changed.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cutegemm.errors import DeviceError, TargetError

#: Target -> compute capability of the GPUs that run it. An ``a`` target runs on exactly that capability.
SUPPORTED_TARGETS: dict[str, tuple[int, int]] = {"sm_90a": (9, 0), "sm_100a": (10, 0)}

#: Those of them that there are kernels for.
BUILT_TARGETS: tuple[str, ...] = ("sm_90a", "sm_100a")

#: Dynamic shared memory one thread block may have, bytes: an SM's 228 KiB less the 1 KiB the driver keeps for
#: each block. The same on compute capability 9.0 and 10.0 (CUDA programming guide, opt-in maximum).
SMEM_PER_BLOCK = 232_448

#: SMs of a complete GPC: GH100 has 8 of them with 18 each (Hopper white paper).
SMS_PER_GPC = 18

# Why an architecture that exists is not among the supported ones.
_REFUSED_TARGETS: dict[str, str] = {
    "sm_100f": "family targets are untested here and have crashed behind the FFI launch path",
    "sm_103a": "Blackwell Ultra (B300) has tcgen05 too, but nothing here was tried for it, and an sm_100a "
    "kernel does not run on it",
    "sm_103f": "Blackwell Ultra (B300) is untested here, and an sm_100a kernel does not run on it",
    "sm_110a": "Thor is not supported",
    "sm_120a": "consumer Blackwell has neither WGMMA nor tcgen05, which these kernels are made of",
    "sm_121a": "consumer Blackwell has neither WGMMA nor tcgen05, which these kernels are made of",
}

_NEAREST_TARGET: dict[str, str] = {
    "90": "sm_90a",
    "90a": "sm_90a",
    "hopper": "sm_90a",
    "100": "sm_100a",
    "100a": "sm_100a",
    "blackwell": "sm_100a",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU model, or the GPU at hand: what a kernel choice depends on.

    ``bf16_flops`` and ``memory_bytes_per_s`` are the vendor's dense peak figures, not what a kernel reaches.
    """

    name: str
    target: str  # the architecture kernels for it are compiled for
    sms: int  # streaming multiprocessors enabled
    sm_clock_hz: float  # highest SM clock
    memory_bytes_per_s: float  # peak of the device memory
    l2_bytes: int
    bf16_flops: float  # dense bf16 or fp16 tensor-core peak, flop/s
    smem_per_block: int = SMEM_PER_BLOCK
    registers_per_sm: int = 65_536  # 32-bit registers; both architectures
    device_names: tuple[str, ...] = ()  # what the driver calls it, as torch reports it

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor), e.g. (9, 0)."""
        return SUPPORTED_TARGETS[self.target]

    def resident_clusters(self, ctas: int) -> int:
        """About how many clusters of so many CTAs, one CTA an SM, run at once; the driver knows exactly.

        A cluster lies within one GPC. Which of a GPC's SMs are enabled differs from card to card, in pairs:
        of each GPC, (ctas - 2) / 2 SMs on average are left over. On an H200 of 132 SMs the time of a launch
        was seen to jump beyond 66, 30 and 15 clusters of 2, 4 and 8; this gives 66, 31 and 14.
        """
        gpcs = math.ceil(self.sms / SMS_PER_GPC)
        left_over = gpcs * max(ctas - 2, 0) / 2
        return max(1, round((self.sms - left_over) / ctas))


# Sources. [run] = read from the CUDA runtime of such a card (bandwidth = memory clock x bus width x 2),
# [nv] = NVIDIA's data sheet or architecture white paper, [der] = derived, with the arithmetic.
GPUS: tuple[Gpu, ...] = (
    Gpu(
        name="H20",
        target="sm_90a",
        sms=78,  # [run]
        sm_clock_hz=1.98e9,  # [run]
        memory_bytes_per_s=4.02e12,  # [run] 6144 bit x 2619 MHz x 2
        l2_bytes=62_914_560,  # [run]
        bf16_flops=148e12,  # [nv] a quarter of what 78 such SMs do elsewhere
        device_names=("NVIDIA H20",),
    ),
    Gpu(
        name="H100 SXM",
        target="sm_90a",
        sms=132,  # [nv]
        sm_clock_hz=1.98e9,  # [run]
        memory_bytes_per_s=3.35e12,  # [nv]
        l2_bytes=52_428_800,  # [nv] 50 MB
        bf16_flops=989e12,  # [nv]
        device_names=("NVIDIA H100 80GB HBM3",),
    ),
    Gpu(
        name="H100 PCIe",
        target="sm_90a",
        sms=114,  # [nv]
        sm_clock_hz=1.755e9,  # [nv]
        memory_bytes_per_s=2.0e12,  # [nv]
        l2_bytes=52_428_800,  # [nv] 50 MB
        bf16_flops=756e12,  # [nv]
        device_names=("NVIDIA H100 PCIe",),
    ),
    Gpu(
        name="H200",
        target="sm_90a",
        sms=132,  # [run]
        sm_clock_hz=1.98e9,  # [run]
        memory_bytes_per_s=4.8e12,  # [nv]
        l2_bytes=62_914_560,  # [run] 60 MiB, though often quoted as 50 MB
        bf16_flops=989e12,  # [nv]
        device_names=("NVIDIA H200",),
    ),
    Gpu(
        name="H800 PCIe",
        target="sm_90a",
        sms=114,  # [run]
        sm_clock_hz=1.755e9,  # [nv] as H100 PCIe
        memory_bytes_per_s=2.04e12,  # [run] 5120 bit x 1593 MHz x 2
        l2_bytes=52_428_800,  # [run]
        bf16_flops=756e12,  # [nv] as H100 PCIe
        device_names=("NVIDIA H800 PCIe",),
    ),
    Gpu(
        name="B200",
        target="sm_100a",
        sms=148,  # [run]
        sm_clock_hz=1.98e9,  # [der] 75 Tflop/s fp32 / (148 SMs x 256 flop/clock)
        memory_bytes_per_s=7.67e12,  # [run] 7680 bit x 3996 MHz x 2
        l2_bytes=132_644_864,  # [run]
        bf16_flops=2250e12,  # [nv]
        device_names=("NVIDIA B200",),
    ),
    Gpu(
        name="GB200",
        target="sm_100a",
        sms=152,  # [run]
        sm_clock_hz=2.06e9,  # [der] 80 Tflop/s fp32 / (152 SMs x 256 flop/clock)
        memory_bytes_per_s=8.0e12,  # [nv]
        l2_bytes=132_644_864,  # as B200: the same die
        bf16_flops=2500e12,  # [nv]
        device_names=("NVIDIA GB200",),
    ),
)


def _simplified(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum()).removeprefix("nvidia")


def gpu_by_name(name: str) -> Gpu:
    """The model called ``name`` ("H200", "h100-sxm", "NVIDIA H100 80GB HBM3").

    Raises DeviceError, listing the known models, if there is none of that name.
    """
    wanted = _simplified(name)
    for gpu in GPUS:
        if wanted == _simplified(gpu.name) or wanted in map(_simplified, gpu.device_names):
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise DeviceError(f"no GPU model called {name!r} is known; known are: {known}")


def normalise_target(target: str) -> str:
    """``target`` if it is one cutegemm compiles for; otherwise TargetError with the name to write instead.

    The only normalising is of surrounding blanks and case: ``"sm_90"`` is a different architecture from
    ``"sm_90a"``, one without WGMMA, so it is refused and not read as a slip of the pen.
    """
    if not isinstance(target, str):
        raise TargetError(
            f"target is {target!r}; write its name as a string, one of: {', '.join(BUILT_TARGETS)}"
        )
    name = target.strip().lower()
    if name in SUPPORTED_TARGETS:
        return name
    if name in _REFUSED_TARGETS:
        raise TargetError(
            f"target {target!r} is not supported: {_REFUSED_TARGETS[name]} ({_what_is_built()})"
        )
    short = name.removeprefix("sm").removeprefix("compute").lstrip("_").replace(".", "")
    near = _NEAREST_TARGET.get(short)
    if near is not None:
        why = (
            "without the final 'a' the architecture lacks the tensor-core instructions these kernels use"
            if short in ("90", "100")
            else "targets are written in full"
        )
        raise TargetError(f"target {target!r} is not supported: {why}; {_advice(near)}")
    for gpu in GPUS:
        if _simplified(name) in (_simplified(gpu.name), *map(_simplified, gpu.device_names)):
            raise TargetError(
                f"target {target!r} is a GPU, not the architecture that its kernels are compiled for; "
                f"{_advice(gpu.target)}"
            )
    raise TargetError(f"target {target!r} is unknown; {_what_is_built()}")


def _what_is_built() -> str:
    return f"there are kernels for: {', '.join(BUILT_TARGETS)}"


def _advice(target: str) -> str:
    """What to write, if ``target`` is what was meant."""
    if target in BUILT_TARGETS:
        return f"write {target!r}"
    return f"{target!r} would be right, but there is no kernel for it yet; {_what_is_built()}"


def target_of_capability(major: int, minor: int) -> str | None:
    """The target whose kernels a GPU of this compute capability runs, or None if cutegemm has none for it."""
    for target, capability in SUPPORTED_TARGETS.items():
        if capability == (major, minor):
            return target
    return None


def current_gpu(device: Any = None) -> Gpu:
    """The GPU behind ``device`` (None: torch's current one; or an index, "cuda:1", a torch.device).

    SM count and L2 size are the driver's (a MIG slice has fewer SMs than its model); the rest comes from the
    table, or for a model not in it from the driver where it says and else from the nearest model. Cached.

    Raises DeviceError if there is no GPU, TargetError if cutegemm has no kernels for it.
    """
    import torch

    if torch.version.cuda is None:
        raise DeviceError(
            f"a GPU is needed, but this torch ({torch.__version__}) is built without CUDA; install a CUDA "
            f"build, or name a target to compile without a GPU: target='sm_90a'"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            "a GPU is needed and torch sees none (driver missing, or CUDA_VISIBLE_DEVICES empty); "
            "run `python -m cutegemm doctor`, or name a target to compile without a GPU: target='sm_90a'"
        )
    if device is None:
        index = torch.cuda.current_device()
    elif isinstance(device, int):
        index = device
    else:
        named = torch.device(device)
        if named.type != "cuda":
            raise DeviceError(f"device {device!r} is not a CUDA device; give an index or 'cuda:0'")
        index = torch.cuda.current_device() if named.index is None else named.index
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(
            f"device {device!r} does not exist; this process sees {torch.cuda.device_count()} GPU(s)"
        )
    return _gpu_at(index)


def current_target(device: Any = None) -> str:
    """``"sm_90a"`` or ``"sm_100a"``, whichever the GPU behind ``device`` runs; errors as for current_gpu."""
    return current_gpu(device).target


@cache
def _gpu_at(index: int) -> Gpu:
    import torch

    return gpu_from_properties(torch.cuda.get_device_properties(index))


def gpu_from_properties(properties: Any) -> Gpu:
    """The Gpu that ``torch.cuda.get_device_properties`` describes; TargetError if it has no kernels here."""
    target = target_of_capability(properties.major, properties.minor)
    if target is None:
        known = ((t, *SUPPORTED_TARGETS[t]) for t in BUILT_TARGETS)
        runs = ", ".join(f"{target} (capability {a}.{b})" for target, a, b in known)
        raise TargetError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}, for which "
            f"cutegemm has no kernels; supported are {runs}"
        )
    sms = properties.multi_processor_count
    l2_bytes = getattr(properties, "L2_cache_size", 0)
    try:
        model = gpu_by_name(properties.name)
    except DeviceError:
        model = _unlisted(properties, target, sms)
    return replace(model, sms=sms, l2_bytes=l2_bytes or model.l2_bytes)


def _unlisted(properties: Any, target: str, sms: int) -> Gpu:
    nearest = min((gpu for gpu in GPUS if gpu.target == target), key=lambda gpu: abs(gpu.sms - sms))
    bus_bits = getattr(properties, "memory_bus_width", 0) or 0
    memory_khz = getattr(properties, "memory_clock_rate", 0) or 0
    bandwidth = 2 * memory_khz * 1e3 * bus_bits / 8  # two transfers per clock
    sm_khz = getattr(properties, "clock_rate", 0) or 0
    return replace(
        nearest,
        name=properties.name.removeprefix("NVIDIA ").strip(),
        sm_clock_hz=sm_khz * 1e3 or nearest.sm_clock_hz,
        memory_bytes_per_s=bandwidth or nearest.memory_bytes_per_s,
        device_names=(properties.name,),
    )
