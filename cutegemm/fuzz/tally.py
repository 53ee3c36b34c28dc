"""What a run has counted, and what it has found."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cutegemm.fuzz.case import Case
from cutegemm.fuzz.trial import REFUSED, RIGHT, Verdict

Path = tuple[str, str, str]  # A, B, D: how they are loaded and stored
NOTHING = "-"


@dataclass(frozen=True)
class Finding:
    """A failure.

    first      as it was found; smallest: the smallest case that fails in the same way, its verdict
    tries      cases run to shrink it
    alone      whether the smallest fails in a fresh process too
    """

    first: Case
    smallest: Case
    verdict: Verdict
    tries: int = 0
    alone: bool = True

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": self.verdict.kind,
            "message": self.verdict.message,
            "case": repr(self.smallest),
            "first": repr(self.first),
            "tries": self.tries,
            "alone": self.alone,
        }


@dataclass
class Tally:
    """Cases counted by path and by feature; safe to use from several threads."""

    by_path: dict[Path, Counter[str]] = field(default_factory=dict)
    by_feature: dict[str, Counter[str]] = field(default_factory=dict)
    messages: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    again: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def cases(self) -> int:
        """How many were tried, those tried to shrink a failure left out."""
        return sum(counts.total() for counts in self.by_path.values())

    def count(self, case: Case, verdict: Verdict) -> None:
        """One more case."""
        kind = verdict.kind if verdict.kind in (RIGHT, REFUSED) else "failed"
        with self._lock:
            self.by_path.setdefault(path_of(case, verdict), Counter())[kind] += 1
            for name in features(case, verdict):
                self.by_feature.setdefault(name, Counter())[kind] += 1
            if kind == REFUSED:
                self.messages[verdict.message] += 1

    def is_new(self, case: Case, verdict: Verdict) -> bool:
        """Whether no failure like this was seen before; it counts as seen from now on."""
        words = re.sub(r"\d+|\(.*?\)", "#", verdict.message) if verdict.kind == "error" else ""
        signature = (verdict.kind, words, *path_of(case, verdict))
        with self._lock:
            self.again[signature] += 1
            return self.again[signature] == 1

    def found(self, finding: Finding) -> None:
        """One more finding, unless another one has shrunk to the same case."""
        with self._lock:
            if all(other.smallest != finding.smallest for other in self.findings):
                self.findings.append(finding)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cases": self.cases,
            "paths": [
                {"a": path[0], "b": path[1], "d": path[2], **counts}
                for path, counts in sorted(self.by_path.items())
            ],
            "features": {name: dict(counts) for name, counts in sorted(self.by_feature.items())},
            "failures": [finding.as_json() for finding in self.findings],
        }


def path_of(case: Case, verdict: Verdict) -> Path:
    """How A and B are loaded and D is stored, as the library says."""
    if 0 in case.sizes:
        return "K = 0" if case.k == 0 and 0 not in case.sizes[:3] else "empty", NOTHING, NOTHING
    ways = verdict.ways
    return ways.a or "?", ways.b or "?", ways.d or "?"


def features(case: Case, verdict: Verdict) -> Iterator[str]:
    """What else is special about a case."""
    if verdict.ways.singly:
        yield "batch, one product at a time"
    scheduler = case.scheduler
    yield "assignment: " + ("default" if scheduler is None else type(scheduler.assignment).__name__)
    yield "configuration: " + ("heuristic" if case.config is None else "given")
    yield f"called: {case.call}"
    yield "D: " + ("allocated" if case.out is None else "given")
    if case.l is not None:
        yield "batch"
    if case.planted:
        yield "NaN and Inf in the operands"
    for name in ("a", "b", "out"):
        yield from _of_strides(name, case)


def _of_strides(name: str, case: Case) -> Iterator[str]:
    where, shape = case.placed(name), case.shape(name)
    long = [stride for size, stride in zip(shape[-2:], where.strides[-2:], strict=True) if size > 1]
    letter = {"a": "A", "b": "B", "out": "D"}[name]
    if where.offset % 8:
        yield f"{letter}: start off 16 bytes"
    if len(long) == 2 and 1 not in long:
        yield f"{letter}: no unit stride"
    if case.l is not None and case.l > 1 and where.strides[0] == 0:
        yield f"{letter}: broadcast over the batch"
