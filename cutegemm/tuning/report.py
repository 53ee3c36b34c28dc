"""What a person sees of tuning: a bar while it runs, a table of the candidates at the end."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cutegemm.bench.sweeps import SweepProgress
from cutegemm.tuning.tuner import Tuned


class TuneBar(SweepProgress):
    """One bar, on a terminal only, for one shape and phase after another. A context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task: TaskID | None = None
        self._shape = ""

    @classmethod
    def on_stderr(cls) -> "TuneBar":
        """A bar on standard error."""
        return cls(Console(stderr=True))

    def __enter__(self) -> "TuneBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def shape(self, name: str, number: int, total: int) -> None:
        """The next shape starts, the ``number``-th of ``total``."""
        self._shape = name if total == 1 else f"{name} ({number} of {total})"

    def phase(self, name: str, total: int) -> None:
        """A phase of so many candidates begins; its bar takes the place of the last one's."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(f"{self._shape}: {name}", total=total)

    def done(self, name: str) -> None:
        """One candidate is through."""
        if self._task is not None:
            self._bar.advance(self._task)


def trials_table(tuned: Tuned, most: int | None = None) -> Table:
    """The candidates of one shape, the fastest first and those that failed last; at most ``most`` of them."""
    table = Table(title=f"{tuned.problem}: times in us", title_justify="left")
    table.add_column("candidate")
    for head in ("predicted", "measured", "+-%", "to heuristic"):
        table.add_column(head, justify="right")
    table.add_column("")
    reference = tuned.winner.heuristic_us
    for trial in tuned.trials[:most]:
        ratio = None if trial.us is None or reference is None else 100 * (trial.us / reference - 1)
        table.add_row(
            trial.candidate.name,
            f"{trial.candidate.predicted_us:.2f}",
            _number(trial.us, ".2f"),
            _number(None if trial.spread is None else 50 * trial.spread, ".1f"),
            "-" if ratio is None else f"{ratio:+.1f} %",
            Text(trial.failure or trial.remark),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
