"""The tensors of a call: every mistake is one sentence that says what was given, what is allowed, what to do.

All of it runs before anything is launched, so none of it needs a GPU.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import gpu_stand_ins
import pytest
import torch
from gpu_stand_ins import (
    OnGpu,
    OnSecondGpu,
    gemm_on_torch,
    on_gpu,
    torch_in_place_of_the_host_code,
    zeros,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cutegemm
from cutegemm import Gemm
from cutegemm.alignment import paths_of
from cutegemm.errors import CutegemmError, DeviceError, OperandTypeError, ProblemError
from cutegemm.operands import byte_span, check_out, check_overlap, contiguous_mode
from cutegemm.problem import MAX_SIZE, GemmProblem

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> Gemm:
    """bfloat16, A and B K-major, sizes open."""
    return gemm_on_torch(monkeypatch)[0]


def refusal(error: type[CutegemmError], call: Callable[[], Any]) -> str:
    """The message of the error a call ends in."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


A, B = zeros(16, 64), zeros(24, 64).t()


# --- a and b -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, [[1.0]], "a"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_operand_that_is_no_tensor(gemm: Gemm, name: str, wrong: Any) -> None:
    operands = {"a": A, "b": B, name: wrong}
    message = refusal(OperandTypeError, lambda: gemm(**operands))
    assert message == f"{name} is {type(wrong).__name__}; pass a torch.Tensor"


def test_numpy_array(gemm: Gemm) -> None:
    array = torch.zeros(16, 64).numpy()
    assert refusal(OperandTypeError, lambda: gemm(array, B)) == "a is ndarray; pass a torch.Tensor"


def test_sparse_tensor(gemm: Gemm) -> None:
    sparse = torch.zeros(16, 64, dtype=BF16).to_sparse()
    message = refusal(OperandTypeError, lambda: gemm(sparse, B))
    assert "a is not a plain strided tensor (torch.sparse_coo)" in message
    assert "densify it first" in message
    assert message == refusal(OperandTypeError, lambda: cutegemm.matmul(sparse, B))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensor(gemm: Gemm, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(8, 64), torch.zeros(9, 64)], dtype=BF16, layout=layout)
    message = refusal(OperandTypeError, lambda: gemm(nested, B))
    assert message == "a is a nested tensor; pass its parts, or pad them into one tensor"


@pytest.mark.parametrize(("name", "dtype"), [("a", F16), ("b", torch.float32), ("a", torch.int8)])
def test_dtype_that_was_not_compiled_for(gemm: Gemm, name: str, dtype: torch.dtype) -> None:
    operands = {"a": A, "b": B}
    operands[name] = operands[name].to(dtype)
    message = refusal(OperandTypeError, lambda: gemm(**operands))
    assert f"{name} has dtype {dtype}, this gemm was compiled for torch.bfloat16" in message
    assert "convert the tensor or compile for its dtype" in message


@pytest.mark.parametrize("shape", [(), (64,), (1, 16, 64), (1, 1, 16, 64)])
@pytest.mark.parametrize("name", ["a", "b"])
def test_wrong_rank(gemm: Gemm, name: str, shape: tuple[int, ...]) -> None:
    operands = {"a": A, "b": B, name: zeros(*shape)}
    message = refusal(ProblemError, lambda: gemm(**operands))
    modes = {"a": "(M, K)", "b": "(K, N)"}[name]
    assert message == f"{name} has {len(shape)} dimensions {shape}; this gemm takes {modes}"


def test_wrong_rank_of_a_batched_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, _ = gemm_on_torch(monkeypatch, (None, None, None, None))
    message = refusal(ProblemError, lambda: gemm(A, B))
    assert message == "a has 2 dimensions (16, 64); this gemm takes (L, M, K)"


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_cpu_tensor(gemm: Gemm, name: str) -> None:
    operands = {"a": A, "b": B, "out": zeros(16, 24)}
    operands[name] = operands[name].as_subclass(torch.Tensor)
    message = refusal(DeviceError, lambda: gemm(**operands))
    assert message == f"{name} lies on cpu; move it to the GPU with .cuda()"


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_meta_tensor(gemm: Gemm, name: str) -> None:
    operands = {"a": A, "b": B, "out": zeros(16, 24)}
    shape, stride = operands[name].shape, operands[name].stride()
    operands[name] = torch.empty_strided(shape, stride, dtype=BF16, device="meta")
    assert f"{name} lies on meta" in refusal(DeviceError, lambda: gemm(**operands))


def test_operands_on_two_gpus(gemm: Gemm) -> None:
    message = refusal(DeviceError, lambda: gemm(A, on_gpu(B, OnSecondGpu)))
    assert message == "a lies on cuda:0 and b on cuda:1; move them to one device"


def test_out_on_another_gpu(gemm: Gemm) -> None:
    out = on_gpu(zeros(16, 24), OnSecondGpu)
    message = refusal(DeviceError, lambda: gemm(A, B, out=out))
    assert message == "out lies on cuda:1, a and b on cuda:0; allocate it there or leave it out"


def test_different_k(gemm: Gemm) -> None:
    message = refusal(ProblemError, lambda: gemm(A, zeros(24, 72).t()))
    assert message == "a is (16, 64) and b is (72, 24): K differs, 64 and 72"


def test_a_weight_given_as_n_by_k_is_told_to_transpose(gemm: Gemm) -> None:
    message = refusal(ProblemError, lambda: gemm(A, zeros(24, 64)))
    assert "K differs, 64 and 24" in message
    assert "pass a weight of shape (N, K) as w.t()" in message


def test_different_l(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, _ = gemm_on_torch(monkeypatch, (None, None, None, None))
    message = refusal(ProblemError, lambda: gemm(zeros(3, 16, 64), zeros(2, 24, 64).mT))
    assert "L differs, 3 and 2" in message


@pytest.mark.parametrize(
    ("shape", "named"), [((17, 24, 64), "M=17"), ((16, 32, 64), "N=32"), ((16, 24, 128), "K=128")]
)
def test_sizes_other_than_compiled_for(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], named: str
) -> None:
    gemm, _ = gemm_on_torch(monkeypatch, shape)
    message = refusal(ProblemError, lambda: gemm(A, B))
    name = named[0]
    assert f"the gemm was compiled for {named}" in message
    assert f"compile for this shape, or with None in {name}'s place" in message


def test_size_beyond_a_kernel_s(gemm: Gemm) -> None:
    huge = zeros(1, 64).expand(2**31, 64)
    message = refusal(ProblemError, lambda: gemm(huge, B, out=zeros(1, 24).expand(2**31, 24)))
    assert message.startswith(f"M is {2**31} in this call")
    assert f"up to {MAX_SIZE}" in message


# --- layout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "majors", "remedy"),
    [
        ("a", "k-major", 'a_major="m"'),
        ("b", "k-major", 'b_major="n"'),
        ("out", "n-major", 'out_major="m"'),
    ],
)
def test_wrong_major(gemm: Gemm, name: str, majors: str, remedy: str) -> None:
    operands = {"a": A, "b": B, "out": zeros(16, 24)}
    right = operands[name]
    operands[name] = right.contiguous() if name == "b" else right.mT.contiguous().mT
    message = refusal(ProblemError, lambda: gemm(**operands))
    assert f"{name} has strides {operands[name].stride()}, this gemm was compiled for {majors}" in message
    assert f"pass {remedy} to compile" in message


def test_majors_are_read_off_the_unit_stride_not_off_the_size(gemm: Gemm) -> None:
    padded = zeros(16, 192)[:, :64]
    torch.testing.assert_close(gemm(padded, B).as_subclass(torch.Tensor), torch.zeros(16, 24, dtype=BF16))


def test_pitch_of_a_single_row_does_not_matter(gemm: Gemm) -> None:
    assert gemm(zeros(1, 999), on_gpu(torch.zeros(24, 1000, dtype=BF16))[:, :999].t()).shape == (1, 24)


def test_start_of_eight_elements_is_aligned(gemm: Gemm) -> None:
    assert gemm(zeros(16 * 64 + 8)[8:].view(16, 64), B).shape == (16, 24)


@pytest.mark.parametrize("shape", [(0, 24, 64), (16, 0, 64), (16, 24, 0), (0, 0, 0)])
def test_empty_products_need_no_kernel(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    m, n, k = shape
    out = zeros(m, n).fill_(float("nan"))
    for _ in range(2):
        assert gemm(zeros(m, k), zeros(n, k).t(), out=out) is out
        assert out.count_nonzero() == 0
    assert not prepared
    # Nothing is launched that could check: the checks here run on every call.
    message = refusal(OperandTypeError, lambda: gemm(zeros(m, k), zeros(n, k).t(), out=out.half()))
    assert "out has dtype torch.float16" in message


# --- out ---------------------------------------------------------------------------------------------------


def test_result_is_out(gemm: Gemm) -> None:
    a, b = on_gpu(torch.randn(16, 64, dtype=BF16)), on_gpu(torch.randn(24, 64, dtype=BF16)).t()
    out = zeros(16, 24)
    assert gemm(a, b, out=out) is out
    wanted = (a.float() @ b.float()).to(BF16)
    assert torch.equal(out, wanted)
    assert torch.equal(gemm(a, b), wanted)


@pytest.mark.parametrize("shape", [(16, 32), (24, 16), (8, 24)])
def test_out_of_wrong_shape(gemm: Gemm, shape: tuple[int, int]) -> None:
    message = refusal(ProblemError, lambda: gemm(A, B, out=zeros(*shape)))
    assert message == f"out has shape {shape}, the result has (16, 24); allocate it so or leave it out"


def test_out_of_wrong_rank(gemm: Gemm) -> None:
    assert "out has 1 dimensions" in refusal(ProblemError, lambda: gemm(A, B, out=zeros(16 * 24)))


def test_out_of_wrong_dtype(gemm: Gemm) -> None:
    message = refusal(OperandTypeError, lambda: gemm(A, B, out=zeros(16, 24, dtype=torch.float32)))
    assert "out has dtype torch.float32, this gemm was compiled for torch.bfloat16" in message


@pytest.mark.parametrize("wrong", [[0.0], "out", 1])
def test_out_that_is_no_tensor(gemm: Gemm, wrong: Any) -> None:
    message = refusal(OperandTypeError, lambda: gemm(A, B, out=wrong))
    assert message == f"out is {type(wrong).__name__}; pass a torch.Tensor"
    assert message == refusal(OperandTypeError, lambda: cutegemm.matmul(A, B, out=wrong))


def test_out_that_overlaps_itself(gemm: Gemm) -> None:
    rows = zeros(1, 24).expand(16, 24)
    message = refusal(ProblemError, lambda: gemm(A, B, out=rows))
    assert "out has strides (0, 1) for shape (16, 24): its elements overlap; allocate it densely" in message
    short = zeros(1000).as_strided((16, 24), (16, 1))
    assert "its elements overlap" in refusal(ProblemError, lambda: gemm(A, B, out=short))


def test_batches_of_out_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, _ = gemm_on_torch(monkeypatch, (None, None, None, None))
    a, b = zeros(2, 16, 64), zeros(2, 24, 64).mT
    overlapping = zeros(1000).as_strided((2, 16, 24), (8, 24, 1))
    assert "its elements overlap" in refusal(ProblemError, lambda: gemm(a, b, out=overlapping))
    between_the_rows = zeros(16, 2, 24).transpose(0, 1)
    assert gemm(a, b, out=between_the_rows) is between_the_rows


@given(
    st.tuples(*[st.integers(1, 4)] * 3), st.permutations((1, 8, 16)), st.sampled_from([0, 8, 16, 24, 40, 64])
)
def test_out_that_overlaps_itself_is_found_exactly(
    shape: tuple[int, int, int], strides: list[int], batch_stride: int
) -> None:
    """Against the set of element addresses, where one mode is contiguous."""
    row, column = ((strides[0], 1) if strides[0] != 1 else (1, 8))[:2]
    stride = (batch_stride, row, column)
    out = zeros(1000).as_strided(shape, stride)
    problem = GemmProblem(None, None, None, None, out_major="n" if column == 1 else "m", batched=True)
    a, b = zeros(shape[0], shape[1], 8), zeros(shape[0], 8, shape[2])
    addresses = element_addresses(out)
    if len(addresses) == out.numel():
        assume(is_nested(shape, stride))
        check_out(problem, out, a, b)
    else:
        assert "its elements overlap" in refusal(ProblemError, lambda: check_out(problem, out, a, b))


def is_nested(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the modes can be sorted so that each steps over all of those inside it."""
    inside = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= inside:
            return False
        inside += step * (size - 1)
    return True


def element_addresses(tensor: torch.Tensor) -> set[int]:
    """The address of every element."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return {tensor.data_ptr() + tensor.element_size() * int(offset) for offset in offsets.flatten()}


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """The address of every byte of every element."""
    return {address + i for address in element_addresses(tensor) for i in range(tensor.element_size())}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=2, max_size=3))
def test_byte_span_reaches_the_last_element(modes: list[tuple[int, int]]) -> None:
    shape, stride = zip(*modes, strict=True)
    tensor = torch.zeros(1000, dtype=BF16).as_strided(shape, stride)
    addresses = element_addresses(tensor)
    assert byte_span(tensor) == (max(addresses) + 2 - tensor.data_ptr() if addresses else 0)


# --- out and its inputs ------------------------------------------------------------------------------------


def overlaps(out: torch.Tensor, operand: torch.Tensor) -> bool:
    """Whether the check refuses the pair."""
    try:
        check_overlap(out, "a", operand)
    except ProblemError:
        return True
    return False


BUFFER = torch.zeros(400, dtype=BF16)


@st.composite
def windows(draw: st.DrawFn, pitch: int | None = None) -> torch.Tensor:
    """A matrix somewhere in the buffer, row- or column-major."""
    pitch = draw(st.integers(8, 16)) if pitch is None else pitch
    lines, run = draw(st.integers(2, 6)), draw(st.integers(1, 8))
    offset = draw(st.integers(0, 10 * 16))
    matrix = BUFFER.as_strided((lines, run), (pitch, 1), offset)
    return matrix.t() if draw(st.booleans()) else matrix


@given(windows(), windows())
@settings(max_examples=300)
def test_shared_memory_is_never_missed(out: torch.Tensor, operand: torch.Tensor) -> None:
    if bytes_of(out) & bytes_of(operand):
        assert overlaps(out, operand)


@given(windows(16), windows(16), st.sampled_from([torch.float32, BF16]))
@settings(max_examples=300)
def test_shared_memory_is_found_exactly_in_one_buffer(
    out: torch.Tensor, operand: torch.Tensor, out_dtype: torch.dtype
) -> None:
    if out_dtype == torch.float32:  # half as many elements in each line of the same buffer
        wide = BUFFER.view(torch.float32)
        size = [
            max(1, side // 2) if step == 1 else side
            for side, step in zip(out.shape, out.stride(), strict=True)
        ]
        out = wide.as_strided(size, [max(1, step // 2) for step in out.stride()], out.storage_offset() // 2)
    assert overlaps(out, operand) == bool(bytes_of(out) & bytes_of(operand))


def test_columns_of_one_buffer_side_by_side(gemm: Gemm) -> None:
    buffer = zeros(16, 64 + 24)
    a, out = buffer[:, :64], buffer[:, 64:]
    for _ in range(2):
        assert gemm(a, B, out=out) is out


@pytest.mark.parametrize("name", ["a", "b"])
def test_out_shares_memory_with_an_input(gemm: Gemm, name: str) -> None:
    square_a, square_b = zeros(64, 64), zeros(64, 64)
    out = {"a": square_a, "b": square_b}[name]
    message = refusal(ProblemError, lambda: gemm(square_a, square_b.t(), out=out))
    assert message == (f"out shares memory with {name}: the result would be read as input; pass another out")


def test_a_repeated_call_is_checked_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same shapes and strides as a call that went well: only the addresses tell."""
    gemm, prepared = gemm_on_torch(monkeypatch)
    memory = zeros(3 * 64, 64)
    a, b, out = memory[:64], memory[64:128], memory[128:]
    gemm(a, b.t(), out=out)
    assert "out shares memory with a" in refusal(ProblemError, lambda: gemm(a, b.t(), out=memory[8:72]))
    assert "out shares memory with b" in refusal(ProblemError, lambda: gemm(a, b.t(), out=memory[120:184]))
    gemm(a, a.t(), out=out)
    assert len(prepared) == 1


@given(
    st.integers(0, 40), st.integers(0, 40), st.sampled_from("nm"), st.none() | st.integers(0, 3),
    st.sampled_from([F16, torch.float32]),
)  # fmt: skip
def test_a_result_of_the_gemm_s_own_can_be_stored(
    m: int, n: int, out_major: str, batches: int | None, out_dtype: torch.dtype
) -> None:
    lead = () if batches is None else (batches,)
    gemm = cutegemm.compile(
        (None,) * (3 + len(lead)), BF16, out_dtype=out_dtype, out_major=out_major, target="sm_90a"
    )
    a, b = torch.empty(*lead, m, 8), torch.empty(*lead, 8, n)
    out = gemm._allocate(a, b)
    assert (out.shape, out.dtype) == ((*lead, m, n), out_dtype)
    assert (out if out_major == "n" else out.mT).is_contiguous()
    if out.numel():
        run = n if out_major == "n" else m
        whole_units = run * out_dtype.itemsize % 16 == 0
        sizes = (batches or 1, m, n, 8)
        paths = paths_of(gemm.problem, sizes, a, torch.empty(*lead, 8, n), out)
        assert paths.store == ("tma" if whole_units else "direct")


# --- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_gradients_are_refused_and_never_dropped(gemm: Gemm, name: str) -> None:
    for attempt in range(2):
        operands = {"a": zeros(16, 64), "b": zeros(24, 64).t(), "out": zeros(16, 24)}
        operands[name].requires_grad_()
        message = refusal(ProblemError, lambda operands=operands: gemm(**operands))
        assert f"{name} requires grad and this gemm has no backward" in message
        assert "torch.no_grad()" in message
        assert f"{name}.detach()" in message
        if attempt == 0:  # and again once a call of these shapes has gone well
            with torch.no_grad():
                gemm(**operands)


def test_parameters_work_without_gradients(gemm: Gemm) -> None:
    weight = torch.nn.Parameter(torch.zeros(24, 64, dtype=BF16)).as_subclass(OnGpu)
    assert weight.requires_grad
    with torch.no_grad():
        assert gemm(A, weight.t()).shape == (16, 24)
    with torch.inference_mode():
        assert gemm(A, weight.t()).shape == (16, 24)
    assert "b requires grad" in refusal(ProblemError, lambda: gemm(A, weight.t()))
    assert gemm(A, weight.detach().t()).shape == (16, 24)


# --- repeated calls ----------------------------------------------------------------------------------------


def test_a_kind_of_call_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    for _ in range(3):
        gemm(zeros(16, 64), zeros(24, 64).t())
    gemm(zeros(32, 64), zeros(24, 64).t())
    gemm(on_gpu(zeros(16, 64), OnSecondGpu), on_gpu(zeros(24, 64), OnSecondGpu).t())
    assert [call[:-1] for call in prepared] == [(1, 16, 24, 64, 0), (1, 32, 24, 64, 0), (1, 16, 24, 64, 1)]


def test_alternating_alignments_are_checked_thoroughly_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    thorough = []
    checked = Gemm._thorough_call
    monkeypatch.setattr(Gemm, "_thorough_call", lambda *call: (thorough.append(call), checked(*call))[1])
    memory = on_gpu(torch.randn(16 * 64 + 8, dtype=BF16))
    views = [memory[start : start + 16 * 64].view(16, 64) for start in (0, 1)]
    b = on_gpu(torch.randn(24, 64, dtype=BF16)).t()
    for _ in range(3):
        for a in views:
            assert torch.equal(gemm(a, b, out=zeros(16, 24)), (a.float() @ b.float()).to(BF16))
    assert len(thorough) == len(prepared) == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutegemm.gemm, "MAX_KNOWN_LAUNCHES", 5)
    gemm, prepared = gemm_on_torch(monkeypatch)
    for m in range(1, 13):
        gemm(zeros(m, 64), B)
        assert len(gemm._launches) <= 5
    assert len(prepared) == 12


def test_an_error_of_the_launch_itself_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, _ = gemm_on_torch(monkeypatch)
    failing = [False]

    def host_code(a: Any, b: Any, out: Any, record: int, outcome: int) -> None:
        if failing[0]:
            raise RuntimeError("illegal memory access")
        torch_in_place_of_the_host_code(a, b, out, record, outcome)

    monkeypatch.setattr(gpu_stand_ins, "torch_in_place_of_the_host_code", host_code)
    gemm(A, B)
    failing[0] = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gemm(A, B)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gemm(zeros(8, 64), B)


def test_threads_that_make_the_same_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, _ = gemm_on_torch(monkeypatch)
    a, b = on_gpu(torch.randn(16, 64, dtype=BF16)), on_gpu(torch.randn(24, 64, dtype=BF16)).t()
    wanted = (a.float() @ b.float()).to(BF16)
    rounds = 20
    barrier = Barrier(8)

    def work(_: int) -> bool:
        right = True
        for _ in range(rounds):
            barrier.wait()
            gemm._launches.clear()
            barrier.wait()
            right &= torch.equal(gemm(a, b), wanted)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# --- majors and matmul -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "stride", "mode"),
    [
        ((4, 8), (8, 1), "k"),
        ((4, 8), (1, 4), "m"),
        ((4, 8), (192, 1), "k"),
        ((4, 1), (1, 1), "m"),
        ((4, 1), (8, 1), "k"),
        ((1, 8), (1, 1), "k"),
        ((1, 8), (7, 1), "k"),
        ((1, 8), (1, 16), "m"),
        ((1, 1), (3, 5), "k"),
    ],
)  # fmt: skip
def test_contiguous_mode(shape: tuple[int, int], stride: tuple[int, int], mode: str) -> None:
    assert contiguous_mode(torch.zeros(1000).as_strided(shape, stride), ("m", "k")) == mode


@pytest.mark.parametrize("dims", [0, 1, 4])
@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_matmul_of_wrong_rank(name: str, dims: int) -> None:
    operands = {"a": A, "b": B, "out": zeros(16, 24), name: zeros(*[8] * dims)}
    message = refusal(ProblemError, lambda: cutegemm.matmul(**operands))
    assert message == f"{name} has {dims} dimensions; matmul takes 2, or 3 with a leading batch mode"


@pytest.mark.parametrize("wrong", [None, 1.0, [A]])
def test_matmul_of_no_tensor(wrong: Any) -> None:
    message = refusal(OperandTypeError, lambda: cutegemm.matmul(wrong, B))
    assert message == f"a is {type(wrong).__name__}; pass a torch.Tensor"


@pytest.mark.parametrize("wrong", [0, 140234, "default", torch.device("cpu")])
def test_stream_that_is_none(gemm: Gemm, wrong: Any) -> None:
    message = refusal(OperandTypeError, lambda: gemm(A, B, stream=wrong))
    assert f"stream={wrong!r} is no torch.cuda.Stream" in message
    assert "torch.cuda.ExternalStream" in message
