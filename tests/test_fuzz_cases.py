"""Cases of the fuzzer: as text, in memory, as they are drawn; and what is called right."""

import math

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from cutegemm import GemmConfig
from cutegemm.errors import CutegemmError
from cutegemm.fuzz.case import Case, Strided, parse_case
from cutegemm.fuzz.drawing import EMULATOR, GPU, Limits, cases
from cutegemm.fuzz.judge import complaints, expected
from cutegemm.fuzz.kinds import Kind, is_legal, random_kind
from cutegemm.fuzz.memory import MARGIN, placed_input, placed_output
from cutegemm.fuzz.tally import features, path_of
from cutegemm.fuzz.trial import Verdict
from cutegemm.hardware import BUILT_TARGETS
from cutegemm.operands import contiguous_mode
from cutegemm.scheduler import Dynamic, Morton, Persistent, SplitK, Static, StreamK, TileScheduler

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
SMALL = Limits(small=12, middle=20, most=40, most_k=40, elements=1 << 14, work=1 << 16, batch=3, block=50)
DRAWN = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def any_case(limits: Limits, emulated: bool = True) -> st.SearchStrategy[Case]:
    return st.builds(random_kind, st.integers(0, 200), st.just("sm_90a")).flatmap(
        lambda kind: cases(kind, limits, emulated)
    )


# --- as text -----------------------------------------------------------------------------------------------


@DRAWN
@given(any_case(GPU, emulated=False) | any_case(EMULATOR))
def test_a_case_is_read_as_it_is_written(case: Case) -> None:
    assert parse_case(repr(case)) == case
    assert "'" not in repr(case)


def test_a_case_is_written_without_what_goes_without_saying() -> None:
    assert repr(Case(1, 2, 3)) == "Case(m=1, n=2, k=3)"
    scheduler = TileScheduler(Morton(), StreamK(3, ordered=False))
    case = Case(
        1, 2, 3, l=4, majors="mnm", a=Strided((0, 1, 8), 3), config=GemmConfig(64, 32), scheduler=scheduler
    )
    assert repr(case) == (
        'Case(m=1, n=2, k=3, l=4, majors="mnm", a=Strided(strides=(0, 1, 8), offset=3), '
        "config=GemmConfig(tile_m=64, tile_n=32), "
        "scheduler=TileScheduler(order=Morton(), assignment=StreamK(max_workers=3, ordered=False)))"
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "Case", "Case()", "Case(m=1, n=1)", "Case(1, 1, k=-1)", "Case(1, 1, 1.5)", "Strided((1, 1))",
        "Case(1, 1, 1, a=Strided((1,)))", 'Case(1, 1, 1, majors="nnn")', 'Case(1, 1, 1, majors="kk")',
        'Case(1, 1, 1, dtype="int8")', 'Case(1, 1, 1, call="twice")', "Case(1, 1, __import__('os').getpid())",
        "print(1)", "Case(1, 1, 1, config=GemmConfig(0, 8))", "Case(*x)", "Case(1, 1, 1",
        "Case(1, 1, 1, foo=2)", 'Case(1, 1, 1, out=7)', 'Case(1, 1, 1, scheduler=Morton())',
    ],
)  # fmt: skip
def test_what_is_no_case_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(CutegemmError) as caught:
        parse_case(text)
    assert "\n" not in str(caught.value)


# --- as they are drawn -------------------------------------------------------------------------------------


@DRAWN
@given(any_case(GPU, emulated=False))
def test_drawn_cases_keep_within_their_limits_and_obey_the_rules(case: Case) -> None:
    batch, m, n, k = case.sizes
    assert batch * m * n * k <= GPU.work
    for name in ("a", "b", "out"):
        assert math.prod(case.shape(name)) <= GPU.elements
    if case.config is not None:
        assert is_legal(
            Kind(case.dtype, case.out_dtype, case.majors, case.l is not None, case.config, case.scheduler)
        )
    if case.call == "matmul":
        assert (case.config, case.scheduler) == (None, None)
        assert case.out is not None or (case.out_dtype == case.dtype and case.majors[2] == "n")


@DRAWN
@given(any_case(SMALL))
def test_layouts_name_matrices_of_their_majors(case: Case) -> None:
    """No element of D lies where another does, and the contiguous mode is the one compiled for, if any is."""
    out = placed_output(case, CPU).tensor
    numbers = torch.arange(out.numel(), dtype=torch.float32).reshape(out.shape).to(out.dtype)
    assert torch.equal(out.copy_(numbers), numbers)
    for name, major, modes in zip(("a", "b", "out"), case.majors, ("mk", "kn", "mn"), strict=True):
        rows, columns = case.shape(name)[-2:]
        strides = case.placed(name).strides[-2:]
        if min(rows, columns) > 1 and 1 in strides and strides != (1, 1):
            assert contiguous_mode(placed(case, name), (modes[0], modes[1])) == major


def placed(case: Case, name: str) -> torch.Tensor:
    """The tensor of an operand."""
    return placed_output(case, CPU).tensor if name == "out" else placed_input(case, name, CPU).tensor


def test_what_is_drawn_covers_what_may_matter() -> None:
    seen: set[str] = set()

    @settings(max_examples=500, deadline=None, derandomize=True, database=None)
    @given(any_case(SMALL) | any_case(SMALL, emulated=False))
    def look(case: Case) -> None:
        seen.update(features(case, Verdict("right")))
        seen.add(path_of(case, Verdict("right"))[0])
        seen.update(f"size {size}" for size in case.sizes)
        seen.add(f"{case.dtype} {case.out_dtype} {case.majors}")
        seen.update(f"aligned {name}" for name in ("a", "b") if case.placed(name).offset % 8 == 0)

    look()
    wanted = {
        "empty", "size 0", "size 1", "size 7", "size 8", "size 9", "batch",
        "D: allocated", "A: no unit stride", "B: no unit stride", "D: no unit stride",
        "A: start off 16 bytes",
        "A: broadcast over the batch", "B: broadcast over the batch", "NaN and Inf in the operands",
        "called: matmul", "called: open", "called: known", "assignment: Dynamic", "assignment: SplitK",
        "assignment: StreamK", "assignment: default", "configuration: given", "configuration: heuristic",
    }  # fmt: skip
    assert sorted(wanted - seen) == []
    assert len([name for name in seen if "float" in name]) > 2 * 3 * 8 / 2


def test_sums_of_no_products_are_drawn() -> None:
    wish = settings(max_examples=3000, derandomize=True, database=None, phases=[Phase.generate])
    case = find(any_case(SMALL), lambda case: path_of(case, Verdict("right"))[0] == "K = 0", settings=wish)
    assert case.k == 0
    assert 0 not in case.shape("out")


# --- in memory ---------------------------------------------------------------------------------------------


def test_inputs_lie_amid_poison_and_are_numbers_themselves() -> None:
    case = Case(5, 3, 7, l=2, a=Strided((40, 8, 1), 3), seed=4)
    a = placed_input(case, "a", CPU)
    assert a.tensor.storage_offset() == MARGIN + 3
    assert a.tensor.stride() == (40, 8, 1)
    assert a.tensor.isfinite().all()
    assert int(a.buffer.isfinite().sum()) == a.tensor.numel()
    assert a.buffer.isnan().any()
    assert a.buffer.isinf().any()
    assert a.changed() == 0
    a.buffer[0] = 1.0
    assert a.changed() == 1
    assert placed_input(case, "a", CPU).tensor.equal(a.tensor)


def test_a_broadcast_input_is_one_matrix() -> None:
    case = Case(4, 4, 4, l=3, b=Strided((0, 1, 4)))
    b = placed_input(case, "b", CPU)
    assert int(b.buffer.isfinite().sum()) == 16
    assert b.tensor[0].equal(b.tensor[2])


def test_planted_elements_are_inside() -> None:
    case = Case(20, 20, 20, planted=3)
    a = placed_input(case, "a", CPU)
    assert 1 <= int((~a.tensor.isfinite()).sum()) <= 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_canaries_are_told_from_elements(dtype: str) -> None:
    case = Case(3, 5, 1, out_dtype=dtype, out=Strided((9, 1), 1))
    out = placed_output(case, CPU)
    assert out.tensor.isnan().all()
    out.tensor.fill_(1.0)
    assert out.changed_outside() == 0
    out.buffer[MARGIN + 1 + 5] = 1.0
    assert out.changed_outside() == 1


def test_without_margins_a_buffer_ends_with_its_matrix() -> None:
    case = Case(3, 5, 1, out=Strided((9, 1), 1))
    assert placed_output(case, CPU, margin=0).buffer.numel() == 1 + 2 * 9 + 5
    assert placed_input(case, "b", CPU, margin=0).buffer.numel() == 5


# --- what is right -----------------------------------------------------------------------------------------


def special(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bfloat16)


def test_special_values_go_where_ieee_puts_them() -> None:
    a = special([[1, 2], [INF, 1], [-INF, 1], [NAN, 1], [INF, INF], [0, 1]])
    b = special([[1, 0, -1, INF], [1, 1, 1, 1]])
    right = expected(a, b)
    found = torch.where(right.nan, NAN, right.truth)
    found = torch.where(right.positive, INF, torch.where(right.negative, -INF, found))
    by_torch = torch.matmul(a.double(), b.double())
    assert torch.equal(found.isnan(), by_torch.isnan())
    assert torch.equal(found.nan_to_num(0), by_torch.nan_to_num(0))


@DRAWN
@given(any_case(SMALL))
def test_special_values_as_torch_has_them(case: Case) -> None:
    a, b = placed_input(case, "a", CPU).tensor, placed_input(case, "b", CPU).tensor
    right, by_torch = expected(a, b), torch.matmul(a.double(), b.double())
    assert torch.equal(right.nan, by_torch.isnan())
    assert torch.equal(right.positive, by_torch == INF)
    assert torch.equal(right.negative, by_torch == -INF)


def kinds(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> set[str]:
    return {kind for kind, _ in complaints(out, a, b)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [1, 64, 5000])
def test_rounding_is_right_and_a_missing_product_is_not(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(9, k, generator=generator).to(torch.float16)
    b = (torch.randn(k, 11, generator=generator) * k**-0.5).to(torch.float16)
    out = torch.matmul(a.float(), b.float()).to(dtype)
    assert not kinds(out, a, b)
    longest = torch.matmul(a[:, :-1].float(), b[:-1].float()).to(dtype)
    if k <= 64 or dtype == torch.float32:
        assert kinds(longest, a, b) == {"wrong numbers"}
    one = out.clone()
    one[8, 10] = -one[8, 10]
    assert kinds(one, a, b) == {"wrong numbers"}
    one[8, 10] = NAN
    assert kinds(one, a, b) == {"special values"}


def test_sums_in_16_bits_are_not_right() -> None:
    a, b = torch.randn(16, 512).bfloat16(), torch.randn(512, 16).bfloat16()
    out = torch.zeros(16, 16).bfloat16()
    for first in range(0, 512, 16):
        out += a[:, first : first + 16] @ b[first : first + 16]
    assert kinds(out, a, b) == {"wrong numbers"}


def test_products_that_are_all_alike_may_lose_what_their_sum_loses() -> None:
    case = parse_case(
        'Case(m=7, n=3, k=40, dtype="float16", out_dtype="float32", majors="mnm", a=Strided(strides=(1, 0)), '
        "b=Strided(strides=(0, 1)))"
    )
    a, b = placed_input(case, "a", CPU).tensor, placed_input(case, "b", CPU).tensor
    steps = [torch.matmul(a[:, k : k + 4].float(), b[k : k + 4].float()) for k in range(0, 40, 4)]
    out = steps[0]
    for step in steps[1:]:
        out = out + step
    assert not kinds(out, a, b)


def test_torch_may_let_a_nan_in_but_the_product_may_not() -> None:
    a, b = torch.ones(88, 9).bfloat16(), torch.ones(9, 6).bfloat16()
    a[10, 0] = NAN
    out = torch.matmul(a.float(), b.float()).bfloat16()
    assert not kinds(out, a, b)
    out[9, 0] = NAN
    assert kinds(out, a, b) == {"special values"}


@pytest.mark.parametrize("target", BUILT_TARGETS)
def test_kinds_of_every_target_are_legal_and_varied(target: str) -> None:
    kinds = [random_kind(seed, target) for seed in range(100)]
    assert all(is_legal(kind) for kind in kinds)
    assert 50 < sum(kind.config is not None for kind in kinds) < 100
    for name, count in (("tile_m", 3), ("tile_n", 8), ("cluster_m", 2), ("consumers", 2), ("swap_ab", 2)):
        assert len({getattr(kind.config, name) for kind in kinds if kind.config is not None}) >= count, name
    work = {type(kind.scheduler.assignment) for kind in kinds if kind.scheduler is not None}
    assert work >= {Persistent, Static, Dynamic, SplitK, StreamK}
