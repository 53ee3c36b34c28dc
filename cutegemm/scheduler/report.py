"""The waves of one problem as a table: `python -m cutegemm explain M N K --schedule "GroupedM(8)"`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cutegemm.config import GemmConfig
from cutegemm.errors import DeviceError, ProblemError, TargetError
from cutegemm.gemm import NOMINAL_GPU
from cutegemm.hardware import Gpu, current_gpu, gpu_by_name
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.analysis import Grid, Summary, Wave, summarise, waves
from cutegemm.scheduler.arithmetic import ceil_div

MIB = 2**20
SHOWN = 12  # waves in the table; of more, the first and the last


@dataclass(frozen=True)
class ScheduleReport:
    """A scheduler on a problem in a configuration: its waves, and the sum of them.

    workers     clusters that run at one time
    grid        as the kernel sees it: M and N exchanged if the configuration swaps A and B
    """

    scheduler: TileScheduler
    problem: GemmProblem
    config: GemmConfig
    gpu: Gpu
    workers: int
    grid: Grid
    waves: tuple[Wave, ...]

    @property
    def summary(self) -> Summary:
        """Efficiency and working sets of all waves."""
        return summarise(self.waves, self.workers * self.grid.cluster_size)

    def render(self, console: Console) -> None:
        """Print the table of waves and the summary."""
        grid, summary = self.grid, self.summary
        lines = [str(self.problem), str(self.config)]
        if self.config.swap_ab:
            lines.append("A and B are swapped: the waves are those of the transposed product")
        clusters = "" if grid.cluster_size == 1 else f", in clusters of {grid.cluster[0]} x {grid.cluster[1]}"
        batch = "" if grid.batch == 1 else f", {grid.batch} times"
        lines.append(
            f"{self.scheduler}: {grid.tiles_m} x {grid.tiles_n} tiles{clusters}{batch}; "
            f"{self.workers} workers\n"
        )
        console.print(escape("\n".join(lines)), soft_wrap=True, highlight=False)
        console.print(waves_table(self.waves))
        l2 = f"L2 of {self.gpu.name}: {self.gpu.l2_bytes / MIB:.0f} MiB"
        console.print(
            f"\n{_count(summary.waves, 'wave')} of {self.workers * grid.cluster_size} slots, "
            f"{summary.efficiency:.1%} of them used\n"
            f"working set of a wave: {summary.mean_bytes / MIB:.1f} MiB on average, "
            f"{summary.max_bytes / MIB:.1f} at most; {escape(l2)}",
            soft_wrap=True,
            highlight=False,
        )

    def save_picture(self, path: Path) -> None:
        """Draw the first wave and the grid into a file whose suffix says the format (.png, .svg, .pdf).

        Raises MissingDependencyError without matplotlib.
        """
        from cutegemm.scheduler.plot import plot

        grid = self.grid
        figure = plot(
            self.scheduler,
            grid.tiles_m,
            grid.tiles_n,
            self.workers,
            tile_m=grid.tile_m,
            tile_n=grid.tile_n,
            k=grid.k,
            dtype=grid.dtype,
            cluster=grid.cluster,
        )
        try:
            figure.savefig(path)
        except ValueError as error:  # a suffix it has no format for
            raise ProblemError(f"{path}: {error}") from error


def report(
    scheduler: TileScheduler,
    problem: GemmProblem,
    config: GemmConfig,
    target: str,
    workers: int | None = None,
) -> ScheduleReport:
    """The waves of ``scheduler`` on a problem whose sizes are all known.

    target      where it would run: on the GPU here if it is of that architecture, else on its usual model
    workers     clusters that run at one time; None: as many as the GPU's SMs make up, one CTA for an SM
    Raises ProblemError for a size that is not known, or zero, and what TileScheduler.waves raises.
    """
    sizes = {"L": problem.l if problem.batched else 1, "M": problem.m, "N": problem.n, "K": problem.k}
    for name, size in sizes.items():
        if not size:
            raise ProblemError(f"{name}={'?' if size is None else size}: waves need a size of at least 1")
    seen = problem.swapped() if config.swap_ab else problem
    m, n, k = (size for size in (seen.m, seen.n, seen.k) if size is not None)
    grid = Grid(
        tiles_m=ceil_div(m, config.tile_m),
        tiles_n=ceil_div(n, config.tile_n),
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        k=k,
        dtype=seen.a_dtype,
        cluster=(config.cluster_m, config.cluster_n),
        batch=seen.l or 1,
    )
    gpu = _gpu_of(target)
    # With split K a worker is the CTAs that share a tile.
    resident = gpu.resident_clusters(config.cluster_size * scheduler.splits) if workers is None else workers
    found = waves(scheduler.order, scheduler.assignment, grid, resident)
    return ScheduleReport(scheduler, problem, config, gpu, resident, grid, tuple(found))


def _gpu_of(target: str) -> Gpu:
    try:
        gpu = current_gpu()
    except (DeviceError, TargetError):
        return gpu_by_name(NOMINAL_GPU[target])
    return gpu if gpu.target == target else gpu_by_name(NOMINAL_GPU[target])


def waves_table(found: Sequence[Wave]) -> Table:
    """A line for each wave, for the first and last of many."""
    table = Table(box=None, pad_edge=False)
    for name in ("wave", "tiles", "A bands", "B bands", "A MiB", "B MiB", "A + B MiB"):
        table.add_column(name, justify="right", style="bold" if name == "wave" else None)
    numbers = list(range(len(found)))
    shown = numbers if len(numbers) <= SHOWN else [*numbers[: SHOWN - 3], None, *numbers[-2:]]
    for number in shown:
        if number is None:
            table.add_row("...")
            continue
        wave = found[number]
        sizes = (wave.a_bytes, wave.b_bytes, wave.working_set_bytes)
        table.add_row(
            *map(str, (number, len(wave.tiles), wave.a_bands, wave.b_bands)),
            *(f"{size / MIB:.1f}" for size in sizes),
        )
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
