"""The emulator beside the GPU it emulates: the same kernels on the same inputs, element by element.

    python benchmarks/emulator_agreement.py [--jobs N] [--json FILE]

100 products of 20 kernels with normally distributed inputs, and some of inputs at the ends of their types'
ranges, where it is not documented what tensor cores do. Each runs on the GPU, in the emulator, and there with
``exact_sums``; those at the ends also as if small numbers were zeros. Needs a Hopper GPU; half a minute.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cutegemm
from cutegemm import GemmConfig
from cutegemm.gemm import Gemm
from cutegemm.scheduler import Dynamic, SplitK, StreamK, TileScheduler

CASES_PER_KERNEL = 5
MOST_TILES = 3  # along M and N

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """One kernel; ``k``: largest K that is drawn."""

    config: GemmConfig
    dtype: str
    out_dtype: str
    majors: str = "kkn"
    scheduler: TileScheduler = TileScheduler()  # noqa: RUF009 - frozen
    k: int = 800

    def gemm(self) -> Gemm:
        """For products of any size."""
        a_major, b_major, out_major = self.majors
        return cutegemm.compile(
            (None, None, None),
            self.dtype,
            out_dtype=self.out_dtype,
            a_major=a_major,
            b_major=b_major,
            out_major=out_major,
            config=self.config,
            scheduler=self.scheduler,
        )


def kernels() -> list[Kernel]:
    """Five of each pair of dtypes: schedules, clusters, exchanged operands, majors, shared K."""
    split, stream = TileScheduler(assignment=SplitK(4)), TileScheduler(assignment=StreamK())
    dynamic = TileScheduler(assignment=Dynamic())
    found = []
    for dtype in ("bfloat16", "float16"):
        for out_dtype in ("float32", dtype):
            found += [
                Kernel(GemmConfig(128, 128), dtype, out_dtype, "kkn"),
                Kernel(GemmConfig(64, 64, schedule="pingpong"), dtype, out_dtype, "mnn", dynamic),
                Kernel(GemmConfig(128, 64, cluster_m=2), dtype, out_dtype, "mkm"),
                Kernel(GemmConfig(64, 32, swap_ab=True), dtype, out_dtype, "kkn", split, 2000),
                Kernel(GemmConfig(64, 64, consumers=1), dtype, out_dtype, "knn", stream, 2400),
            ]
    return found


@dataclass(frozen=True)
class Difference:
    """Two results of one product: elements, how many differ, and by how much at most."""

    elements: int
    different: int
    largest: float

    @classmethod
    def of(cls, found: torch.Tensor, expected: torch.Tensor) -> "Difference":
        """NaN is the same as NaN, whatever its bits; zeros of different sign are different."""
        both_nan = found.isnan() & expected.isnan()
        integer = torch.int32 if found.dtype == torch.float32 else torch.int16
        differ = (found.view(integer) != expected.view(integer)) & ~both_nan
        gaps = (found.double() - expected.double()).abs()[differ]
        return cls(
            found.numel(), int(differ.sum()), float(gaps.nan_to_num(torch.inf).max()) if differ.any() else 0.0
        )

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(
            self.elements + other.elements, self.different + other.different, max(self.largest, other.largest)
        )


@dataclass(frozen=True)
class Agreement:
    """One kind of products: differences from the GPU, by how the product was emulated."""

    name: str
    cases: int
    differences: dict[str, Difference]


def normal(kernel: Kernel, number: int) -> Iterator[Pair]:
    """The inputs of a kernel's products: sizes of whole and of parts of tiles."""
    chance = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    config = kernel.config
    tiles = (config.tile_n, config.tile_m) if config.swap_ab else (config.tile_m, config.tile_n)
    for _ in range(CASES_PER_KERNEL):
        m, n = (8 * chance.randint(1, MOST_TILES * tile // 8) for tile in tiles)
        k = 8 * chance.randint(1, kernel.k // 8)
        yield operands(kernel, torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator))


def operands(kernel: Kernel, a: torch.Tensor, b: torch.Tensor) -> Pair:
    """a (M, K) and b (K, N) rounded to the kernel's type and laid out in its majors."""
    dtype = getattr(torch, kernel.dtype)
    a, b = a.to(dtype), b.to(dtype)
    return (
        a if kernel.majors[0] == "k" else a.t().contiguous().t(),
        b if kernel.majors[1] == "n" else b.t().contiguous().t(),
    )


def _scaled(a_exponent: int, b_exponent: int) -> Callable[[torch.Generator], Pair]:
    def make(generator: torch.Generator) -> Pair:
        a, b = torch.randn(64, 96, generator=generator), torch.randn(96, 64, generator=generator)
        return a * 2.0**a_exponent, b * 2.0**b_exponent

    return make


def _with_specials(generator: torch.Generator) -> Pair:
    """Infinities and NaN in some rows, zeros of either sign in others."""
    a, b = torch.randn(64, 96, generator=generator), torch.randn(96, 64, generator=generator)
    a[3, 5], a[4, 7], a[5, 9] = torch.inf, -torch.inf, torch.nan
    a[6], a[7] = 0.0, -0.0
    a[3, 6] = -torch.inf
    return a, b


# Powers of two that normally distributed a and b are multiplied by.
ENDS: dict[str, dict[str, Callable[[torch.Generator], Pair]]] = {
    "bfloat16": {
        "subnormal products and sums": _scaled(-69, -69),
        "subnormal products, normal sums": _scaled(-64, -64),
        "subnormal factors": _scaled(-131, 30),
        "products beyond the range": _scaled(64, 64),
        "sums near the end of the range": _scaled(63, 62),
        "infinities, NaN, zeros": _with_specials,
    },
    "float16": {
        "subnormal factors": _scaled(-19, 0),
        "both factors subnormal": _scaled(-19, -19),
        "largest factors": _scaled(13, 13),
        "infinities, NaN, zeros": _with_specials,
    },
}


def _flushed(tensor: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers of the tensor's type as zeros of their sign."""
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, tensor * 0.0, tensor)


def compare_kernel(number: int) -> Agreement:
    """Runs all products of one kernel."""
    kernel = kernels()[number]
    gemm = kernel.gemm()
    total: dict[str, Difference] = {}
    for a, b in normal(kernel, number):
        expected = gemm(a.cuda(), b.cuda()).cpu()
        for name, exact in (("float32 sums", False), ("exact sums", True)):
            found = gemm.emulate(a, b, exact_sums=exact).out
            total[name] = total.get(name, Difference(0, 0, 0.0)) + Difference.of(found, expected)
    return Agreement(f"{kernel.dtype} to {kernel.out_dtype}", CASES_PER_KERNEL, total)


def compare_ends(dtype: str) -> list[Agreement]:
    """Runs the products at the ends of a type's range."""
    kernel = Kernel(GemmConfig(64, 64, consumers=1), dtype, "float32")
    gemm = kernel.gemm()
    results = []
    for name, make in ENDS[dtype].items():
        a, b = operands(kernel, *make(torch.Generator().manual_seed(1)))
        expected = gemm(a.cuda(), b.cuda()).cpu()
        as_emulated = gemm.emulate(a, b, exact_sums=True).out
        without_small = gemm.emulate(_flushed(a), _flushed(b), exact_sums=True).out
        found = {
            "exact sums": as_emulated,
            "factors flushed": without_small,
            "results flushed": _flushed(as_emulated),
        }
        differences = {how: Difference.of(out, expected) for how, out in found.items()}
        results.append(Agreement(f"{dtype}, {name}", 1, differences))
    return results


def _table(title: str, rows: list[Agreement]) -> Table:
    table = Table(title=title)
    ways = list(rows[0].differences)
    for column in ("products", "cases", "elements", *ways):
        table.add_column(column, justify="left" if column == "products" else "right")
    for row in rows:
        cells = [
            f"{100 * d.different / d.elements:.2f} %, {d.largest:.1e}" if d.different else "the same"
            for d in row.differences.values()
        ]
        elements = next(iter(row.differences.values())).elements
        table.add_row(row.name, str(row.cases), f"{elements:,}", *cells)
    return table


def _by_dtypes(rows: list[Agreement]) -> list[Agreement]:
    """Those of the same name added up."""
    total: dict[str, Agreement] = {}
    for row in rows:
        before = total.get(row.name)
        if before is None:
            total[row.name] = row
            continue
        sums = {how: before.differences[how] + row.differences[how] for how in row.differences}
        total[row.name] = Agreement(row.name, before.cases + row.cases, sums)
    return list(total.values())


def main() -> int:
    """Prints two tables; 1 if a sum that should be the same bit by bit is not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("a Hopper GPU is needed: it is what the emulator is compared with", file=sys.stderr)
        return 2
    numbers = range(len(kernels()))
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        ends = [pool.submit(compare_ends, dtype) for dtype in ENDS]
        rows = list(track(pool.map(compare_kernel, numbers), total=len(numbers)))
        at_ends = [row for future in ends for row in future.result()]
    inside = _by_dtypes(rows)
    console = Console()
    console.print(_table("share of elements that differ from the GPU's, largest difference", inside))
    console.print(_table("at the ends of the range", at_ends))
    if arguments.json is not None:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "normal": [asdict(row) for row in inside],
            "ends": [asdict(row) for row in at_ends],
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(any(row.differences["exact sums"].different for row in inside))


if __name__ == "__main__":
    sys.exit(main())
