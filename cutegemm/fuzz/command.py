"""``python -m cutegemm fuzz``: arguments, exit codes, and what is printed.

Exit code 0: every case was right, or refused where that is right. 1: one was not.
"""

import argparse
import json
import os
import secrets
import sys
import time
from pathlib import Path

from rich.console import Console

from cutegemm.errors import ConfigError, ProblemError
from cutegemm.fuzz.campaign import Executor, Plan, run
from cutegemm.fuzz.case import parse_case
from cutegemm.fuzz.drawing import EMULATOR, GPU
from cutegemm.fuzz.memory import MARGIN
from cutegemm.fuzz.product import EmulatedProduct, GpuProduct, Product
from cutegemm.fuzz.report import FuzzBar, print_report
from cutegemm.fuzz.tally import Tally, path_of
from cutegemm.hardware import current_target, normalise_target

OK, FAILED = 0, 1
DEFAULT_SECONDS = 60.0
HANG_SECONDS = 60.0
GPU_TARGET = "gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``main`` on a parser."""
    parser.add_argument(
        "--target",
        default=GPU_TARGET,
        help="gpu: run on the current GPU (default); an architecture such as sm_90a: run in the emulator",
    )
    parser.add_argument("--cases", type=_positive, metavar="N", help="end after about N cases")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"end after N seconds (default {DEFAULT_SECONDS:.0f}, without --cases)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="draw the cases of this seed (default: a new one)"
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="J",
        help="processes that compile and run cases (default: one for each CPU, 16 at most)",
    )
    parser.add_argument(
        "--failures",
        type=_positive,
        default=10,
        metavar="N",
        help="end after N different failures (default 10)",
    )
    parser.add_argument(
        "--hang",
        type=float,
        default=HANG_SECONDS,
        metavar="SECONDS",
        help=f"time after which a case counts as a hang (default {HANG_SECONDS:.0f}, compiling included)",
    )
    parser.add_argument(
        "--allow-refusals",
        action="store_true",
        help="count cases that the library refuses with an error of its own apart, not as failures",
    )
    parser.add_argument(
        "--tight",
        action="store_true",
        help="no memory around the operands, so that compute-sanitizer sees every step beyond them",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and failures")
    parser.add_argument("--case", metavar="TEXT", help="try this one case, as a failure's report names it")


def main(args: argparse.Namespace) -> int:
    """Fuzzes; exit code 1 if a case failed. Raises CutegemmError where nothing can be run."""
    on_gpu = args.target == GPU_TARGET
    product: Product = (
        GpuProduct(current_target()) if on_gpu else EmulatedProduct(normalise_target(args.target))
    )
    jobs = args.jobs or min(16, os.cpu_count() or 1)
    plan = Plan(
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        product=product,
        limits=GPU if on_gpu else EMULATOR,
        jobs=jobs,
        cases=args.cases,
        seconds=DEFAULT_SECONDS if args.cases is None and args.seconds is None else args.seconds,
        failures=args.failures,
        hang=args.hang,
        refusals=args.allow_refusals,
        margin=0 if args.tight else MARGIN,
        environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ},
    )
    if args.case is not None:
        return _one(plan, args.case)
    if plan.hang <= 0 or (plan.seconds is not None and plan.seconds <= 0):
        raise ConfigError("--seconds and --hang are more than 0")
    return _many(plan, args.target, args.json)


def _one(plan: Plan, text: str) -> int:
    case = parse_case(text)
    with Executor(plan) as executor:
        verdict = executor.verdict(case)
    console = Console()
    console.print(f"{case!r}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"A, B, D by: {', '.join(path_of(case, verdict))}", highlight=False)
    style = "bold red" if verdict.failed else "bold green"
    words = f"{verdict.kind}: {verdict.message}" if verdict.message else verdict.kind
    console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)
    return FAILED if verdict.failed else OK


def _many(plan: Plan, target: str, path: Path | None) -> int:
    out, err = Console(), Console(stderr=True)
    if not out.is_terminal:
        out = Console(width=160)
    err.print(f"seed {plan.seed}, {plan.jobs} worker process{'es' * (plan.jobs > 1)}", highlight=False)
    tally, begun = Tally(), time.monotonic()
    try:
        with FuzzBar(err, tally, plan.cases, plan.seconds) as bar:
            run(plan, tally, bar.advance)
    finally:  # what was found before an interrupt counts
        seconds = time.monotonic() - begun
        print_report(out, tally, seconds, plan.seed, target)
        sys.stdout.flush()
    if path is not None:
        _write(path, {"seed": plan.seed, "target": target, "seconds": round(seconds, 1), **tally.as_json()})
    return FAILED if tally.findings else OK


def _write(path: Path, content: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ProblemError(
            f"{path} cannot be written: {error.strerror}; name a file in a folder of yours"
        ) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
