"""Epilogues on sm_100a: the functions that Hopper's tests use, judged by the same references."""

from typing import Any

import pytest
import torch
from epilogue_checks import check, inputs
from test_epilogue_emulated import (
    arithmetic,
    conditions,
    everything,
    functions,
    operands_of,
    rand,
    reduced,
    reduced_pairs,
)

import cutegemm
from cutegemm import GemmConfig
from cutegemm import epilogue as epi
from cutegemm.emulator import Emulation
from cutegemm.errors import ConfigError
from cutegemm.scheduler import Dynamic, SplitK, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

TARGET = "sm_100a"
SMALL = GemmConfig(64, 64, consumers=1)
PAIR = GemmConfig(256, 96, cluster_m=2, mma_ctas=2)
FOLDED = GemmConfig(128, 96, cluster_m=2, mma_ctas=2, consumers=1)
CAREFUL = {"check": True, "seed": 1, "resident": 2}


@epi.fuse
def glu(acc: Any, bias: epi.Row) -> Any:
    """Half as many columns: pairs of neighbours meet."""
    even, odd = epi.pairs(acc + bias)
    return epi.silu(even) * odd, {"both": epi.cast(epi.interleave(odd, even), "float32")}


def run(*arguments: Any, **options: Any) -> Emulation:
    """``epilogue_checks.check`` with every check of the emulator on."""
    return check(*arguments, **{"target": TARGET, "circumstances": CAREFUL, **options})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "config", [GemmConfig(128, 64), PAIR, FOLDED, GemmConfig(64, 72, swap_ab=True)], ids=str
)
def test_an_operand_of_each_kind(config: GemmConfig) -> None:
    run(everything, (136, 104, 72), operands_of(136, 104), config=config)


@pytest.mark.parametrize("out_major", ["n", "m"])
def test_outputs_that_tma_cannot_store(out_major: str) -> None:
    run(everything, (75, 41, 72), operands_of(75, 41), config=SMALL, out_major=out_major)


def test_batches_and_work_from_the_hardware() -> None:
    scheduler = TileScheduler(assignment=Dynamic())
    run(everything, (3, 72, 136, 64), operands_of(72, 136, 3), config=SMALL, scheduler=scheduler)


def test_after_the_sums_of_a_split_k() -> None:
    scheduler = TileScheduler(assignment=SplitK(2))
    run(everything, (72, 136, 328), operands_of(72, 136), config=SMALL, scheduler=scheduler)


@pytest.mark.parametrize("config", [SMALL, FOLDED], ids=str)
def test_pairs_of_columns(config: GemmConfig) -> None:
    run(glu, (72, 144, 64), {"bias": rand(144)}, config=config)


@pytest.mark.parametrize(
    ("fused", "operands"),
    [
        (arithmetic, {"other": rand(72, 40) + 3}),
        (functions, {}),
        (conditions, {"seed": -5, "offset": 11}),
    ],
    ids=["arithmetic", "functions", "conditions"],
)
def test_every_operation(fused: Any, operands: dict[str, Any]) -> None:
    run(fused, (72, 40, 64), operands, config=SMALL, circumstances={})


# --- reductions --------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(128, 80),
        GemmConfig(64, 24, consumers=1),
        GemmConfig(128, 64, swap_ab=True),
        PAIR,
        FOLDED.with_(consumers=2, tile_n=64),
    ],
    ids=str,
)
def test_reductions(config: GemmConfig) -> None:
    run(reduced, (136, 104, 72), {"bias": rand(104) + 1}, config=config)


def test_reductions_of_pairs() -> None:
    run(reduced_pairs, (136, 112, 72), {}, config=FOLDED)


def test_reductions_of_outputs_that_tma_cannot_store() -> None:
    run(reduced, (77, 53, 64), {"bias": rand(53) + 1}, config=SMALL)


def test_reductions_of_batches_and_work_from_the_hardware() -> None:
    """A value that is no number is found again wherever it belongs, and nowhere else."""
    bias, scheduler = rand(56), TileScheduler(assignment=Dynamic())
    bias[7] = float("nan")
    config = GemmConfig(64, 32, consumers=1, cluster_n=2)
    run(reduced, (2, 72, 56, 64), {"bias": bias}, config=config, scheduler=scheduler, out_major="m")


def test_shared_tiles_pass_through_the_epilogue_once() -> None:
    scheduler = TileScheduler(assignment=StreamK())
    sharing = {**CAREFUL, "resident": 5}
    for config in (GemmConfig(128, 64), FOLDED.with_(tile_n=64, swap_ab=True)):
        run(
            reduced,
            (72, 56, 2560),
            {"bias": rand(56)},
            config=config,
            scheduler=scheduler,
            circumstances=sharing,
        )


def test_reductions_have_the_same_bits_in_every_order() -> None:
    gemm = cutegemm.compile((None, None, None), "bfloat16", epilogue=reduced, config=FOLDED, target=TARGET)
    a, b = inputs(136, 104, 72)
    runs = [gemm.emulate(a, b, bias=rand(104), seed=seed) for seed in (None, 1)]
    for other in runs[1:]:
        for name, values in other.outputs.items():
            assert torch.equal(values, runs[0].outputs[name])


def test_reductions_need_all_of_k() -> None:
    with pytest.raises(ConfigError, match=r"reduces rows or columns; with K split 2 ways .* than SplitK"):
        cutegemm.compile(
            (64, 64, 64), "bfloat16", epilogue=reduced, scheduler=TileScheduler.splitting(2),
            config=SMALL, target=TARGET,
        )  # fmt: skip


def test_the_heuristic_finds_a_configuration_for_reductions() -> None:
    gemm = cutegemm.compile((512, 512, 8192), "bfloat16", epilogue=reduced, target=TARGET)
    assert gemm.scheduler.splits == 1


# --- the code ----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fused", "config", "n"),
    [
        (everything, GemmConfig(128, 128), 1000),
        (everything, GemmConfig(128, 256), 1001),
        (reduced, GemmConfig(256, 256, cluster_m=2, mma_ctas=2), 1000),
        (glu, GemmConfig(128, 256), 1000),
    ],
    ids=["operands", "no TMA store", "reductions", "half the columns"],
)
def test_registers_hold_an_epilogue_and_a_chunk(fused: Any, config: GemmConfig, n: int) -> None:
    """In a loop over chunks: unrolled, wide tiles took more registers than there are."""
    gemm = cutegemm.compile((None, n, None), "bfloat16", epilogue=fused, config=config, target=TARGET)
    assert gemm.resources.spills == 0
    assert gemm.resources.registers * gemm.resources.threads <= 65536


def test_pairs_need_columns_that_are_columns() -> None:
    with pytest.raises(ConfigError, match="takes columns in pairs, which swap_ab=True"):
        cutegemm.compile(
            (64, 64, 64), "bfloat16", epilogue=glu, config=SMALL.with_(swap_ab=True), target=TARGET
        )
