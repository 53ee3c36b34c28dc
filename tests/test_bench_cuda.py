"""CudaGpu against a recording stand-in for torch.cuda: order of calls, streams, failed captures, hangs."""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutegemm import hardware
from cutegemm.bench import cuda
from cutegemm.bench.gpu import DeviceLostError
from cutegemm.bench.measure import Measurement
from cutegemm.bench.method import QUICK
from cutegemm.bench.peers import DEFAULT_PEERS, choose_peers
from cutegemm.bench.suite import find_ceilings
from cutegemm.bench.workload import as_cases
from cutegemm.errors import DeviceError

GRAPH_SIGNATURE = inspect.signature(torch.cuda.graph.__init__)


class Driver:
    """What torch.cuda would do, written down; streams and graphs are names."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: Any = SimpleNamespace(name="default", wait_stream=lambda other: None)
        self.capturing = False
        self.pending_queries = 0
        self.query_error: Exception | None = None
        self.capture_end_error: Exception | None = None

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self.current.name}{' capturing' if self.capturing else ''}")

    def make_stream(self, device: int) -> Any:
        return SimpleNamespace(
            name="side", wait_stream=lambda other: self.note(f"side waits for {other.name}")
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def make_graph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.note("replay"))

    def graph(self, *args: Any, **keywords: Any) -> Any:
        # As strict about arguments as the real one of this torch.
        bound = GRAPH_SIGNATURE.bind(None, *args, **keywords).arguments
        return Capture(self, bound["stream"], bound["capture_error_mode"])

    def make_event(self, enable_timing: bool = False) -> Any:
        return FakeEvent(self, enable_timing)


class Capture:
    """torch.cuda.graph: when ending a broken capture raises, it leaves its stream set."""

    def __init__(self, driver: Driver, stream: Any, mode: str) -> None:
        self.driver = driver
        self.stream = stream
        self.mode = mode
        self.before: Any = None

    def __enter__(self) -> None:
        self.before = self.driver.current
        self.driver.current = self.stream
        self.driver.capturing = True
        self.driver.note(f"begin {self.mode}")

    def __exit__(self, *args: object) -> None:
        self.driver.capturing = False
        if self.driver.capture_end_error is not None:
            raise self.driver.capture_end_error
        self.driver.current = self.before


class FakeEvent:
    """Happens after ``pending_queries`` questions."""

    def __init__(self, driver: Driver, timing: bool) -> None:
        self.driver = driver
        self.timing = timing

    def record(self, stream: Any = None) -> None:
        self.driver.note("timed event" if self.timing else "event")

    def query(self) -> bool:
        assert not self.driver.capturing
        if self.driver.query_error is not None:
            raise self.driver.query_error
        self.driver.pending_queries -= 1
        return self.driver.pending_queries < 0

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.timing
        assert end.timing
        return 12.5


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    stand_ins = {
        "current_device": lambda: 0,
        "Stream": fake.make_stream,
        "current_stream": lambda device=None: fake.current,
        "stream": fake.stream,
        "CUDAGraph": fake.make_graph,
        "graph": fake.graph,
        "Event": fake.make_event,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(hardware, "current_gpu", lambda device=None: None)
    return fake


def test_warm_up_on_the_capture_stream_before_the_capture(driver: Driver) -> None:
    gpu = cuda.CudaGpu()
    gpu.record([lambda i=i: driver.note(f"call {i}") for i in range(5)])  # type: ignore[misc]
    assert driver.log == [
        "side waits for default on default",
        *[f"call {i} on side" for i in range(3)],
        "side waits for side on side",
        "event on side",
        "begin thread_local on side capturing",
        *[f"call {i} on side capturing" for i in range(5)],
    ]
    assert driver.current.name == "default"


def test_a_replay_warms_up_and_times_without_a_gap(driver: Driver) -> None:
    gpu = cuda.CudaGpu()
    recording = gpu.record([lambda: None])
    driver.log.clear()
    assert recording.replay_us() == pytest.approx(12_500.0)
    assert driver.log == ["replay on side", "timed event on side", "replay on side", "timed event on side"]
    driver.log.clear()
    recording.replay()
    assert driver.log == ["replay on side"]
    assert driver.current.name == "default"


def test_a_failed_capture_tells_its_cause_and_puts_the_stream_back(driver: Driver) -> None:
    gpu = cuda.CudaGpu()
    driver.capture_end_error = RuntimeError("operation failed due to a previous error during capture")

    def launch() -> None:
        if driver.capturing:
            raise ValueError("this library synchronizes")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="this library synchronizes"):
        gpu.record([launch])
    assert driver.current.name == "default"
    assert gc.isenabled()


def test_an_error_in_the_warm_up_is_raised_before_any_capture(driver: Driver) -> None:
    gpu = cuda.CudaGpu()

    def launch() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        gpu.record([launch])
    assert not any("begin" in line for line in driver.log)
    assert driver.current.name == "default"


def test_a_hang_is_noticed_without_synchronizing(driver: Driver) -> None:
    gpu = cuda.CudaGpu(hang_s=0.05)
    driver.pending_queries = 10**9
    with pytest.raises(DeviceLostError, match=r"did not finish in 0\.05 s"):
        gpu.wait()


def test_waiting_ends_when_the_work_does(driver: Driver) -> None:
    gpu = cuda.CudaGpu()
    driver.pending_queries = 3
    gpu.wait()
    assert driver.pending_queries == -1


def test_an_error_of_the_context_is_a_lost_gpu(driver: Driver) -> None:
    gpu = cuda.CudaGpu()
    driver.query_error = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    with pytest.raises(
        DeviceLostError, match="a kernel failed on the GPU: CUDA error: an illegal memory access was"
    ):
        gpu.wait()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(device: Any = None) -> None:
        raise DeviceError("torch sees none")

    monkeypatch.setattr(hardware, "current_gpu", none)
    with pytest.raises(DeviceError, match="measuring needs an NVIDIA GPU"):
        cuda.CudaGpu()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("580.159.04, 700.00\n", ("580.159.04", 700.0)),
        ("580.159.04, [N/A]\n", ("580.159.04", None)),
        ("", ("unknown", None)),
        ("No devices were found\n", ("unknown", None)),
    ],
)
def test_driver_and_power(
    monkeypatch: pytest.MonkeyPatch, output: str, expected: tuple[str, float | None]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr(cuda.subprocess, "run", run)
    assert cuda._driver_and_power("abc") == expected
    assert commands[0][-1] == "--id=GPU-abc"


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(cuda.subprocess, "run", run)
    assert cuda._driver_and_power("") == ("unknown", None)


@pytest.mark.gpu
def test_on_a_gpu_a_replay_takes_as_long_as_its_copies() -> None:
    gpu = cuda.CudaGpu()
    source = torch.ones(2**28, dtype=torch.uint8, device=gpu.device)
    target = torch.empty_like(source)
    recording = gpu.record([lambda: target.copy_(source)] * 4)
    target.zero_()
    gpu.wait()
    recording.replay()
    gpu.wait()
    assert torch.equal(source, target)
    rate = 4 * 2 * 2**28 / recording.replay_us() / 1e6
    assert 0.2 < rate < 10.0  # TB/s
    facts = gpu.facts()
    assert facts.l2_bytes > 2**20
    assert facts.driver != "unknown"
    assert gpu.free_bytes() > 0
    with pytest.raises(RuntimeError):
        gpu.record([lambda: target.sum().item()])  # synchronizes: no capture can hold it
    gpu.record([lambda: target.copy_(source)]).replay_us()


@pytest.mark.gpu
@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_on_a_gpu_every_library_here_is_right(a_major: str, b_major: str) -> None:
    chosen, _ = choose_peers(DEFAULT_PEERS)
    [case] = as_cases([(264, 520, 584)], a_major=a_major, b_major=b_major)
    gpu = cuda.CudaGpu()
    result = Measurement(case, chosen, gpu, QUICK, lambda name, step: None).run(find_ceilings(gpu))
    assert result.cold
    assert [(row.name, row.failure) for row in result.rows] == [(peer.name, None) for peer in chosen]
    assert all(row.relative_error is not None and row.relative_error < 5e-3 for row in result.rows)
