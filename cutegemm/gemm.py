"""Gemm: what ``compile`` returns. Chooses and builds kernels on first use, checks and launches calls."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cutegemm import heuristic
from cutegemm.alignment import expected_paths, one_at_a_time, paths_of
from cutegemm.allocation import dense_beside, dense_maker, gpu_count
from cutegemm.artifact import Artifact, Resources
from cutegemm.callrecord import CallRecord, Outcome, OutcomeWord
from cutegemm.config import GemmConfig
from cutegemm.errors import (
    ConfigError,
    CutegemmError,
    DeviceError,
    OperandTypeError,
    ProblemError,
    TargetError,
)
from cutegemm.hardware import Gpu, current_gpu, gpu_by_name
from cutegemm.kernels import Choice, Fastest, Kernels
from cutegemm.operands import check_call, check_grad, operand_rules, read_sizes
from cutegemm.parts.paths import Paths
from cutegemm.parts.plan import KernelPlan
from cutegemm.problem import GemmProblem
from cutegemm.residency import loading_allowed, resident_clusters
from cutegemm.scheduler import TileScheduler
from cutegemm.workspace import WithWorkspace, needs

if TYPE_CHECKING:
    from cutegemm.emulator.machine import Progress
    from cutegemm.emulator.run import Emulation

# Cross-compiling names no GPU; the choice is then made for this one.
NOMINAL_GPU = {"sm_90a": "H200", "sm_100a": "B200"}

# Launches a Gemm of unknown sizes remembers: more than a process meets, unless it never repeats one.
MAX_KNOWN_LAUNCHES = 65536

outcome_word = OutcomeWord()
LAUNCHED = int(Outcome.LAUNCHED)  # a member of an enumeration takes longer to look up
# What passing something else than the tensors a launch was prepared for may raise.
REFUSALS = (LookupError, AttributeError, ValueError, TypeError, RuntimeError)


class Gemm:
    """D = A @ B for one problem, callable on CUDA tensors. Made by ``cutegemm.compile``.

    problem     what was asked
    scheduler   tile order and assignment
    target      architecture the kernels are built for
    Kernels are built at the first call or on ``build()``; artifacts need no GPU.
    """

    def __init__(
        self,
        problem: GemmProblem,
        config: GemmConfig | Fastest | None,
        scheduler: TileScheduler | None,
        target: str,
    ) -> None:
        self.problem = problem
        self.target = target
        self._kernels = Kernels(problem, config, scheduler, target)
        self._static = problem.is_static
        self._paths = expected_paths(problem)
        self._launches: dict[Any, Launch] = {}
        # The last one, where sizes and GPU cannot differ: there is nothing to look up.
        self._only: Launch | None = None
        self._prepared: dict[tuple[Any, Paths], Launch] = {}
        if config is not None:
            self._choice()  # an illegal configuration is refused here, not at the first call

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

        Strides and addresses are free: slices of larger tensors, one matrix for the whole batch (stride 0),
        odd pitches. Those that are multiples of 16 bytes are the fastest; for others there are kernels with
        other loads and stores (see ``explain``), and batches whose matrices are not all a multiple of 16
        bytes apart are launched product by product. A matrix with no contiguous mode is copied first.
        Returns out. Raises OperandTypeError, ProblemError, DeviceError and TargetError for what was passed;
        where the kernel has to be built first, ConfigError, BuildError, MissingDependencyError and
        StaleSourceError too.
        """
        if stream is not None:
            with on_stream(stream, a):
                return self(a, b, out=out)
        error: Exception | None = None
        launch = result = None
        try:
            # A known kind of call. Nothing is checked here that the compiled host code checks.
            launch = self._only or self._launches.get(
                a.get_device() if self._static else (a.get_device(), a.shape, b.shape)
            )
            if launch is not None:
                result = launch.new_result() if out is None else out
                if a.requires_grad or b.requires_grad or result.requires_grad:
                    check_grad(a, b, out)
                outcome, address = outcome_word.both
                launch.function(a, b, result, launch.record_address, address)
                if outcome.value == LAUNCHED:
                    return result
        except CutegemmError:
            raise
        except REFUSALS as caught:
            error = caught
        if launch is not None and result is not None and self._launched_otherwise(launch, a, b, result):
            return result
        # A new kind of call, or one the host code refused: the thorough checks say what is wrong.
        return self._thorough_call(a, b, out, error)

    def emulate(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        check: bool = False,
        seed: int | None = None,
        resident: int | None = None,
        exact_sums: bool = False,
        processes: int | None = 1,
        progress: "Callable[[Progress], None] | None" = None,
    ) -> "Emulation":
        """out = a @ b on CPU tensors, by running the PTX a GPU call would launch. Needs no GPU.

        check     look for races and uninitialised reads of shared memory
        seed      None: warps in a fixed order, copies and MMAs as early as possible; a number: random order,
                  everything as late as allowed, waits that fail for no reason
        resident  clusters that run at once, as the GPU's size would decide; fewer means more tiles for each
        exact_sums  add as the tensor cores of an H200 do, so that the result has the same bits; slower
        processes   among which clusters are divided if they do not depend on each other; None or 0: as many
                  as there are CPUs. Never among several if there are work counters or sums in global memory
        progress  is called a few times a second with a cutegemm.emulator.Progress
        Returns an Emulation with .out and .trace. Raises what a call raises for its operands, and
        EmulationError for faults of the kernel: DeadlockError, RaceError, OutOfBoundsError, ...
        """
        from cutegemm.emulator.product import Circumstances, emulate

        read_sizes(self.problem, a, b, device="cpu")
        if out is None:
            out = self._allocate(a, b)
        circumstances = Circumstances(
            check, seed, resident, progress=progress, exact_sums=exact_sums, processes=processes
        )
        return emulate(self._kernels, self._gpu(), (a, b, out), circumstances)

    def _launch_key(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        """What decides on the launch; sizes of a static problem are compared by the launch itself."""
        return a.get_device() if self._static else (a.get_device(), a.shape, b.shape)

    def _launched_otherwise(self, known: "Launch", a: Any, b: Any, out: Any) -> bool:
        """Tries the kernel prepared for these sizes and this call's alignment, if that is another one.

        A loop over slices alternates among a few. The host code checks the call as it does any other.
        """
        record = known.record
        try:
            key = self._launch_key(a, b)
            paths = paths_of(self.problem, (record.l, record.m, record.n, record.k), a, b, out)
            other = self._prepared.get((key, paths))
            if other is None or other is known:
                return False
            outcome, address = outcome_word.both
            other.function(a, b, out, other.record_address, address)
        except REFUSALS:
            return False  # the thorough checks come next, and say why
        if outcome.value == LAUNCHED:
            self._try_first(key, other)
        return outcome.value == LAUNCHED

    def _try_first(self, key: Any, launch: "Launch") -> None:
        """The next call of this kind is tried with a launch; one for another alignment is refused by it."""
        self._launches[key] = launch
        if self._static and gpu_count() == 1:
            self._only = launch

    def _thorough_call(self, a: Any, b: Any, out: Any, error: Exception | None) -> torch.Tensor:
        sizes = read_sizes(self.problem, a, b)
        if out is None:
            out = self._allocate(a, b)
        check_call(self.problem, a, b, out)
        if 0 in sizes:
            return out.zero_()  # nothing to launch: empty, or a sum of no products
        rules = operand_rules(self.problem)
        dense_a, dense_b, dense_out = (
            rule.dense(tensor) for rule, tensor in zip(rules, (a, b, out), strict=True)
        )
        with loading_allowed():
            self._launch_checked(sizes, dense_a, dense_b, dense_out, error)
        return out if dense_out is out else out.copy_(dense_out)

    def _launch_checked(
        self,
        sizes: tuple[int, int, int, int],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        error: Exception | None,
    ) -> None:
        """Launches what has passed every check and has a contiguous mode each."""
        if self.problem.batched and one_at_a_time(self.problem, a, b):
            for each in zip(a, b, out, strict=True):
                self._one_product._launch_checked((1, *sizes[1:]), *each, error)
            return
        launch = self._launch_for(sizes, a, b, out)
        # The exact checks for overlap have passed: the host code's quick ones are overruled.
        launch.function(a, b, out, launch.disjoint_record_address, outcome_word.address)
        if outcome_word.word.value != Outcome.LAUNCHED:
            raise error or DeviceError(f"the launch was refused: {Outcome(outcome_word.word.value).name}")
        self._try_first(self._launch_key(a, b), launch)

    @cached_property
    def _one_product(self) -> "Gemm":
        """For batches whose matrices do not all begin on a unit TMA addresses: one of their products."""
        single = self._kernels.of_one_product()
        return Gemm(single.problem, single.config, single.scheduler, self.target)

    def _launch_for(
        self, sizes: tuple[int, int, int, int], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> "Launch":
        paths = paths_of(self.problem, sizes, a, b, out)
        key = (self._launch_key(a, b), paths)
        launch = self._prepared.get(key)
        if launch is None:
            if len(self._prepared) >= MAX_KNOWN_LAUNCHES:
                self._prepared.clear()
                self._launches.clear()
            launch = self._prepared[key] = self._prepare_launch(sizes, a.get_device(), paths)
        return launch

    def _prepare_launch(self, sizes: tuple[int, int, int, int], device: int, paths: Paths) -> "Launch":
        """The kernel for sizes (l, m, n, k) on a GPU: chosen, built, loaded."""
        return self._launch_among(self._kernels, sizes, device, paths)

    def _launch_among(
        self, kernels: Kernels, sizes: tuple[int, int, int, int], device: int, paths: Paths
    ) -> "Launch":
        gpu = current_gpu(device)
        if gpu.target != self.target:
            raise TargetError(
                f"this gemm was compiled for {self.target}, GPU {device} ({gpu.name}) runs {gpu.target}; "
                f'compile with target="{gpu.target}"'
            )
        choice, artifact = kernels.built(kernels.problem.with_sizes(*sizes), gpu, paths)
        plan = choice.plan(kernels.problem)
        resident = resident_clusters(artifact, plan.cluster_ctas, device)
        function = artifact.load()
        if needed := needs(choice.scheduler, plan, resident, sizes[-1]):
            function = WithWorkspace(function, device, needed)
        records = CallRecord(*sizes, resident, 0), CallRecord(*sizes, resident, 1)
        return Launch(function, *records, self._result_maker(sizes, device), plan)

    def _allocate(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A dense result tensor beside a, for operands not checked against each other yet."""
        shape = (*a.shape[:-1], self._result_columns(b.shape[-1]))
        return dense_beside(a, shape, self.problem.out_major, self.problem.out_torch)

    def _result_columns(self, n: int) -> int:
        """Columns of the result of a product of n."""
        return n

    def _result_maker(self, sizes: tuple[int, int, int, int], device: int) -> Callable[[], torch.Tensor]:
        """Makes dense result tensors for calls of sizes (l, m, n, k)."""
        batch, m, n, _ = sizes
        columns = self._result_columns(n)
        shape = (batch, m, columns) if self.problem.batched else (m, columns)
        return dense_maker(shape, self.problem.out_major, self.problem.out_torch, device)

    # --- choosing and building -------------------------------------------------------------------------

    @property
    def config(self) -> GemmConfig:
        """The configuration used, stages filled in; for sizes unknown as yet, the one for about 4096."""
        return self._choice().config

    @property
    def scheduler(self) -> TileScheduler:
        """Tile order and assignment used; where not given, chosen with the configuration."""
        return self._choice().scheduler

    @property
    def paths(self) -> Paths:
        """How dense operands of the problem's sizes are loaded and the result is stored; see alignment.py."""
        return self._choice().paths

    def _choice(self, gpu: Gpu | None = None) -> Choice:
        """The kernel for dense operands; where there is none, that for padded ones, which a call may have.

        Raises ProblemError, ConfigError.
        """
        choice: Choice = self._for_dense(self._kernels.choice, gpu or self._gpu())
        return choice

    def _for_dense(self, find: Callable[[GemmProblem, Gpu, Paths], Any], gpu: Gpu) -> Any:
        padded = replace(self._paths, a="tma", b="tma")
        try:
            return find(self.problem, gpu, self._paths)
        except (ConfigError, ProblemError):
            if self._paths == padded:
                raise
        return find(self.problem, gpu, padded)

    def prepare(self) -> "Gemm":
        """Imports the kernel compiler now if ``config``'s kernel is not in the cache. Returns self.

        ``compile`` calls it, so that a first call takes the time of compiling and no more.
        """
        self._kernels.import_compiler_unless_cached(self._choice())
        return self

    def build(self) -> "Gemm":
        """Compiles now what the first call would compile. Needs no GPU. Returns self.

        Raises BuildError; ConfigError for a given configuration with which an epilogue spills registers.
        """
        self._for_dense(self._kernels.built, self._gpu())
        return self

    @property
    def artifact(self) -> Artifact:
        """The compiled kernel of ``config``; built on first use."""
        artifact: Artifact = self._for_dense(self._kernels.built, self._gpu())[1]
        return artifact

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

    def explain(self, count: int = 8, gpu: str | None = None) -> str:
        """Why this configuration: the cheapest candidates with each term of the cost model, in SM cycles.

        gpu: a model's name, such as "H20"; None: the GPU at hand, else the one the target is nominally for.
        Raises DeviceError for an unknown model, TargetError for one of another architecture.
        """
        model = self._gpu() if gpu is None else gpu_by_name(gpu)
        if model.target != self.target:
            raise TargetError(f"{model.name} runs {model.target} kernels, this is one for {self.target}")
        given = self._kernels.config
        choice = self._choice(model)
        splits = heuristic.SPLITS if self._kernels.scheduler is None else (choice.scheduler.splits,)
        sizes = (self.problem.l, self.problem.m, self.problem.n, self.problem.k)
        lines = [
            f"{self.problem} on {model.name} ({model.sms} SMs, {self.target}), tiles by {choice.scheduler}",
            f"operands by: {choice.paths}",
            *(["M, N, K not known are taken as 4096, L as 1"] if None in sizes else []),
            _EXPLAIN_HEADER,
        ]
        if given is not None:
            cost = heuristic.estimate(choice.plan(self.problem), self.problem, model)
            whence = "measured" if isinstance(given, Fastest) else "given"
            lines += [_explained(cost), f"configuration {whence}, not chosen: {choice.config}; candidates:"]
        lines += map(_explained, heuristic.ranked(self.problem, model, count, choice.paths, splits))
        return "\n".join((*lines, _EXPLAIN_LEGEND))

    def __reduce__(self) -> tuple[Any, ...]:
        """How pickle and copy make an equal Gemm; its kernels come from the cache."""
        return Gemm, (self.problem, self._kernels.config, self._kernels.scheduler, self.target)

    def __eq__(self, other: object) -> bool:
        return self.__reduce__() == other.__reduce__() if isinstance(other, Gemm) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.problem, self._kernels.config, self.target))

    def __repr__(self) -> str:
        config = self._kernels.config or "configuration by heuristic"
        scheduler = self._kernels.scheduler or "scheduler by heuristic"
        return f"Gemm({self.problem}; {config}; {scheduler}; {self.target})"

    def _gpu(self) -> Gpu:
        """The GPU at hand if it runs this target, else the model the target is nominally for."""
        try:
            gpu = current_gpu()
        except (DeviceError, TargetError):
            return gpu_by_name(NOMINAL_GPU[self.target])
        return gpu if gpu.target == self.target else gpu_by_name(NOMINAL_GPU[self.target])


_EXPLAIN_HEADER = (
    f"{'total':>10} {'waves':>6} {'tiles':>7} {'mma':>9} {'fill':>9} {'store':>7} {'reduce':>7} {'dram':>9}"
    "  configuration"
)
_EXPLAIN_LEGEND = (
    "cycles; total: the launch; waves: tiles of the busiest SM; tiles: of the whole problem; mma, fill: one\n"
    "tile's main loop if only tensor cores or only loads mattered; store: exposed epilogue of a tile;\n"
    "reduce: adding the sums of a split K; dram: device memory alone, for the whole problem"
)


def _explained(e: heuristic.Estimate) -> str:
    return (
        f"{e.total:10.0f} {e.waves:6d} {e.tiles:7d} {e.mma:9.0f} {e.fill:9.0f} {e.store:7.0f} {e.reduce:7.0f}"
        f" {e.dram:9.0f}  {e.config}" + (f", K split {e.splits} ways" if e.splits > 1 else "")
    )


@dataclass(frozen=True)
class Launch:
    """A loaded kernel and what its host code is told; the records must outlive their addresses' use.

    new_result   allocates an output of the sizes in the record
    """

    function: Callable[..., None]
    record: CallRecord
    disjoint_record: CallRecord
    new_result: Callable[[], torch.Tensor]
    plan: KernelPlan | None = None
    record_address: int = field(init=False)
    disjoint_record_address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "record_address", ctypes.addressof(self.record))
        object.__setattr__(self, "disjoint_record_address", ctypes.addressof(self.disjoint_record))


def on_stream(stream: object, a: object) -> Any:
    """A context in which ``stream`` is the current one. Raises OperandTypeError, DeviceError."""
    if not isinstance(stream, torch.cuda.Stream):
        raise OperandTypeError(
            f"stream={stream!r} is no torch.cuda.Stream; wrap a raw handle in torch.cuda.ExternalStream"
        )
    if isinstance(a, torch.Tensor) and a.device.type == "cuda" and a.device != stream.device:
        raise DeviceError(
            f"stream belongs to {stream.device}, a lies on {a.device}; pass a stream of that GPU"
        )
    return torch.cuda.stream(stream)
