"""What calls with an epilogue cost the host: the first, which compiles its kernel, and repeated ones.

    python benchmarks/fused_calls.py [--epilogue NAME ...]

Nothing is cached when it starts. A plain product brings in the compiler before the first epilogue, as it has
in a process that uses more than one kernel. Repeated calls: the median of batches that the GPU's queue takes
without waiting, of products of 128^3, whose kernels take less than their launches.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from epilogues import EPILOGUES, Inputs, make_inputs, product
from rich.console import Console
from rich.table import Table

from cutegemm.epilogue import library

LARGE, SMALL = (4096, 4096, 4096), (128, 128, 128)
CALLS, BATCHES = 300, 15


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call, to the end of its kernel."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def host_us(call: Callable[[], object]) -> float:
    """Host microseconds of a repeated call."""
    batches = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        batches.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(batches)


def call_of(gemm: Any, inputs: Inputs, name: str | None) -> Callable[[], object]:
    """A plain product, or one with an epilogue's operands."""
    if name is None:
        return lambda: gemm(inputs.a, inputs.b, out=inputs.plain)
    return lambda: gemm(inputs.a, inputs.b, out=inputs.out, **inputs.operands)


def measured(name: str | None, generator: torch.Generator) -> tuple[float, float]:
    """Seconds of compile() and a first large product; host microseconds of a repeated small one."""
    fused = library.every()[name or "bias"]
    large, small = (make_inputs(fused, shape, generator) for shape in (LARGE, SMALL))
    first = seconds_of(lambda: call_of(product(LARGE, name, None), large, name)())
    again = call_of(product(SMALL, name, None), small, name)
    again()
    return first, host_us(again)


def table_of(names: Sequence[str]) -> Table:
    """A line for the plain product, and one for each epilogue; torch.mm's host time for comparison."""
    table = Table("epilogue", "first call s", "host us", box=None, pad_edge=False)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = make_inputs(library.bias, SMALL, generator)
    torch_us = host_us(lambda: torch.mm(inputs.a, inputs.b, out=inputs.plain))
    table.add_row("torch.mm", "", f"{torch_us:.2f}")
    for name in (None, *names):
        first, host = measured(name, generator)
        table.add_row(name or "plain, with the compiler", f"{first:.2f}", f"{host:.2f}")
    return table


def main() -> int:
    """Measures in a cache of its own, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epilogue", action="append", choices=sorted(library.every()))
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to launch on")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["CUTEGEMM_CACHE_DIR"] = folder
        Console().print(table_of(chosen.epilogue or EPILOGUES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
