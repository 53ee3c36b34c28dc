"""`python -m cutegemm emulate`: a product run on the CPU from its PTX, judged and drawn."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from cutegemm.emulator.faults import EmulationError
from cutegemm.emulator.run import Emulation
from cutegemm.emulator.timeline import FORMATS, division_of, require_matplotlib, timeline
from cutegemm.errors import ProblemError
from cutegemm.inspection import DEFAULT_TARGET, Request

if TYPE_CHECKING:
    from cutegemm.emulator.machine import Progress as EmulationProgress
    from cutegemm.gemm import Gemm
    from cutegemm.problem import GemmProblem
    from cutegemm.scheduler import TileScheduler

FAULT = 1  # exit code where the kernel is at fault or its result is wrong

# Warp instructions of sm_90a kernels, counted: for a tile, for 16384 elements of D, and for a consumer
# warpgroup in each step of K, the producer's share included.
TILE_INSTRUCTIONS, STORE_INSTRUCTIONS, STEP_INSTRUCTIONS = 1000, 600, 225
# What one CPU core emulates in a second, about; how many times longer checks and random orders take.
INSTRUCTIONS_PER_SECOND, FLOP_PER_SECOND = 450_000, 5e9
CHECK_FACTOR, SEED_FACTOR = 1.7, 1.4


@dataclass(frozen=True)
class Wish:
    """What to emulate and what to keep of it.

    scheduler   None: chosen with the configuration
    check       look for races and uninitialised reads of shared memory
    seed        of the inputs and of an adverse order of everything; None: a fixed order
    resident    clusters that run at once; None: as many as the GPU runs
    exact_sums  whether sums have the bits of an H200's
    processes   among which independent clusters are divided; 0: as many as there are CPUs
    trace       file for the Chrome trace
    picture     file for the timeline of CTA number ``cta``
    """

    request: Request
    scheduler: "TileScheduler | None" = None
    check: bool = False
    seed: int | None = None
    resident: int | None = None
    exact_sums: bool = False
    processes: int = 1
    trace: Path | None = None
    picture: Path | None = None
    cta: int = 0

    def gemm(self) -> "Gemm":
        """The Gemm, not built yet. Raises ProblemError for a wish that cannot be fulfilled."""
        request = self.request
        if None in request.shape:
            raise ProblemError("a size is ?; an emulated product needs numbers for M, N, K and --batch")
        if self.resident is not None and self.resident < 1:
            raise ProblemError(f"--resident {self.resident}: at least 1 cluster must run")
        if self.processes < 0:
            raise ProblemError(f"--processes {self.processes}: give a number from 1 on, or auto")
        self._check_files()
        # Nothing will run on the GPU here: its architecture does not matter.
        return replace(request, target=request.target or DEFAULT_TARGET).compile(self.scheduler)

    def _check_files(self) -> None:
        """Said before the work rather than after it."""
        for path in (self.trace, self.picture):
            if path is not None and not path.absolute().parent.is_dir():
                raise ProblemError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
        if self.picture is not None:
            if self.picture.suffix not in FORMATS:
                raise ProblemError(f"--timeline {self.picture}: the file must end in {', '.join(FORMATS)}")
            require_matplotlib()


@dataclass(frozen=True)
class Verdict:
    """How far a result is from a float64 product of the same inputs.

    error   Frobenius norm of the difference over that of the product
    wrong   elements further off than rounding explains, NaN included
    """

    error: float
    wrong: int
    elements: int

    @classmethod
    def of(cls, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> "Verdict":
        """Judges out = a @ b."""
        truth = torch.matmul(a.double(), b.double())
        difference = (out.double() - truth).abs()
        # One rounding to out's dtype, and a float32 sum of K products in any order. Not `>`: NaN must count.
        rounding = torch.finfo(out.dtype).eps / 2 * truth.abs() + torch.finfo(out.dtype).tiny
        summing = (
            a.shape[-1] * torch.finfo(torch.float32).eps * torch.matmul(a.double().abs(), b.double().abs())
        )
        wrong = int((~(difference <= rounding + summing)).sum())
        error = float(difference.norm() / truth.norm()) if truth.any() else float(difference.norm())
        return cls(error, wrong, out.numel())

    @property
    def right(self) -> bool:
        """Whether every element is."""
        return self.wrong == 0

    def __str__(self) -> str:
        verdict = "right" if self.right else f"WRONG in {self.wrong:,} of {self.elements:,} elements"
        return f"relative error {self.error:.2e} against float64: {verdict}"


@dataclass(frozen=True)
class Outcome:
    """A finished emulation."""

    gemm: "Gemm"
    emulation: Emulation
    verdict: Verdict
    seconds: float

    @property
    def launched(self) -> str:
        """Grid and block in words."""
        launch = self.emulation.launch
        if launch is None:
            return "nothing: there are no products to add"
        grid, cluster = ("x".join(map(str, sizes)) for sizes in (launch.grid, launch.cluster))
        ctas, threads = _product(launch.grid), _product(launch.block)
        return f"grid {grid} in clusters of {cluster}: {ctas} CTA{'s' * (ctas != 1)} of {threads} threads"

    def draw(self, path: Path, cta: int = 0) -> None:
        """Writes the timeline of a CTA. Raises what ``timeline`` raises, and ProblemError if it cannot be."""
        gemm, launch = self.gemm, self.emulation.launch
        ctas = 0 if launch is None else _product(launch.grid)
        title = f"{gemm.problem}: CTA {cta} of {ctas}\n{gemm.config}; {gemm.scheduler}"
        k = gemm.problem.k or 0
        figure = timeline(self.emulation.trace, division_of(gemm, k, cta), cta=cta, title=title)
        with _writing(path):
            figure.savefig(path)

    def table(self, check: bool) -> Table:
        """What ran and what came of it."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        gemm, result = self.gemm, self.emulation
        by = f" by {result.processes} processes" if result.processes > 1 else ""
        rows = [
            ("problem", str(gemm.problem)),
            ("configuration", str(gemm.config)),
            ("tiles", str(gemm.scheduler)),
            ("launched", self.launched),
            ("emulated", f"{result.instructions:,} warp instructions in {self.seconds:.1f} s{by}"),
            ("modelled", f"{result.trace.cycles:,} cycles by a simple cost model; measure on a GPU"),
            ("result", str(self.verdict)),
        ]
        if check:
            rows.append(("checked", "no race, no uninitialised read of shared memory"))
        for name, value in rows:
            table.add_row(
                name, escape(value), style="red" if name == "result" and not self.verdict.right else ""
            )
        return table


def command(wish: Wish) -> int:
    """Emulates what is wished for and says what came of it; 0, or FAULT.

    Raises CutegemmError for what cannot be done; an EmulationError is reported here.
    """
    console, notes = Console(), Console(stderr=True)
    gemm = wish.gemm()
    try:
        outcome = emulate(gemm, wish, notes)
    except EmulationError as error:
        notes.print(f"{gemm.problem}\n{gemm.config}", markup=False, highlight=False)
        notes.print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        return FAULT
    console.print(outcome.table(wish.check))
    if wish.trace is not None:
        with _writing(wish.trace):
            outcome.emulation.trace.write_chrome(wish.trace)
        notes.print(f"{wish.trace}  (for ui.perfetto.dev or chrome://tracing)", markup=False, soft_wrap=True)
    if wish.picture is not None:
        outcome.draw(wish.picture, wish.cta)
        notes.print(str(wish.picture), markup=False, soft_wrap=True)
    return 0 if outcome.verdict.right else FAULT


def emulate(gemm: "Gemm", wish: Wish, notes: Console) -> Outcome:
    """Builds, emulates on random inputs and judges; progress and an estimate of the time go to ``notes``.

    Raises BuildError, EmulationError; ProblemError if the operands do not fit into memory.
    """
    with _progress(notes, "compiling"):
        gemm.build()
    estimate = seconds_expected(gemm, wish.check, wish.seed is not None)
    alone = "" if wish.processes == 1 else " in one process"
    notes.print(f"emulating takes {_about(estimate)}{alone}; Ctrl-C ends it", highlight=False)
    a, b, out = operands(gemm.problem, wish.seed or 0)
    started = time.perf_counter()
    with _bar(notes) as progress:
        result = gemm.emulate(
            a,
            b,
            out=out,
            check=wish.check,
            seed=wish.seed,
            resident=wish.resident,
            exact_sums=wish.exact_sums,
            processes=wish.processes,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    with _progress(notes, "comparing"):
        verdict = Verdict.of(out, a, b)
    return Outcome(gemm, result, verdict, seconds)


def seconds_expected(gemm: "Gemm", check: bool = False, adverse: bool = False) -> float:
    """About how long emulating takes, from tiles and steps of K; the sizes must be known."""
    problem, config = gemm.problem, gemm.config
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    batch, k = problem.l or 0, problem.k or 0
    tiles = batch * -(-(m or 0) // config.tile_m) * -(-(n or 0) // config.tile_n)
    steps = tiles * -(-k // config.tile_k) * (1 if config.schedule == "pingpong" else config.consumers)
    area = tiles * config.tile_m * config.tile_n
    # The CTAs that share a tile's K each bring in and hand on a whole tile.
    whole = gemm.scheduler.splits * (tiles * TILE_INSTRUCTIONS + area / 16384 * STORE_INSTRUCTIONS)
    seconds = (whole + steps * STEP_INSTRUCTIONS) / INSTRUCTIONS_PER_SECOND + 2 * area * k / FLOP_PER_SECOND
    return seconds * (CHECK_FACTOR if check else 1) * (SEED_FACTOR if adverse else 1)


def operands(problem: "GemmProblem", seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normally distributed a and b with lines on 16 bytes as TMA asks, and an out of NaN, on the CPU.

    Raises ProblemError if they do not fit into memory.
    """
    m, n, k = problem.m or 0, problem.n or 0, problem.k or 0
    lead = (problem.l or 0,) if problem.batched else ()
    generator = torch.Generator().manual_seed(seed)
    try:
        a = _padded(lead, m, k, problem.a_torch, problem.a_major == "k", generator)
        b = _padded(lead, k, n, problem.b_torch, problem.b_major == "n", generator)
        out = torch.full((*lead, m, n) if problem.out_major == "n" else (*lead, n, m), float("nan"))
        out = out.to(problem.out_torch)
    except RuntimeError as error:  # torch's class for an allocation that failed
        raise ProblemError(f"operands of {problem} do not fit into memory; take a smaller problem") from error
    return a, b, out if problem.out_major == "n" else out.mT


def _padded(
    lead: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    row_major: bool,
    generator: torch.Generator,
) -> torch.Tensor:
    lines, run = (rows, columns) if row_major else (columns, rows)
    unit = 16 // dtype.itemsize
    whole = torch.randn((*lead, lines, -(-run // unit) * unit), generator=generator).to(dtype)
    tensor = whole[..., :run]
    return tensor if row_major else tensor.mT


@contextmanager
def _progress(console: Console, what: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        bar.add_task(what, total=None)
        yield


@contextmanager
def _bar(console: Console) -> Iterator[Callable[["EmulationProgress"], None]]:
    """A bar of CTAs that have ended, and a count of instructions for the time until the first has."""
    columns = (
        TextColumn("emulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("CTAs, {task.fields[instructions]:,} instructions"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("emulating", total=None, instructions=0)

        def show(progress: "EmulationProgress") -> None:
            bar.update(
                task, completed=progress.ended, total=progress.ctas, instructions=progress.instructions
            )

        yield show


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProblemError(
            f"{path} cannot be written: {error.strerror}; name a file in a folder of yours"
        ) from error


def _about(seconds: float) -> str:
    """A time in words, no more precise than the estimate is."""
    if seconds < 1:
        return "about a second"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:,.0f} hours"


def _product(sizes: tuple[int, int, int]) -> int:
    x, y, z = sizes
    return x * y * z
