"""What this machine can do and what is in the way, in plain words: `python -m cutegemm doctor`.

machine.py   the facts: driver, GPUs, packages, cache
checks.py    facts -> findings, each with a sentence and a remedy
messages.py  error messages -> cause and remedy
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cutegemm.doctor.checks import Finding, State, diagnose
from cutegemm.doctor.machine import Machine, inspect_machine
from cutegemm.doctor.messages import KnownError, explain_error

__all__ = [
    "Finding",
    "KnownError",
    "Machine",
    "diagnose",
    "doctor",
    "exit_code",
    "explain_error",
    "inspect_machine",
    "render",
    "to_json",
]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if something prevents even compiling, else 0."""
    return int(any(finding.prevents == "compiling" for finding in findings))


_MARKS: dict[State, str] = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


def render(findings: Sequence[Finding], console: Console) -> None:
    """A table, each remedy under its sentence."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, _MARKS[finding.state], escape(finding.sentence))
        if finding.remedy:
            table.add_row("", "", f"[cyan]-> {escape(finding.remedy)}[/]")
    console.print(table)


def to_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON list of objects."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def doctor(*, as_json: bool = False, error: str | None = None, console: Console | None = None) -> int:
    """Look at this machine and print what was found; with ``error``, explain that message instead.

    Returns the exit code: 1 if nothing can be compiled here (or nothing is known about ``error``), else 0.
    """
    console = console or Console()
    if error is not None:
        known = explain_error(error)
        if known is None:
            console.print("Nothing is known about this message; run `python -m cutegemm doctor` without it.")
            return 1
        if as_json:
            console.print_json(json.dumps({"cause": known.cause, "remedy": known.remedy}))
        else:
            console.print(f"{escape(known.cause)}\n[cyan]-> {escape(known.remedy)}[/]")
        return 0
    findings = diagnose(inspect_machine())
    if as_json:
        console.print(to_json(findings), markup=False, highlight=False, soft_wrap=True)
    else:
        render(findings, console)
    return exit_code(findings)
