"""The command line: one parser; each command parses, calls the function that does the work, and prints.

Whatever a command needs is imported when it runs, so that `doctor` works where the DSL does not.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm import __version__
from cutegemm.dependencies import missing_dependency
from cutegemm.errors import ConfigError, CutegemmError
from cutegemm.hardware import BUILT_TARGETS

if TYPE_CHECKING:
    from cutegemm.inspection import Request

EXIT_REFUSED = 2  # what was asked cannot be done; argparse uses the same for what it cannot read

_SHARING = ("cooperative", "pingpong")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A CutegemmError becomes one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the encoding does not
    try:
        return _run(words)
    except CutegemmError as error:
        print(f"cutegemm: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:
        # `... inspect --sass | head`: the reader has what it wanted. What is still buffered must go
        # somewhere, or the interpreter complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("cutegemm: interrupted", file=sys.stderr)
        return 130


def _run(words: Sequence[str]) -> int:
    try:
        arguments = parser(words[0] if words else "").parse_args(words)
        command: Callable[[argparse.Namespace], int] = arguments.command
        code = command(arguments)
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        raise missing_dependency(error) from error


def parser(first_word: str = "") -> argparse.ArgumentParser:
    """The parser of all commands.

    The bench, the tuner and the fuzzer declare their own arguments, and importing them imports torch: they
    are asked only when ``first_word`` says that they are wanted.
    """
    top = argparse.ArgumentParser(
        prog="python -m cutegemm", description="GEMM kernels for Hopper GPUs, from Python."
    )
    top.add_argument("--version", action="version", version=f"cutegemm {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    explain = commands.add_parser(
        "explain",
        help="why a shape gets the configuration it gets; with --schedule, in which waves it is done",
    )
    _add_problem(explain)
    explain.add_argument(
        "--gpu", metavar="NAME", help="a GPU model, such as H20 (default: the one here, else H200)"
    )
    _add_waves(explain)
    explain.set_defaults(command=_explain)

    inspect = commands.add_parser("inspect", help="compile a kernel and show its resources and instructions")
    _add_problem(inspect)
    _add_config(inspect)
    shown = inspect.add_mutually_exclusive_group()
    shown.add_argument("--ptx", action="store_true", help="print the PTX and nothing else")
    shown.add_argument("--sass", action="store_true", help="print the SASS and nothing else")
    inspect.add_argument(
        "--save", metavar="DIR", type=Path, help="write kernel.ptx, .cubin and .sass into DIR"
    )
    inspect.set_defaults(command=_inspect)

    emulate = commands.add_parser(
        "emulate", help="run a kernel on the CPU, from its PTX, and check the result"
    )
    _add_problem(emulate)
    _add_emulation(emulate, _add_config(emulate, takes_schedule=False))
    emulate.set_defaults(command=_emulate)

    bench = commands.add_parser("bench", help="measure on the GPU, next to cuBLAS and other libraries")
    if first_word == "bench":
        from cutegemm.bench import add_arguments

        add_arguments(bench)
    bench.set_defaults(command=_bench)

    tune = commands.add_parser("tune", help="measure on the GPU which kernel is fastest, and remember it")
    if first_word == "tune":
        from cutegemm.tuning.command import add_arguments as add_tuning

        add_tuning(tune)
    tune.set_defaults(command=_tune)

    fuzz = commands.add_parser("fuzz", help="random products of every shape and layout, until one is wrong")
    if first_word == "fuzz":
        from cutegemm.fuzz.command import add_arguments as add_fuzzing

        add_fuzzing(fuzz)
    fuzz.set_defaults(command=_fuzz)

    doctor = commands.add_parser("doctor", help="what this machine can do, and what is in the way")
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")
    doctor.add_argument("--error", metavar="TEXT", help="explain an error message instead")
    doctor.set_defaults(command=_doctor)

    cache = commands.add_parser("cache", help="the compiled kernels on disk, and what tuning found")
    cache.add_argument("--clear", action="store_true", help="remove them")
    cache.set_defaults(command=_cache)
    return top


def _size(text: str) -> int | None:
    if text in ("?", "any"):
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write a whole number, or ? if it varies"
        ) from None


def _pair_or_triple(count: int, example: str) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        parts = text.lower().split("x")
        if len(parts) != count or not all(part.isdecimal() for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {example}")
        return tuple(map(int, parts))

    return read


def _add_problem(command: argparse.ArgumentParser) -> None:
    for name in "MNK":
        command.add_argument(name.lower(), metavar=name, type=_size, help=f"size {name}, or ? if it varies")
    command.add_argument(
        "--batch", metavar="L", type=_size, default=1, help="independent products (default 1)"
    )
    command.add_argument(
        "--dtype", default="bfloat16", help="of A and B: bfloat16 (default) or float16, or short: bf16, fp16"
    )
    command.add_argument("--out-dtype", help="of D (default: as A and B)")
    command.add_argument(
        "--a-major", choices=("k", "m"), default="k", help="contiguous mode of A (default k)"
    )
    command.add_argument(
        "--b-major", choices=("k", "n"), default="k", help="contiguous mode of B (default k)"
    )
    command.add_argument(
        "--out-major", choices=("n", "m"), default="n", help="contiguous mode of D (default n)"
    )
    command.add_argument(
        "--target", help=f"{' or '.join(BUILT_TARGETS)} (default: the GPU here, without one sm_90a)"
    )


def _add_waves(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "waves", "with --schedule: which tiles run together, and how much of A and B they read"
    )
    group.add_argument(
        "--schedule",
        dest="order",
        metavar="ORDER",
        help='order of the tiles, such as "GroupedM(8)" or "Hilbert"',
    )
    group.add_argument(
        "--assignment",
        help='who takes which tile, such as "Dynamic" or "Persistent(100)" (default Persistent)',
    )
    group.add_argument(
        "--workers", type=int, help="clusters that run at one time (default: all that fit the GPU)"
    )
    group.add_argument("--plot", metavar="FILE", type=Path, help="draw them into FILE (.png, .svg or .pdf)")
    group.add_argument(
        "--tile",
        metavar="MxNxK",
        type=_pair_or_triple(3, "128x256x64"),
        help="tile (default: the heuristic's)",
    )
    group.add_argument("--cluster", metavar="MxN", type=_pair_or_triple(2, "2x1"), help="CTAs of a cluster")


def _add_config(command: argparse.ArgumentParser, takes_schedule: bool = True) -> argparse._ArgumentGroup:
    group = command.add_argument_group(
        "configuration", "left out, the heuristic chooses; given, --tile is needed"
    )
    group.add_argument(
        "--tile", metavar="MxNxK", type=_pair_or_triple(3, "128x256x64"), help="tile, elements"
    )
    group.add_argument("--cluster", metavar="MxN", type=_pair_or_triple(2, "2x1"), help="CTAs of a cluster")
    group.add_argument("--stages", type=int, help="pipeline stages (default: as many as fit)")
    group.add_argument("--store-stages", type=int, help="output buffers of a consumer warpgroup")
    group.add_argument("--consumers", type=int, help="consumer warpgroups")
    group.add_argument("--mma-ctas", type=int, help="CTAs that compute a tile together (sm_100a: 1 or 2)")
    if takes_schedule:
        group.add_argument("--schedule", choices=_SHARING, help="how the consumers share tiles")
    group.add_argument("--swap-ab", action="store_true", default=None, help="compute the transposed product")
    return group


def _add_emulation(command: argparse.ArgumentParser, config: argparse._ArgumentGroup) -> None:
    config.add_argument(
        "--schedule",
        dest="schedules",
        metavar="ORDER",
        action="append",
        default=[],
        help='order of the tiles, such as "GroupedM(8)"; cooperative or pingpong: how the consumers share '
        "tiles. May be given once for each",
    )
    config.add_argument("--assignment", help='who takes which tile, such as "Static" or "StreamK"')
    group = command.add_argument_group("emulation")
    group.add_argument(
        "--check", action="store_true", help="look for races and uninitialised reads of shared memory"
    )
    group.add_argument(
        "--seed",
        type=int,
        help="of the inputs and of an adverse order of warps and copies (default: in order)",
    )
    group.add_argument(
        "--resident", metavar="N", type=int, help="clusters that run at once (default: all that fit the GPU)"
    )
    group.add_argument(
        "--exact-sums", action="store_true", help="add as an H200 does, bit by bit (several times slower)"
    )
    group.add_argument(
        "--processes",
        metavar="N",
        type=_processes,
        default=1,
        help="divide clusters that do not depend on each other among N processes; 0 or auto: one for each "
        "CPU (default 1)",
    )
    group.add_argument("--trace", metavar="FILE", type=Path, help="write a Chrome trace, for Perfetto")
    group.add_argument(
        "--timeline", metavar="FILE", type=Path, help="draw what a CTA did when (.png, .svg or .pdf)"
    )
    group.add_argument("--cta", metavar="N", type=int, default=0, help="the CTA to draw (default 0)")


def _processes(text: str) -> int:
    """A number, or auto, which is 0."""
    try:
        return 0 if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def _request(arguments: argparse.Namespace) -> "Request":
    from cutegemm.inspection import Request

    shape: tuple[int | None, ...] = (arguments.m, arguments.n, arguments.k)
    if arguments.batch != 1:
        shape = (arguments.batch, *shape)
    config: dict[str, object] = {}
    if getattr(arguments, "tile", None) is not None:
        config.update(zip(("tile_m", "tile_n", "tile_k"), arguments.tile, strict=True))
    if getattr(arguments, "cluster", None) is not None:
        config.update(zip(("cluster_m", "cluster_n"), arguments.cluster, strict=True))
    for name in ("stages", "store_stages", "consumers", "mma_ctas", "schedule", "swap_ab"):
        if getattr(arguments, name, None) is not None:
            config[name] = getattr(arguments, name)
    return Request(
        shape=shape,
        dtype=arguments.dtype,
        out_dtype=arguments.out_dtype,
        majors=(arguments.a_major, arguments.b_major, arguments.out_major),
        target=arguments.target,
        config=config,
    )


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.order is None:
        for name in ("assignment", "workers", "plot"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f'--{name} is about waves; say in which order, e.g. --schedule "GroupedM(8)"'
                )
        print(_request(arguments).compile().explain(gpu=arguments.gpu))
        return 0
    if arguments.gpu is not None:
        raise ConfigError(
            "--gpu is about the configuration; with --schedule say how many --workers there are"
        )

    from rich.console import Console

    from cutegemm.scheduler import TileScheduler
    from cutegemm.scheduler.notation import parse_assignment, parse_order
    from cutegemm.scheduler.report import report

    scheduler = TileScheduler(
        parse_order(arguments.order), parse_assignment(arguments.assignment or "Persistent")
    )
    gemm = _request(arguments).compile()
    waves = report(scheduler, gemm.problem, gemm.config, gemm.target, workers=arguments.workers)
    waves.render(Console())
    if arguments.plot is not None:
        waves.save_picture(arguments.plot)
        print(arguments.plot, file=sys.stderr)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cutegemm.inspection import inspect, save

    report = inspect(_request(arguments))
    if arguments.save is not None:
        for path in save(report, arguments.save):
            print(path, file=sys.stderr)
    if arguments.ptx:
        print(report.artifact.ptx)
    elif arguments.sass:
        print(report.artifact.sass)
    else:
        report.render(Console())
    return 0


def _emulate(arguments: argparse.Namespace) -> int:
    from cutegemm.emulation import Wish, command
    from cutegemm.scheduler import TileScheduler
    from cutegemm.scheduler.notation import parse_assignment, parse_order

    orders = [word for word in arguments.schedules if word not in _SHARING]
    sharing = [word for word in arguments.schedules if word in _SHARING]
    if len(orders) > 1 or len(sharing) > 1:
        raise ConfigError(f"--schedule given twice: {' and '.join(orders if len(orders) > 1 else sharing)}")
    arguments.schedule = sharing[0] if sharing else None
    parts: dict[str, Any] = {}
    if orders:
        parts["order"] = parse_order(orders[0])
    if arguments.assignment is not None:
        parts["assignment"] = parse_assignment(arguments.assignment)
    return command(
        Wish(
            _request(arguments),
            TileScheduler(**parts) if parts else None,
            check=arguments.check,
            seed=arguments.seed,
            resident=arguments.resident,
            exact_sums=arguments.exact_sums,
            processes=arguments.processes,
            trace=arguments.trace,
            picture=arguments.timeline,
            cta=arguments.cta,
        )
    )


def _bench(arguments: argparse.Namespace) -> int:
    from cutegemm.bench import main as run_bench

    return run_bench(arguments)


def _tune(arguments: argparse.Namespace) -> int:
    from cutegemm.tuning.command import main as run_tuning

    return run_tuning(arguments)


def _fuzz(arguments: argparse.Namespace) -> int:
    from cutegemm.fuzz.command import main as run_fuzzing

    return run_fuzzing(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from cutegemm.doctor import doctor

    return doctor(as_json=arguments.json, error=arguments.error)


def _cache(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cutegemm.cache import default_cache
    from cutegemm.inspection import cache_table, kernels, results
    from cutegemm.tuning.winners import Winners, winners_table

    cache = default_cache()
    tuned = Winners(cache.root)
    if arguments.clear:
        removed, forgotten = kernels(cache.clear()), tuned.clear()
        print(f"{removed}{f' and {results(forgotten)}' if forgotten else ''} removed from {cache.root}")
        return 0
    console = Console()
    console.print(cache_table(cache))
    if winners := tuned.entries():
        console.print(winners_table(winners, "tuned, newest first"))
    return 0
