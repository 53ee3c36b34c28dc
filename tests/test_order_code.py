"""The code orders are traced to: run on this CPU against plain Python, and counted for the GPU."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from order_kernels import Arithmetic, Truncating, cost_of, loop, traced_tile

import cutegemm
from cutegemm import GemmConfig
from cutegemm.cubin import find_nvdisasm
from cutegemm.errors import MissingDependencyError
from cutegemm.scheduler import (
    Blocked,
    ColumnMajor,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    RowMajor,
    TileOrder,
    TileScheduler,
)

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

ORDERS = (
    RowMajor(),
    ColumnMajor(),
    GroupedM(1),
    GroupedM(8),
    GroupedM(6),
    GroupedM(2**15),
    GroupedN(8),
    GroupedN(5),
    Blocked(8, 16),
    Blocked(6, 7),
    Blocked(2**15, 2**15),
    Morton(1),
    Morton(8),
    Morton(2**15),
    Hilbert(1),
    Hilbert(8),
    Hilbert(64),
)
POINTS = 20_000
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "schedules.md"


def points(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tasks and the grids they belong to: small, narrow, large, and up to 2^31 - 1 tiles."""
    rng = np.random.default_rng(seed)
    quarter = POINTS // 4
    widest = np.exp2(rng.uniform(0, 31, quarter)).astype(np.int64)
    other = np.maximum(np.exp2(rng.uniform(0, 1, quarter) * (31 - np.log2(widest))).astype(np.int64), 1)
    exact = np.array([1, 2**31 - 1, 2**31 - 1, 1, 46340, 46340, 2**30, 1, 1, 2**30]).reshape(-1, 2).T
    tiles_m = np.concatenate(
        [
            rng.integers(1, 20, quarter),
            rng.integers(1, 3000, quarter),
            rng.integers(1, 4, quarter),
            widest,
            exact[0],
        ]
    )
    tiles_n = np.concatenate(
        [
            rng.integers(1, 20, quarter),
            rng.integers(1, 3000, quarter),
            rng.integers(1, 9999, quarter),
            other,
            exact[1],
        ]
    )
    tiles_n = np.minimum(tiles_n, (2**31 - 1) // tiles_m)
    count = tiles_m * tiles_n
    tasks = (rng.random(len(count)) * count).astype(np.int64)
    # First and last tasks are where something is off by one.
    tasks = np.where(rng.random(len(count)) < 0.2, count - 1, tasks)
    return np.where(rng.random(len(count)) < 0.05, 0, tasks), tiles_m, tiles_n


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_a_kernel_s_code_agrees_with_python(order: TileOrder) -> None:
    tasks, tiles_m, tiles_n = points()
    found = np.stack(traced_tile(order)(tasks, tiles_m, tiles_n))
    expected = np.stack(order.tile(tasks, tiles_m, tiles_n))
    wrong = np.flatnonzero((found != expected).any(axis=0))
    assert not len(wrong), [(int(x[wrong[0]])) for x in (tasks, tiles_m, tiles_n, *found, *expected)]
    # And arrays with plain integers, where whole grids are compared elsewhere.
    for k in range(0, len(tasks), 397):
        one = order.tile(int(tasks[k]), int(tiles_m[k]), int(tiles_n[k]))
        assert one == tuple(int(x) for x in expected[:, k])


@pytest.mark.parametrize(
    "function", ["divmod", "divmod, prepared", "divmod by 7", "divmod by 8", "ceil_div", "minimum", "select"]
)
def test_arithmetic_of_a_kernel_agrees_with_python(function: str) -> None:
    rng = np.random.default_rng(1)
    limit = 2**30 if function == "ceil_div" else 2**31
    edges = np.array(
        [1, 2, 3, 2**15, 2**16 - 1, 2**16, 2**16 + 1, limit // 2 - 1, limit // 2, limit - 2, limit - 1]
    )
    a, b = (x.ravel() for x in np.meshgrid(edges, edges))
    a = np.concatenate([a, a - 1, np.exp2(rng.uniform(0, np.log2(limit), POINTS)).astype(np.int64)])
    b = np.concatenate([b, b, np.exp2(rng.uniform(0, np.log2(limit), POINTS)).astype(np.int64)])
    # Just below, at and above multiples.
    near = np.clip(a // b * b + rng.integers(-1, 2, len(a)), 0, limit - 1)
    a, b = np.concatenate([a, near]), np.concatenate([b, b])
    order = Arithmetic(function)
    found = traced_tile(order)(a, b, b)
    expected = [np.broadcast_to(x, a.shape) for x in order.tile(a, b, b)]
    for one, other in zip(found, expected, strict=True):
        assert (one == other).all()


def test_the_comparison_sees_a_difference() -> None:
    """``%`` of a device integer truncates, Python's does not."""
    order = Truncating()
    found = traced_tile(order)([1, 2], [7, 7], [7, 7])
    assert [x.tolist() for x in found] != [x.tolist() for x in order.tile(np.array([1, 2]), 7, 7)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "order", [GroupedM(2), GroupedN(2), Blocked(2, 3), Morton(2), Morton(4), Hilbert(2), Hilbert(4)], ids=repr
)
@pytest.mark.parametrize(
    "config", [GemmConfig(64, 8, consumers=1), GemmConfig(64, 16, cluster_m=2, consumers=1)], ids=str
)
def test_whole_kernels_of_each_order(order: TileOrder, config: GemmConfig) -> None:
    """The PTX of a GEMM, run on this CPU: a ragged grid, several tiles a worker, clusters beyond the edge."""
    a = torch.randint(-3, 4, (300, 24)).to(torch.bfloat16)
    b = torch.randint(-3, 4, (37, 24)).to(torch.bfloat16).t()
    scheduler = TileScheduler(order)
    gemm = cutegemm.compile((300, 37, 24), "bfloat16", target="sm_90a", scheduler=scheduler, config=config)
    found = gemm.emulate(a, b, resident=3).out
    assert torch.equal(found.float(), (a.float() @ b.float()).to(torch.bfloat16).float())


# --- what an order costs -----------------------------------------------------------------------------------


def needs_disassembler() -> None:
    """Skips a test where SASS cannot be read."""
    try:
        find_nvdisasm()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def documented_costs() -> dict[str, tuple[int, int]]:
    """Order -> (PTX, SASS) instructions, from the table of the documentation."""
    rows = re.findall(
        r"^\| `([A-Z]\w+\([\d, ]*\))` \| .*\| (\d+) \| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    return {name: (int(ptx), int(sass)) for name, ptx, sass in rows}


@pytest.mark.parametrize(
    "order",
    [RowMajor(), ColumnMajor(), GroupedM(8), GroupedN(8), Blocked(8, 16), Morton(8), Hilbert(8)],
    ids=repr,
)
def test_what_the_documentation_says_an_order_costs(order: TileOrder) -> None:
    """To a tenth: another compiler release counts differently."""
    needs_disassembler()
    name = f"{type(order).__name__}({', '.join(str(value) for value in vars(order).values())})"
    ptx, sass = documented_costs()[name]
    cost = cost_of(order)
    assert cost.ptx == pytest.approx(ptx, rel=0.1, abs=2)
    assert cost.sass == pytest.approx(sass, rel=0.1, abs=2)
    # The division by the size of a strip or of the grid is prepared before the loop over the tasks.
    assert cost.reciprocals == {RowMajor: 0, ColumnMajor: 0, Blocked: 2}.get(type(order), 1)


def test_a_division_by_what_changes_with_the_task_is_seen() -> None:
    needs_disassembler()
    assert cost_of(Arithmetic("divmod by the task")).reciprocals == 1
    assert cost_of(Arithmetic("divmod, prepared")).reciprocals == 0


def test_the_loop_finder() -> None:
    text = ["L1:", "a", "L2:", "b", "bra L2;", "c", "bra L1;", "bra L9;", "L9:", "d"]
    assert loop(text, r"(L\d):", r"bra (L\d);") == text[:7]
