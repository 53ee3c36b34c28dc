"""Host time of one call, and the time of the first call in a new process."""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cutegemm.bench.gpu import Gpu
from cutegemm.bench.inputs import random_operands
from cutegemm.bench.peers import compile_case
from cutegemm.bench.worker import FirstCall, Worker
from cutegemm.bench.workload import Case, as_cases

#: Fewer than the launches a stream queues before a call blocks (1024), so that only the host is timed.
BATCH_CALLS = 200


def host_us(
    calls: Mapping[str, Callable[[], object]],
    wait: Callable[[], None],
    *,
    batches: int = 40,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, float]:
    """Median host microseconds of one call, over batches that take turns.

    ``wait`` empties the queue between batches.
    """
    per_call: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(BATCH_CALLS):
            call()
        wait()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(batches):
            for name, call in calls.items():
                begin = clock()
                for _ in range(BATCH_CALLS):
                    call()
                per_call[name].append((clock() - begin) / 1e3 / BATCH_CALLS)
                wait()
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(times) for name, times in per_call.items()}


def gemm_host_us(gpu: Gpu, size: int = 128, dtype: str = "bfloat16") -> dict[str, float]:
    """Host cost of cutegemm's and torch's call, with ``out=`` and allocating, on a very short kernel."""
    [case] = as_cases([(size, size, size)], dtype)
    [one] = random_operands(case, 1, gpu.device, seed=0)
    a, b, out = one.a, one.b, one.out
    gemm = compile_case(case)
    calls: dict[str, Callable[[], object]] = {
        "gemm(a, b, out=d)": lambda: gemm(a, b, out=out),
        "gemm(a, b)": lambda: gemm(a, b),
        "torch.mm(a, b, out=d)": lambda: torch.mm(a, b, out=out),
        "torch.mm(a, b)": lambda: torch.mm(a, b),
    }
    return host_us(calls, gpu.wait)


def first_call_seconds(case: Case, repeats: int = 3) -> dict[str, float]:
    """Seconds from ``cutegemm.compile`` to the end of its first product in a new process with a CUDA context:
    with an empty cache ("cold"), then with the kernel on disk; each the median of the repeats.
    """

    def median(times: list[tuple[float, float]]) -> tuple[float, float]:
        return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

    with tempfile.TemporaryDirectory(prefix="cutegemm-first-call-") as folder:
        folders = [Path(folder) / str(repeat) for repeat in range(repeats)]
        compile_cold, cold = median([_first_call(case, fresh) for fresh in folders])
        compile_warm, warm = median([_first_call(case, filled) for filled in folders])
    return {
        "cold": cold,
        "from disk": warm,
        "compile() before it, cold (imports the compiler)": compile_cold,
        "compile() before it, from disk": compile_warm,
    }


def _first_call(case: Case, caches: Path) -> tuple[float, float]:
    """Seconds of compile() and of the first call in a new process with its caches in that folder."""
    environment = {
        **os.environ,
        "CUTEGEMM_CACHE_DIR": str(caches / "cutegemm"),
        # The DSL keeps files of its own, which would make a cold start look warm.
        "CUTE_DSL_CACHE_DIR": str(caches / "dsl"),
    }
    with Worker(environment) as worker:
        [answer] = worker.ask(FirstCall(case), timeout_s=180)
    return float(answer["compile_s"]), float(answer["seconds"])
