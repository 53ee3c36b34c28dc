"""Gemm: what ``compile`` returns. Chooses and builds kernels on first use, checks and launches calls."""

import ctypes
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
from cutegemm.errors import (
    CutegemmError,
    DeviceError,
    MissingDependencyError,
    OperandTypeError,
    TargetError,
)
from cutegemm.fingerprint import KernelKey, kernel_key
from cutegemm.hardware import Gpu, current_gpu, gpu_by_name
from cutegemm.hopper.plan import HopperPlan, StorePath, plan
from cutegemm.operands import (
    check_grad,
    check_out,
    check_overlap,
    operand_rules,
    read_sizes,
    store_path,
)
from cutegemm.problem import GemmProblem
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
        self._kernels: dict[tuple[GemmConfig, StorePath], Artifact] = {}
        self._static = problem.is_static
        self._store = store_path(problem, (problem.l, problem.m, problem.n, problem.k), None)
        self._launches: dict[Any, Launch] = {}
        self._prepared: dict[tuple[Any, StorePath], Launch] = {}
        if config is not None:
            self._plan(config, self._store)  # an illegal configuration is refused here, not at the first call

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
        out     (M, N) or (L, M, N), contiguous along out_major; allocated densely if None
        stream  a torch.cuda.Stream; the current stream of the tensors' device if None

        Strides of a and b are free but for TMA's rule: their addresses and non-unit strides are multiples
        of 16 bytes. out has no such rule; where its lines are no multiple of 16 bytes, or start off one,
        a kernel with a slower store takes the call.
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
            a_rule, b_rule, out_rule = operand_rules(self.problem)
            for rule, tensor in ((a_rule, a), (b_rule, b), (out_rule, out)):
                rule.check_major(tensor)
            a_rule.check_alignment(a)
            b_rule.check_alignment(b)
        check_overlap(out, "a", a)
        check_overlap(out, "b", b)
        if 0 in (l, m, n, k):
            return out.zero_()  # nothing to launch: empty, or a sum of no products
        with loading_allowed():
            launch = self._launch_for((l, m, n, k), a, b, out)
            # Every check passed, the exact ones for overlap too: the host code's quick ones are overruled.
            launch.function(a, b, out, launch.disjoint_record_address, _outcome.address)
        if _outcome.word.value != Outcome.LAUNCHED:
            raise error or DeviceError(f"the launch was refused: {Outcome(_outcome.word.value).name}")
        # The next call is tried with this launch first; one for another alignment comes back here.
        self._launches[self._launch_key(a, b)] = launch
        return out

    def _launch_for(
        self, sizes: tuple[int, int, int, int], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> "Launch":
        store = store_path(self.problem, sizes, out)
        key = (self._launch_key(a, b), store)
        launch = self._prepared.get(key)
        if launch is None:
            if len(self._prepared) >= MAX_KNOWN_LAUNCHES:
                self._prepared.clear()
                self._launches.clear()
            launch = self._prepared[key] = self._prepare_launch(sizes, a.get_device(), store)
        return launch

    def _prepare_launch(self, sizes: tuple[int, int, int, int], device: int, store: StorePath) -> "Launch":
        """The kernel for sizes (l, m, n, k) on a GPU: chosen, built, loaded."""
        gpu = current_gpu(device)
        if gpu.target != self.target:
            raise TargetError(
                f"this gemm was compiled for {self.target}, GPU {device} ({gpu.name}) runs {gpu.target}; "
                f'compile with target="{gpu.target}"'
            )
        config = self._config_for(self.problem.with_sizes(*sizes), gpu, store)
        artifact = self._artifact(config, store)
        resident = resident_clusters(artifact, config.cluster_size, device)
        return Launch(artifact.load(), CallRecord(*sizes, resident, 0), CallRecord(*sizes, resident, 1))

    def _allocate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A dense result tensor."""
        problem = self.problem
        m, n, batch = a.shape[-2], b.shape[-1], a.shape[:-2]
        shape = (*batch, m, n) if problem.out_major == "n" else (*batch, n, m)
        out = a.new_empty(shape, dtype=problem.out_torch, requires_grad=False)
        return out if problem.out_major == "n" else out.transpose(-1, -2)

    # --- choosing and building -------------------------------------------------------------------------

    @property
    def config(self) -> GemmConfig:
        """The configuration used, stages filled in; for sizes unknown as yet, the one for about 4096."""
        if self._asked is not None:
            return self._plan(self._asked, self._store).config
        return self._config_for(self.problem, self._gpu(), self._store)

    def prepare(self) -> "Gemm":
        """Imports the kernel compiler now if ``config``'s kernel is not in the cache. Returns self.

        ``compile`` calls it, so that a first call takes the time of compiling and no more.
        """
        if not default_cache().holds(self._key(self.config, self._store)):
            _builder()
        return self

    def build(self) -> "Gemm":
        """Compiles now what the first call would compile. Needs no GPU. Returns self. Raises BuildError."""
        self._artifact(self.config, self._store)
        return self

    @property
    def artifact(self) -> Artifact:
        """The compiled kernel of ``config``; built on first use."""
        return self._artifact(self.config, self._store)

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
            for e in heuristic.ranked(self.problem, gpu, count, self._store)
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

    def _config_for(self, problem: GemmProblem, gpu: Gpu, store: StorePath) -> GemmConfig:
        if self._asked is not None:
            return self._asked
        return heuristic.choose(_by_size_class(self.problem, problem), gpu, store)

    def _plan(self, config: GemmConfig, store: StorePath) -> HopperPlan:
        return plan(config, self.problem.swapped() if config.swap_ab else self.problem, store)

    def _artifact(self, config: GemmConfig, store: StorePath) -> Artifact:
        key = (config, store)
        artifact = self._kernels.get(key)
        if artifact is None:
            with self._lock:
                artifact = self._kernels.get(key) or self._build(config, store)
                self._kernels[key] = artifact
        return artifact

    def _build(self, config: GemmConfig, store: StorePath) -> Artifact:
        def compile_now() -> dict[str, bytes]:
            build = _builder()  # brings in the compiler; a cached kernel does without
            return build(self._plan(config, store), self.problem.kind(), self.scheduler, self.target)

        return Artifact.from_entry(default_cache().get_or_build(self._key(config, store), compile_now))

    def _key(self, config: GemmConfig, store: StorePath) -> KernelKey:
        """Cache key of one configuration's kernel: everything that shapes it, in words."""
        plan_, kind = self._plan(config, store), self.problem.kind()
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


def _builder() -> Callable[..., dict[str, bytes]]:
    """What compiles a plan. Raises MissingDependencyError if the compiler's modules are not importable."""
    try:
        from cutegemm.hopper.build import build
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cutlass":
            raise
        raise MissingDependencyError(
            f"the module {error.name} of nvidia-cutlass-dsl cannot be imported, although its metadata "
            'is there; reinstall it with: pip install --force-reinstall "nvidia-cutlass-dsl==4.8.*"'
        ) from error
    return build


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
