"""``python -m cutegemm tune``: arguments, exit codes, and what is printed."""

import argparse
import sys

from rich.console import Console

from cutegemm.bench.command import add_shapes, shapes_of
from cutegemm.errors import DeviceError
from cutegemm.tuning import tuner
from cutegemm.tuning.candidates import DEFAULT_TOP
from cutegemm.tuning.report import TuneBar, trials_table
from cutegemm.tuning.winners import winners_table

OK, FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``main`` on a parser."""
    add_shapes(parser)
    parser.add_argument(
        "--top",
        type=int,
        default=DEFAULT_TOP,
        metavar="N",
        help=f"candidates of the heuristic's ranking to measure (default {DEFAULT_TOP})",
    )
    parser.add_argument("--again", action="store_true", help="measure shapes that were tuned before as well")
    parser.add_argument("--quiet", action="store_true", help="no table of candidates, only that of winners")


def main(args: argparse.Namespace) -> int:
    """Tunes every shape; exit code 1 if one could not be. Raises CutegemmError where nothing can be tuned."""
    cases = shapes_of(args)
    tuner.require_gpu(None)
    out, err = Console(), Console(stderr=True)
    if not out.is_terminal:
        out = Console(width=220)
    winners, failed = [], 0
    with TuneBar(err) as bar:
        for number, case in enumerate(cases, 1):
            bar.shape(case.shape, number, len(cases))
            try:
                tuned = tuner.tune(case.problem, top=args.top, again=args.again, progress=bar)
            except DeviceError as error:  # this shape's kernels; the next shape has others
                failed += 1
                err.print(f"{case.shape}: {error}", highlight=False, markup=False, soft_wrap=True)
                continue
            winners.append(tuned.winner)
            if not args.quiet:
                out.print(trials_table(tuned) if tuned.trials else f"{case.shape}: tuned before")
    out.print(winners_table(winners))
    sys.stdout.flush()
    return FAILED if failed else OK
