"""Tile orders traced for the machine: run on this CPU, or compiled for a GPU and counted."""

import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutegemm.cubin import disassemble
from cutegemm.scheduler.arithmetic import ceil_div, divisor, divmod_, minimum, select


@dataclass(frozen=True)
class Nothing:
    """No order at all: what a loop costs without one."""

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        return i, i


@dataclass(frozen=True)
class Arithmetic:
    """Not an order either: the shared arithmetic on two numbers, packed into two results."""

    function: str

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        a, b = i, tiles_m
        return {
            "divmod": lambda: divmod_(a, b),
            "divmod, prepared": lambda: divmod_(a, divisor(b)),
            "divmod by 7": lambda: divmod_(a, 7),
            "divmod by 8": lambda: divmod_(a, 8),
            "divmod by the task": lambda: divmod_(tiles_n, a + 1),
            "ceil_div": lambda: (ceil_div(a, b), tiles_n),
            "minimum": lambda: (minimum(a, b), minimum(a, 100)),
            "select": lambda: (select(a < b, a, b), select((a < b) ^ True, a, 3)),
        }[self.function]()


@dataclass(frozen=True)
class Truncating:
    """An order that means something else on the device: the remainder of a negative number."""

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        return (i - tiles_m) % 5, i


@cute.jit
def tile_each(
    tasks: cute.Tensor, grids_m: cute.Tensor, grids_n: cute.Tensor, m: cute.Tensor, n: cute.Tensor,
    order: cutlass.Constexpr,
) -> None:  # fmt: skip
    """The tile of each task on its own grid, in host memory."""
    for k in cutlass.range(cute.size(tasks)):
        row, column = order.tile(tasks[k], grids_m[k], grids_n[k])
        m[k] = row
        n[k] = column


def traced_tile(order: Any) -> Callable[[Any, Any, Any], tuple[np.ndarray, np.ndarray]]:
    """``order.tile`` on three int32 arrays, through the code a kernel would be traced to, run on this CPU."""
    length = cute.sym_int()
    fakes = [
        make_fake_tensor(Int32, (length,), (1,), memspace=cute.AddressSpace.generic, assumed_align=4)
        for _ in range(5)
    ]
    function = cute.compile(tile_each, *fakes, order, options="--enable-tvm-ffi")

    def tile(tasks: Any, tiles_m: Any, tiles_n: Any) -> tuple[np.ndarray, np.ndarray]:
        inputs = [torch.tensor(np.asarray(x), dtype=torch.int32) for x in (tasks, tiles_m, tiles_n)]
        m, n = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
        function(*inputs, m, n)
        return m.numpy(), n.numpy()

    return tile


@cute.kernel
def walk_kernel(
    tiles: cute.Tensor, order: cutlass.Constexpr, tiles_m: Int32, tiles_n: Int32, workers: Int32
) -> None:
    """A persistent worker that writes down its tiles."""
    tasks = tiles_m * tiles_n
    task, _, _ = cute.arch.block_idx()
    while task < tasks:
        m, n = order.tile(task, tiles_m, tiles_n)
        tiles[task] = m
        tiles[task + tasks] = n
        task = task + workers


@cute.jit
def walk(
    tiles: cute.Tensor, order: cutlass.Constexpr, tiles_m: Int32, tiles_n: Int32, workers: Int32, stream: Any
) -> None:
    """Launches walk_kernel."""
    walk_kernel(tiles, order, tiles_m, tiles_n, workers).launch(
        grid=(workers, 1, 1), block=(32, 1, 1), stream=stream
    )


@dataclass(frozen=True)
class Cost:
    """Instructions of a worker's loop, PTX and SASS, and those of the SASS that divide (MUFU)."""

    ptx: int
    sass: int
    reciprocals: int


def loop_cost(order: Any) -> Cost:
    """What one turn of a persistent worker's loop costs, compiled for sm_90a."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            walk, make_fake_tensor(Int32, (cute.sym_int(),), (1,)), order, Int32(0), Int32(0), Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {folder}",
        )  # fmt: skip
        ptx = loop(compiled.__ptx__.splitlines(), r"(\$L\w+):", r"\bbra(?:\.uni)?\s+(\$L\w+);")
        sass = loop(disassemble(compiled.__cubin__).splitlines(), r"\.(L_x_\d+):", r"\bBRA `\(\.(L_x_\d+)\)")
    ptx = [line for line in ptx if re.match(r"(?:@!?%p\d+\s+)?[a-z][\w.]*\s.*;$", line)]
    sass = [line for line in sass if re.match(r"/\*[0-9a-f]+\*/\s", line)]
    return Cost(len(ptx), len(sass), sum("MUFU" in line for line in sass))


def loop(lines: Iterable[str], label: str, branch: str) -> list[str]:
    """The lines of the longest stretch that ends with a branch back to its beginning."""
    stripped = [line.strip() for line in lines]
    labels = {match[1]: k for k, line in enumerate(stripped) if (match := re.match(label, line))}
    loops = [
        stripped[labels[match[1]] : k + 1]
        for k, line in enumerate(stripped)
        if (match := re.search(branch, line)) and labels.get(match[1], k + 1) < k
    ]
    return max(loops, key=len)


def cost_of(order: Any) -> Cost:
    """What an order adds to each turn of the loop."""
    full, empty = loop_cost(order), loop_cost(Nothing())
    return Cost(full.ptx - empty.ptx, full.sass - empty.sass, full.reciprocals - empty.reciprocals)
