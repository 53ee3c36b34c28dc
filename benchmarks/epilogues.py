"""What an epilogue costs: fused products beside plain ones, cuBLAS with torch.compile, and QuACK, on a GPU.

    python benchmarks/epilogues.py [--quick] [--shape M N K ...] [--epilogue NAME ...] [--json FILE]
    python benchmarks/epilogues.py --configs     a handful of configurations beside the heuristic's, no peers

Taken as every benchmark of cutegemm is: CUDA graphs, input sets rotated so that the L2 is cold,
implementations in random order in each round, median of the rounds; each result checked against the
epilogue's own reference. For gated epilogues N is that of the product, twice the output's. QuACK's epilogues
work only where its packages lie below a folder named site-packages.
"""

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cutegemm
from cutegemm import GemmConfig, heuristic
from cutegemm.bench import QUICK, Case, Method
from cutegemm.bench.cuda import CudaGpu
from cutegemm.bench.gpu import sentence
from cutegemm.bench.method import FULL
from cutegemm.bench.workload import calls_per_replay, rotation_of
from cutegemm.epilogue import Fused, library
from cutegemm.epilogue.graph import FULL as FULL_WIDTH
from cutegemm.epilogue.spec import scaled_size
from cutegemm.errors import ConfigError, DeviceError, TargetError
from cutegemm.hardware import current_gpu
from cutegemm.problem import GemmProblem

Shape = tuple[int, int, int]
SHAPES = ((4096, 4096, 4096), (8192, 8192, 2048), (4096, 14336, 4096), (128, 7168, 4096))
EPILOGUES = ("bias_gelu", "bias_gelu_tanh", "residual", "scale_rows_and_columns", "swiglu")
COPY_BYTES_PER_US = 4.14e6  # what an H200 copies; a Tile operand may take the time of its bytes
TOLERANCE = 1e-2  # relative, in the Frobenius norm: bfloat16 rounds to 4e-3
ESTIMATE_CALLS = 16
BUILDERS = 12  # processes that compile at once
BIG = (
    GemmConfig(128, 192, 64, 2, 1, 2, "pingpong"),
    GemmConfig(192, 128, 64, 1, 2, 2, "pingpong"),
    GemmConfig(128, 176, 64, 2, 1, 2, "pingpong"),
    GemmConfig(128, 128, 64, 2, 1, 2, "pingpong"),
    GemmConfig(128, 256, 64, 2, 1, 2, "cooperative"),
    GemmConfig(256, 128, 64, 1, 2, 2, "cooperative"),
)
# For products of which each SM has a tile or two: nothing hides their epilogue.
SMALL = (
    GemmConfig(64, 112, 128, 2, 1, 1, "cooperative"),
    GemmConfig(64, 112, 64, 2, 1, 1, "cooperative"),
    GemmConfig(64, 112, 64, 2, 1, 2, "cooperative"),
    GemmConfig(64, 112, 64, 2, 1, 2, "pingpong"),
    GemmConfig(64, 128, 64, 2, 1, 2, "cooperative"),
    GemmConfig(64, 128, 128, 2, 1, 2, "cooperative"),
)
SMALL_M = 256  # rows up to which the small ones are tried


def by_torch(name: str) -> Callable[..., torch.Tensor]:
    """The same computation as a user of torch writes it: a product, then pointwise code for torch.compile."""
    functional = torch.nn.functional

    def gated(x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x[:, 0::2]) * x[:, 1::2]

    pointwise: dict[str, Callable[..., torch.Tensor]] = {
        "bias_gelu": lambda x, bias: functional.gelu(x + bias),
        "bias_gelu_tanh": lambda x, bias: functional.gelu(x + bias, approximate="tanh"),
        "residual": lambda x, residual: x + residual,
        "scale_rows_and_columns": lambda x, rows, columns: x * rows[:, None] * columns,
        "swiglu": gated,
    }
    chosen = pointwise[name]

    def compute(a: torch.Tensor, b: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
        return chosen(torch.mm(a, b), **operands)

    return compute


@dataclass(frozen=True)
class Inputs:
    """One of the sets the calls rotate through."""

    a: torch.Tensor
    b: torch.Tensor
    operands: dict[str, torch.Tensor]
    out: torch.Tensor
    plain: torch.Tensor


@dataclass
class Contender:
    """An implementation of one epilogue, and its times."""

    name: str
    call: Callable[[Inputs], Any]
    result: Callable[[Inputs, Any], torch.Tensor] | None
    rounds_us: list[float] = field(default_factory=list)
    failure: str | None = None
    recording: Any = None
    config: str | None = None
    model_us: float | None = None

    @property
    def us(self) -> float | None:
        """Median microseconds of one call."""
        return statistics.median(self.rounds_us) if self.rounds_us else None


def make_inputs(fused: Fused, shape: Shape, generator: torch.Generator) -> Inputs:
    """Normally distributed operands of one call."""
    m, n, k = shape
    rand = partial(torch.randn, generator=generator, device=generator.device, dtype=torch.bfloat16)
    operands = {}
    for name, kind in fused.kinds.items():
        sizes = {"m": m, "n": scaled_size(n, kind.width)}
        operands[name] = rand([sizes[mode] for mode in kind.modes])
    columns = scaled_size(n, fused.epilogue.width)
    out = torch.empty(m, columns, device=generator.device, dtype=torch.bfloat16)
    plain = torch.empty(m, n, device=generator.device, dtype=torch.bfloat16)
    return Inputs(rand(m, k), (rand(n, k) * k**-0.5).t(), operands, out, plain)


def product(shape: Shape, name: str | None, config: GemmConfig | None) -> Any:
    """Our product: plain for no name, chosen by the heuristic for no configuration."""
    fused = None if name is None else library.every()[name]
    return cutegemm.compile(shape, torch.bfloat16, epilogue=fused, config=config)


def ours(label: str, shape: Shape, name: str | None, config: GemmConfig | None) -> Contender:
    """A call of ours, and what the cost model says of it."""
    try:
        gemm = product(shape, name, config)
    except ConfigError as error:
        return Contender(label, lambda i: None, None, failure=sentence(error))
    if name is None:
        found = Contender(label, lambda i: gemm(i.a, i.b, out=i.plain), None)
    else:
        found = Contender(label, lambda i: gemm(i.a, i.b, out=i.out, **i.operands), lambda i, _: i.out)
    gpu, choice = current_gpu(), gemm._choice()
    estimate = heuristic.estimate(choice.plan(gemm.problem), gemm.problem, gpu)
    return replace(found, config=str(choice.config), model_us=1e6 * estimate.total / gpu.sm_clock_hz)


def explicit(shape: Shape) -> tuple[GemmConfig, ...]:
    """The configurations tried for a shape."""
    return SMALL if shape[0] <= SMALL_M else BIG


def of_configs(name: str, shape: Shape) -> list[Contender]:
    """The heuristic's choices, and every configuration without and with the epilogue."""
    found = [ours("plain", shape, None, None), ours("fused", shape, name, None)]
    for config in explicit(shape):
        found += [ours(f"plain {config}", shape, None, config), ours(f"fused {config}", shape, name, config)]
    return found


def build_all(shapes: Sequence[Shape], names: Sequence[str]) -> None:
    """Compiles what ``of_configs`` will launch, in several processes: they share the cache on disk."""
    wanted = {(shape, name, config) for shape in shapes for name in (None, *names)
              for config in (None, *explicit(shape))}  # fmt: skip
    with ProcessPoolExecutor(BUILDERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build_one, sorted(wanted, key=repr)))


def build_one(wanted: tuple[Shape, str | None, GemmConfig | None]) -> None:
    """One kernel; one that is not legal is reported where it is measured."""
    try:
        product(*wanted).build()
    except ConfigError:
        return


def contenders(name: str, shape: Shape) -> list[Contender]:
    """Everything that is measured for an epilogue beside its peers."""
    eager = by_torch(name)
    compiled = torch.compile(eager) if find_spec("triton") else eager
    found = [
        ours("plain", shape, None, None),
        ours("fused", shape, name, None),
        Contender("cublas", lambda i: torch.mm(i.a, i.b, out=i.plain), None),
        Contender("torch", lambda i: compiled(i.a, i.b, **i.operands), lambda _, result: result),
    ]
    if name == "swiglu" and find_spec("quack"):
        from quack.gemm_interface import gemm_act

        gate = partial(gemm_act, activation="swiglu", store_preact=False)
        for label, tuned in (("quack", False), ("quack-tuned", True)):
            call = partial(gate, tuned=tuned)
            found.append(
                Contender(
                    label,
                    lambda i, call=call: call(i.a, i.b, postact_out=i.out),  # type: ignore[misc]
                    lambda i, _: i.out,
                )
            )
    return found


def measure(
    name: str, shape: Shape, running: list[Contender], gpu: CudaGpu, method: Method
) -> list[Contender]:
    """Checks, captures and times contenders for one epilogue and shape."""
    fused = library.every()[name]
    case = Case(GemmProblem.from_user(shape, "bfloat16"))
    rotation = rotation_of(
        case,
        rotate_bytes=method.rotate_bytes,
        l2_bytes=gpu.facts().l2_bytes,
        free_bytes=gpu.free_bytes(),
        share=method.memory_share,
    )
    generator = torch.Generator(gpu.device).manual_seed(method.seed)
    sets = [make_inputs(fused, shape, generator) for _ in range(rotation.sets)]
    truth = fused.reference(sets[0].a, sets[0].b, **sets[0].operands)
    calls = 0
    for one in running:
        if one.failure:
            continue
        try:
            check(one, sets[0], truth)
            if not calls:
                few = max(2, min(ESTIMATE_CALLS, len(sets)))
                estimate = gpu.record(launches(one, sets, few)).replay_us() / few
                calls = calls_per_replay(len(sets), estimate, method.replay_ms)
            one.recording = gpu.record(launches(one, sets, calls))
        except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its own failure
            one.failure = sentence(error)
            gpu.wait()
    order, timed = random.Random(method.seed), [one for one in running if one.recording is not None]
    for _ in range(method.rounds):
        order.shuffle(timed)
        for one in timed:
            gpu.pause(method.pause_ms)
            one.rounds_us.append(one.recording.replay_us() / calls)
    for one in running:
        one.recording = None
    return running


def launches(one: Contender, sets: Sequence[Inputs], calls: int) -> list[Callable[[], object]]:
    """Calls that rotate through the sets."""
    return [partial(one.call, sets[call % len(sets)]) for call in range(calls)]


def check(one: Contender, inputs: Inputs, truth: torch.Tensor) -> None:
    """Raises ArithmeticError if a first call's result is wrong."""
    inputs.out.fill_(float("nan"))
    returned = one.call(inputs)
    torch.cuda.synchronize()
    if one.result is None:
        return
    error = float((one.result(inputs, returned).float() - truth).norm() / truth.norm())
    if not error < TOLERANCE:
        raise ArithmeticError(f"relative error {error:.2e} is above {TOLERANCE:.0e}")


def judged(name: str, shape: Shape, found: list[Contender]) -> dict[str, Any]:
    """The numbers of one line."""
    times = {one.name: one.us for one in found}
    m, n, _ = shape
    kinds = library.every()[name].kinds.values()
    tiles = sum(2 * m * scaled_size(n, kind.width) for kind in kinds if kind.modes == "mn")
    narrower = library.every()[name].epilogue.width != FULL_WIDTH
    line: dict[str, Any] = {"epilogue": name, "shape": list(shape), "us": times}
    line["failures"] = {one.name: one.failure for one in found if one.failure}
    plain, fused, torch_us = times.get("plain"), times.get("fused"), times.get("torch")
    if plain and fused and not narrower:
        allowed = 1.03 * plain + tiles / COPY_BYTES_PER_US
        line |= {"cost": fused / plain - 1, "allowed": allowed / plain - 1, "within": fused <= allowed}
    if fused and torch_us:
        line["times torch"] = torch_us / fused
    quack_us = times.get("quack")
    if fused and quack_us:
        line["times quack"] = quack_us / fused
    line["configs"] = {one.name: one.config for one in found if one.config}
    line["model us"] = {one.name: one.model_us for one in found if one.model_us}
    return line


def table_of_configs(line: dict[str, Any]) -> Table:
    """What each configuration takes, plain and fused, beside the heuristic's choices and the model's word."""
    table = Table(box=None, pad_edge=False, title=f"{line['epilogue']} {'x'.join(map(str, line['shape']))}")
    for column in ("plain µs", "model µs", "fused µs", "model µs", "cost", "configuration"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    us: dict[str, float | None] = line["us"]
    model, base = line["model us"], us.get("plain")
    for label in [name.removeprefix("fused") for name in us if name.startswith("fused")]:
        pair = [f"plain{label}", f"fused{label}"]
        numbers = [f"{of.get(one) or math.nan:.2f}" for one in pair for of in (us, model)]
        fused = us.get(pair[1])
        cost = f"{fused / base - 1:+.1%}" if fused and base else ""
        chosen = " / ".join(dict.fromkeys(line["configs"].get(one, "") for one in pair))
        table.add_row(*numbers, cost, f"chosen: {chosen}" if not label else label.strip())
    return table


def table_of(lines: list[dict[str, Any]]) -> Table:
    """All lines as a table."""
    table = Table(box=None, pad_edge=False)
    names = ("plain", "fused", "cublas", "torch", "quack", "quack-tuned")
    for column in ("epilogue", "shape", *(f"{name} µs" for name in names), "cost", "allowed", "times torch"):
        table.add_column(column, justify="left" if column in ("epilogue", "shape") else "right")
    for line in lines:
        us = [line["us"].get(name) for name in names]
        shares = [f"{line[key]:+.1%}" if key in line else "" for key in ("cost", "allowed")]
        ratio = f"{line['times torch']:.2f}" if "times torch" in line else ""
        shape = "x".join(map(str, line["shape"]))
        table.add_row(line["epilogue"], shape, *(f"{t:.2f}" if t else "" for t in us), *shares, ratio)
    return table


def main() -> int:
    """Measures, prints a table and the failures; 1 if something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--epilogue", action="append", choices=EPILOGUES)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--configs", action="store_true", help="configurations of ours, no peers")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    chosen = parser.parse_args()
    try:
        gpu = CudaGpu()
    except (DeviceError, TargetError) as error:
        parser.error(str(error))
    console, method = Console(width=180), QUICK if chosen.quick else FULL
    console.print(f"{gpu.facts().name}; {method}", soft_wrap=True)
    shapes, names = [tuple(given) for given in chosen.shape or SHAPES], chosen.epilogue or EPILOGUES
    if chosen.configs:
        build_all(shapes, names)
    against: Callable[[str, Shape], list[Contender]] = of_configs if chosen.configs else contenders
    lines = []
    with torch.no_grad():
        for shape in shapes:
            for name in names:
                lines.append(judged(name, shape, measure(name, shape, against(name, shape), gpu, method)))
                console.print(table_of_configs(lines[-1]) if chosen.configs else table_of(lines[-1:]))
                gpu.release()
                if chosen.json is not None:
                    chosen.json.write_text(json.dumps(lines, indent=1))
    console.print(table_of(lines))
    failures = [(line, who, why) for line in lines for who, why in line["failures"].items()]
    for line, who, why in failures:
        console.print(f"{line['epilogue']} {line['shape']}: {who}: {why}", markup=False, soft_wrap=True)
    return 1 if any(who in ("plain", "fused") for _, who, _ in failures) else 0


if __name__ == "__main__":
    sys.exit(main())
