"""Random small products on the emulator: whatever is legal is right, whoever runs first.

The kernels are few, so that little is compiled; sizes, clusters at a time and orders of execution are drawn.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from emulation import gemm_of, judged
from gpu_checks import Case
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import GemmConfig
from cutegemm.gemm import Gemm
from cutegemm.scheduler import Dynamic, Hilbert, Morton, RowMajor, SplitK, StreamK, TileScheduler

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXAMPLES = 208  # of all kernels together
MOST_TILES = 3  # along each side
STREAMED = 12  # times as many stages of K, of which a piece is worth sharing


@dataclass(frozen=True)
class Kind:
    """A kernel: configuration, scheduler, and a case whose sizes are yet to be drawn."""

    config: GemmConfig
    case: Case = Case(0, 0, 0)  # noqa: RUF009 - frozen
    scheduler: TileScheduler | None = None


KINDS = {
    "cooperative": Kind(GemmConfig(128, 128)),
    "cooperative 64x96 float16": Kind(
        GemmConfig(64, 96), Case(0, 0, 0, dtype=F16, out_dtype=F16, b_major="n"), TileScheduler(Hilbert())
    ),
    "one consumer, batch": Kind(
        GemmConfig(64, 64, consumers=1), Case(0, 0, 0, l=0, out_dtype=F32, a_major="m")
    ),
    "ping-pong": Kind(GemmConfig(64, 128, schedule="pingpong"), Case(0, 0, 0, out_major="m")),
    "ping-pong, batch": Kind(
        GemmConfig(64, 64, schedule="pingpong"),
        Case(0, 0, 0, l=0, dtype=F16, out_dtype=F32),
        TileScheduler(RowMajor()),
    ),
    "cluster 2x1": Kind(GemmConfig(128, 64, cluster_m=2), Case(0, 0, 0, b_major="n")),
    "cluster 1x2": Kind(
        GemmConfig(64, 128, cluster_n=2), Case(0, 0, 0, a_major="m", dtype=F16, out_dtype=BF16)
    ),
    "cluster 2x2 ping-pong": Kind(
        GemmConfig(64, 64, cluster_m=2, cluster_n=2, schedule="pingpong"), Case(0, 0, 0, out_dtype=F32)
    ),
    "swapped": Kind(GemmConfig(128, 24, swap_ab=True)),
    "swapped, other majors": Kind(
        GemmConfig(64, 16, swap_ab=True, consumers=1), Case(0, 0, 0, a_major="m", b_major="n", out_dtype=F32)
    ),
    "split 2": Kind(
        GemmConfig(64, 64, consumers=1), Case(0, 0, 0), TileScheduler(assignment=SplitK(2))
    ),
    "split 4, m-major D": Kind(
        GemmConfig(64, 64), Case(0, 0, 0, out_major="m", dtype=F16, out_dtype=F16),
        TileScheduler(assignment=SplitK(4)),
    ),
    "split 8": Kind(
        GemmConfig(64, 32, consumers=1), Case(0, 0, 0, out_dtype=F32), TileScheduler(assignment=SplitK(8))
    ),
    "dynamic": Kind(GemmConfig(64, 64, consumers=1), Case(0, 0, 0), TileScheduler(assignment=Dynamic())),
    "dynamic, cluster 2x1, ping-pong": Kind(
        GemmConfig(64, 64, cluster_m=2, schedule="pingpong"), Case(0, 0, 0, l=0, out_dtype=F32),
        TileScheduler(Morton(), Dynamic()),
    ),
    "stream": Kind(GemmConfig(64, 64, consumers=1), Case(0, 0, 0), TileScheduler(assignment=StreamK())),
    "stream, ping-pong, batch": Kind(
        GemmConfig(64, 64, schedule="pingpong"), Case(0, 0, 0, l=0, dtype=F16, out_dtype=F32),
        TileScheduler(assignment=StreamK(ordered=False)),
    ),
    "stream, cluster 1x2, direct store": Kind(
        GemmConfig(128, 64, cluster_n=2), Case(0, 0, 0, out_shift=1), TileScheduler(assignment=StreamK())
    ),
    "direct store": Kind(GemmConfig(64, 64), Case(0, 0, 0, out_shift=1)),
}  # fmt: skip


@cache
def gemm(name: str) -> Gemm:
    """The Gemm of a kind, for any sizes."""
    kind = KINDS[name]
    return gemm_of(kind.case, kind.config, kind.scheduler)


@st.composite
def cases(draw: st.DrawFn, kind: Kind) -> Case:
    """Sizes of up to three tiles each way, ragged or whole; K many times as long where workers share it.

    A line of D ends on 16 bytes, or else is stored by a kernel of its own: there is a kind for those.
    """
    config = kind.config
    tile = {"m": config.tile_m, "n": config.tile_n, "k": config.tile_k}
    if kind.scheduler is not None and kind.scheduler.streamed:
        tile["k"] *= STREAMED
    if config.swap_ab:
        tile["m"], tile["n"] = tile["n"], tile["m"]

    line = kind.case.out_major
    unit = {line: 16 // kind.case.out_dtype.itemsize} if kind.case.out_shift == 0 else {}

    def size(axis: str) -> int:
        step = unit.get(axis, 1)
        ragged = st.integers(1, MOST_TILES * tile[axis] // step).map(lambda units: units * step)
        return draw(ragged | st.integers(1, MOST_TILES).map(lambda count: count * tile[axis]))

    batch = None if kind.case.l is None else draw(st.integers(1, 3))
    return replace(kind.case, m=size("m"), n=size("n"), k=size("k"), l=batch)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=-(-EXAMPLES // len(KINDS)), deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_product_is_right_in_any_order(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(KINDS[name]))
    seed = data.draw(st.none() | st.integers(0, 2**31 - 1))
    resident = data.draw(st.integers(1, 5))
    check = data.draw(st.booleans())
    judged(gemm(name), case, seed=seed, resident=resident, check=check)
