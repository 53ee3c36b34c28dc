"""GemmProblem: what a user may ask, and the sentence for each thing that cannot be asked."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmProblem
from cutegemm.errors import CutegemmError, OperandTypeError, ProblemError
from cutegemm.problem import MAX_SIZE, dtype_bytes, dtype_name

SIZES = st.none() | st.integers(0, MAX_SIZE)
DTYPES = st.sampled_from(["bfloat16", "float16"])
MAJORS = {
    "a_major": st.sampled_from("km"),
    "b_major": st.sampled_from("kn"),
    "out_major": st.sampled_from("nm"),
}


@st.composite
def problems(draw: st.DrawFn) -> GemmProblem:
    """Any problem a user may ask."""
    shape = draw(st.tuples(SIZES, SIZES, SIZES) | st.tuples(SIZES, SIZES, SIZES, SIZES))
    out_dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    majors = {name: draw(majors) for name, majors in MAJORS.items()}
    return GemmProblem.from_user(shape, draw(DTYPES), out_dtype=out_dtype, **majors)


def refusal(error: type[CutegemmError], *args: Any, **kwargs: Any) -> str:
    """The one-line message with which from_user and compile both refuse."""
    with pytest.raises(error) as caught:
        GemmProblem.from_user(*args, **kwargs)
    with pytest.raises(error) as from_compile:
        cutegemm.compile(*args, **kwargs, target="sm_90a")
    assert str(caught.value) == str(from_compile.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plain_problem() -> None:
    problem = GemmProblem.from_user((16, 24, 32), torch.bfloat16)
    assert problem == GemmProblem(16, 24, 32)
    assert (problem.l, problem.batched, problem.is_static) == (1, False, True)
    assert (problem.a_torch, problem.b_torch, problem.out_torch) == (torch.bfloat16,) * 3


def test_a_batched_problem_with_open_sizes() -> None:
    problem = GemmProblem.from_user((None, 16, None, 32), "float16", out_dtype=torch.float32)
    assert (problem.l, problem.m, problem.n, problem.k, problem.batched) == (None, 16, None, 32, True)
    assert not problem.is_static
    assert problem.out_torch == torch.float32


def test_one_batch_is_not_no_batch() -> None:
    assert GemmProblem.from_user((1, 8, 8, 8), "bfloat16") != GemmProblem.from_user((8, 8, 8), "bfloat16")


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, "float16", "torch.float16", (torch.float16, "float16"), ["fp16", torch.half],
     "fp16", "f16", "half", "Float16", "FP16", " torch.half "],
)  # fmt: skip
def test_ways_to_name_a_dtype(dtype: Any) -> None:
    problem = GemmProblem.from_user((8, 8, 8), dtype)
    assert (problem.a_dtype, problem.b_dtype, problem.out_dtype) == ("float16",) * 3


@pytest.mark.parametrize(
    ("dtype", "given_as"),
    [
        ("fp8", "'fp8'"),
        ("fp32", "'fp32'"),
        (torch.float32, "torch.float32"),
        ("float8_e4m3fn", "'float8_e4m3fn'"),
        (torch.int8, "torch.int8"),
        (None, "None"),
        (16, "16"),
        (np.dtype("float16"), "dtype('float16')"),
        (torch.zeros(2), "tensor([0., 0.])"),
    ],
)
def test_unknown_input_dtype(dtype: Any, given_as: str) -> None:
    message = refusal(OperandTypeError, (8, 8, 8), dtype)
    assert f"dtype={given_as} is not supported" in message
    assert "use one of bfloat16, float16" in message
    assert "float32" not in message.replace(given_as, "")


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_short_names_of_bfloat16(name: str) -> None:
    assert GemmProblem.from_user((8, 8, 8), name, out_dtype="fp32").a_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["fp32", "f32", "float", "float32", torch.float32])
def test_names_of_an_output_dtype(name: Any) -> None:
    assert GemmProblem.from_user((8, 8, 8), "bf16", out_dtype=name).out_dtype == "float32"


@pytest.mark.parametrize("major", [np.array(["k", "m"]), ["k"], None, torch.zeros(2)])
def test_a_major_that_is_no_text(major: Any) -> None:
    assert 'use "k" or "m"' in refusal(ProblemError, (8, 8, 8), "bf16", a_major=major)


@pytest.mark.parametrize("out_dtype", ["fp64", torch.float64, "float8_e5m2", 32])
def test_unknown_output_dtype(out_dtype: Any) -> None:
    message = refusal(OperandTypeError, (8, 8, 8), "bfloat16", out_dtype=out_dtype)
    assert f"out_dtype={out_dtype!r} is not supported" in message
    assert "use one of bfloat16, float16, float32" in message


def test_mixed_dtypes() -> None:
    message = refusal(OperandTypeError, (8, 8, 8), (torch.bfloat16, torch.float16))
    assert "A is bfloat16 and B is float16" in message
    assert "convert one" in message


@pytest.mark.parametrize("pair", [("bfloat16",), ("bfloat16",) * 3, (), [torch.bfloat16]])
def test_a_tuple_of_dtypes_that_is_no_pair(pair: tuple[str, ...]) -> None:
    message = refusal(OperandTypeError, (8, 8, 8), pair)
    assert f"dtype={pair!r}" in message
    assert "a pair (a, b)" in message


@pytest.mark.parametrize("shape", [(), (8,), (8, 8), (1, 2, 3, 4, 5), torch.Size((8,))])
def test_wrong_number_of_sizes(shape: tuple[int, ...]) -> None:
    message = refusal(ProblemError, shape, "bfloat16")
    assert f"has {len(shape)} entries" in message
    assert "give (M, N, K), or (L, M, N, K)" in message


@pytest.mark.parametrize("shape", [128, None, "128", b"888", {8, 16, 24}, torch.zeros(3)])
def test_shape_that_is_no_sequence(shape: Any) -> None:
    message = refusal(OperandTypeError, shape, "bfloat16")
    assert "is no sequence of sizes" in message
    assert "give (M, N, K)" in message


@pytest.mark.parametrize(
    ("shape", "named"),
    [((8.0, 8, 8), "M=8.0"), ((8, True, 8), "N=True"), ((8, 8, "8"), "K='8'"), ((2.5, 8, 8, 8), "L=2.5")],
)
def test_size_that_is_no_integer(shape: tuple[Any, ...], named: str) -> None:
    message = refusal(OperandTypeError, shape, "bfloat16")
    assert f"{named} in shape=" in message
    assert "must be an integer, or None if known at the call" in message


@pytest.mark.parametrize(
    ("shape", "named"), [((-1, 8, 8), "M=-1"), ((8, 2**31, 8), f"N={2**31}"), ((-3, 8, 8, 8), "L=-3")]
)
def test_size_out_of_range(shape: tuple[int, ...], named: str) -> None:
    message = refusal(ProblemError, shape, "bfloat16")
    assert f"{named} in shape=" in message
    assert f"must lie in 0..{MAX_SIZE}" in message


def test_sizes_of_numpy_become_python_integers() -> None:
    problem = GemmProblem.from_user((np.int64(8), np.int32(16), np.uint8(24)), "bfloat16")
    assert problem == GemmProblem.from_user((8, 16, 24), "bfloat16")
    assert [type(size) for size in (problem.m, problem.n, problem.k)] == [int, int, int]
    message = refusal(OperandTypeError, (np.float32(8), 8, 8), "bfloat16")
    assert "must be an integer" in message


def test_zero_is_a_size() -> None:
    assert GemmProblem.from_user((0, 0, 0, 0), "bfloat16").is_static


@pytest.mark.parametrize(
    ("argument", "wrong", "allowed"),
    [
        ("a_major", "n", '"k" or "m"'),
        ("b_major", "m", '"k" or "n"'),
        ("out_major", "k", '"n" or "m"'),
        ("a_major", None, '"k" or "m"'),
        ("b_major", "K", '"k" or "n"'),
        ("out_major", ["n"], '"n" or "m"'),
    ],
)
def test_unknown_major(argument: str, wrong: Any, allowed: str) -> None:
    message = refusal(ProblemError, (8, 8, 8), "bfloat16", **{argument: wrong})
    assert message.startswith(f"{argument}={wrong!r} is unknown")
    assert f"use {allowed}" in message


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="tile"):
        cutegemm.compile((8, 8, 8), "bfloat16", tile=128, target="sm_90a")  # type: ignore[call-arg]


@given(problems())
def test_swapping_twice_is_the_same_question(problem: GemmProblem) -> None:
    swapped = problem.swapped()
    assert swapped.swapped() == problem
    assert (swapped.m, swapped.n) == (problem.n, problem.m)
    # Majors mean the same memory: A's contiguous mode is K exactly when B's of the swapped problem is.
    assert (swapped.b_major == "k") == (problem.a_major == "k")
    assert (swapped.a_major == "k") == (problem.b_major == "k")
    assert (swapped.out_major == "n") == (problem.out_major == "m")


@given(problems(), st.tuples(*[st.integers(0, 4096)] * 4))
def test_kind_forgets_sizes_and_nothing_else(problem: GemmProblem, sizes: tuple[int, int, int, int]) -> None:
    kind = problem.kind()
    assert (kind.l, kind.m, kind.n, kind.k) == (None,) * 4
    known = problem.with_sizes(*sizes)
    assert (known.l, known.m, known.n, known.k) == sizes
    assert known.is_static
    assert known.kind() == kind
    assert known.batched == problem.batched


@given(problems())
def test_text_shows_every_part(problem: GemmProblem) -> None:
    text = str(problem)
    for size in (problem.m, problem.n, problem.k):
        assert ("?" if size is None else str(size)) in text
    for part in (problem.a_dtype, f"-> {problem.out_dtype}", f"A {problem.a_major}-major",
                 f"B {problem.b_major}-major", f"D {problem.out_major}-major"):  # fmt: skip
        assert part in text
    assert problem.batched == (text.count(" x ") == 1)


@given(problems())
def test_equal_questions_are_one_key(problem: GemmProblem) -> None:
    again = problem.swapped().swapped()
    assert hash(again) == hash(problem)
    assert len({again, problem}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_are_torch_s(dtype: torch.dtype) -> None:
    assert dtype_bytes(dtype_name(dtype, "dtype")) == dtype.itemsize
