"""``python -m cutegemm bench``: arguments, exit codes, and what is printed.

Exit code 0: all of cutegemm's kernels ran and were right. 1: one of them failed or was wrong. 3: a kernel
hangs or broke the GPU's context. Where nothing can be measured (no GPU, bad arguments) CutegemmError is
raised.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cutegemm.bench.cuda import CudaGpu
from cutegemm.bench.gpu import DeviceLostError, Gpu
from cutegemm.bench.hostcost import first_call_seconds, gemm_host_us
from cutegemm.bench.method import FULL, QUICK, Method
from cutegemm.bench.peers import DEFAULT_PEERS, PEERS, choose_peers
from cutegemm.bench.report import SuiteBar, print_report
from cutegemm.bench.result import Report, Result
from cutegemm.bench.suite import DEFAULT_SUITE, find_ceilings, load_suite, now, run_suite, versions
from cutegemm.bench.workload import Case, as_cases
from cutegemm.config import GemmConfig
from cutegemm.errors import ConfigError, CutegemmError, ProblemError
from cutegemm.problem import INPUT_DTYPES, OUTPUT_DTYPES, full_dtype_name

OK, FAILED, LOST = 0, 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``main`` on a parser."""
    add_shapes(parser)
    parser.add_argument("--rounds", type=int, help=f"measurements of each (default {FULL.rounds})")
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT_PEERS),
        help=f"libraries beside cuBLAS, which always runs; of {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="TEXT",
        help='a configuration to measure: "128x256 cluster=2x1 stages=4", or with a name "wide: 128x256", or '
        '"heuristic" for the default choice; may be repeated',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--quick", action="store_true", help="few short rounds, no first-call and host times")


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that ``shapes_of`` reads: which products are to be measured."""
    parser.add_argument(
        "sizes", nargs="*", type=int, metavar="M N K", help="one or more shapes; default: the suite"
    )
    parser.add_argument(
        "--suite", type=Path, metavar="FILE", help="JSON file of shapes (default: the H200 suite)"
    )
    parser.add_argument(
        "--dtype", type=full_dtype_name, default="bfloat16", choices=INPUT_DTYPES, help="of A and B"
    )
    parser.add_argument(
        "--out-dtype", type=full_dtype_name, choices=OUTPUT_DTYPES, help="of D (default: as the inputs)"
    )
    parser.add_argument("--a-major", default="k", choices=("k", "m"), help="contiguous mode of A")
    parser.add_argument("--b-major", default="k", choices=("k", "n"), help="contiguous mode of B")


def parse_config(text: str) -> tuple[str, GemmConfig | None]:
    """(name, configuration) of a text: "[NAME:] 128x256x64 cluster=2x1 consumers=2 stages=4", or "heuristic".

    Words are separated by blanks or commas. ``AxB[xC]`` alone is the tile; ``cluster=AxB`` the cluster; every
    other word is FIELD=VALUE with a field of GemmConfig. Without a name, the text is the name.

    Raises ConfigError for a word it does not know or a value the field does not take.
    """
    name, colon, body = text.rpartition(":")
    name = name.strip() if colon else body.strip()
    if body.strip() == "heuristic":
        return name, None
    values: dict[str, Any] = {}
    for word in body.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals:
            key, value = "tile", word
        if key in ("tile", "cluster"):
            values |= _sizes(key, value)
        else:
            values[key] = _value(key, value)
    needed = [
        field.name for field in fields(GemmConfig) if field.default is MISSING and field.name not in values
    ]
    if needed:
        raise ConfigError(
            f"configuration {text!r} lacks {', '.join(needed)}; start it with a tile such as 128x256"
        )
    return name, GemmConfig(**values)


def _sizes(key: str, value: str) -> dict[str, int]:
    parts = value.split("x")
    longest = 3 if key == "tile" else 2
    if not 2 <= len(parts) <= longest or not all(part.isdigit() for part in parts):
        raise ConfigError(
            f"{key} {value!r} is unreadable; write sizes like {'128x256x64' if longest == 3 else '2x1'}"
        )
    return {f"{key}_{axis}": int(part) for axis, part in zip("mnk", parts, strict=False)}


def _value(key: str, value: str) -> Any:
    known = {field.name for field in fields(GemmConfig)}
    if key not in known:
        raise ConfigError(f"{key!r} is no field of a configuration; there are {', '.join(sorted(known))}")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    return int(value) if value.lstrip("-").isdigit() else value


def main(
    args: argparse.Namespace,
    *,
    make_gpu: Callable[[], Gpu] = CudaGpu,
    leave: Callable[[int], object] = os._exit,
) -> int:
    """Runs the bench as ``add_arguments`` describes; returns the exit code, or raises CutegemmError.

    ``leave`` ends the process after a kernel hung: Python's ordinary way out would wait for it.
    """
    console = Console(stderr=True)
    cases = shapes_of(args)
    variants = _variants(args)
    names = [name for name in args.peers.split(",") if name]
    _, notes = choose_peers(names)
    run = _Run(make_gpu(), cases, variants, names, _method(args), args.json)
    try:
        report = run.everything(console, notes, quick=args.quick)
    except DeviceLostError as error:
        console.print(
            f"error: {error.implementation or 'the GPU'}: {error}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        print_report(run.report(notes), _stdout())
        sys.stdout.flush()
        leave(LOST)
        return LOST
    print_report(report, _stdout())
    return FAILED if report.failures(ours=True) else OK


def _stdout() -> Console:
    """Wide enough for the table where the width is nobody's (a pipe, a log)."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def shapes_of(args: argparse.Namespace) -> list[Case]:
    """The products that the arguments of ``add_shapes`` name. Raises ProblemError."""
    layout = {"out_dtype": args.out_dtype, "a_major": args.a_major, "b_major": args.b_major}
    if not args.sizes:
        return load_suite(args.suite or DEFAULT_SUITE, args.dtype, **layout)
    if args.suite:
        raise ProblemError("give either --suite FILE or shapes M N K, not both")
    if len(args.sizes) % 3:
        raise ProblemError(f"{len(args.sizes)} sizes were given; a shape is three, M N K")
    triples = [args.sizes[i : i + 3] for i in range(0, len(args.sizes), 3)]
    return as_cases(triples, args.dtype, **layout)


def _variants(args: argparse.Namespace) -> dict[str, GemmConfig | None] | None:
    if not args.config:
        return None
    parsed = [parse_config(text) for text in args.config]
    variants = dict(parsed)
    if len(variants) < len(parsed) or set(variants) & set(PEERS):
        raise ConfigError(f"--config names must differ from each other and from {', '.join(PEERS)}")
    return variants


def _method(args: argparse.Namespace) -> Method:
    method = QUICK if args.quick else FULL
    return method if args.rounds is None else replace(method, rounds=args.rounds)


class _Run:
    """A run in progress: keeps what it has, and writes it to the JSON file after every shape."""

    def __init__(
        self,
        gpu: Gpu,
        cases: Sequence[Case],
        variants: Mapping[str, GemmConfig | None] | None,
        peers: Sequence[str],
        method: Method,
        json_path: Path | None,
    ) -> None:
        self._gpu = gpu
        self._cases = cases
        self._variants = variants
        self._peers = peers
        self._method = method
        self._json_path = json_path
        self._results: list[Result] = []
        self._host_us: dict[str, float] = {}
        self._first_call_s: dict[str, float] = {}
        self._date = now()
        self._facts = gpu.facts()
        self._ceilings = find_ceilings(gpu)

    def everything(self, console: Console, notes: list[str], *, quick: bool) -> Report:
        """All shapes, then the costs of a call, unless ``quick``."""
        with SuiteBar(console, lambda result: self._keep(result, notes)) as bar:
            run_suite(
                self._cases,
                peers=self._peers,
                variants=self._variants,
                method=self._method,
                gpu=self._gpu,
                ceilings=self._ceilings,
                progress=bar,
            )
        if not quick:
            self._costs(notes)
        self._write(notes)
        return self.report(notes)

    def _costs(self, notes: list[str]) -> None:
        steps = {
            "host times of a call": lambda: self._host_us.update(gemm_host_us(self._gpu)),
            "first-call times": lambda: self._first_call_s.update(first_call_seconds(self._cases[0])),
        }
        for name, step in steps.items():
            try:
                step()
            except DeviceLostError:
                raise
            except (CutegemmError, RuntimeError) as error:
                notes.append(f"{name} were not measured: {error}")

    def _keep(self, result: Result, notes: list[str]) -> None:
        self._results.append(result)
        self._write(notes)

    def _write(self, notes: list[str]) -> None:
        if self._json_path is None:
            return
        self._json_path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._json_path.with_name(self._json_path.name + ".partial")
        partial.write_text(json.dumps(self.report(notes).to_json(), indent=1) + "\n")
        partial.replace(self._json_path)

    def report(self, notes: Sequence[str]) -> Report:
        """What there is so far."""
        return Report(
            gpu=asdict(self._facts),
            versions=versions(),
            date=self._date,
            method={"text": str(self._method), **asdict(self._method)},
            ceilings=asdict(self._ceilings),
            results=tuple(self._results),
            host_us=self._host_us,
            first_call_s=self._first_call_s,
            notes=tuple(notes),
        )
