"""Suites of shapes, and running one: ``run_suite``."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cutegemm.bench.cuda import CudaGpu
from cutegemm.bench.gpu import DeviceLostError, Gpu, sentence
from cutegemm.bench.measure import Measurement
from cutegemm.bench.method import FULL, Method
from cutegemm.bench.peers import DEFAULT_PEERS, Cublas, Implementation, choose_peers, our_variants
from cutegemm.bench.result import Result, Row
from cutegemm.bench.workload import KNOWN_CEILINGS, Case, Ceilings, as_cases
from cutegemm.errors import CutegemmError, ProblemError
from cutegemm.problem import GemmProblem

DEFAULT_SUITE = Path(__file__).parents[2] / "benchmarks" / "h200_suite.json"


class Progress:
    """Told how a run goes; does nothing. The command line shows a bar in its place."""

    def begin(self, shapes: int) -> None:
        """So many shapes are coming."""

    def shape(self, case: Case) -> None:
        """The next shape starts."""

    def step(self, implementation: str, step: str) -> None:
        """The implementation does its next step on the current shape."""

    def result(self, result: Result) -> None:
        """The shape is done."""


def load_suite(path: Path, dtype: str, **layout: Any) -> list[Case]:
    """Cases of a suite file: JSON with a list "shapes" of objects with m, n, k and perhaps a label.

    ``layout``: out_dtype, a_major, b_major as ``as_cases`` takes them.
    Raises ProblemError for a file that cannot be read or is no suite.
    """
    try:
        entries = json.loads(path.read_text())["shapes"]
        shapes = [((entry["m"], entry["n"], entry["k"]), str(entry.get("label", ""))) for entry in entries]
    except OSError as error:
        raise ProblemError(
            f"cannot read the suite {path}: {error.strerror}; give --suite FILE or M N K"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProblemError(
            f"{path} is no suite: {sentence(error)}; it must be JSON like "
            f'{{"shapes": [{{"m": 64, "n": 64, "k": 64}}]}}'
        ) from error
    cases = as_cases([shape for shape, _ in shapes], dtype, **layout)
    return [Case(case.problem, label) for case, (_, label) in zip(cases, shapes, strict=True)]


def run_suite(
    shapes: Sequence[Case | GemmProblem | Sequence[int]],
    *,
    dtype: str = "bfloat16",
    peers: Sequence[str | Implementation] = DEFAULT_PEERS,
    variants: Mapping[str, Any] | None = None,
    method: Method | None = None,
    gpu: Gpu | None = None,
    ceilings: Ceilings | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Measures cutegemm and its peers on every shape, interleaved; cuBLAS always takes part.

    shapes     (M, N, K) tuples of ``dtype`` with K-major operands; problems or cases for anything else
    peers      names among ``peers.PEERS``, or implementations of your own; what cannot run here is left out
    variants   name -> GemmConfig or None (the heuristic's choice), side by side; default: "cutegemm": None
    method     rounds, replay length, pauses; default ``Method()``
    ceilings   of the floor; default: known for this GPU, or measured first

    An implementation that fails has its sentence in its row and the others go on; a shape that
    cannot be measured at all has it in every row. Raises DeviceError without a GPU, DeviceLostError when a
    kernel hangs or breaks the GPU's context.
    """
    cases = as_cases(shapes, dtype)
    method = method or FULL
    gpu = gpu or CudaGpu()
    progress = progress or Progress()
    chosen, _ = choose_peers(peers)
    implementations = [*chosen, *our_variants(variants)]
    progress.begin(len(cases))
    if ceilings is None:
        ceilings = find_ceilings(gpu)
    results = []
    for case in cases:
        progress.shape(case)
        result = _measure(case, implementations, gpu, method, ceilings, progress)
        results.append(result)
        progress.result(result)
        gpu.release()
    return results


def _measure(
    case: Case,
    implementations: Sequence[Implementation],
    gpu: Gpu,
    method: Method,
    ceilings: Ceilings,
    progress: Progress,
) -> Result:
    try:
        return Measurement(case, implementations, gpu, method, progress.step).run(ceilings)
    except DeviceLostError:
        raise
    except (CutegemmError, torch.OutOfMemoryError) as error:
        rows = tuple(Row(one.name, one.ours, failure=sentence(error)) for one in implementations)
        return Result(case, rows, ceilings.floor_us(case), sets=0, calls=0, cold=False)


def find_ceilings(gpu: Gpu) -> Ceilings:
    """The rates known for this GPU, or those of a large copy and a large cuBLAS product measured now."""
    facts = gpu.facts()
    known = KNOWN_CEILINGS.get(facts.name)
    return known or measure_ceilings(gpu)


def measure_ceilings(gpu: Gpu, copy_bytes: int = 2**30, size: int = 8192) -> Ceilings:
    """Device-to-device copy rate (bytes read and written) and bf16 rate of a ``size`` cubed cuBLAS product.

    ``copy_bytes`` must be many times the L2.
    """
    copy_us = _copy_us(gpu, copy_bytes)
    gpu.release()
    endless = Ceilings(float("inf"), float("inf"), "")
    [case] = as_cases([(size, size, size)])
    result = Measurement(case, [Cublas()], gpu, Method(rounds=3), lambda name, step: None).run(endless)
    gpu.release()
    rate = result.tflops("cublas")
    if rate is None:
        raise ProblemError(f"cannot measure the matrix rate of this GPU: {result.rows[0].failure}")
    name = gpu.facts().name
    source_text = f"copy rate and cuBLAS {case.shape} bfloat16 rate measured on this {name} before the run"
    return Ceilings(2e6 * copy_bytes / copy_us, rate * 1e12, source_text)


def _copy_us(gpu: Gpu, copy_bytes: int, copies: int = 8) -> float:
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=gpu.device)
    target = torch.empty_like(source)
    recording = gpu.record([lambda: target.copy_(source)] * copies)
    return min(recording.replay_us() for _ in range(3)) / copies


_PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "deep_gemm",
    "nvidia-cublas",
)


def versions() -> dict[str, str]:
    """Versions of everything measured that is installed."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for package in ("cutegemm", *_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The time, for a report."""
    return datetime.now(UTC).isoformat(timespec="seconds")
