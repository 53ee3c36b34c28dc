"""Fits the constants of the cost model (cutegemm/costmodel.py) to measured sweeps, and judges its choices.

    python benchmarks/fit_heuristic.py --check SWEEP.json ...         how good are the choices, what is wrong
    python benchmarks/fit_heuristic.py --seconds 120 SWEEP.json ...    a new fit, beside today's constants

Regret is the measured time of the kernel the model would choose, over that of the best measured one, less
one. What is minimised is mostly the regret, made smooth: kernels that are predicted nearly equal share the
choice. How well predictions match the times counts too, so that the constants keep a meaning.

A sweep holds few kernels of the kind that an earlier model disliked, and a fit may believe in them for want
of evidence. With --suite FILE the shapes of a suite are guarded: kernels nobody measured for them count as
worse than the best, and these shapes count several times. With --folds N the fit is repeated N times without
one Nth of the shapes and judged on those: what to expect of other shapes.

Nothing is written: whoever likes a fit copies it into the class Constants, and runs the tests.
"""

import argparse
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sweep_data import KIND, Kernel, Shape, Sizes, SweepError, Timings, read

from cutegemm.bench.suite import load_suite
from cutegemm.costmodel import FITTED, Constants, Work, cost
from cutegemm.hardware import Gpu, gpu_by_name
from cutegemm.heuristic import candidates
from cutegemm.hopper.plan import SPLITS
from cutegemm.parts.paths import ALIGNED

NEARLY_EQUAL = 0.012  # predictions this close, relative, share the choice
START_NEARLY_EQUAL = 0.05  # wider at first: the way out of small dips
TOLERATED = 0.02  # regret beyond this counts more
SPREAD = 0.15  # kernels this much slower than the best count a third in how well predictions match
WEIGHT_OF_RANKING, WEIGHT_OF_SCALE = 0.5, 0.15
REACH = 8.0  # how far from today's value a constant may go, as a factor
# Where the meaning of a constant says more.
BOUNDS = {
    "sharpness": (1.0, 8.0),
    "mma_sharpness": (2.0, 10.0),
    "sustained_macs": (1300.0, 2048.0),
    "row_cycles": (0.4, 1.2),
    "row_cycles_off_line": (0.4, 3.0),
    "coincidence": (0.02, 0.5),
    "outside_rows": (1.0, 8.0),
    "multicast_cost": (1.0, 1.4),
    "l2_off_line": (1.0, 2.0),
    "l2_off_sector": (1.0, 2.0),
    "pair_share": (0.01, 1.0),
    "dram_share": (0.85, 1.4),
    "dram_unevenness": (0.5, 1.0),
    "split_margin": (1.0, 1.3),
}
BAD = 0.08  # a regret that --check explains
UNMEASURED = 0.05  # the regret taken for a kernel nobody has measured, of a guarded shape
RIVALS = 5  # such kernels taken in for each guarded shape, at each of CHALLENGES moments of a fit
CHALLENGES = 4
GUARDED_WEIGHT = 3  # times a guarded shape counts


def parameter_names() -> list[str]:
    """The constants that are fitted."""
    return [field.name for field in fields(Constants)]


def with_values(values: Sequence[float]) -> Constants:
    """Constants of these values, in the order of parameter_names."""
    return Constants(*map(float, values))


def predicted_us(timings: Timings, gpu: Gpu, constants: Constants) -> np.ndarray:
    """The model's microseconds of every row; the margin of split tiles is in them."""
    return cost(timings.table, timings.work, gpu, constants).total / gpu.sm_clock_hz * 1e6


def choices(timings: Timings, predicted: np.ndarray) -> np.ndarray:
    """The row the model chooses for each shape."""
    return np.array(
        [
            timings.starts[shape] + np.argmin(predicted[timings.rows_of(shape)])
            for shape in range(len(timings.shapes))
        ]
    )


def regrets(timings: Timings, predicted: np.ndarray) -> np.ndarray:
    """Of each shape: the chosen kernel's time over the best one's, less one."""
    return timings.us[choices(timings, predicted)] / timings.best_us - 1


class Objective:
    """What a fit minimises, over sweeps taken on one GPU."""

    def __init__(self, shapes: Sequence[Shape], gpu: Gpu, guarded: Container[Sizes] = ()) -> None:
        self._gpu = gpu
        self._guarded = guarded
        extra = [shape for shape in shapes if shape.sizes in guarded]
        self._take([*shapes, *extra * (GUARDED_WEIGHT - 1)])

    def _take(self, shapes: Sequence[Shape]) -> None:
        self._timings = timings = Timings.of(shapes)
        measured = np.isfinite(timings.us)
        self._log_us = np.log(np.where(measured, timings.us, 1.0))
        slower = self._log_us - np.log(timings.best_us)[timings.shape_of]
        self._slower = np.where(measured, slower, UNMEASURED)
        weights = np.where(measured, np.exp(-slower / SPREAD), 0.0)
        self._weights = weights / np.add.reduceat(weights, timings.starts)[timings.shape_of]

    def challenge(self, constants: Constants) -> None:
        """Takes in, for each guarded shape, the unmeasured kernels a model of these constants likes best."""
        self._take(
            [
                with_rivals(shape, self._gpu, constants) if shape.sizes in self._guarded else shape
                for shape in self._timings.shapes
            ]
        )

    def __call__(self, constants: Constants, nearly_equal: float = NEARLY_EQUAL) -> float:
        """Mean smooth regret, more for those beyond TOLERATED, and how far predictions are off."""
        starts, shape_of = self._timings.starts, self._timings.shape_of
        predicted = np.log(predicted_us(self._timings, self._gpu, constants))
        lowest = np.minimum.reduceat(predicted, starts)[shape_of]
        chosen = np.exp((lowest - predicted) / nearly_equal)
        regret = np.add.reduceat(chosen * self._slower, starts) / np.add.reduceat(chosen, starts)
        beyond = np.maximum(regret - TOLERATED, 0.0)
        error = predicted - self._log_us
        scale = np.add.reduceat(self._weights * error, starts)
        ranking = np.add.reduceat(self._weights * (error - scale[shape_of]) ** 2, starts)
        return float(
            regret.mean()
            + 2 * np.sqrt((beyond**2).mean())
            + WEIGHT_OF_RANKING * np.sqrt(ranking.mean())
            + WEIGHT_OF_SCALE * np.sqrt((scale**2).mean())
        )


def with_rivals(shape: Shape, gpu: Gpu, constants: Constants) -> Shape:
    """The shape with the RIVALS best predicted kernels it lacks; splits only where some were measured."""
    ways = SPLITS if any(kernel.splits > 1 for kernel in shape.us) else (1,)
    table = candidates(KIND, ALIGNED, ways)
    total = cost(table, Work(shape.m, shape.n, shape.k), gpu, constants).total
    us = dict(shape.us)
    for row in np.argsort(total, kind="stable"):
        plan = table.plans[row]
        us.setdefault(Kernel(plan.config.with_(stages=None, store_stages=None), plan.splits), float("nan"))
        if len(us) >= len(shape.us) + RIVALS:
            break
    return replace(shape, us=us)


def fit(
    objective: Objective,
    start: Constants,
    seconds: float,
    progress: Callable[[float, float], None] = lambda done, value: None,
) -> Constants:
    """The best constants found in so many seconds: gradient steps (Adam) on the logarithms of the constants.

    progress is told the share of the time that is over, and the best value so far.
    """
    names = parameter_names()
    first = np.array([getattr(start, name) for name in names])
    low, high = np.log([BOUNDS.get(n, (v / REACH, v * REACH)) for n, v in zip(names, first, strict=True)]).T
    x = np.clip(np.log(first), low, high)
    best, best_value, challenges = start, objective(start), 0
    slope, power, begin, step = np.zeros_like(x), np.zeros_like(x), time.monotonic(), 0
    while (done := (time.monotonic() - begin) / seconds) < 1:
        step += 1
        if done * CHALLENGES >= challenges:
            challenges += 1
            objective.challenge(with_values(np.exp(x)))
            best_value = objective(best)
        width = START_NEARLY_EQUAL * (1 - done) + NEARLY_EQUAL * done
        here = objective(with_values(np.exp(x)), width)
        aside = [objective(with_values(np.exp(x + 1e-3 * unit)), width) for unit in np.eye(len(x))]
        gradient = (np.array(aside) - here) / 1e-3
        slope, power = 0.8 * slope + 0.2 * gradient, 0.95 * power + 0.05 * gradient**2
        direction = slope / (1 - 0.8**step) / (np.sqrt(power / (1 - 0.95**step)) + 1e-5)
        x = np.clip(x - (0.05 * (1 - done) + 0.002) * direction, low, high)
        value = objective(with_values(np.exp(x)))
        if value < best_value:
            best, best_value = with_values(np.exp(x)), value
        progress(min(1.0, (time.monotonic() - begin) / seconds), best_value)
    return best


def rounded(constants: Constants) -> Constants:
    """Three digits, as they stand in the source."""
    return with_values([float(f"{getattr(constants, name):.3g}") for name in parameter_names()])


# --- judging -----------------------------------------------------------------------------------------------


def classes(timings: Timings) -> dict[str, np.ndarray]:
    """Kinds of shapes, by name, as masks; a shape may be of several."""
    m, n, k = (np.array([getattr(shape, size) for shape in timings.shapes]) for size in "mnk")
    short = np.minimum(m, n)
    memory = 2 * (m * k + k * n + m * n) / 4.14e12 > 2.0 * m * n * k / 830e12
    return {
        "all": np.ones(len(m), dtype=bool),
        "shorter than 4 us": timings.best_us < 4,
        "short side up to 16": short <= 16,
        "short side 17 to 128": (short > 16) & (short <= 128),
        "short side above 128": short > 128,
        "bound by memory, 4 us and more": memory & (timings.best_us >= 4),
        "bound by arithmetic": ~memory,
        "K off 16-byte sectors": k % 16 != 0,
        "splits measured": np.array([any(q.splits > 1 for q in shape.us) for shape in timings.shapes]),
    }


def regret_table(timings: Timings, found: dict[str, np.ndarray]) -> Grid:
    """Regrets by class of shape, for each set of constants by name, in per cent."""
    grid = Grid(title="regret, %", title_justify="left")
    grid.add_column("shapes")
    grid.add_column("number", justify="right")
    for name in found:
        for head in ("mean", "95th", "worst", "within 2"):
            grid.add_column(f"{head}\n{name}", justify="right")
    for kind, mask in classes(timings).items():
        if not mask.any():
            continue
        cells = []
        for regret in found.values():
            own = 100 * regret[mask]
            cells += [f"{own.mean():.2f}", f"{np.percentile(own, 95):.1f}", f"{own.max():.1f}"]
            cells.append(f"{100 * (own <= 2).mean():.0f} %")
        grid.add_row(kind, str(mask.sum()), *cells)
    return grid


def constants_table(present: Constants, fitted: Constants) -> Grid:
    """Both sets side by side."""
    grid = Grid("constant", title="constants", title_justify="left")
    for head in ("present", "fitted", "change"):
        grid.add_column(head, justify="right")
    for name in parameter_names():
        before, after = getattr(present, name), getattr(fitted, name)
        grid.add_row(name, f"{before:g}", f"{after:g}", f"{100 * (after / before - 1):+.0f} %")
    return grid


@dataclass(frozen=True)
class Blame:
    """A constant that would have to be ``factor`` times what it is for the best kernel to be chosen."""

    name: str
    factor: float


def blames(timings: Timings, gpu: Gpu, constants: Constants, pick: int, best: int) -> list[Blame]:
    """The terms whose error would explain a wrong choice, the least error first: pick and best are rows."""

    def advantage(c: Constants) -> float:
        predicted = predicted_us(timings, gpu, c)
        return float(np.log(predicted[best] / predicted[pick]))

    now, found = advantage(constants), []
    for name in parameter_names():
        value = getattr(constants, name)
        slope = (advantage(replace(constants, **{name: value * 1.01})) - now) / np.log(1.01)
        if abs(slope) > 1e-4 and abs(now / slope) < np.log(REACH):
            found.append(Blame(name, float(np.exp(-now / slope))))
    return sorted(found, key=lambda blame: abs(np.log(blame.factor)))


def explain(timings: Timings, gpu: Gpu, constants: Constants, console: Console) -> None:
    """Every choice with a regret above BAD: what was chosen, what was best, which term may be wrong."""
    predicted = predicted_us(timings, gpu, constants)
    regret, picks = regrets(timings, predicted), choices(timings, predicted)
    for index in np.argsort(-regret):
        if regret[index] <= BAD:
            break
        rows, shape, pick = timings.rows_of(int(index)), timings.shapes[index], int(picks[index])
        best = rows.start + int(np.argmin(timings.us[rows]))
        console.print(f"[bold]{shape.m}x{shape.n}x{shape.k}[/]: {100 * regret[index]:.1f} % lost")
        one = Timings.of([replace(shape, us={timings.kernels[r]: timings.us[r] for r in (pick, best)})])
        for word, row in (("chosen", pick), ("best", best)):
            times = f"{timings.us[row]:8.2f} us, predicted {predicted[row]:8.2f}"
            console.print(f"   {word:6} {times}: {timings.kernels[row]}")
        wrong = [f"{b.name} x {b.factor:.2f}" for b in blames(one, gpu, constants, 0, 1)[:3]]
        remedy = f"would be right with {', or '.join(wrong)}" if wrong else "no one term explains it"
        console.print(f"   {remedy}")


def held_out(shapes: Sequence[Shape], gpu: Gpu, folds: int, seconds: float) -> tuple[Timings, np.ndarray]:
    """All shapes, and each one's regret with constants fitted without it."""
    timings = Timings.of(shapes)
    sizes = sorted({(shape.m, shape.n, shape.k) for shape in shapes})
    turn = dict(zip(sizes, np.random.default_rng(1).permutation(len(sizes)) % folds, strict=True))
    fold_of = np.array([turn[shape.m, shape.n, shape.k] for shape in shapes])
    regret = np.zeros(len(shapes))
    for fold in range(folds):
        rest = [shape for shape, own in zip(shapes, fold_of, strict=True) if own != fold]
        fitted = fit(Objective(rest, gpu), FITTED, seconds / folds)
        regret[fold_of == fold] = regrets(timings, predicted_us(timings, gpu, fitted))[fold_of == fold]
    return timings, regret


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 2: a file is no sweep."""
    parser = argparse.ArgumentParser(description="Fit the cost model's constants to sweeps.")
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to fit (default 120)")
    parser.add_argument(
        "--check", action="store_true", help="no fit: judge today's constants, explain errors"
    )
    parser.add_argument("--suite", type=Path, metavar="FILE", help="shapes to guard: see above")
    parser.add_argument("--folds", type=int, default=0, metavar="N", help="judge on shapes left out, N fits")
    parser.add_argument("--gpu", default="H200", help="the model the sweeps were taken on (default H200)")
    args = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    try:
        shapes, gpu = read(args.sweeps), gpu_by_name(args.gpu)
    except SweepError as error:
        print(f"fit_heuristic: {error}", file=sys.stderr)
        return 2
    timings = Timings.of(shapes)
    found = {"present": regrets(timings, predicted_us(timings, gpu, FITTED))}
    if args.check:
        console.print(regret_table(timings, found))
        explain(timings, gpu, FITTED, console)
        return 0
    if args.folds > 1:
        found["left out"] = held_out(shapes, gpu, args.folds, args.seconds)[1]
        console.print(regret_table(timings, found))
        return 0
    with Progress(
        TextColumn("fitting"), BarColumn(), TextColumn("{task.fields[value]}"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=1.0, value="")

        def progress(done: float, value: float) -> None:
            bar.update(task, completed=done, value=f"{value:.4f}")

        guarded = (
            set() if args.suite is None else {(c.m, c.n, c.k) for c in load_suite(args.suite, "bfloat16")}
        )
        fitted = rounded(fit(Objective(shapes, gpu, guarded), FITTED, args.seconds, progress))
    found["fitted"] = regrets(timings, predicted_us(timings, gpu, fitted))
    console.print(constants_table(FITTED, fitted))
    console.print(regret_table(timings, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
