"""An order of tiles of one's own: one class with one method, checked, looked at, compiled, run.

Snake strips: like GroupedM, but every other strip runs backwards. Where one strip ends the next begins, so
the last bands of B a strip has read are the first the next one needs, and are still in L2.
"""

import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cutegemm
from cutegemm.errors import DeviceError, TargetError
from cutegemm.hardware import current_gpu
from cutegemm.scheduler import (
    GroupedM,
    Persistent,
    RowMajor,
    TileScheduler,
    Wave,
    check_bijection,
    summarise,
)
from cutegemm.scheduler.arithmetic import divmod_, select

M, N, K = 4000, 6000, 2048  # no whole number of tiles: the last strip is narrower
TILE = 128
TARGET = "sm_90a"
WORKERS = 132
GRIDS = ((1, 1), (1, 9), (9, 1), (16, 16), (17, 5), (77, 53))


@dataclass(frozen=True)  # equal snakes share a kernel, and their repr is part of its name in the cache
class Snake:
    """Strips of ``group`` tile rows, M fastest; odd strips from the last column to the first."""

    group: int = 8

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        """The tile (m, n) of task i. The same lines run on Python ints and in the kernel."""
        m, n = GroupedM(self.group).tile(i, tiles_m, tiles_n)
        strip, _ = divmod_(m, self.group)
        _, odd = divmod_(strip, 2)
        return m, select(odd == 1, tiles_n - 1 - n, n)


def bands(wave: Wave) -> set[tuple[str, int]]:
    """The bands of A and B a wave reads."""
    return {("A", tile.m) for tile in wave.tiles} | {("B", tile.n) for tile in wave.tiles}


def show_waves(console: Console, tiles_m: int, tiles_n: int) -> None:
    """What a wave reads, and what of it the wave before has not read, for the snake and two other orders."""
    table = Table(box=None, pad_edge=False, title=f"{tiles_m} x {tiles_n} tiles, {WORKERS} workers")
    for name in ("order", "waves", "slots used", "MiB of a wave", "bands", "new bands"):
        table.add_column(name, justify="left" if name == "order" else "right")
    for order in (RowMajor(), GroupedM(8), Snake(8)):
        waves = TileScheduler(order).waves(
            tiles_m, tiles_n, WORKERS, tile_m=TILE, tile_n=TILE, k=K, dtype="bfloat16"
        )
        whole = summarise(waves, WORKERS)
        read = [bands(wave) for wave in waves]
        new = len(read[0]) + sum(len(after - before) for before, after in pairwise(read))
        table.add_row(
            repr(order),
            str(whole.waves),
            f"{whole.efficiency:.1%}",
            f"{whole.mean_bytes / 2**20:.1f}",
            str(sum(map(len, read))),
            str(new),
        )
    console.print(table)


def relative_error(d: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return ((d.float() - truth).norm() / truth.norm()).item()


def run_on_gpu(console: Console, scheduler: TileScheduler) -> bool:
    """The product on the current GPU; whether it is as good as torch.mm's."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    a = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, generator=generator)
    b = torch.randn(N, K, device="cuda", dtype=torch.bfloat16, generator=generator).t()
    d = cutegemm.compile((M, N, K), torch.bfloat16, scheduler=scheduler)(a, b)
    # True float32: TF32 would round the inputs of the reference itself.
    torch.backends.cuda.matmul.allow_tf32 = False
    truth = torch.mm(a.float(), b.float())
    ours, theirs = relative_error(d, truth), relative_error(torch.mm(a, b), truth)
    console.print(f"relative error {ours:.2e}, torch.mm {theirs:.2e}")
    return ours <= 2 * theirs


def main() -> int:
    """Check, look, compile, run; the exit code is 1 for a wrong result."""
    console = Console()
    order = Snake(8)
    for tiles_m, tiles_n in GRIDS:
        check_bijection(order, tiles_m, tiles_n)
    console.print(f"{order!r} visits every tile once on {len(GRIDS)} grids")
    show_waves(console, -(-M // TILE), -(-N // TILE))

    scheduler = TileScheduler(order, Persistent())
    gemm = cutegemm.compile((M, N, K), "bfloat16", scheduler=scheduler, target=TARGET)
    console.print(f"compiled for {TARGET}: {gemm.resources}")

    try:
        gpu = current_gpu()
    except (DeviceError, TargetError) as error:
        console.print(f"not run: {error}")
        return 0
    if gpu.target != TARGET:
        console.print(f"not run: {gpu.name} is a {gpu.target}")
        return 0
    return 0 if run_on_gpu(console, scheduler) else 1


if __name__ == "__main__":
    sys.exit(main())
