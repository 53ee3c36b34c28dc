"""Timings of many configurations of many shapes: the file that sweep.py writes and fit_heuristic.py reads.

A JSON list, one object a shape: "shape" [M, N, K], "cublas" microseconds, and "rows", each [configuration,
microseconds, CTAs that share a tile's K (1 if left out)]. A configuration is the ``repr`` of a GemmConfig.
"""

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cutegemm import GemmConfig, GemmProblem
from cutegemm.costmodel import Table, Work
from cutegemm.hopper.plan import HopperPlan, plan

Sizes = tuple[int, int, int]  # M, N, K
KIND = GemmProblem(None, None, None)  # bfloat16, K-major A and B, row-major D: what the sweeps are of


class SweepError(Exception):
    """A file is no sweep; the message says which and why."""


@dataclass(frozen=True)
class Kernel:
    """One configuration of a sweep."""

    config: GemmConfig
    splits: int

    def plan(self) -> HopperPlan:
        """The kernel it stands for."""
        return plan(self.config, KIND.swapped() if self.config.swap_ab else KIND, splits=self.splits)

    def __str__(self) -> str:
        return str(self.config) + (f", K split {self.splits} ways" if self.splits > 1 else "")


@dataclass(frozen=True)
class Shape:
    """One shape of a sweep: microseconds of every kernel measured, and of cuBLAS; NaN: not measured."""

    m: int
    n: int
    k: int
    cublas_us: float
    us: dict[Kernel, float]

    @property
    def sizes(self) -> Sizes:
        """M, N, K."""
        return self.m, self.n, self.k

    def to_json(self) -> dict[str, Any]:
        """The object of the file."""
        rows = [[repr(kernel.config), us, kernel.splits] for kernel, us in self.us.items()]
        return {"shape": [self.m, self.n, self.k], "cublas": self.cublas_us, "rows": rows}


def parse_config(text: str) -> GemmConfig:
    """The GemmConfig a ``repr`` shows; nothing is evaluated. SweepError for any other text."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "GemmConfig":
            raise ValueError("it is no call of GemmConfig")
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return GemmConfig(*map(ast.literal_eval, call.args), **fields)
    except (SyntaxError, ValueError, TypeError) as error:
        raise SweepError(f"{text!r} is no configuration: {error}") from error


def read(paths: Iterable[Path]) -> list[Shape]:
    """The shapes of all files, in order. SweepError for what cannot be read."""
    shapes = []
    for path in paths:
        try:
            for entry in json.loads(path.read_text(encoding="utf-8")):
                us = {
                    Kernel(parse_config(text), splits[0] if splits else 1): float(time)
                    for text, time, *splits in entry["rows"]
                }
                if us:
                    shapes.append(Shape(*map(int, entry["shape"]), float(entry["cublas"]), us))
        except OSError as error:
            raise SweepError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SweepError(f"{path} is no sweep: {type(error).__name__} {error}") from error
    return shapes


def write(path: Path, shapes: Iterable[Shape]) -> None:
    """The file of shapes, replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps([shape.to_json() for shape in shapes]) + "\n", encoding="utf-8")
    partial.replace(path)


@dataclass(frozen=True)
class Timings:
    """A sweep as arrays, one row for each kernel of each shape; the rows of a shape follow each other."""

    shapes: tuple[Shape, ...]
    kernels: tuple[Kernel, ...]
    table: Table
    work: Work
    us: np.ndarray
    shape_of: np.ndarray  # index into shapes, for each row
    starts: np.ndarray  # first row of each shape
    best_us: np.ndarray  # for each shape

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> "Timings":
        """All timings of these shapes."""
        plans: dict[Kernel, HopperPlan] = {}
        kernels, us, shape_of, sizes = [], [], [], []
        for index, shape in enumerate(shapes):
            for kernel, time in shape.us.items():
                if kernel not in plans:
                    plans[kernel] = kernel.plan()
                kernels.append(kernel)
                us.append(time)
                shape_of.append(index)
                sizes.append((shape.m, shape.n, shape.k))
        m, n, k = np.array(sizes).T
        starts = np.searchsorted(shape_of, np.arange(len(shapes)))
        table = Table.of([plans[kernel] for kernel in kernels], KIND)
        times = np.array(us)
        best = np.minimum.reduceat(np.where(np.isfinite(times), times, np.inf), starts)
        return cls(
            tuple(shapes), tuple(kernels), table, Work(m, n, k), times, np.array(shape_of), starts, best
        )

    def rows_of(self, shape: int) -> slice:
        """The rows of one shape."""
        ends = [*self.starts[1:], len(self.us)]
        return slice(int(self.starts[shape]), int(ends[shape]))
