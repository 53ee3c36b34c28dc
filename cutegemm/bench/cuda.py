"""The real GPU: CUDA graphs through torch, timed by events."""

import gc
import subprocess
import time
from collections.abc import Sequence

import torch

from cutegemm import hardware
from cutegemm.bench.gpu import DeviceLostError, GpuFacts, Launch, Recording
from cutegemm.errors import DeviceError

#: Calls outside the capture: module loading, run-time compilation and library workspaces happen in the first.
WARM_UP_CALLS = 3


class CudaGpu:
    """torch's current CUDA device.

    ``hang_s``: seconds after which unfinished work is a hang.

    Raises DeviceError if there is no GPU, TargetError if cutegemm has no kernels for it.
    """

    def __init__(self, hang_s: float = 20.0) -> None:
        try:
            hardware.current_gpu()
        except DeviceError as error:
            raise DeviceError(
                "measuring needs an NVIDIA GPU of compute capability 9.0 or 10.0 and a CUDA build of torch, "
                "and they are not here; `python -m cutegemm doctor` says what is missing"
            ) from error
        self._hang_s = hang_s
        self._index = torch.cuda.current_device()
        # Warm-up and capture share one stream, so that the workspaces libraries keep per stream
        # exist before the capture begins.
        self.stream = torch.cuda.Stream(self._index)

    @property
    def device(self) -> torch.device:
        """Where operands live."""
        return torch.device("cuda", self._index)

    def facts(self) -> GpuFacts:
        """What torch and nvidia-smi say of the device."""
        properties = torch.cuda.get_device_properties(self._index)
        driver, power = _driver_and_power(str(getattr(properties, "uuid", "")))
        return GpuFacts(
            name=properties.name,
            driver=driver,
            sms=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            memory_bytes=properties.total_memory,
            power_limit_w=power,
        )

    def free_bytes(self) -> int:
        """Device memory that can be allocated now."""
        return int(torch.cuda.mem_get_info(self._index)[0])

    def record(self, launches: Sequence[Launch]) -> Recording:
        """A CUDA graph of the launches; raises what a launch raises, this thread's stream unchanged."""
        self.stream.wait_stream(torch.cuda.current_stream(self._index))
        # The outer block restores the caller's stream even where a failed capture leaves its own behind.
        with torch.cuda.stream(self.stream):
            for launch in launches[:WARM_UP_CALLS]:
                launch()
            self.wait()
            graph = torch.cuda.CUDAGraph()
            _capture(graph, self.stream, launches)
        return _GraphRecording(self, graph, launches)

    def wait(self) -> None:
        """Until this thread's current stream and the recording stream have run dry.

        Raises DeviceLostError if that takes longer than ``hang_s`` or the context is lost.
        """
        try:
            mark = torch.cuda.Event()
            torch.cuda.current_stream(self._index).wait_stream(self.stream)
            mark.record(torch.cuda.current_stream(self._index))
        except RuntimeError as error:
            raise DeviceLostError(f"the GPU refuses further work: {_first_line(error)}") from error
        self.wait_for(mark)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Until ``event`` has happened; polls, because synchronizing on a kernel that hangs never returns."""
        deadline = time.monotonic() + self._hang_s
        try:
            while not event.query():
                if time.monotonic() > deadline:
                    raise DeviceLostError(
                        f"a kernel did not finish in {self._hang_s:g} s; it hangs, and this process cannot "
                        f"use the GPU any more"
                    )
                time.sleep(1e-4)
        except DeviceLostError:
            raise
        except RuntimeError as error:
            raise DeviceLostError(f"a kernel failed on the GPU: {_first_line(error)}") from error

    def pause(self, milliseconds: float) -> None:
        """Lets the GPU idle."""
        time.sleep(milliseconds / 1e3)

    def release(self) -> None:
        """Gives unused memory back to the driver."""
        gc.collect()
        torch.cuda.empty_cache()


def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, launches: Sequence[Launch]) -> None:
    # A collection in the middle of a capture could free another graph, which CUDA forbids there.
    gc.collect()
    gc.disable()
    cause: Exception | None = None
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                for launch in launches:
                    launch()
            except Exception as error:
                cause = error
                raise
    except Exception as error:  # noqa: BLE001 - raised again, or the one it hides
        # Ending a broken capture raises an error of its own that says nothing of the first.
        raise (cause or error) from None
    finally:
        gc.enable()


class _GraphRecording:
    def __init__(self, gpu: CudaGpu, graph: torch.cuda.CUDAGraph, launches: Sequence[Launch]) -> None:
        self._gpu = gpu
        self._graph = graph
        self._launches = launches  # they hold the operands, whose addresses are in the graph
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def replay(self) -> None:
        """Runs the launches, untimed."""
        with torch.cuda.stream(self._gpu.stream):
            self._graph.replay()

    def replay_us(self) -> float:
        """GPU microseconds of one replay."""
        with torch.cuda.stream(self._gpu.stream):
            # While the first replay runs, the host queues the rest: no launch latency between the events.
            self._graph.replay()
            self._start.record()
            self._graph.replay()
            self._end.record()
        self._gpu.wait_for(self._end)
        return float(self._start.elapsed_time(self._end)) * 1e3


def _driver_and_power(uuid: str) -> tuple[str, float | None]:
    """Driver version and power limit in watts from nvidia-smi; ("unknown", None) where it is not there."""
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    if uuid:
        command.append(f"--id={uuid if uuid.startswith(('GPU-', 'MIG-')) else 'GPU-' + uuid}")
    try:
        line = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.splitlines()[0]
        driver, power = (part.strip() for part in line.split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "unknown", None
    return driver, float(power) if power.replace(".", "", 1).isdigit() else None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
