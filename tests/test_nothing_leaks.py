"""Nothing leaks: poison around the operands stays there, so do canaries around D, and NaN and Inf inside the
operands come out exactly where IEEE arithmetic puts them. On the emulator, and again on a GPU.

The memory around A and B is NaN and Inf throughout, D is NaN beforehand; see cutegemm/fuzz/memory.py.
"""

from dataclasses import replace

import pytest
import torch

import cutegemm
from cutegemm import GemmConfig
from cutegemm.fuzz.case import Case, Strided
from cutegemm.fuzz.memory import placed_input, placed_output
from cutegemm.fuzz.product import EmulatedProduct, GpuProduct
from cutegemm.fuzz.trial import Trial
from cutegemm.hardware import current_target
from cutegemm.scheduler import Dynamic, SplitK, StreamK, TileScheduler

NAN, INF = float("nan"), float("inf")
ONE = GemmConfig(64, 64, consumers=1)
TWO = GemmConfig(128, 64)

# Sizes are a little beyond a tile, so that there are lines and columns beyond the matrix in every last one.
# Everything is aligned here but for the lengths of lines; the cases below are this one with changes.
BASE = Case(70, 67, 69, a=Strided((72, 1)), b=Strided((1, 72)), out=Strided((72, 1)), config=ONE)
ODD_D = Strided((69, 1), 1)

CHANGES: dict[str, dict[str, object]] = {
    "whole units of 16 bytes": {"n": 72, "k": 72},
    "lines that end within 16 bytes": {},
    "two consumers": {"config": TWO},
    "D off 16 bytes": {"out": ODD_D, "out_dtype": "float32"},
    "D m-major, off 16 bytes": {"majors": "kkm", "out": Strided((1, 73), 3), "config": TWO},
    "A off 16 bytes": {"a": Strided((72, 1), 3)},
    "B off 16 bytes": {"b": Strided((1, 72), 5)},
    "odd pitches": {"a": Strided((71, 1)), "b": Strided((1, 75)), "out": ODD_D, "config": TWO},
    "odd pitches, m-major and n-major": {
        "majors": "mnn", "a": Strided((1, 71), 1), "b": Strided((77, 1), 7), "out": ODD_D,
    },
    "float16": {"dtype": "float16", "out_dtype": "float16", "a": Strided((69, 1)), "b": Strided((1, 69), 1)},
    "the heuristic's kernel": {"config": None, "a": Strided((71, 1), 1), "b": Strided((1, 73), 2)},
    "no unit stride": {"a": Strided((207, 3)), "b": Strided((2, 134)), "out": Strided((140, 2))},
    "expanded": {"a": Strided((0, 1), 1), "b": Strided((1, 0))},
    "a K of 1": {"k": 1, "a": Strided((9, 1), 1), "b": Strided((1, 3), 1)},
    "ping-pong": {"a": Strided((71, 1)), "config": GemmConfig(64, 64, schedule="pingpong")},
    "cluster": {"out": ODD_D, "config": GemmConfig(64, 64, consumers=1, cluster_m=2)},
    "swapped": {"a": Strided((71, 1)), "out": ODD_D, "config": GemmConfig(64, 64, consumers=1, swap_ab=True)},
    "K split": {
        "k": 265, "a": Strided((267, 1)), "b": Strided((1, 272)), "out": ODD_D,
        "scheduler": TileScheduler(assignment=SplitK(2)),
    },
    "StreamK": {
        "k": 1033, "a": Strided((1035, 1)), "b": Strided((1, 1040)), "out": ODD_D, "resident": 3,
        "scheduler": TileScheduler(assignment=StreamK()),
    },
    "Dynamic": {
        "a": Strided((71, 1)), "out": ODD_D, "resident": 2, "scheduler": TileScheduler(assignment=Dynamic()),
    },
    "batch": {
        "l": 3, "a": Strided((72 * 80, 72, 1)), "b": Strided((72 * 72, 1, 72)), "out": Strided((5100, 72, 1)),
    },
    "batch, matrices off 16 bytes": {
        "l": 2, "a": Strided((5101, 71, 1), 1), "b": Strided((4801, 1, 69)), "out": Strided((4901, 69, 1)),
    },
    "batch of one B": {
        "l": 2, "a": Strided((72 * 80, 72, 1)), "b": Strided((0, 1, 75), 1), "out": Strided((4901, 69, 1)),
    },
    "batch between the lines": {
        "l": 2, "a": Strided((72, 144, 1)), "b": Strided((69, 1, 138)), "out": Strided((67, 134, 1)),
    },
}  # fmt: skip
CASES = {name: replace(BASE, **changes) for name, changes in CHANGES.items()}  # type: ignore[arg-type]


def test_the_cases_go_every_way() -> None:
    product, ways = EmulatedProduct("sm_90a"), []
    for case in CASES.values():
        a, b = (placed_input(case, name, torch.device("cpu")).tensor for name in ("a", "b"))
        ways.append(product.ways(case, a, b, placed_output(case, torch.device("cpu")).tensor))
    assert {way.a for way in ways} == {way.b for way in ways} == {"tma", "realigned", "copied"}
    assert {way.d for way in ways} == {"tma", "direct", "split", "copied"}
    assert any(way.singly for way in ways)


@pytest.mark.parametrize("planted", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_nothing_leaks(name: str, planted: int) -> None:
    case = replace(CASES[name], planted=planted, seed=1 + planted, adverse=7)
    verdict = Trial(case, EmulatedProduct("sm_90a")).verdict()
    assert verdict.kind == "right", verdict


@pytest.mark.gpu
@pytest.mark.parametrize("planted", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_nothing_leaks_on_a_gpu(name: str, planted: int) -> None:
    case = replace(CASES[name], planted=planted, seed=1 + planted)
    verdict = Trial(case, GpuProduct(current_target())).verdict()
    assert verdict.kind == "right", verdict


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "off 16 bytes"])
def test_special_values_come_out_where_they_must(shift: int) -> None:
    """A NaN fills its row or column, Inf has its factor's sign, Inf times 0 and Inf - Inf are NaN."""
    a, b = (torch.full((6400,), NAN, dtype=torch.bfloat16) for _ in range(2))
    a, b = a.as_strided((66, 70), (80, 1), shift), b.as_strided((70, 66), (80, 1), shift)
    a.fill_(1.0)
    b.fill_(1.0)
    a[3, 69] = NAN
    a[5, 0] = INF
    a[7, 65], a[7, 66] = INF, -INF
    b[0, 2], b[0, 4] = -1.0, 0.0
    b[69, 65] = -INF
    wanted = torch.full((66, 66), 70.0)
    wanted[:, 2], wanted[:, 4], wanted[:, 65] = 68.0, 69.0, -INF
    wanted[3] = NAN
    wanted[5] = INF
    wanted[5, 2], wanted[5, 4], wanted[5, 65] = -INF, NAN, NAN
    wanted[7] = NAN
    gemm = cutegemm.compile((66, 66, 70), "bfloat16", b_major="n", config=ONE, target="sm_90a")
    found = gemm.emulate(a, b).out
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0, INF, -INF).float(), wanted.nan_to_num(0, INF, -INF))
