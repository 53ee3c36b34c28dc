"""Results: what was measured of one shape by each implementation, and the whole run as JSON and back."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cutegemm.bench.workload import Case
from cutegemm.problem import GemmProblem

SCHEMA = 1
BASELINE = "cublas"


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean, or None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call in each round."""

    rounds_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """The median: the number that counts."""
        return statistics.median(self.rounds_us)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the rounds; differences below it are noise."""
        return (max(self.rounds_us) - min(self.rounds_us)) / self.us


@dataclass(frozen=True)
class Row:
    """One implementation on one shape. ``failure`` says in a sentence why numbers are missing or wrong.

    relative_error   Frobenius norm of the difference over that of the float32 truth
    largest_error    largest difference of one element over the root mean square of the truth
    """

    name: str
    ours: bool
    timing: Timing | None = None
    relative_error: float | None = None
    largest_error: float | None = None
    config: str = ""
    failure: str | None = None

    @property
    def good(self) -> bool:
        """Measured, and right."""
        return self.timing is not None and self.failure is None


@dataclass(frozen=True)
class Result:
    """Every implementation on one shape.

    floor_us        below which none can come
    sets, calls     input sets, and calls of one graph that rotate through them
    cold            whether the sets were enough to keep the L2 cold
    """

    case: Case
    rows: tuple[Row, ...]
    floor_us: float
    sets: int
    calls: int
    cold: bool

    def row(self, name: str) -> Row | None:
        """The row of that implementation, if it took part."""
        return next((row for row in self.rows if row.name == name), None)

    def speedup(self, name: str) -> float | None:
        """cuBLAS's time over this implementation's; None unless both were measured and right."""
        row, baseline = self.row(name), self.row(BASELINE)
        if row is None or baseline is None or not (row.good and baseline.good):
            return None
        return _us(baseline) / _us(row)

    def tflops(self, name: str) -> float | None:
        """Tera-operations per second."""
        row = self.row(name)
        return self.case.flops / _us(row) / 1e6 if row and row.timing else None

    def gb_per_s(self, name: str) -> float | None:
        """Compulsory bytes per second, in 1e9: what the memory moved at least."""
        row = self.row(name)
        return self.case.bytes / _us(row) / 1e3 if row and row.timing else None

    def share_of_floor(self, name: str) -> float | None:
        """Floor over time: 1 is perfect."""
        row = self.row(name)
        return self.floor_us / _us(row) if row and row.timing else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, derived ones included for whoever reads the file without this package."""
        return {
            "label": self.case.label,
            **asdict(self.case.problem),
            "floor_us": self.floor_us,
            "sets": self.sets,
            "calls": self.calls,
            "cold": self.cold,
            "implementations": {row.name: self._row_json(row) for row in self.rows},
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        timing = row.timing
        return {
            "ours": row.ours,
            "us": timing and timing.us,
            "min_us": timing and min(timing.rounds_us),
            "max_us": timing and max(timing.rounds_us),
            "spread": timing and timing.spread,
            "tflops": self.tflops(row.name),
            "gb_per_s": self.gb_per_s(row.name),
            "share_of_floor": self.share_of_floor(row.name),
            "times_faster_than_cublas": self.speedup(row.name),
            "relative_error": row.relative_error,
            "largest_error": row.largest_error,
            "config": row.config,
            "failure": row.failure,
            "rounds_us": timing and list(timing.rounds_us),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Result":
        """The Result that ``to_json`` wrote; KeyError if ``data`` is none."""
        fields = {name: data[name] for name in GemmProblem.__dataclass_fields__}
        rows = tuple(_row_from_json(name, row) for name, row in data["implementations"].items())
        case = Case(GemmProblem(**fields), data["label"])
        return cls(case, rows, data["floor_us"], data["sets"], data["calls"], data["cold"])


def _us(row: Row) -> float:
    if row.timing is None:
        raise ValueError(f"{row.name} was not timed")
    return row.timing.us


def _row_from_json(name: str, data: Mapping[str, Any]) -> Row:
    rounds = data["rounds_us"]
    return Row(
        name=name,
        ours=data["ours"],
        timing=None if rounds is None else Timing(tuple(rounds)),
        relative_error=data["relative_error"],
        largest_error=data["largest_error"],
        config=data["config"],
        failure=data["failure"],
    )


@dataclass(frozen=True)
class Report:
    """A whole run: where and how it was taken, and every shape's result.

    host_us       microseconds of host time of one call, by what was called
    first_call_s  seconds of the first call in a new process: "cold" and "from disk"
    notes         sentences a reader should know: peers that could not run, results that are missing
    """

    gpu: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    method: Mapping[str, Any]
    ceilings: Mapping[str, Any]
    results: tuple[Result, ...] = ()
    host_us: Mapping[str, float] = field(default_factory=dict)
    first_call_s: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Every implementation, in the order of first appearance."""
        return list(dict.fromkeys(row.name for result in self.results for row in result.rows))

    @property
    def ours(self) -> list[str]:
        """The implementations that are cutegemm's."""
        return [
            name
            for name in self.names
            if any(r.name == name and r.ours for x in self.results for r in x.rows)
        ]

    def geomean_speedup(self, name: str) -> float | None:
        """Geometric mean over cuBLAS of the shapes where both were measured."""
        speedups = (result.speedup(name) for result in self.results)
        return geomean(speedup for speedup in speedups if speedup is not None)

    def failures(self, *, ours: bool) -> list[str]:
        """One sentence per failed implementation and shape."""
        return [
            f"{row.name} on {result.case.shape}: {row.failure}"
            for result in self.results
            for row in result.rows
            if row.failure is not None and row.ours == ours
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump."""
        return {
            "schema": SCHEMA,
            "gpu": dict(self.gpu),
            "versions": dict(self.versions),
            "date": self.date,
            "method": dict(self.method),
            "ceilings": dict(self.ceilings),
            "geomean_times_faster_than_cublas": {name: self.geomean_speedup(name) for name in self.names},
            "host_us": dict(self.host_us),
            "first_call_s": dict(self.first_call_s),
            "notes": list(self.notes),
            "shapes": [result.to_json() for result in self.results],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Report":
        """The Report that ``to_json`` wrote; ValueError for another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA}: written by another version")
        plain = {
            name: data[name]
            for name in ("gpu", "versions", "date", "method", "ceilings", "host_us", "first_call_s")
        }
        results = tuple(Result.from_json(row) for row in data["shapes"])
        return cls(**plain, results=results, notes=tuple(data["notes"]))
