"""What a person sees: a progress bar while it runs, a table at the end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cutegemm.bench.result import BASELINE, Report, Result, Row
from cutegemm.bench.suite import Progress as SuiteProgress
from cutegemm.bench.sweeps import SweepProgress
from cutegemm.bench.workload import Case


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


class SuiteBar(SuiteProgress):
    """A bar on a terminal and a line per finished shape, which ``keep`` gets too. A context manager."""

    def __init__(self, console: Console, keep: Callable[[Result], None]) -> None:
        self._console = console
        self._keep = keep
        self._bar = _bar(console)
        self._task = TaskID(0)
        self._shape = ""

    def __enter__(self) -> "SuiteBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, shapes: int) -> None:
        """So many shapes are coming."""
        self._task = self._bar.add_task("starting", total=shapes)

    def shape(self, case: Case) -> None:
        """The next shape starts."""
        self._shape = case.shape

    def step(self, implementation: str, step: str) -> None:
        """The implementation does its next step."""
        self._bar.update(self._task, description=f"{self._shape} {implementation}: {step}")

    def result(self, result: Result) -> None:
        """A line for whoever reads along; the table comes last."""
        self._keep(result)
        self._bar.advance(self._task)
        parts = [f"{row.name} {_us(row)}" for row in result.rows]
        self._console.print(f"{result.case.shape}: {', '.join(parts)}", highlight=False, soft_wrap=True)


class SweepBar(SweepProgress):
    """The same for a sweep. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _bar(console)
        self._task = TaskID(0)

    def __enter__(self) -> "SweepBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, name: str, total: int) -> None:
        """A phase begins."""
        self._task = self._bar.add_task(name, total=total)
        if not self._console.is_terminal:
            self._console.print(f"{name}: {total} configurations", highlight=False)

    def done(self, name: str) -> None:
        """One configuration is through."""
        self._bar.advance(self._task)


def _us(row: Row) -> str:
    if row.failure is not None:
        return "FAILED"
    return f"{row.timing.us:.2f} us" if row.timing else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _of(value: float | None, form: str, row: Row | None) -> str:
    return "failed" if row is not None and row.failure is not None else _number(value, form)


def suite_tables(report: Report) -> list[Table]:
    """One table per implementation of ours: times, rates, share of the floor, ratios to everyone else."""
    others = [name for name in report.names if name not in report.ours and name != BASELINE]
    return [_suite_table(report, name, others) for name in report.ours]


def _suite_table(report: Report, name: str, others: Sequence[str]) -> Table:
    title = f"{name} on {report.gpu['name']}, times in us, ratios: times faster than cuBLAS"
    table = Table(title=title, title_justify="left")
    table.add_column("M x N x K")
    heads = [name, "+-%", "TFLOP/s", "GB/s", "of floor", "cuBLAS", "ratio", *others, "error", "cuBLAS error"]
    for head in heads:
        table.add_column(head, justify="right")
    for result in report.results:
        row, baseline = result.row(name), result.row(BASELINE)
        spread = row.timing.spread * 50 if row and row.timing else None
        cells = [
            _of(row.timing.us if row and row.timing else None, ".2f", row),
            _number(spread, ".1f"),
            _number(result.tflops(name), ".0f"),
            _number(result.gb_per_s(name), ".0f"),
            _number(result.share_of_floor(name), ".2f"),
            _of(baseline.timing.us if baseline and baseline.timing else None, ".2f", baseline),
            _number(result.speedup(name), ".3f"),
            *(_of(result.speedup(other), ".3f", result.row(other)) for other in others),
            _number(row.relative_error if row else None, ".1e"),
            _number(baseline.relative_error if baseline else None, ".1e"),
        ]
        table.add_row(result.case.shape + ("" if result.cold else " (warm L2)"), *cells)
    means = [_number(report.geomean_speedup(one), ".3f") for one in (name, *others)]
    table.add_section()
    table.add_row("geomean", *[""] * 6, *means, "", "")
    return table


def sweep_table(rows: Sequence[Mapping[str, Any]], best: int | None = None) -> Table:
    """The rows of a sweep, the ``best`` fastest of each shape only if given, failures last."""
    table = Table(title="times in us; ratio: times faster than cuBLAS", title_justify="left")
    for head in ("M x N x K", "configuration"):
        table.add_column(head)
    for head in ("time", "+-%", "TFLOP/s", "of floor", "ratio"):
        table.add_column(head, justify="right")
    table.add_column("failure")
    shapes = dict.fromkeys((row["m"], row["n"], row["k"]) for row in rows)
    for shape in shapes:
        group = [row for row in rows if (row["m"], row["n"], row["k"]) == shape]
        group.sort(key=lambda row: (row["failure"] is not None, row["us"] or float("inf")))
        for row in group[:best]:
            spread = None if row["spread"] is None else row["spread"] * 50
            numbers = [
                (row["us"], ".2f"),
                (spread, ".1f"),
                (row["tflops"], ".0f"),
                (row["share_of_floor"], ".2f"),
            ]
            cells = [_number(value, form) for value, form in numbers]
            ratio = _number(row["times_faster_than_cublas"], ".3f")
            failure = Text(row["failure"] or "")
            table.add_row("x".join(map(str, shape)), row["name"], *cells, ratio, failure)
        table.add_section()
    return table


def cost_table(report: Report) -> Table | None:
    """Host time of one call and seconds of a first call, where they were measured."""
    if not report.host_us and not report.first_call_s:
        return None
    table = Table(title="Cost of a call", title_justify="left")
    table.add_column("what")
    table.add_column("time", justify="right")
    for name, us in report.host_us.items():
        table.add_row(f"host time of {name}", f"{us:.2f} us")
    for name, seconds in report.first_call_s.items():
        table.add_row(f"first call, {name}", f"{seconds:.2f} s")
    return table


def print_report(report: Report, console: Console) -> None:
    """Notes and failures first, the tables last."""
    for note in report.notes:
        console.print(note, highlight=False, soft_wrap=True)
    for failure in [*report.failures(ours=False), *report.failures(ours=True)]:
        console.print(f"failed: {failure}", highlight=False, markup=False, soft_wrap=True)
    cost = cost_table(report)
    if cost is not None:
        console.print(cost)
    for table in suite_tables(report):
        console.print(table)
