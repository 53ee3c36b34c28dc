"""Gemm without a GPU: what is built when, what shares a kernel, what a wrong target or a missing GPU gets."""

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import Gemm, GemmConfig
from cutegemm.cache import default_cache
from cutegemm.errors import DeviceError, OperandTypeError, TargetError
from cutegemm.operands import check_kind
from cutegemm.scheduler import ColumnMajor, GroupedM, Persistent, Static, TileScheduler

BF16 = torch.bfloat16
SMALL = GemmConfig(64, 8, consumers=1)
WIDER = GemmConfig(64, 16, consumers=1)
WIDE = GemmConfig(64, 128, consumers=1, stages=4, store_stages=1)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def cross(**options: Any) -> Gemm:
    """A small Gemm for sm_90a, some options changed."""
    options = {"shape": (None, None, None), "dtype": BF16, "config": SMALL, "target": "sm_90a", **options}
    return cutegemm.compile(options.pop("shape"), options.pop("dtype"), **options)


# --- one kernel for each thing that shapes it --------------------------------------------------------------

PAIRED = GemmConfig(128, 32, cluster_m=2, mma_ctas=2)

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({}, {"dtype": torch.float16}),
    "out_dtype": ({}, {"out_dtype": torch.float32}),
    "a_major": ({}, {"a_major": "m"}),
    "b_major": ({"config": WIDER}, {"config": WIDER, "b_major": "n"}),
    "out_major": ({}, {"out_major": "m"}),
    "batch mode": ({}, {"shape": (None, None, None, None)}),
    "order": ({}, {"scheduler": TileScheduler(ColumnMajor())}),
    "strip width": ({}, {"scheduler": TileScheduler(GroupedM(5))}),
    "assignment": ({}, {"scheduler": TileScheduler(assignment=Static())}),
    "limit of workers": ({}, {"scheduler": TileScheduler(assignment=Persistent(9))}),
    "tile_m": ({}, {"config": SMALL.with_(tile_m=128)}),
    "tile_n": ({}, {"config": SMALL.with_(tile_n=24)}),
    "tile_k": ({}, {"config": SMALL.with_(tile_k=128)}),
    "cluster_m": ({"config": SMALL.with_(tile_n=16)}, {"config": SMALL.with_(tile_n=16, cluster_m=2)}),
    "cluster_n": ({}, {"config": SMALL.with_(cluster_n=2)}),
    "consumers": ({"config": GemmConfig(64, 16, consumers=1)}, {"config": GemmConfig(64, 16)}),
    "schedule": ({"config": GemmConfig(64, 16)}, {"config": GemmConfig(64, 16, schedule="pingpong")}),
    "stages": ({}, {"config": SMALL.with_(stages=5)}),
    "store_stages": ({"config": WIDE}, {"config": WIDE.with_(store_stages=2)}),
    "swap_ab": ({}, {"config": SMALL.with_(swap_ab=True)}),
    "target": ({"config": SMALL}, {"config": SMALL, "target": "sm_100a"}),
    "mma_ctas": (
        {"config": PAIRED.with_(mma_ctas=1), "target": "sm_100a"},
        {"config": PAIRED, "target": "sm_100a"},
    ),
}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gemm], str]:
    """The cache key a Gemm would build its kernel under."""

    def key_of(gemm: Gemm) -> str:
        asked: list[str] = []

        class Cache:
            def get_or_build(self, key: str, build: object) -> None:
                asked.append(str(key))
                raise InterruptedError

        with monkeypatch.context() as patch:
            patch.setattr(cutegemm.kernels, "default_cache", Cache)
            with pytest.raises(InterruptedError):
                gemm.build()
        return asked[0]

    return key_of


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_makes_another_kernel(option: str, keys: Callable[[Gemm], str]) -> None:
    one, other = (cross(**options) for options in OPTIONS[option])
    assert keys(one) == keys(cross(**OPTIONS[option][0]))
    assert keys(one) != keys(other)


def test_every_field_of_a_configuration_is_among_the_options() -> None:
    assert set(GemmConfig.__dataclass_fields__) <= set(OPTIONS)


def test_sizes_share_a_kernel(keys: Callable[[Gemm], str]) -> None:
    shapes = [(None, None, None), (1, 8, 16), (4096, 4096, 4096), (0, 8, 8)]
    assert len({keys(cross(shape=shape)) for shape in shapes}) == 1
    assert len({keys(cross(shape=shape)) for shape in [(1, 8, 8, 8), (None, 9, 16, 8)]}) == 1


def test_outputs_that_tma_cannot_store_have_a_kernel_of_their_own(keys: Callable[[Gemm], str]) -> None:
    odd = {keys(cross(shape=shape)) for shape in [(1, 7, 8), (None, 4095, 4096)]}
    assert len(odd) == 1
    assert odd != {keys(cross())}


def test_operands_that_tma_cannot_load_have_kernels_of_their_own(keys: Callable[[Gemm], str]) -> None:
    config = GemmConfig(64, 64, consumers=1)
    odd = {keys(cross(shape=shape, config=config)) for shape in [(1, 8, 3), (None, 8, 4095)]}
    assert len(odd) == 1
    assert odd != {keys(cross(config=config))}


def test_a_configuration_for_aligned_operands_is_legal_whatever_k_is() -> None:
    """Whether an operand is aligned is the tensor's affair: a row of 3 elements may have a pitch of 8."""
    gemm = cross(shape=(64, 64, 3), config=GemmConfig(64, 40, consumers=1))
    assert "sm_90a" in gemm.ptx


def test_a_kernel_is_compiled_once_for_all_that_share_it() -> None:
    config = GemmConfig(64, 56, consumers=1)
    before = default_cache().stats().compiled
    gemms = [cross(shape=shape, config=config) for shape in ((None, None, None), (128, 128, 128), (7, 16, 8))]
    assert default_cache().stats().compiled == before  # nothing yet: compile() compiles nothing
    cubins = {gemm.build().cubin for gemm in gemms}
    assert len(cubins) == 1
    assert default_cache().stats().compiled == before + 1


def test_what_can_be_read_without_a_gpu() -> None:
    gemm = cross()
    assert gemm.build() is gemm
    assert gemm.problem.a_dtype == "bfloat16"
    assert gemm.config.stages
    assert ".target sm_90a" in gemm.ptx
    assert gemm.cubin.startswith(b"\x7fELF")
    assert "HGMMA.64x8x16" in gemm.sass
    assert gemm.resources.stages == gemm.config.stages
    assert gemm.resources.spills == 0
    assert "?x?x? bfloat16" in repr(gemm)
    assert "64x8x64" in repr(gemm)


def test_compiling_stays_quick() -> None:
    """About a second on a machine of its own; an alarm if it grows out of all proportion."""
    gemm = cross(config=GemmConfig(128, 136))
    assert 0 < gemm.artifact.build_seconds < 15


# --- targets and GPUs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "remedy"),
    [("sm_90", "write 'sm_90a'"), ("90", "write 'sm_90a'"), ("hopper", "write 'sm_90a'"), ("sm_80", "sm_90a"),
     ("sm_100f", "kernels for: sm_90a"), ("sm_120a", "not supported"), ("", "kernels for: sm_90a"),
     (90, "sm_90a")],
)  # fmt: skip
def test_targets_that_are_none(target: Any, remedy: str) -> None:
    with pytest.raises(TargetError) as caught:
        cross(target=target)
    assert repr(target) in str(caught.value)
    assert remedy in str(caught.value)


def test_a_target_may_be_written_in_capitals() -> None:
    assert cross(target=" SM_90a ").target == "sm_90a"


@no_gpu
def test_without_a_gpu_the_error_says_how_to_go_on() -> None:
    with pytest.raises(DeviceError) as caught:
        cross(target=None)
    assert "a GPU is needed" in str(caught.value)
    assert "target='sm_90a'" in str(caught.value)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """CPU tensors."""
    return torch.zeros(16, 64, dtype=BF16), torch.zeros(24, 64, dtype=BF16).t()


@pytest.mark.parametrize("shape", [(None, None, None), (16, 24, 64)])
def test_cpu_tensors_are_refused_and_the_process_lives(shape: tuple[int | None, ...]) -> None:
    gemm = cross(shape=shape)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"a lies on cpu; move it to the GPU with \.cuda\(\)"):
            gemm(*operands())


def test_matmul_says_which_tensor_is_of_the_wrong_kind() -> None:
    a, b = operands()
    out = torch.zeros(16, 24)
    with pytest.raises(DeviceError, match=r"^a lies on cpu; move it to the GPU with \.cuda\(\)$"):
        cutegemm.matmul(a, b, out=out)
    with pytest.raises(
        OperandTypeError, match=r"a has dtype torch\.float32, kernels take bfloat16, float16;"
    ):
        cutegemm.matmul(a.float(), b.float())
    with pytest.raises(OperandTypeError, match=r"take bfloat16, float16, float32; convert it, e\.g\."):
        check_kind(out.double(), "out")


# --- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda gemm: pickle.loads(pickle.dumps(gemm))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize(
    "options", [{}, {"config": None}, {"scheduler": TileScheduler(GroupedM(5), Static())}], ids=str
)
def test_a_copy_is_an_equal_gemm(copied: Callable[[Gemm], Gemm], options: dict[str, Any]) -> None:
    gemm = cross(**options).build()
    other = copied(gemm)
    assert other is not gemm
    assert other == gemm
    assert hash(other) == hash(gemm)
    assert repr(other) == repr(gemm)
    compiled = default_cache().stats().compiled
    assert other.cubin == gemm.cubin
    assert default_cache().stats().compiled == compiled  # kernels are shared through the cache


def test_gemms_of_other_problems_differ() -> None:
    assert cross() != cross(out_major="m")
    assert cross() != cross(config=WIDER)
    assert cross() != cross(scheduler=TileScheduler(ColumnMajor()))
    assert cross() != "a gemm"


def test_the_checks_survive_optimised_python() -> None:
    """``python -O`` drops assert statements: nothing of use may be in one."""
    script = """
        import torch, cutegemm
        assert False, "asserts are on"
        small = cutegemm.GemmConfig(64, 8, consumers=1)
        a, b = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(24, 64, dtype=torch.bfloat16)
        gemm = cutegemm.compile((None, None, None), "bfloat16", config=small, target="sm_90a").build()
        calls = [
            lambda: cutegemm.compile((8, 8), "bfloat16", target="sm_90a"),
            lambda: cutegemm.compile((8, 8, 8), "int8", target="sm_90a"),
            lambda: cutegemm.compile((8, 8, 8), "bfloat16", target="sm_90"),
            lambda: cutegemm.compile((8, 8, 8), "bfloat16", config=small.with_(tile_n=9), target="sm_90a"),
            lambda: cutegemm.GemmConfig(64, 0),
            lambda: cutegemm.scheduler.GroupedM(0),
            lambda: gemm(a, b.t()),
            lambda: gemm(a[0], b.t()),
            lambda: gemm("a", b.t()),
        ]
        for call in calls:
            try:
                call()
            except cutegemm.CutegemmError as error:
                print(type(error).__name__)
        print(gemm.resources.spills)
    """
    done = subprocess.run(
        [sys.executable, "-O", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "ProblemError", "OperandTypeError", "TargetError", "ConfigError", "ConfigError", "ConfigError",
        "DeviceError", "ProblemError", "OperandTypeError", "0",
    ]  # fmt: skip
