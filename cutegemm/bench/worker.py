"""Another Python process that compiles, measures or makes a first call, and answers over a pipe.

Kernels that hang, or that break the GPU's context, take only the worker down. A worker is a fresh
interpreter, not a fork (CUDA does not survive one) and not multiprocessing's spawn (which runs the caller's
script again). Parent and worker run the same code, so pickles are safe between them.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from cutegemm.bench.gpu import DeviceLostError, Gpu, sentence
from cutegemm.bench.method import Method
from cutegemm.bench.workload import Case, Ceilings

LOST_EXIT_CODE = 3

Event = dict[str, Any]

_END: Event = {"event": "end"}


class Job(Protocol):
    """What a worker can be asked: a picklable object."""

    def run(self, send: Callable[[Event], None]) -> None:
        """Does it and sends answers; anything raised reaches the parent as an event "error" or "lost"."""


@dataclass(frozen=True)
class Build:
    """Compiles a kernel into the cache on disk; needs no GPU as ``target`` is named."""

    case: Case
    config: Any
    target: str | None

    def run(self, send: Callable[[Event], None]) -> None:
        """One answer: seconds taken."""
        from cutegemm.bench.peers import compile_case

        begin = time.perf_counter()
        gemm = compile_case(self.case, self.config, self.target)
        gemm.build()
        send({"event": "built", "seconds": time.perf_counter() - begin})


@dataclass(frozen=True)
class FirstCall:
    """The first product of a process: compile(), which may import the compiler, and the call itself."""

    case: Case

    def run(self, send: Callable[[Event], None]) -> None:
        """One answer: seconds of compile(), and of the call up to the end of the kernel."""
        import torch

        from cutegemm.bench.inputs import random_operands
        from cutegemm.bench.peers import compile_case

        [one] = random_operands(self.case, 1, torch.device("cuda"), seed=0)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        gemm = compile_case(self.case)
        compiled = time.perf_counter()
        gemm(one.a, one.b, out=one.out)
        torch.cuda.synchronize()
        ended = time.perf_counter()
        send({"event": "first call", "compile_s": compiled - begin, "seconds": ended - compiled})


@dataclass(frozen=True)
class Measure:
    """Several configurations of one shape beside cuBLAS, on the GPU of index ``device`` (None: the first)."""

    case: Case
    variants: Mapping[str, Any]
    method: Method
    ceilings: Ceilings | None
    device: int | None = None

    def run(self, send: Callable[[Event], None]) -> None:
        """A "step" before each step, then the "result"."""
        import torch

        from cutegemm.bench.cuda import CudaGpu

        if self.device is not None:
            torch.cuda.set_device(self.device)
        self.run_on(CudaGpu(), send)

    def run_on(self, gpu: Gpu, send: Callable[[Event], None]) -> None:
        """The same on a given GPU."""
        from cutegemm.bench.measure import Measurement
        from cutegemm.bench.peers import Cublas, our_variants
        from cutegemm.bench.suite import find_ceilings

        def watch(name: str, step: str) -> None:
            send({"event": "step", "name": name, "step": step})

        ceilings = self.ceilings or find_ceilings(gpu)
        # cuBLAS has no epilogues of ours.
        peers = [Cublas()] if self.case.problem.epilogue is None else []
        implementations = [*peers, *our_variants(self.variants)]
        result = Measurement(self.case, implementations, gpu, self.method, watch).run(ceilings)
        send({"event": "result", "result": result, "ceilings": ceilings})
        gpu.release()


class WorkerError(RuntimeError):
    """The worker could not do its job, died, or was silent for too long.

    ``implementation`` names what broke the GPU, where the worker could still tell.
    """

    def __init__(self, message: str, implementation: str = "") -> None:
        super().__init__(message)
        self.implementation = implementation


class SilentWorkerError(WorkerError):
    """The worker gave no answer in time and was ended."""


class Worker:
    """A worker process. A context manager; ``ask`` may be called again and again.

    environment   of the process; None: this one's
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        mine, theirs = Pipe()
        self._connection = mine
        code = f"from cutegemm.bench.worker import serve_descriptor; serve_descriptor({theirs.fileno()})"
        environment = dict(os.environ if environment is None else environment)
        # The worker must find this very package, wherever the parent found it.
        path = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        # With the worker's end open here too, a worker's death would not show as the end of the pipe.
        theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None and not self._connection.closed

    def ask(self, job: Job, timeout_s: float) -> Iterator[Event]:
        """The job's answers as they come, at most ``timeout_s`` apart.

        Raises WorkerError with the job's sentence when that fails, and when the worker dies or stays silent.
        """
        try:
            self._connection.send(job)
            while True:
                if not self._connection.poll(timeout_s):
                    self.stop()
                    raise SilentWorkerError(f"no answer in {timeout_s:g} s; the worker process was ended")
                event: Event = self._connection.recv()
                if event == _END:
                    return
                if event["event"] == "error":
                    raise WorkerError(event["message"])
                if event["event"] == "lost":
                    self.stop()
                    raise WorkerError(event["message"], event["name"])
                yield event
        except (EOFError, ConnectionError) as error:
            self.stop()
            raise WorkerError(f"the worker process died (exit code {self._process.returncode})") from error

    def stop(self) -> None:
        """Ends the process: by closing its pipe if it listens, by force if it does not."""
        self._connection.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: Connection, leave: Callable[[int], object] = os._exit) -> None:
    """Answers jobs until the parent closes the pipe. ``leave`` ends the process after the GPU was lost."""
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            job.run(connection.send)
        except DeviceLostError as error:
            connection.send({"event": "lost", "name": error.implementation, "message": str(error)})
            # Python's ordinary way out waits for the GPU, which will not answer.
            leave(LOST_EXIT_CODE)
            return
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the answer
            with contextlib.suppress(ConnectionError):
                connection.send({"event": "error", "message": sentence(error)})
            continue
        connection.send(_END)


def serve_descriptor(descriptor: int) -> None:
    """``serve`` on the pipe a parent left open under this file descriptor."""
    serve(Connection(descriptor))
