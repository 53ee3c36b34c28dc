"""A persistent matrix product in Triton, for comparison: what its compiler makes of a plain TMA kernel.

Programs walk the output tiles in strips of GROUP tile rows, so that neighbours share operands in the L2.
Triton reads annotations at run time: no postponed evaluation here.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cutegemm.bench.workload import Case
from cutegemm.errors import ProblemError
from cutegemm.problem import dtype_bytes

# Tile rows of a strip.
GROUP = tl.constexpr(8)


@triton.jit
def _matmul_kernel(  # type: ignore[no-untyped-def]  # Triton would read the annotations
    a, b, d, m, n, k,
    LAYOUT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(m, TILE_M)
    tiles_n = tl.cdiv(n, TILE_N)
    strip = GROUP * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first = tile // strip * GROUP
        rows = min(tiles_m - first, GROUP)
        row = (first + tile % strip % rows) * TILE_M
        column = tile % strip // rows * TILE_N
        accumulator = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for step in range(tl.cdiv(k, TILE_K)):
            depth = step * TILE_K
            if LAYOUT[0] == "k":
                x = a.load([row, depth])
            else:
                x = a.load([depth, row]).T
            if LAYOUT[1] == "k":
                y = b.load([column, depth]).T
            else:
                y = b.load([depth, column])
            accumulator = tl.dot(x, y, accumulator)
        d.store([row, column], accumulator.to(d.dtype))


def _set_blocks(arguments: dict[str, Any]) -> None:
    tile_m, tile_n, tile_k = (arguments[name] for name in ("TILE_M", "TILE_N", "TILE_K"))
    a_major, b_major = arguments["LAYOUT"]
    arguments["a"].block_shape = [tile_m, tile_k] if a_major == "k" else [tile_k, tile_m]
    arguments["b"].block_shape = [tile_n, tile_k] if b_major == "k" else [tile_k, tile_n]
    arguments["d"].block_shape = [tile_m, tile_n]


def _config(tile_m: int, tile_n: int, tile_k: int, stages: int, warps: int) -> Any:
    tiles = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k}
    return triton.Config(tiles, num_stages=stages, num_warps=warps, pre_hook=_set_blocks)


CONFIGS = [
    _config(128, 256, 64, 3, 8),
    _config(128, 128, 64, 4, 8),
    _config(64, 128, 64, 5, 4),
    _config(64, 64, 128, 4, 4),
]

_tuned = triton.autotune(
    CONFIGS,
    key=["m", "n", "k", "LAYOUT"],
    do_bench=lambda call, quantiles: triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles),
)(_matmul_kernel)


def check(case: Case) -> None:
    """Raises ProblemError for an operand whose rows are no multiple of 16 bytes, which TMA cannot read."""
    p = case.problem
    rows = {
        "A": (case.k if p.a_major == "k" else case.m) * dtype_bytes(p.a_dtype),
        "B": (case.k if p.b_major == "k" else case.n) * dtype_bytes(p.b_dtype),
        "D": case.n * dtype_bytes(p.out_dtype),
    }
    for operand, size in rows.items():
        if size % 16:
            raise ProblemError(
                f"the Triton kernel uses TMA, and rows of {operand} have {size} bytes: no multiple of 16"
            )


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b; the first call of a shape measures every tile and keeps the fastest."""
    (m, k), n = a.shape, b.shape[1]
    layout = ("k" if a.stride(1) == 1 else "m") + ("k" if b.stride(0) == 1 else "n")
    block = [1, 1]  # the real one is set for each tile just before the launch
    x, y = a if layout[0] == "k" else a.t(), b.t() if layout[1] == "k" else b
    descriptors = [TensorDescriptor.from_tensor(tensor, block) for tensor in (x, y, out)]
    _tuned[(_sms(a.device.index),)](*descriptors, m, n, k, LAYOUT=layout)


@cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
