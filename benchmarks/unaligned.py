"""Operands off 16 bytes beside cuBLAS on the same tensors, on a GPU.

    python benchmarks/unaligned.py [--shape M N K ...] [--json FILE]

A, B and D begin 1, 3 and 1 elements after a multiple of 16 bytes, and their lines are two elements longer
than the matrices. B is taken both ways. CUDA graphs, input sets rotated over more than the L2, both in
random order in each round, median of the rounds; D is filled with NaN before it is checked.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cutegemm

SHAPES = ((1000, 1000, 1000), (1023, 1025, 1022), (4097, 4099, 4095), (64, 4097, 4095))
ALIGNED = {(1000, 1000, 1000)}  # everything about it is a multiple of 16 bytes, and is left so
LATE, LONGER = (1, 3, 1), 2
ROTATED_BYTES = 160e6
ROUNDS, GRAPH_US = 9, 3000.0
TOLERANCE = 3e-3


def matrix(rows: int, columns: int, late: int, longer: int, last_contiguous: bool = True) -> torch.Tensor:
    """A random bfloat16 (rows, columns) that begins ``late`` elements into its allocation."""
    lines, length = (rows, columns) if last_contiguous else (columns, rows)
    pitch = length + longer
    memory = torch.randn(late + lines * pitch, device="cuda").to(torch.bfloat16)
    view = memory[late:].view(lines, pitch)[:, :length]
    return view if last_contiguous else view.t()


def graph_of(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """``calls`` calls, one for each input set in turn."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def medians(graphs: list[torch.cuda.CUDAGraph], calls: int) -> list[float]:
    """Microseconds of one call of each."""
    found: list[list[float]] = [[] for _ in graphs]
    order = random.Random(1)
    for _ in range(ROUNDS):
        for i in order.sample(range(len(graphs)), len(graphs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[i].replay()
            end.record()
            torch.cuda.synchronize()
            found[i].append(begin.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(times) for times in found]


def measure(shape: tuple[int, int, int], b_major: str) -> dict[str, object]:
    """One line: times of both, and how ours loads and stores. Raises ArithmeticError for a wrong result."""
    m, n, k = shape
    late, longer = ((0, 0, 0), 0) if shape in ALIGNED else (LATE, LONGER)
    sets = max(2, int(ROTATED_BYTES / (2 * (m * k + k * n + m * n))) + 1)
    operands = [
        (
            matrix(m, k, late[0], longer),
            matrix(k, n, late[1], longer, b_major == "n"),
            matrix(m, n, late[2], longer),
        )
        for _ in range(sets)
    ]
    gemm = cutegemm.compile(shape, torch.bfloat16, b_major=b_major)
    a, b, out = operands[0]
    out.fill_(float("nan"))
    gemm(a, b, out=out)
    truth = a.float() @ b.float()
    error = float((out.float() - truth).norm() / truth.norm())
    if not error < TOLERANCE:
        raise ArithmeticError(f"{shape}, B {b_major}-major: relative error {error:.2e}")

    def ours(i: int) -> object:
        a, b, out = operands[i % sets]
        return gemm(a, b, out=out)

    def theirs(i: int) -> object:
        a, b, out = operands[i % sets]
        return torch.mm(a, b, out=out)

    calls = max(3, min(40, int(GRAPH_US / (2 * m * n * k / 5e8 + 2))))
    ours_us, cublas_us = medians([graph_of(ours, calls), graph_of(theirs, calls)], calls)
    return {"shape": list(shape), "b_major": b_major, "us": ours_us, "cublas_us": cublas_us, "error": error}


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--json", type=Path, help="file for the numbers")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a GPU, and there is none")
    shapes = [tuple(shape) for shape in chosen.shape or SHAPES]
    work = [(shape, b_major) for shape in shapes for b_major in "kn"]
    lines = [measure(*each) for each in track(work, "measuring", console=Console(stderr=True))]
    table = Table("M x N x K", "B", "cutegemm us", "cuBLAS us", "ratio", "error", box=None, pad_edge=False)
    for line in lines:
        ours_us, cublas_us = float(str(line["us"])), float(str(line["cublas_us"]))
        table.add_row(
            "x".join(map(str, line["shape"])),  # type: ignore[call-overload]
            f"{line['b_major']}-major",
            f"{ours_us:.1f}",
            f"{cublas_us:.1f}",
            f"{cublas_us / ours_us:.2f}",
            f"{line['error']:.1e}",
        )
    Console().print(table)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
