"""``Gemm.emulate``: the kernel a GPU call would launch, on CPU tensors."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cutegemm.alignment import one_at_a_time, paths_of
from cutegemm.callrecord import CallRecord, Outcome
from cutegemm.emulator.arguments import Addresses
from cutegemm.emulator.faults import EmulationError
from cutegemm.emulator.host import TensorArgument
from cutegemm.emulator.lines import source_lines
from cutegemm.emulator.machine import Progress
from cutegemm.emulator.run import Emulation, run
from cutegemm.emulator.trace import Trace
from cutegemm.errors import CutegemmError, OperandTypeError, ProblemError
from cutegemm.hardware import Gpu
from cutegemm.kernels import Choice, Kernels
from cutegemm.operands import check_call, operand_rules
from cutegemm.parts.plan import KernelPlan, counts_tasks
from cutegemm.workspace import needs

# Modes whose stride the compiled code takes to be 1.
_UNIT_MODE = {"a": {"k": -1, "m": -2}, "b": {"n": -1, "k": -2}, "out": {"n": -1, "m": -2}}


def _ring_labels(stages: int) -> dict[int, str]:
    """The barriers of the operand ring, which come first in shared memory, by their offset."""
    arrived = {8 * i: f"inputs_arrived[{i}]" for i in range(stages)}
    return arrived | {8 * (stages + i): f"inputs_consumed[{i}]" for i in range(stages)}


def _sms(choice: Choice, plan: KernelPlan, resident: int | None) -> int | None:
    """SMs of the emulated GPU, where its size decides on the number of workers; None: all of them."""
    if resident is None or not choice.scheduler.queued or counts_tasks(choice.scheduler, plan):
        return None
    return resident * plan.cluster_ctas


def _with_source_lines(error: EmulationError, kernels: Kernels, choice: Choice, ptx: str) -> EmulationError:
    """A fault that names lines of the Python source too, if the compiler is there to tell them."""
    try:
        located = error.located(source_lines(ptx, kernels.ptx_with_lines(choice)))
    except CutegemmError:
        return error
    return located.with_traceback(error.__traceback__)


@dataclass(frozen=True)
class Circumstances:
    """How a product is emulated.

    check      whether races and uninitialised reads are looked for
    seed       None for a fixed order, a number for an adverse one
    resident   clusters that run at once; None: as many as the GPU has SMs for
    ptx        device code to run in place of the compiled one's
    progress   is called a few times a second
    exact_sums whether sums have the bits of an H200's
    processes  among which independent clusters are divided; None or 0: as many as there are CPUs
    """

    check: bool = False
    seed: int | None = None
    resident: int | None = None
    ptx: str | None = None
    progress: Callable[[Progress], None] | None = None
    exact_sums: bool = False
    processes: int | None = 1

    def __post_init__(self) -> None:
        """Raises OperandTypeError, ProblemError."""
        for name in ("seed", "resident", "processes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise OperandTypeError(f"{name} is {value!r}; pass a whole number, or None")
        if self.resident is not None and self.resident < 1:
            raise ProblemError(
                f"resident is {self.resident}; give clusters from 1 on, or None for what the GPU has room for"
            )


def emulate(
    kernels: Kernels,
    gpu: Gpu,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    circumstances: Circumstances,
) -> Emulation:
    """out = a @ b by the kernel that ``gpu`` would run; ``operands`` are a, b, out on the CPU.

    Of a batch that is launched product by product, the trace is that of the last.

    Raises what a call raises for its operands, and EmulationError for faults of the kernel.
    """
    a, b, out = operands
    sizes = check_call(kernels.problem, a, b, out, device="cpu")
    if 0 in sizes:
        return Emulation(out.zero_(), {}, Trace(), None)
    problem = kernels.problem
    a, b, dense_out = (
        rule.dense(tensor) for rule, tensor in zip(operand_rules(problem), operands, strict=True)
    )
    if problem.batched and one_at_a_time(problem, a, b):
        single = kernels.of_one_product()
        for each in zip(a, b, dense_out, strict=True):
            result = emulate(single, gpu, each, circumstances)
    else:
        paths = paths_of(problem, sizes, a, b, dense_out)
        choice = kernels.choice(problem.with_sizes(*sizes), gpu, paths)
        result = emulate_choice(kernels, gpu, Product(choice, sizes, (a, b, dense_out)), circumstances)
    return replace(result, out=out if dense_out is out else out.copy_(dense_out))


@dataclass(frozen=True)
class Product:
    """One checked call: the kernel that serves it, its sizes (l, m, n, k), its tensors a, b, out.

    extras   what the host code is given behind the stream
    """

    choice: Choice
    sizes: tuple[int, int, int, int]
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    extras: tuple[Any, ...] = ()


def emulate_choice(kernels: Kernels, gpu: Gpu, product: Product, circumstances: Circumstances) -> Emulation:
    """Runs a call that was checked; no size of it is 0. Raises EmulationError for faults of the kernel."""
    problem, choice, sizes = kernels.problem, product.choice, product.sizes
    a, b, out = product.operands
    plan = choice.plan(problem)
    resident = circumstances.resident or gpu.resident_clusters(plan.cluster_ctas)
    needed = needs(choice.scheduler, plan, resident, sizes[-1])
    counters = torch.zeros(needed.counters, dtype=torch.int32)
    partials = torch.full((needed.partial_bytes // 4,), float("nan"))
    record = CallRecord(*sizes, resident, 1, counters.data_ptr(), partials.data_ptr())
    outcome = ctypes.c_int32(-1)
    artifact = kernels.artifact(choice)
    ptx = circumstances.ptx or artifact.ptx
    try:
        result = run(
            artifact,
            TensorArgument(a, _UNIT_MODE["a"][problem.a_major]),
            TensorArgument(b, _UNIT_MODE["b"][problem.b_major]),
            TensorArgument(out, _UNIT_MODE["out"][problem.out_major]),
            Addresses(record, {"counters": counters, "partials": partials} if needed else {}),
            outcome,
            None,
            *product.extras,
            sms=_sms(choice, plan, circumstances.resident),
            seed=circumstances.seed,
            check=circumstances.check,
            ptx=ptx,
            barrier_labels=_ring_labels(plan.stages),
            progress=circumstances.progress,
            exact_sums=circumstances.exact_sums,
            processes=circumstances.processes,
        )
    except EmulationError as error:
        raise _with_source_lines(error, kernels, choice, ptx) from None
    if outcome.value != Outcome.LAUNCHED:
        raise EmulationError(f"the host code refused the launch: {Outcome(outcome.value).name}")
    if counters.any():
        raise EmulationError("the kernel left its counters other than 0: the next launch would go wrong")
    return replace(result, out=out)
