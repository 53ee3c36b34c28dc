"""Epilogues without a kernel: what is traced, what is refused and where, the reference, errors of a call."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from epilogue_checks import SMALL, inputs

import cutegemm
from cutegemm import GemmConfig
from cutegemm import epilogue as epi
from cutegemm.errors import (
    ConfigError,
    DeviceError,
    EpilogueError,
    OperandTypeError,
    ProblemError,
)
from cutegemm.scheduler import TileScheduler


@epi.fuse
def scaled_bias(acc: Any, scale: epi.Scalar, bias: epi.Row, factor: epi.Scalar = 1.0) -> Any:
    """Scale, then bias."""
    return (acc * scale + bias) * factor


@epi.fuse
def residual(acc: Any, r: epi.Tile) -> Any:
    return acc + r, {"sum": epi.row_sum(acc)}


@epi.fuse
def glu(acc: Any) -> Any:
    gate, up = epi.pairs(acc)
    return epi.silu(gate) * up


# --- tracing -----------------------------------------------------------------------------------------------


def test_the_graph_says_what_the_function_does() -> None:
    assert str(scaled_bias.graph).splitlines() == [
        "%0 = acc: float N",
        "%1 = operand 'scale': float any",
        "%2 = operand 'bias': float N",
        "%3 = operand 'factor': float any",
        "%4 = mul %0 %1: float N",
        "%5 = add %4 %2: float N",
        "%6 = mul %5 %3: float N",
        "main = %6",
    ]


def test_what_is_computed_twice_is_one_node() -> None:
    @epi.fuse
    def twice(acc: Any) -> Any:
        return epi.exp(acc) + epi.exp(acc)

    assert [node.op for node in twice.graph.nodes] == ["acc", "exp", "add"]


def test_functions_with_one_graph_are_one_epilogue() -> None:
    def first(acc: Any, bias: epi.Row) -> Any:
        return acc + bias

    def second(acc: Any, bias: epi.Row) -> Any:
        """Another name, another text."""
        biased = acc + bias
        return biased * 1 if False else biased

    assert epi.fuse(first).epilogue == epi.fuse(second).epilogue
    assert hash(epi.fuse(first).epilogue) == hash(epi.fuse(second).epilogue)
    assert repr(epi.fuse(first).epilogue) == repr(epi.fuse(second).epilogue)


def test_whole_numbers_stay_whole() -> None:
    @epi.fuse
    def masked(acc: Any) -> Any:
        return epi.where(epi.row_index(acc) // 2 % 3 == 0, acc, 0.0)

    types = {node.op: node.type for node in masked.graph.nodes}
    assert types["floordiv"] == types["mod"] == "int"
    assert types["eq"] == "bool"
    assert types["where"] == "float"


def unused_operand(acc: Any, x: epi.Row) -> Any:
    return acc


def data_dependent(acc: Any) -> Any:
    if acc > 0:  # HERE
        return acc
    return -acc


def chained(acc: Any) -> Any:
    return epi.where(0 < acc < 1, acc, 0.0)  # HERE


def by_math(acc: Any) -> Any:
    return math.exp(acc)  # HERE


def by_torch(acc: Any) -> Any:
    return torch.exp(acc)  # HERE


def by_unknown_torch(acc: Any) -> Any:
    return torch.sin(acc)  # HERE


def by_method(acc: Any) -> Any:
    return acc.clamp(0)  # HERE


def dead(acc: Any) -> Any:
    epi.exp(acc)  # HERE
    return acc


def nothing(acc: Any) -> Any:
    acc + 1.0


def indexed(acc: Any) -> Any:
    return acc[0]  # HERE


def with_tensor(acc: Any) -> Any:
    return acc + torch.zeros(3)  # HERE


def of_two_widths(acc: Any, q: epi.HalfRow) -> Any:
    return acc + q  # HERE


def used_reduction(acc: Any) -> Any:
    return acc, {"x": epi.row_sum(acc) * 2}  # HERE


def main_reduction(acc: Any) -> Any:
    return epi.row_sum(acc)  # HERE


def stored_condition(acc: Any) -> Any:
    return acc > 0  # HERE


def choice_by_number(acc: Any) -> Any:
    return epi.where(acc, 1.0, 0.0)  # HERE


def fractional_remainder(acc: Any) -> Any:
    return acc % 2  # HERE


def bad_cast(acc: Any) -> Any:
    return epi.cast(acc, "int8")  # HERE


def scaled_expression(acc: Any, beta: epi.Scalar, c: epi.Tile) -> Any:
    return acc + epi.scaled(beta, c * 2)  # HERE


def scaled_by_row(acc: Any, beta: epi.Row, c: epi.Tile) -> Any:
    return acc + epi.scaled(beta, c)  # HERE


def fractional_seed(acc: Any, seed: epi.Scalar) -> Any:
    return acc * epi.random(acc, seed)  # HERE


def bad_name(acc: Any) -> Any:
    return acc, {"out": acc}  # HERE


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (unused_operand, "the operand x is never used"),
    (data_dependent, "there is one for each element: use epi.where"),
    (chained, "a chain of comparisons"),
    (by_math, "in place of those of math"),
    (by_torch, "torch.exp is no operation of an epilogue; use epi.exp"),
    (by_unknown_torch, "torch.sin is no operation of an epilogue; the operations are"),
    (by_method, "values of an epilogue have no .clamp; use epi.maximum and epi.minimum"),
    (dead, "neither used nor returned"),
    (nothing, "the function returns nothing"),
    (indexed, "cannot be taken apart or indexed"),
    (with_tensor, "tensors come in as operands"),
    (of_two_widths, "values of N and N / 2 columns meet here"),
    (used_reduction, "a reduction is finished after the kernel"),
    (main_reduction, "return a reduction as a further output"),
    (stored_condition, "a condition cannot be stored"),
    (choice_by_number, "epi.where chooses by a condition"),
    (fractional_remainder, "// and % are for whole numbers"),
    (bad_cast, "dtype='int8' is not supported; use one of bfloat16, float16, float32"),
    (scaled_expression, "epi.scaled takes an operand as it is"),
    (scaled_by_row, "the factor of epi.scaled is one number"),
    (fractional_seed, "annotate it epi.Integer"),
    (bad_name, "is no name for an output"),
]


@pytest.mark.parametrize(("function", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_fused_is_refused_at_its_line(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(EpilogueError) as caught:
        epi.fuse(function)
    message = str(caught.value)
    assert text in message
    assert f"in {function.__name__}" in message
    assert __file__ in message
    if "# HERE" in inspect.getsource(function):
        assert message.splitlines()[-1].endswith("# HERE")


def test_signatures_that_are_none() -> None:
    def bare(acc: Any, q) -> Any:  # type: ignore[no-untyped-def]
        return acc + q

    def star(acc: Any, *rows: epi.Row) -> Any:
        return acc

    def row_default(acc: Any, bias: epi.Row = 0.0) -> Any:
        return acc + bias

    def reserved(acc: Any, out: epi.Tile) -> Any:
        return acc + out

    for function, text in (
        (bare, "the operand q is not annotated with its kind, one of epi.Scalar"),
        (star, "named one by one"),
        (row_default, "only scalars may"),
        (reserved, "the name of an argument of the call"),
    ):
        with pytest.raises(EpilogueError, match=text):
            epi.fuse(function)
    with pytest.raises(EpilogueError, match="no plain Python function"):
        epi.fuse(len)


# --- reference ---------------------------------------------------------------------------------------------


def test_the_function_is_its_own_reference() -> None:
    a, b = inputs(5, 6, 8)
    bias = torch.randn(6)
    expected = (a.float() @ b.float() * 0.5 + bias) * 1.0
    assert torch.equal(scaled_bias.reference(a, b, scale=0.5, bias=bias), expected)
    main, further = residual.reference(a, b, r=expected)
    assert torch.equal(main, a.float() @ b.float() + expected)
    assert torch.equal(further["sum"], (a.float() @ b.float()).sum(-1))
    assert glu.reference(a, b).shape == (5, 3)


def test_a_fused_function_may_be_called_in_another() -> None:
    @epi.fuse
    def outer(acc: Any, scale: epi.Scalar, bias: epi.Row) -> Any:
        return epi.relu(scaled_bias(acc, scale, bias))

    assert {"mul", "add", "where"} <= {node.op for node in outer.graph.nodes}


def test_random_numbers_are_uniform_and_repeatable() -> None:
    acc = torch.zeros(512, 512)
    values = epi.random(acc, 7)
    assert torch.equal(values, epi.random(acc, 7))
    assert not torch.equal(values, epi.random(acc, 8))
    assert not torch.equal(values, epi.random(acc, 7, stream=1))
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert abs(float(values.mean()) - 0.5) < 5 * 0.289 / 512
    counts = torch.histc(values, 16, 0, 1) / values.numel()
    assert float((counts - 1 / 16).abs().max()) < 5 * (1 / 16) ** 0.5 / 512
    neighbours = torch.corrcoef(torch.stack((values[:, :-1].flatten(), values[:, 1:].flatten())))[0, 1]
    assert abs(float(neighbours)) < 5 / 512


def test_numbers_pass_through_the_functions_too() -> None:
    assert epi.exp(0.0) == 1.0
    assert epi.maximum(2, 3.0) == 3.0
    assert epi.where(True, 1.0, 2.0) == 1.0


# --- calls -------------------------------------------------------------------------------------------------


def gemm_of(fused: epi.Fused, **options: Any) -> Any:
    options = {"config": SMALL, "target": "sm_90a", **options}
    shape = options.pop("shape", (None, None, None))
    return cutegemm.compile(shape, "bfloat16", epilogue=fused, **options)


ROW = torch.zeros(16)
WRONG_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale": 1.0}, OperandTypeError, r"called without bias=epi\.Row of \(N,\); pass it by name"),
    (
        {"scale": 1, "bias": ROW, "bais": ROW},
        OperandTypeError,
        "no operand bais; its operands are: scale, bias",
    ),
    ({"scale": "1", "bias": ROW}, OperandTypeError, "scale is '1'; pass a number"),
    ({"scale": True, "bias": ROW}, OperandTypeError, "scale is True; pass a number"),
    ({"scale": torch.ones(2), "bias": ROW}, OperandTypeError, "without dimensions"),
    ({"scale": 1.0, "bias": 3}, OperandTypeError, r"bias is int; pass a torch\.Tensor"),
    (
        {"scale": 1.0, "bias": ROW.double()},
        OperandTypeError,
        r"bias has dtype torch\.float64; epi\.Row takes",
    ),
    (
        {"scale": 1.0, "bias": torch.zeros(15)},
        ProblemError,
        r"bias has shape \(15,\); epi\.Row is \(N,\), here",
    ),
    ({"scale": 1.0, "bias": ROW.to("meta")}, DeviceError, "bias lies on meta, a and b on cpu"),
    ({"scale": 1.0, "bias": torch.nn.Parameter(ROW)}, ProblemError, "bias requires grad"),
]


@pytest.mark.parametrize(("operands", "kind", "text"), WRONG_CALLS)
def test_wrong_operands(operands: dict[str, Any], kind: type[Exception], text: str) -> None:
    a, b = inputs(8, 16, 64)
    with pytest.raises(kind, match=text):
        gemm_of(scaled_bias).emulate(a, b, **operands)


def test_wrong_outputs() -> None:
    a, b = inputs(8, 16, 64)
    r = torch.zeros(8, 16)
    gemm = gemm_of(residual)
    with pytest.raises(OperandTypeError, match="outputs has total; the epilogue residual gives sum"):
        gemm.emulate(a, b, r=r, outputs={"total": r})
    with pytest.raises(ProblemError, match=r"sum has shape \(16,\), the epilogue gives \(8,\)"):
        gemm.emulate(a, b, r=r, outputs={"sum": torch.zeros(16)})
    with pytest.raises(
        OperandTypeError, match=r"sum has dtype torch\.bfloat16, the epilogue gives torch\.float32"
    ):
        gemm.emulate(a, b, r=r, outputs={"sum": torch.zeros(8).bfloat16()})
    with pytest.raises(ProblemError, match=r"r has shape \(16, 8\).*pass its transpose"):
        gemm.emulate(a, b, r=torch.zeros(16, 8))
    with pytest.raises(ProblemError, match=r"out has shape \(8, 16\), the result has \(8, 8\)"):
        gemm_of(glu).emulate(a, b, out=torch.zeros(8, 16).bfloat16())
    with pytest.raises(ProblemError, match="takes columns in pairs: N must be even"):
        gemm_of(glu).emulate(*inputs(8, 15, 64))


def test_an_operand_may_be_the_output_but_not_overlap_it() -> None:
    a, b = inputs(8, 16, 64)
    buffer = torch.zeros(9, 16).bfloat16()
    gemm = gemm_of(residual)
    with pytest.raises(ProblemError, match="out shares memory with r"):
        gemm.emulate(a, b, r=buffer[1:], out=buffer[:8])
    gemm, shared = gemm_of(residual, out_dtype="float32"), torch.zeros(8, 16)
    with pytest.raises(ProblemError, match="sum shares memory with out"):
        gemm.emulate(a, b, r=torch.zeros(8, 16), out=shared, outputs={"sum": shared[:, 0]})


def test_a_tensor_of_one_dtype_only() -> None:
    @epi.fuse
    def exact(acc: Any, bias: epi.Row(torch.float32)) -> Any:
        return acc + bias

    with pytest.raises(OperandTypeError, match=r"epi\.Row\(float32\) takes float32"):
        gemm_of(exact).emulate(*inputs(8, 16, 64), bias=ROW.bfloat16())
    with pytest.raises(TypeError, match="scalars are numbers"):
        epi.Scalar(torch.float32)


def test_epilogues_that_some_kernels_cannot_have() -> None:
    with pytest.raises(ConfigError, match="use swap_ab=False"):
        gemm_of(glu, config=SMALL.with_(swap_ab=True))
    with pytest.raises(ConfigError, match="use another scheduler than SplitK"):
        gemm_of(residual, config=GemmConfig(128, 64), scheduler=TileScheduler.splitting(2))
    with pytest.raises(OperandTypeError, match=r"decorated with @cutegemm\.epilogue\.fuse"):
        gemm_of(lambda acc: acc)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda gemm: pickle.loads(pickle.dumps(gemm))],
    ids=["copy", "deep", "pickle"],
)
def test_a_copy_is_an_equal_gemm(copied: Callable[[Any], Any]) -> None:
    gemm = gemm_of(epi.library.bias_gelu)
    other = copied(gemm)
    assert other is not gemm
    assert other == gemm
    assert hash(other) == hash(gemm)
    assert other.fused is epi.library.bias_gelu
    assert gemm != gemm_of(epi.library.bias_relu)
    assert gemm != cutegemm.compile((None, None, None), "bfloat16", config=SMALL, target="sm_90a")


def test_cpu_tensors_need_the_emulator() -> None:
    a, b = inputs(8, 16, 64)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"a lies on cpu; move it to the GPU"):
            gemm_of(scaled_bias)(a, b, scale=1.0, bias=ROW)
    with pytest.raises(OperandTypeError, match="operands belong to an epilogue"):
        cutegemm.matmul(a, b, bias=ROW)
