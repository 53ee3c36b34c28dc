"""Sums that have the bits of an H200's: against sums recorded on one, and by the rule they follow."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmConfig
from cutegemm.emulator.elements import widen
from cutegemm.emulator.numerics import PRODUCTS, added

# Made by float32-output products on an H200: operands' bits, and D (16, 32), for widely spread exponents.
RECORDED = np.load(Path(__file__).parent / "data" / "h200_sums.npz")
NAMES = sorted({name[:-2] for name in RECORDED.files})
KIND = {"bfloat16": "bf16", "float16": "f16"}


def operands(name: str) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """a (16, K), b (32, K) and what the GPU made of them."""
    dtype = getattr(torch, name.split("_")[0])
    a, b = (torch.from_numpy(RECORDED[f"{name}_{which}"]).view(dtype) for which in "ab")
    return a, b, RECORDED[f"{name}_d"]


@pytest.mark.parametrize("name", NAMES)
def test_sums_recorded_on_an_h200(name: str) -> None:
    a, b, recorded = operands(name)
    kind = KIND[name.split("_")[0]]
    wide_a, wide_b = (widen(x.view(torch.int16).numpy().view(np.uint16), kind) for x in (a, b))
    sums = None
    for k in range(0, a.shape[1], PRODUCTS):
        sums = added(wide_a[:, k : k + PRODUCTS], wide_b[:, k : k + PRODUCTS], sums)
    assert sums is not None
    assert np.array_equal(sums, recorded)
    rounded = (a.double() @ b.double().t()).float().numpy()
    assert not np.array_equal(rounded, recorded), "inputs that tell truncated sums from rounded ones"


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("64_10")])
def test_a_whole_kernel_gives_the_recorded_bits(name: str) -> None:
    a, b, recorded = operands(name)
    gemm = cutegemm.compile(
        (16, 32, a.shape[1]), a.dtype, out_dtype="float32", config=GemmConfig(64, 32, consumers=1),
        target="sm_90a",
    )  # fmt: skip
    assert np.array_equal(gemm.emulate(a, b.t(), exact_sums=True).out.numpy(), recorded)
    assert not np.array_equal(gemm.emulate(a, b.t()).out.numpy(), recorded)


NUMBERS = st.floats(-1e4, 1e4, width=16)


@settings(max_examples=200, deadline=None)
@given(st.lists(NUMBERS, min_size=16, max_size=16), st.lists(NUMBERS, min_size=16, max_size=16), NUMBERS)
def test_a_sum_is_cut_off_and_never_far(a: list[float], b: list[float], before: float) -> None:
    """Within 18 units of 2^-25 of the largest term, and one of float32, of the exact sum."""
    row, column = (np.array([x], dtype=np.float32) for x in (a, b))
    start = np.array([[before]], dtype=np.float32)
    terms = [*(row.astype(np.float64) * column.astype(np.float64))[0], float(before)]
    exact, largest = sum(terms), max(map(abs, terms))
    found = float(added(row, column, start)[0, 0])
    assert abs(found - exact) <= 18 * 4 * largest * 2.0**-25 + abs(exact) * 2.0**-23
    if all(term >= 0 for term in terms):
        assert found <= exact


@pytest.mark.parametrize(
    ("a", "b", "before", "expected"),
    [
        (1.0, 1.0, 2.0**25, 2.0**25),  # below the last bit of float32: cut off
        (1.0, 3.0, 2.0**24, 2.0**24 + 2),  # rounding would give + 4
        (1.0, -1.0, 2.0**24, 2.0**24 - 1),
        (0.0, 5.0, 0.0, 0.0),
        (float("inf"), 1.0, 0.0, float("inf")),
        (float("inf"), 0.0, 0.0, float("nan")),
        (1.0, 1.0, float("-inf"), float("-inf")),
        (2.0**-24, 1.0, 0.0, 2.0**-24),  # the least float16, subnormal
        (2.0**-133, 2.0**10, 0.0, 2.0**-123),  # the least bfloat16
        (2.0**-70, 2.0**-70, 2.0**-141, 3 * 2.0**-141),  # a subnormal sum
        (2.0**-75, 2.0**-75, 0.0, 0.0),  # below the least float32: cut off
        (2.0**-75, 2.0**-74, 2.0**-149, 2.0**-148),
    ],
)
def test_single_products(a: float, b: float, before: float, expected: float) -> None:
    row, column = np.zeros((2, 1, 16), dtype=np.float32)
    row[0, 3], column[0, 3] = a, b
    found = added(row, column, np.array([[before]], dtype=np.float32))[0, 0]
    assert found == expected or (np.isnan(found) and np.isnan(expected))


def test_a_nan_in_one_row_leaves_the_others_their_bits() -> None:
    a, b, recorded = operands(NAMES[0])
    wide_a, wide_b = (widen(x.view(torch.int16).numpy().view(np.uint16), "bf16") for x in (a, b))
    wide_a = wide_a.copy()
    wide_a[3, 5] = np.nan
    sums = None
    for k in range(0, a.shape[1], PRODUCTS):
        sums = added(wide_a[:, k : k + PRODUCTS], wide_b[:, k : k + PRODUCTS], sums)
    assert sums is not None
    others = np.arange(len(a)) != 3
    assert np.isnan(sums[3]).all()
    assert np.array_equal(sums[others], recorded[others])
