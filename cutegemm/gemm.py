"""Gemm: what ``compile`` returns. Chooses and builds kernels on first use, checks and launches calls."""

import ctypes
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cutegemm import heuristic
from cutegemm.artifact import Artifact, Resources
from cutegemm.cache import default_cache
from cutegemm.callrecord import CallRecord, Outcome, OutcomeWord
from cutegemm.config import GemmConfig
from cutegemm.errors import CutegemmError, DeviceError, OperandTypeError, TargetError
from cutegemm.fingerprint import KernelKey, kernel_key
from cutegemm.hardware import Gpu, current_gpu, gpu_by_name
from cutegemm.hopper.plan import HopperPlan, plan
from cutegemm.operands import (
    TMA_ALIGNMENT,
    check_grad,
    check_out,
    check_overlap,
    operand_rules,
    read_sizes,
)
from cutegemm.problem import GemmProblem, dtype_bytes
from cutegemm.residency import loading_allowed, resident_clusters
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.identity import scheduler_identity

# Cross-compiling names no GPU; the choice is then made for this one.
NOMINAL_GPU = {"sm_90a": "H200"}

# Launches a Gemm of unknown sizes remembers: more than a process meets, unless it never repeats one.
MAX_KNOWN_LAUNCHES = 65536

_outcome = OutcomeWord()


class Gemm:
    """D = A @ B for one problem, callable on CUDA tensors. Made by ``cutegemm.compile``.

    problem     what was asked
    scheduler   tile order and assignment
    target      architecture the kernels are built for
    Kernels are built at the first call or on ``build()``; artifacts need no GPU.
    """

    def __init__(
        self, problem: GemmProblem, config: GemmConfig | None, scheduler: TileScheduler, target: str
    ) -> None:
        self.problem = problem
        self.scheduler = scheduler
        self.target = target
        self._asked = config
        self._lock = threading.RLock()
        self._kernels: dict[GemmConfig, Artifact] = {}
        self._static = problem.is_static
        self._launches: dict[Any, Launch] = {}
        if config is not None:
            self._plan(config)  # an illegal configuration is refused here, not at the first call

    # --- calling ---------------------------------------------------------------------------------------

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> torch.Tensor:
        """out = a @ b on the GPU the tensors lie on.

        a       (M, K) or (L, M, K), contiguous along the problem's a_major
        b       (K, N) or (L, K, N), contiguous along b_major
        out     (M, N) or (L, M, N), contiguous along out_major; allocated if None, dense if its lines are
                a multiple of 16 bytes and padded to one otherwise
        stream  a torch.cuda.Stream; the current stream of the tensors' device if None

        Strides are free but for TMA's rule: every address and non-unit stride a multiple of 16 bytes.
        Returns out. Raises OperandTypeError, ProblemError, DeviceError, TargetError.
        """
        if stream is not None:
            with _on_stream(stream, a):
                return self(a, b, out=out)
        error: Exception | None = None
        try:
            launch = self._launches.get(self._launch_key(a, b))
            if launch is not None:
                if out is None:
                    out = self._allocate(a, b)
                if torch.is_grad_enabled():
                    check_grad(a, b, out)
                launch.function(a, b, out, launch.record_address, _outcome.address)
                if _outcome.word.value == Outcome.LAUNCHED:
                    return out
        except CutegemmError:
            raise
        except (LookupError, AttributeError, ValueError, TypeError, RuntimeError) as caught:
            error = caught
        # A new kind of call, or one the host code refused: the thorough checks say what is wrong.
        return self._thorough_call(a, b, out, error)

    def _launch_key(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        """What decides on the launch; sizes of a static problem are compared by the launch itself."""
        return a.get_device() if self._static else (a.get_device(), a.shape, b.shape)

    def _thorough_call(self, a: Any, b: Any, out: Any, error: Exception | None) -> torch.Tensor:
        l, m, n, k = read_sizes(self.problem, a, b)  # noqa: E741
        if out is None:
            out = self._allocate(a, b)
        check_out(self.problem, out, a, b)
        check_grad(a, b, out)
        if 0 not in (l, m, n, k):
            for rule, tensor in zip(operand_rules(self.problem), (a, b, out), strict=True):
                rule.check_layout(tensor)
        check_overlap(out, "a", a)
        check_overlap(out, "b", b)
        if 0 in (l, m, n, k):
            return out.zero_()  # nothing to launch: empty, or a sum of no products
        with loading_allowed():
            launch = self._launches.get(self._launch_key(a, b)) or self._prepare_launch(
                (l, m, n, k), a.get_device()
            )
            # Every check passed, the exact ones for overlap too: the host code's quick ones are overruled.
            launch.function(a, b, out, launch.disjoint_record_address, _outcome.address)
        if _outcome.word.value != Outcome.LAUNCHED:
            raise error or DeviceError(f"the launch was refused: {Outcome(_outcome.word.value).name}")
        if len(self._launches) >= MAX_KNOWN_LAUNCHES:
            self._launches.clear()
        self._launches[self._launch_key(a, b)] = launch
        return out

    def _prepare_launch(self, sizes: tuple[int, int, int, int], device: int) -> "Launch":
        """The kernel for sizes (l, m, n, k) on a GPU: chosen, built, loaded."""
        gpu = current_gpu(device)
        if gpu.target != self.target:
            raise TargetError(
                f"this gemm was compiled for {self.target}, GPU {device} ({gpu.name}) runs {gpu.target}; "
                f'compile with target="{gpu.target}"'
            )
        config = self._config_for(self.problem.with_sizes(*sizes), gpu)
        artifact = self._artifact(config)
        resident = resident_clusters(artifact, config.cluster_size, device)
        return Launch(artifact.load(), CallRecord(*sizes, resident, 0), CallRecord(*sizes, resident, 1))

    def _allocate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A result tensor: dense where TMA can store it so, else with its lines padded to 16 bytes."""
        problem = self.problem
        lines, run = (a.shape[-2], b.shape[-1]) if problem.out_major == "n" else (b.shape[-1], a.shape[-2])
        unit = TMA_ALIGNMENT // dtype_bytes(problem.out_dtype)
        pitch = -(-run // unit) * unit
        out = torch.empty((*a.shape[:-2], lines, pitch), dtype=problem.out_torch, device=a.device)
        if pitch != run:
            out = out[..., :run]
        return out if problem.out_major == "n" else out.transpose(-1, -2)

    # --- choosing and building -------------------------------------------------------------------------

    @property
    def config(self) -> GemmConfig:
        """The configuration used, stages filled in; for sizes unknown as yet, the one for about 4096."""
        if self._asked is not None:
            return self._plan(self._asked).config
        return self._config_for(self.problem, self._gpu())

    def prepare(self) -> "Gemm":
        """Imports the kernel compiler now if ``config``'s kernel is not in the cache. Returns self.

        ``compile`` calls it, so that a first call takes the time of compiling and no more.
        """
        if self.config not in self._kernels and not default_cache().holds(self._key(self.config)):
            importlib.import_module("cutegemm.hopper.build")
        return self

    def build(self) -> "Gemm":
        """Compiles now what the first call would compile. Needs no GPU. Returns self. Raises BuildError."""
        self._artifact(self.config)
        return self

    @property
    def artifact(self) -> Artifact:
        """The compiled kernel of ``config``; built on first use."""
        return self._artifact(self.config)

    @property
    def ptx(self) -> str:
        """PTX of the kernel."""
        return self.artifact.ptx

    @property
    def cubin(self) -> bytes:
        """Machine code of the kernel, an ELF file."""
        return self.artifact.cubin

    @property
    def sass(self) -> str:
        """Disassembly of the cubin. Raises MissingDependencyError without nvdisasm."""
        return self.artifact.sass

    @property
    def resources(self) -> Resources:
        """Registers, spilled bytes, shared memory, stages and threads of the kernel."""
        return self.artifact.resources

    def explain(self, count: int = 8) -> str:
        """Why this configuration: the cheapest candidates with each term of the cost model, in SM cycles."""
        gpu = self._gpu()
        lines = [f"{self.problem} on {gpu.name} ({gpu.sms} SMs, {self.target}), tiles by {self.scheduler}"]
        if self._asked is not None:
            lines.append(f"configuration given, not chosen: {self.config}")
        lines.append(
            f"{'total':>10} {'waves':>6} {'tiles':>7} {'mma':>9} {'fill':>9} {'store':>7} {'dram':>9}"
            "  configuration"
        )
        lines += [
            f"{e.total:10.0f} {e.waves:6d} {e.tiles:7d} {e.mma:9.0f} {e.fill:9.0f} {e.store:7.0f}"
            f" {e.dram:9.0f}  {e.config}"
            for e in heuristic.ranked(self.problem, gpu, count)
        ]
        lines.append(
            "cycles; mma and fill: one tile's main loop if only that mattered; store: exposed epilogue; "
            "dram: device memory alone, for the whole problem"
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        config = self._asked or "configuration by heuristic"
        return f"Gemm({self.problem}; {config}; {self.scheduler}; {self.target})"

    def _gpu(self) -> Gpu:
        """The GPU at hand if it runs this target, else the model the target is nominally for."""
        try:
            gpu = current_gpu()
        except (DeviceError, TargetError):
            return gpu_by_name(NOMINAL_GPU[self.target])
        return gpu if gpu.target == self.target else gpu_by_name(NOMINAL_GPU[self.target])

    def _config_for(self, problem: GemmProblem, gpu: Gpu) -> GemmConfig:
        if self._asked is not None:
            return self._plan(self._asked).config
        return heuristic.choose(_by_size_class(self.problem, problem), gpu)

    def _plan(self, config: GemmConfig) -> HopperPlan:
        return plan(config, self.problem.swapped() if config.swap_ab else self.problem)

    def _artifact(self, config: GemmConfig) -> Artifact:
        artifact = self._kernels.get(config)
        if artifact is None:
            with self._lock:
                artifact = self._kernels.get(config) or self._build(config)
                self._kernels[config] = artifact
        return artifact

    def _build(self, config: GemmConfig) -> Artifact:
        def compile_now() -> dict[str, bytes]:
            from cutegemm.hopper.build import build  # brings in the compiler; a cached kernel does without

            return build(self._plan(config), self.problem.kind(), self.scheduler, self.target)

        return Artifact.from_entry(default_cache().get_or_build(self._key(config), compile_now))

    def _key(self, config: GemmConfig) -> KernelKey:
        """Cache key of one configuration's kernel: everything that shapes it, in words."""
        plan_, kind = self._plan(config), self.problem.kind()
        return kernel_key(f"{plan_!r}\n{kind!r}\n{scheduler_identity(self.scheduler)}", self.target)


@dataclass(frozen=True)
class Launch:
    """A loaded kernel and what its host code is told; the records must outlive their addresses' use."""

    function: Callable[..., None]
    record: CallRecord
    disjoint_record: CallRecord
    record_address: int = field(init=False)
    disjoint_record_address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "record_address", ctypes.addressof(self.record))
        object.__setattr__(self, "disjoint_record_address", ctypes.addressof(self.disjoint_record))


def _by_size_class(asked: GemmProblem, actual: GemmProblem) -> GemmProblem:
    """Sizes unknown at compile time, rounded up to a power of two: a loop over them builds few kernels."""

    def rounded(wanted: int | None, size: int | None) -> int | None:
        return size if wanted is not None or size is None else 1 << max(size - 1, 0).bit_length()

    return replace(
        asked,
        m=rounded(asked.m, actual.m),
        n=rounded(asked.n, actual.n),
        k=rounded(asked.k, actual.k),
        l=rounded(asked.l, actual.l),
    )


def _on_stream(stream: object, a: object) -> Any:
    if not isinstance(stream, torch.cuda.Stream):
        raise OperandTypeError(
            f"stream={stream!r} is no torch.cuda.Stream; wrap a raw handle in torch.cuda.ExternalStream"
        )
    if isinstance(a, torch.Tensor) and a.device.type == "cuda" and a.device != stream.device:
        raise DeviceError(
            f"stream belongs to {stream.device}, a lies on {a.device}; pass a stream of that GPU"
        )
    return torch.cuda.stream(stream)
