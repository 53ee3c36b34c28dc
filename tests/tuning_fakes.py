"""Tuning without a GPU: kernels that are torch's product and take as long as a test says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bench_fakes import LAUNCH_US, FakeGpu, LocalWorker

from cutegemm.bench import peers
from cutegemm.bench.gpu import DeviceLostError
from cutegemm.bench.peers import Variant
from cutegemm.bench.worker import Event, Measure, WorkerError
from cutegemm.bench.workload import Case
from cutegemm.epilogue.interpreted import Interpreted
from cutegemm.hardware import Gpu, gpu_by_name
from cutegemm.tuning import tuner

#: Microseconds of a kernel, told its configuration and scheduler.
Cost = Callable[[Variant], float]


@dataclass
class Machine:
    """A GPU, its kernels, and a log of what was asked of it. Set the fields a test is about."""

    cost: Cost = lambda variant: 10.0
    fails: Callable[[Variant], Exception | None] = lambda variant: None
    spoils: Callable[[Variant], bool] = lambda variant: False
    loses: Callable[[Variant], bool] = lambda variant: False
    memory_share: float = 1.0  # with more of the memory than this, it runs out
    gpu: FakeGpu = field(default_factory=lambda: FakeGpu(l2_bytes=1000))
    built: list[str] = field(default_factory=list)
    measured: list[Measure] = field(default_factory=list)

    def compile_case(self, case: Case, config: Any = None, target: str | None = None) -> "Kernel":
        """In place of the bench's: no compiler."""
        assert isinstance(config, Variant)
        return Kernel(self, config, case)

    def worker(self) -> "MachineWorker":
        """In place of another process."""
        return MachineWorker(self)


@dataclass
class Kernel:
    """A Gemm of one variant."""

    machine: Machine
    variant: Variant
    case: Case

    @property
    def config(self) -> str:
        return str(self.variant)

    def build(self) -> None:
        self.machine.built.append(str(self.variant))
        error = self.machine.fails(self.variant)
        if error is not None:
            raise error

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **beside: Any) -> None:
        if self.machine.loses(self.variant):
            raise DeviceLostError("a kernel did not finish")
        result: Any = torch.matmul(a.float(), b.float())
        if self.case.problem.epilogue is not None:
            result = Interpreted(self.case.problem.epilogue).applied(result, **beside)
        out.copy_(result[0] if isinstance(result, tuple) else result)
        if self.machine.spoils(self.variant):
            out.view(-1)[-1] += 100.0 if out.is_contiguous() else 0.0
        self.machine.gpu.now_us += self.machine.cost(self.variant) - LAUNCH_US


class MachineWorker(LocalWorker):
    """A worker whose GPU is the machine's."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def ask(self, job: Any, timeout_s: float) -> Iterator[Event]:
        if not isinstance(job, Measure):
            yield from super().ask(job, timeout_s)
            return
        self._machine.measured.append(job)
        if job.method.memory_share > self._machine.memory_share:
            raise WorkerError("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        events: list[Event] = []
        try:
            job.run_on(self._machine.gpu, events.append)
        except DeviceLostError as error:
            self.alive = False
            raise WorkerError(str(error), error.implementation) from error
        yield from events


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None = None) -> Machine:
    """Puts the machine where the tuner looks for a GPU, a compiler and other processes."""
    tune = tuner.tune

    def tune_here(problem: Any, **options: Any) -> tuner.Tuned:
        return tune(problem, **{"make_worker": machine.worker, **options})

    monkeypatch.setattr(tuner, "current_gpu", lambda: gpu or gpu_by_name("H200"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(peers, "compile_case", machine.compile_case)
    monkeypatch.setattr(tuner, "tune", tune_here)
    for name, method in (("SCREEN", tuner.SCREEN), ("CONFIRM", tuner.CONFIRM)):
        quick = {"replay_ms": 0.05, "pause_ms": 0.0, "rotate_bytes": 20_000}
        monkeypatch.setattr(tuner, name, type(method)(**{**vars(method), **quick}))
    return machine
