"""A GPU with a clock of its own, implementations that cost what a test says, and jobs for workers."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cutegemm.bench.gpu import DeviceLostError, GpuFacts, Launch
from cutegemm.bench.method import Method
from cutegemm.bench.peers import Prepared
from cutegemm.bench.result import Report, Result, Row, Timing
from cutegemm.bench.worker import Event, Job, Measure, WorkerError
from cutegemm.bench.workload import Case, as_cases
from cutegemm.errors import ProblemError

LAUNCH_US = 1.0
# Small products on many threads mostly wait for each other.
torch.set_num_threads(1)
QUICK = Method(rounds=2, replay_ms=0.05, pause_ms=0.0, rotate_bytes=20_000)


class FakeRecording:
    """Launches kept, and run again on the CPU; the fake clock moves by what they cost."""

    def __init__(self, gpu: "FakeGpu", launches: Sequence[Launch]) -> None:
        self._gpu = gpu
        self._launches = launches

    def replay(self) -> None:
        for launch in self._launches:
            self._gpu.now_us += LAUNCH_US
            launch()

    def replay_us(self) -> float:
        begin = self._gpu.now_us
        self.replay()
        return self._gpu.now_us - begin


@dataclass
class FakeGpu:
    """The CPU in place of a GPU. ``lost`` makes every later wait fail, as a broken context does."""

    name: str = "NVIDIA H200"
    l2_bytes: int = 1000
    memory_bytes: int = 10**9
    now_us: float = 0.0
    lost: bool = False
    recorded_calls: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    releases: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def facts(self) -> GpuFacts:
        return GpuFacts(self.name, "1.2", 132, self.l2_bytes, self.memory_bytes, 700.0)

    def free_bytes(self) -> int:
        return self.memory_bytes

    def record(self, launches: Sequence[Launch]) -> FakeRecording:
        self.recorded_calls.append(len(launches))
        launches[0]()
        return FakeRecording(self, launches)

    def wait(self) -> None:
        if self.lost:
            raise DeviceLostError("a kernel did not finish")

    def pause(self, milliseconds: float) -> None:
        self.pauses.append(milliseconds)

    def release(self) -> None:
        self.releases += 1


@dataclass
class Fake:
    """An implementation: A @ B on the CPU, ``cost()`` microseconds, and what ``spoil`` does to the result."""

    gpu: FakeGpu
    name: str
    ours: bool = False
    cost: Callable[[], float] = lambda: LAUNCH_US
    spoil: Callable[[torch.Tensor], None] = lambda out: None
    absent: str | None = None
    log: list[str] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)

    def available(self) -> str | None:
        return self.absent

    def prepare(self, case: Case) -> Prepared:
        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            torch.mm(a, b, out=out)
            self.spoil(out)
            self.outputs.add(out.data_ptr())
            self.log.append(self.name)
            self.gpu.now_us += self.cost() - LAUNCH_US

        return Prepared(product, f"config of {self.name}")


@dataclass
class FakeGemm:
    """What ``compile`` returns, on the CPU."""

    config: Any = "chosen"
    failure: Exception | None = None
    spoil: Callable[[torch.Tensor], None] = lambda out: None

    def build(self) -> None:
        if self.failure is not None:
            raise self.failure

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.build()
        result = torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
        self.spoil(result)
        return result


class LocalWorker:
    """Worker's interface in this process, on a fake GPU. ``breaks`` names configurations that lose it."""

    def __init__(self, breaks: Sequence[str] = ()) -> None:
        self.alive = True
        self._breaks = breaks

    def ask(self, job: Job, timeout_s: float) -> Iterator[Event]:
        events: list[Event] = []
        try:
            if isinstance(job, Measure):
                for name in job.variants:
                    if name in self._breaks:
                        yield {"event": "step", "name": name, "step": "check"}
                        raise DeviceLostError("a kernel did not finish")
                job.run_on(FakeGpu(), events.append)
            else:
                job.run(events.append)
        except DeviceLostError as error:
            self.alive = False
            raise WorkerError(str(error)) from error
        except (ValueError, RuntimeError) as error:
            raise WorkerError(str(error)) from error
        yield from events

    def stop(self) -> None:
        self.alive = False


@dataclass(frozen=True)
class Echo:
    """Answers twice, with the process and a variable of its environment."""

    variable: str = ""

    def run(self, send: Callable[[Event], None]) -> None:
        send({"event": "first", "pid": os.getpid(), "value": os.environ.get(self.variable)})
        print("a library prints to standard output")
        send({"event": "second"})


@dataclass(frozen=True)
class Numbered:
    """A measurement's outline: a result, and one more answer after it."""

    variants: Any
    number: int

    def run(self, send: Callable[[Event], None]) -> None:
        send({"event": "result", "result": self.number})
        send({"event": "afterwards"})


@dataclass(frozen=True)
class Refuse:
    """Raises."""

    def run(self, send: Callable[[Event], None]) -> None:
        raise ProblemError("K=3 is odd\nand more lines")


@dataclass(frozen=True)
class Lose:
    """Finds the GPU lost."""

    def run(self, send: Callable[[Event], None]) -> None:
        send({"event": "step", "name": "x", "step": "check"})
        error = DeviceLostError("a kernel did not finish")
        error.implementation = "the culprit"
        raise error


@dataclass(frozen=True)
class Die:
    """Kills its process, as an aborting library does."""

    def run(self, send: Callable[[Event], None]) -> None:
        os._exit(7)


@dataclass(frozen=True)
class Sleep:
    """Never answers in time."""

    def run(self, send: Callable[[Event], None]) -> None:
        time.sleep(60)


def sample_report() -> Report:
    """A run of two shapes: one all right, one on which ours failed and Triton did not take part."""
    [first, second] = as_cases([(32, 48, 64), (128, 128, 128)])
    good = Row("cutegemm", True, Timing((1.0, 2.0, 3.0)), 1e-3, 2e-2, "128x128x64", None)
    failed = Row("cutegemm", True, None, None, None, "", "RuntimeError: no [red]luck[/red]")
    cublas = Row("cublas", False, Timing((4.0, 4.0, 4.5)), 1e-3, 2e-2)
    peer = Row("triton", False, Timing((8.0, 8.0, 8.0)), 1e-3, 2e-2)
    return Report(
        gpu={"name": "NVIDIA H200", "driver": "1.2"},
        versions={"torch": "2"},
        date="2026-11-30T10:00:00+00:00",
        method={"text": str(Method()), "rounds": 9},
        ceilings={"copy_bytes_per_s": 4.14e12, "flops_per_s": 830e12, "source": "measured"},
        results=(
            Result(first, (cublas, peer, good), 0.5, 30, 60, True),
            Result(second, (cublas, failed), 0.5, 30, 60, False),
        ),
        host_us={"gemm(a, b, out=d)": 5.5},
        first_call_s={"cold": 1.25, "from disk": 0.125},
        notes=("quack was not measured: the package quack is not installed",),
    )
