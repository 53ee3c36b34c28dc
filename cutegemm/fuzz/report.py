"""What a person sees of a run: a bar, tables of what was covered, and how to repeat what failed."""

import shlex
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cutegemm.fuzz.tally import Finding, Tally
from cutegemm.fuzz.trial import REFUSED, RIGHT

REFUSALS_SHOWN = 3
COLUMNS = (RIGHT, REFUSED, "failed")


class FuzzBar:
    """A bar on a terminal: of cases, or of time where that is what is limited. A context manager."""

    def __init__(self, console: Console, tally: Tally, cases: int | None, seconds: float | None) -> None:
        columns = (
            TextColumn("fuzzing"),
            BarColumn(),
            TextColumn("{task.fields[cases]:,} cases, {task.fields[failures]} failures"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._tally = tally
        self._by_time = seconds if cases is None else None
        self._task = self._bar.add_task("", total=cases or seconds, cases=0, failures=0)

    def __enter__(self) -> "FuzzBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """One case is through."""
        cases, [task] = self._tally.cases, self._bar.tasks
        done = cases if self._by_time is None else min(task.elapsed or 0.0, self._by_time)
        self._bar.update(self._task, completed=done, cases=cases, failures=len(self._tally.findings))


def print_report(console: Console, tally: Tally, seconds: float, seed: int, target: str) -> None:
    """Tables of everything that was counted, then the failures."""
    console.print(_table("cases by path", ("A by", "B by", "D by"), sorted(tally.by_path.items())))
    rows = sorted((tuple(name.rpartition(": ")[::2]), counts) for name, counts in tally.by_feature.items())
    console.print(_table("cases by what is in them", ("", ""), rows))
    if tally.messages:
        console.print(f"refused {tally.messages.total()} times, most often:")
        for message, count in tally.messages.most_common(REFUSALS_SHOWN):
            console.print(f"  {count} x {message}", markup=False, highlight=False, soft_wrap=True)
    for number, finding in enumerate(tally.findings, 1):
        print_finding(console, finding, number, target)
    failed = sum(counts["failed"] for counts in tally.by_path.values())
    verdict = f"{failed} failed, {len(tally.findings)} different ones above" if failed else "none failed"
    console.print(
        f"{tally.cases:,} cases in {seconds:.0f} s ({tally.cases / max(seconds, 1e-9):.1f} a second), "
        f"seed {seed}: {verdict}",
        style="bold red" if failed else "bold green",
    )


def print_finding(console: Console, finding: Finding, number: int, target: str) -> None:
    """One failure and the line that repeats it."""
    console.print(f"\nfailure {number}: {finding.verdict.kind}", style="bold red", markup=False)
    console.print(finding.verdict.message, markup=False, highlight=False, soft_wrap=True)
    console.print(f"the smallest of {finding.tries + 1} cases that were tried; again with:", highlight=False)
    console.print(reproducer(finding, target), markup=False, highlight=False, soft_wrap=True)
    if not finding.alone:
        console.print(
            "Alone in a fresh process it did not fail: only the whole run, by its seed, repeats it."
        )


def reproducer(finding: Finding, target: str) -> str:
    """The command line that tries the smallest case again."""
    return f"python -m cutegemm fuzz --target {target} --case {shlex.quote(repr(finding.smallest))}"


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Counter[str]]]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head)
    for head in ("cases", *COLUMNS):
        table.add_column(head, justify="right")
    for names, counts in rows:
        numbers = [counts.total(), *(counts[name] for name in COLUMNS)]
        style = "red" if counts["failed"] else ""
        table.add_row(*names, *(f"{number:,}" if number else "" for number in numbers), style=style)
    return table
