"""Measures many kernels of many random shapes on the GPU; fit_heuristic.py reads the file.

    python benchmarks/sweep.py --shapes 300 --seconds 900 benchmarks/results/sweep_h200_d.json

Shapes: M from 1 to 8192, N and K from 64 to 16384, log-uniform; N a multiple of 8, K of 8 or, every other
time, of 64. Kernels of a shape: the best predicted ones, the best of each family (cluster, swap, schedule,
number of CTAs that share K) so that no kind goes unmeasured because the model dislikes it, and a few at
random. Built in parallel processes and measured as the bench does, beside cuBLAS, every result checked. The
file is written after every few shapes, so that an interrupted sweep keeps what it had.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sweep_data import KIND, Kernel, Shape, Sizes, write

from cutegemm import GemmProblem, hardware, heuristic
from cutegemm.bench import Case, Method, sweep_many
from cutegemm.bench.peers import Variant
from cutegemm.bench.suite import load_suite
from cutegemm.bench.worker import Worker
from cutegemm.costmodel import Work, cost
from cutegemm.hardware import Gpu
from cutegemm.parts.paths import ALIGNED
from cutegemm.scheduler import TileScheduler

METHOD = Method(rounds=5, replay_ms=3.0, pause_ms=1.0)
CHUNK = 8  # shapes built and measured together
BEST, AT_RANDOM = 12, 4  # kernels of a shape, beside the best of each family
POSSIBLE = 2.0  # times the best prediction: kernels beyond it are not measured


def random_shapes(count: int, seed: int) -> list[Sizes]:
    """Log-uniform shapes, all different; the same for the same seed."""
    source = random.Random(seed)

    def size(low: int, high: int) -> int:
        return int(math.exp(source.uniform(math.log(low), math.log(high + 1))))

    found: dict[Sizes, None] = {}
    while len(found) < count:
        unit = 64 if len(found) % 2 else 8
        found[size(1, 8192), max(64, size(64, 16384) // 8 * 8), max(64, size(64, 16384) // unit * unit)] = (
            None
        )
    return list(found)


def kernels_of(sizes: Sizes, gpu: Gpu, source: random.Random, everything: bool = False) -> list[Kernel]:
    """The kernels to measure for a shape, best predicted first; all legal ones if asked for."""
    table = heuristic.candidates(KIND, ALIGNED, heuristic.SPLITS)
    total = cost(table, Work(*sizes), gpu).total
    ranking = [int(row) for row in total.argsort(kind="stable")]
    if not everything:
        possible = [row for row in ranking if total[row] <= POSSIBLE * total[ranking[0]]]
        families: dict[tuple[Any, ...], int] = {}
        for row in possible:
            config, splits = table.plans[row].config, table.plans[row].splits
            family = (config.cluster_m, config.cluster_n, config.swap_ab, config.schedule, splits)
            families.setdefault(family, row)
        rest = possible[BEST:]
        drawn = source.sample(rest, min(AT_RANDOM, len(rest)))
        ranking = list(dict.fromkeys([*ranking[:BEST], *families.values(), *drawn]))
    plans = (table.plans[row] for row in ranking)
    return [Kernel(plan.config.with_(stages=None, store_stages=None), plan.splits) for plan in plans]


def measure(
    work: Mapping[Sizes, Sequence[Kernel]], target: str, make_worker: Callable[[], Worker] = Worker
) -> Iterator[Shape]:
    """The shapes of one chunk, measured; kernels that fail are left out, and shapes without cuBLAS's time."""
    cases = {
        Case(GemmProblem(*sizes)): {str(k): _variant(k) for k in kernels} for sizes, kernels in work.items()
    }
    rows = sweep_many(cases, method=METHOD, make_worker=make_worker, target=target)
    for sizes, kernels in work.items():
        own = {row["name"]: row for row in rows if (row["m"], row["n"], row["k"]) == sizes}
        cublas = [row["cublas_us"] for row in own.values() if row["cublas_us"] is not None]
        us = {k: own[str(k)]["us"] for k in kernels if own[str(k)]["failure"] is None}
        for name, row in own.items():
            if row["failure"] is not None:
                print(f"{sizes}: {name}: {row['failure']}", file=sys.stderr)
        if us and cublas:
            yield Shape(*sizes, statistics.median(cublas), us)


def _variant(kernel: Kernel) -> Variant:
    return Variant(kernel.config, TileScheduler.splitting(kernel.splits))


def main(
    arguments: Sequence[str] | None = None,
    *,
    find_gpu: Callable[[], Gpu] = hardware.current_gpu,
    make_worker: Callable[[], Worker] = Worker,
) -> int:
    """Exit code 0. Raises DeviceError without a GPU."""
    parser = argparse.ArgumentParser(description="Measure kernels of random shapes.")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--shapes", type=int, default=100, help="random shapes (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (default 0)")
    parser.add_argument(
        "--suite", type=Path, metavar="FILE", help="a suite's shapes as well, before the random ones"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="no new shapes after that (default 600)")
    parser.add_argument("--all", action="store_true", help="every legal kernel of each shape: hundreds")
    args = parser.parse_args(arguments)
    gpu, begin, source = find_gpu(), time.monotonic(), random.Random(args.seed)
    suite = [] if args.suite is None else [(c.m, c.n, c.k) for c in load_suite(args.suite, "bfloat16")]
    todo = [*suite, *random_shapes(args.shapes, args.seed)]
    done: list[Shape] = []
    for first in range(0, len(todo), CHUNK):
        if time.monotonic() - begin > args.seconds:
            print(f"time is up: {len(done)} of {len(todo)} shapes", file=sys.stderr)
            break
        work = {sizes: kernels_of(sizes, gpu, source, args.all) for sizes in todo[first : first + CHUNK]}
        done += measure(work, gpu.target, make_worker)
        write(args.out, done)
        print(f"{len(done)} of {len(todo)} shapes, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
