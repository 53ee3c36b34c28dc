"""`make demo`: one GEMM, from the question to the machine code, and on the GPU if there is one.

Compiles the same product for each architecture cutegemm has kernels for, shows what the compiler made of it,
and, where a GPU is at hand, runs it, checks it against float32 and times it next to torch.mm. Where there is
none, the same kernel runs on the CPU, on a smaller product: it is checked, and drawn in a timeline.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.rule import Rule

import cutegemm
from cutegemm.emulation import Wish, emulate
from cutegemm.errors import CutegemmError, DeviceError, MissingDependencyError, ProblemError, TargetError
from cutegemm.hardware import SUPPORTED_TARGETS, current_gpu
from cutegemm.inspection import Request, inspect

M, N, K = 4096, 4096, 7168
EMULATED = (512, 512, 512)  # M, N, K on the CPU: the sizes above would take minutes
TIMELINE = Path(__file__).resolve().parent.parent / "build" / "demo" / "timeline.png"
ERROR_RATIO_ALLOWED = 2.0  # of torch.mm's own error in the same dtype on the same input


def show_kernel(console: Console, target: str) -> bool:
    """Compile for one target and show the result; whether cutegemm has kernels for it."""
    console.print(Rule(f"{M} x {N} x {K} bfloat16, compiled for {target}", align="left"))
    try:
        with console.status(f"compiling for {target}"):
            report = inspect(Request((M, N, K), target=target))
    except TargetError as error:
        console.print(f"{target}: not built yet ({error})\n")
        return False
    report.render(console)
    console.print()
    return True


def microseconds(call: Callable[[], object], repeats: int = 50) -> float:
    """Median time of one call on the GPU, by events, after a warm-up."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]


def relative_error(d: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return ((d.float() - truth).norm() / truth.norm()).item()


def run_on_gpu(console: Console) -> bool:
    """Run, check and time the product on the current GPU; whether the result is right."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    a = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, generator=generator)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16, generator=generator)
    b = w.t()

    started = time.perf_counter()
    gemm = cutegemm.compile((M, N, K), torch.bfloat16)
    d = gemm(a, b)
    torch.cuda.synchronize()
    first_call_s = time.perf_counter() - started

    # True float32: TF32 would round the inputs of the reference itself.
    torch.backends.cuda.matmul.allow_tf32 = False
    truth = torch.mm(a.float(), b.float())
    ours, theirs = relative_error(d, truth), relative_error(torch.mm(a, b), truth)
    right = ours <= ERROR_RATIO_ALLOWED * theirs
    console.print(f"first call, compiling included: {first_call_s:.2f} s")
    console.print(
        f"relative error against float32: {ours:.2e}, torch.mm {theirs:.2e}: "
        + ("[green]right[/]" if right else "[red]WRONG[/]")
    )

    out = torch.empty_like(d)
    us, us_torch = microseconds(lambda: gemm(a, b, out=out)), microseconds(lambda: torch.mm(a, b, out=out))
    flop = 2 * M * N * K
    console.print(f"cutegemm {us:7.1f} us  {flop / us / 1e6:5.0f} TFLOP/s")
    console.print(f"torch.mm {us_torch:7.1f} us  {flop / us_torch / 1e6:5.0f} TFLOP/s")
    console.print("(warm L2, one shape: `make bench` measures properly)")
    return right


def run_on_cpu(console: Console, target: str) -> bool:
    """Emulate the kernel on a smaller product and draw what it did; whether the result is right."""
    # Sizes are arguments of the kernel: given the same configuration, this is the code shown above.
    config = Request((M, N, K), target=target).compile().config
    # One cluster at a time, so that it takes several tiles, one after another.
    wish = Wish(Request(EMULATED, target=target, config=asdict(config)), check=True, seed=0, resident=1)
    outcome = emulate(wish.gemm(), wish, console)
    console.print(outcome.table(check=True))
    try:
        TIMELINE.parent.mkdir(parents=True, exist_ok=True)
        outcome.draw(TIMELINE)
    except (MissingDependencyError, ProblemError, OSError) as error:
        console.print(f"no timeline drawn: {error}", markup=False)
    else:
        console.print(f"what CTA 0 did when: {TIMELINE}", markup=False, soft_wrap=True)
    return outcome.verdict.right


def main() -> int:
    """The demo; 0 if all that could run was right."""
    console = Console()
    built = [target for target in SUPPORTED_TARGETS if show_kernel(console, target)]
    if not built:
        console.print("[red]no kernel could be compiled[/]")
        return 1
    try:
        gpu = current_gpu()
    except (DeviceError, TargetError) as error:
        console.print(Rule(f"no GPU: {' x '.join(map(str, EMULATED))} on the emulator", align="left"))
        console.print(f"not timed: {error}", markup=False)
        return 0 if run_on_cpu(console, built[0]) else 1
    console.print(Rule(f"on the {gpu.name} ({gpu.sms} SMs, {gpu.target})", align="left"))
    if gpu.target not in built:
        console.print(f"not run: there is no {gpu.target} kernel yet")
        return 0
    return 0 if run_on_gpu(console) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CutegemmError as error:
        sys.exit(f"demo: {error}")
