"""Fused kernels in the emulator, each output judged by the epilogue's own reference."""

from typing import Any

import pytest
import torch
from epilogue_checks import SMALL, check, complaint, inputs

import cutegemm
from cutegemm import GemmConfig
from cutegemm import epilogue as epi
from cutegemm.cache import default_cache
from cutegemm.errors import ConfigError
from cutegemm.scheduler import Dynamic, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

PINGPONG = GemmConfig(64, 64, schedule="pingpong")
COOPERATIVE = GemmConfig(128, 80)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@epi.fuse
def everything(acc: Any, scale: epi.Scalar, bias: epi.Row, factor: epi.Col, r: epi.Tile) -> Any:
    """One operand of each kind, and a further output of a dtype of its own."""
    x = acc * scale + bias
    return epi.gelu(x) * factor + r, {"x": epi.cast(x, "float32")}


def operands_of(m: int, n: int, l: int | None = None) -> dict[str, Any]:  # noqa: E741 - the mode's own name
    lead = () if l is None else (l,)
    return {
        "scale": 0.5,
        "bias": rand(n, dtype=torch.bfloat16),
        "factor": rand(*lead, m),
        "r": rand(*lead, m, n, dtype=torch.float16),
    }


# --- every operation ---------------------------------------------------------------------------------------


@epi.fuse
def arithmetic(acc: Any, other: epi.Tile) -> Any:
    return acc, {
        "add": epi.cast(acc + other, "float32"),
        "sub": epi.cast(1.5 - acc, "float32"),
        "mul": epi.cast(acc * other * 2, "float32"),
        "div": epi.cast(acc / other, "float32"),
        "neg": epi.cast(-acc + 0.25, "float32"),
        "abs": epi.cast(abs(acc), "float32"),
        "minimum": epi.cast(epi.minimum(acc, other), "float32"),
        "maximum": epi.cast(epi.maximum(acc, 0.5), "float32"),
        "square": epi.cast(epi.square(acc) + acc**2, "float32"),
        "rounded": epi.cast(epi.cast(acc, torch.bfloat16), "float32"),
        "half": epi.cast(acc, torch.float16),
    }


@epi.fuse
def functions(acc: Any) -> Any:
    positive = abs(acc) + 1e-3
    return acc, {
        "exp": epi.cast(epi.exp(acc), "float32"),
        "log": epi.cast(epi.log(positive), "float32"),
        "sqrt": epi.cast(epi.sqrt(positive), "float32"),
        "rsqrt": epi.cast(epi.rsqrt(positive), "float32"),
        "tanh": epi.cast(epi.tanh(acc), "float32"),
        "sigmoid": epi.cast(epi.sigmoid(3 * acc), "float32"),
        "erf": epi.cast(epi.erf(acc), "float32"),
        "relu": epi.cast(epi.relu(acc), "float32"),
        "gelu": epi.cast(epi.gelu(acc), "float32"),
        "gelu_tanh": epi.cast(epi.gelu_tanh(acc), "float32"),
        "silu": epi.cast(epi.silu(acc), "float32"),
    }


@epi.fuse
def conditions(acc: Any, seed: epi.Integer, offset: epi.Integer) -> Any:
    row, column = epi.row_index(acc), epi.col_index(acc)
    kept = (acc > 0) & ~(acc >= 1) | (acc < -1) & (acc <= -1.5)
    return epi.where(row >= column, acc, 0.0), {
        "kept": epi.cast(epi.where(kept, 1.0, 0.0), "float32"),
        "same": epi.cast(epi.where((row == column) | (column != 3), acc, -1.0), "float32"),
        "blocks": epi.cast((row - offset) // 3 * 1.0 + (column - offset) % 5, "float32"),
        "edges": epi.cast(
            epi.minimum(row, column) + abs(column - row) * 0.5 - epi.maximum(row, 7), "float32"
        ),
        "kept_at_random": epi.cast(epi.where(epi.random(acc, seed) < 0.3, 0.0, acc), "float32"),
        "random": epi.cast(epi.random(acc, seed, stream=2), "float32"),
    }


NARROW = SMALL.with_(tile_n=32)  # a dozen outputs do not fit the registers beside wider tiles


def test_arithmetic() -> None:
    check(arithmetic, (72, 40, 64), {"other": rand(72, 40) + 3}, config=NARROW)


def test_functions() -> None:
    check(functions, (72, 40, 64), {}, config=NARROW)


def test_conditions_indices_and_random_numbers() -> None:
    check(conditions, (72, 40, 64), {"seed": -5, "offset": 11})


def test_nan_and_infinity_are_what_torch_makes_of_them() -> None:
    other = rand(72, 40) + 3
    other[3, :8] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e38, -1e38, 1.0])
    check(arithmetic, (72, 40, 64), {"other": other}, config=NARROW)
    other[3, 2] = -1e4  # GELU and SiLU of -inf are 0 times inf

    @epi.fuse
    def of_tile(acc: Any, x: epi.Tile) -> Any:
        x = x + 0.0 * acc
        further = {"exp": epi.exp(x), "tanh": epi.tanh(x), "gelu": epi.gelu(x), "silu": epi.silu(x)}
        further |= {"relu": epi.relu(x), "erf": epi.erf(x), "sqrt": epi.sqrt(x), "log": epi.log(x)}
        return acc, {name: epi.cast(value, "float32") for name, value in further.items()}

    check(of_tile, (72, 40, 64), {"x": other})


# --- every way a result is stored --------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "one consumer": {},
    "cooperative": {"config": COOPERATIVE},
    "cooperative along N": {"config": GemmConfig(64, 160)},
    "two MMAs a warpgroup": {"config": GemmConfig(256, 48)},
    "ping-pong": {"config": PINGPONG},
    "cluster": {"config": COOPERATIVE.with_(cluster_m=2, tile_n=64)},
    "swapped": {"config": SMALL.with_(swap_ab=True)},
    "swapped ping-pong": {"config": PINGPONG.with_(swap_ab=True)},
    "float32": {"out_dtype": "float32"},
    "column-major": {"out_major": "m"},
    "column-major, swapped": {"out_major": "m", "config": SMALL.with_(swap_ab=True)},
    "one store buffer": {"config": GemmConfig(64, 128, consumers=1, store_stages=1)},
    "three store buffers": {"config": GemmConfig(64, 192, consumers=1, store_stages=2)},
    "K split": {"config": GemmConfig(128, 64), "scheduler": TileScheduler.splitting(2)},
    "K split, swapped": {
        "config": GemmConfig(128, 64, swap_ab=True),
        "scheduler": TileScheduler.splitting(4),
    },
    "StreamK": {"scheduler": TileScheduler(assignment=StreamK()), "circumstances": {"resident": 4}},
    "StreamK, swapped": {
        "config": COOPERATIVE.with_(swap_ab=True),
        "scheduler": TileScheduler(assignment=StreamK()),
        "circumstances": {"resident": 3},
    },
    "Dynamic": {"scheduler": TileScheduler(assignment=Dynamic()), "circumstances": {"resident": 2}},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_storing(way: str) -> None:
    m, n = (136, 200) if "out_major" not in WAYS[way] else (200, 136)
    check(everything, (m, n, 320), operands_of(m, n), **WAYS[way])


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["one consumer", "swapped", "column-major", "float32"])
@pytest.mark.parametrize("sizes", [(77, 53, 64), (1, 1, 8), (130, 67, 72)], ids=str)
def test_outputs_that_tma_cannot_store(sizes: tuple[int, int, int], way: str) -> None:
    check(everything, sizes, operands_of(*sizes[:2]), **WAYS[way])


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["one consumer", "ping-pong", "swapped", "StreamK"])
def test_without_races_in_an_adverse_order(way: str) -> None:
    options = {**WAYS[way]}
    options["circumstances"] = {**options.get("circumstances", {}), "check": True, "seed": 5}
    check(everything, (200, 136, 192), operands_of(200, 136), **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["one consumer", "swapped", "K split"])
def test_batches(way: str) -> None:
    operands = operands_of(72, 40, 3)
    check(everything, (3, 72, 40, 64), operands, **WAYS[way])
    check(everything, (3, 72, 40, 64), {**operands, "bias": rand(3, 40), "r": rand(72, 40)}, **WAYS[way])


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["one consumer", "swapped", "K split", "StreamK"])
def test_no_products_to_add(way: str) -> None:
    check(everything, (72, 40, 0), operands_of(72, 40), **WAYS[way])
    check(everything, (72, 41, 0), operands_of(72, 41), **WAYS[way])


@pytest.mark.parametrize("sizes", [(0, 40, 64), (72, 0, 64), (0, 0, 0)], ids=str)
def test_empty_results(sizes: tuple[int, int, int]) -> None:
    gemm = cutegemm.compile(
        (None, None, None), "bfloat16", epilogue=everything, config=SMALL, target="sm_90a"
    )
    a, b = inputs(*sizes)
    emulation = gemm.emulate(a, b, **operands_of(*sizes[:2]))
    assert emulation.launch is None
    assert emulation.out is not None
    assert tuple(emulation.out.shape) == tuple(emulation.outputs["x"].shape) == sizes[:2]


# --- strides -----------------------------------------------------------------------------------------------


def test_operands_of_any_strides() -> None:
    m, n = 72, 40
    check(everything, (m, n, 64), {
        "scale": torch.tensor(0.25),
        "bias": rand(n, 3)[:, 1],
        "factor": rand(1).expand(m),
        "r": rand(n, m, dtype=torch.bfloat16).t(),
    })  # fmt: skip
    check(everything, (m, n, 64), {
        "scale": torch.tensor(3, dtype=torch.int64),
        "bias": rand(2 * n)[::2],
        "factor": rand(m + 1, dtype=torch.bfloat16)[1:],
        "r": rand(m, n + 1)[:, 1:],
    })  # fmt: skip
    check(everything, (m, n, 64), {**operands_of(m, n), "r": rand(m, 1).expand(m, n)})


def test_further_outputs_of_any_strides() -> None:
    gemm = cutegemm.compile(
        (None, None, None), "bfloat16", epilogue=everything, config=SMALL, target="sm_90a"
    )
    a, b = inputs(72, 40, 64)
    operands = operands_of(72, 40)
    truth = everything.reference(a, b, **operands)[1]["x"]
    for given in (
        torch.full((72, 45), 7.0)[:, 2:42],
        torch.full((40, 72), 7.0).t(),
        torch.full((72, 48), 7.0)[:, 4:44],
    ):
        emulation = gemm.emulate(a, b, outputs={"x": given}, **operands)
        assert emulation.outputs["x"] is given
        assert complaint(given, truth) is None
        if given._base is not None and given._base.shape[0] == 72:
            around = given._base.clone()
            around.as_strided(given.shape, given.stride(), given.storage_offset()).fill_(7.0)
            assert bool((around == 7.0).all())


def test_accumulation_in_place() -> None:
    @epi.fuse
    def accumulate(acc: Any, c: epi.Tile) -> Any:
        return acc + c

    a, b = inputs(136, 72, 128)
    for config, shape in ((SMALL, (136, 72)), (SMALL.with_(swap_ab=True), (136, 72)), (PINGPONG, (136, 72))):
        gemm = cutegemm.compile(
            (None, None, None), "bfloat16", epilogue=accumulate, config=config, target="sm_90a"
        )
        c = rand(*shape, dtype=torch.bfloat16)
        truth = accumulate.reference(a, b, c=c.clone())
        emulation = gemm.emulate(a, b, c=c, out=c)
        assert emulation.out is c
        assert complaint(c, truth) is None


def test_what_is_scaled_by_zero_is_not_read() -> None:
    @epi.fuse
    def scaled_sum(acc: Any, alpha: epi.Scalar, beta: epi.Scalar, c: epi.Tile) -> Any:
        return alpha * acc + epi.scaled(beta, c)

    c = rand(72, 40, dtype=torch.bfloat16)
    nan = torch.full_like(c, float("nan"))
    for way in ("one consumer", "swapped", "K split"):
        check(scaled_sum, (72, 40, 64), {"alpha": 0.5, "beta": -2.0, "c": c}, **WAYS[way])
        check(scaled_sum, (72, 40, 64), {"alpha": 0.5, "beta": 0.0, "c": nan}, **WAYS[way])
        check(scaled_sum, (72, 40, 64), {"alpha": 2, "beta": torch.tensor(0.0), "c": nan}, **WAYS[way])
    for beta in (0.0, -1.0):
        operands = {"alpha": 1.0, "beta": beta, "c": rand(136, 200)}
        watched = {"check": True, "resident": 1}
        check(scaled_sum, (136, 200, 64), operands, config=PINGPONG, circumstances=watched)


# --- pairs of columns --------------------------------------------------------------------------------------


@epi.fuse
def swiglu(acc: Any, bias: epi.Row, after: epi.HalfRow, r: epi.HalfTile) -> Any:
    x = acc + bias
    gate, up = epi.pairs(x)
    return epi.silu(gate) * up * after + r, {"x": x}


@epi.fuse
def rotated(acc: Any, angle: epi.HalfTile) -> Any:
    x, y = epi.pairs(acc)
    return epi.interleave(x - y * angle, y + x * angle)


@epi.fuse
def gate_backward(acc: Any, x: epi.PairTile) -> Any:
    gate, up = epi.pairs(x)
    s = epi.sigmoid(gate)
    return epi.interleave(acc * up * s * (1 + gate * (1 - s)), acc * gate * s)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("way", [way for way in WAYS if "swapped" not in way])
def test_gated(way: str) -> None:
    m, n = (136, 208) if "out_major" not in WAYS[way] else (208, 144)
    operands = {"bias": rand(n), "after": rand(n // 2), "r": rand(m, n // 2, dtype=torch.bfloat16)}
    check(swiglu, (m, n, 320), operands, **WAYS[way])


@pytest.mark.parametrize("sizes", [(77, 54, 64), (1, 2, 8)], ids=str)
def test_gated_outputs_that_tma_cannot_store(sizes: tuple[int, int, int]) -> None:
    m, n, _ = sizes
    check(swiglu, sizes, {"bias": rand(n), "after": rand(n // 2), "r": rand(m, n // 2)})


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["one consumer", "cooperative", "ping-pong", "K split", "float32"])
def test_interleaved(way: str) -> None:
    check(rotated, (136, 80, 64), {"angle": rand(136, 40)}, **WAYS[way])
    check(gate_backward, (136, 40, 64), {"x": rand(136, 80, dtype=torch.bfloat16)}, **WAYS[way])


# --- reductions --------------------------------------------------------------------------------------------


@epi.fuse
def reduced(acc: Any, bias: epi.Row) -> Any:
    x = acc + bias
    return epi.relu(x), {
        "row_sum": epi.row_sum(x),
        "row_max": epi.row_max(x),
        "col_amax": epi.col_amax(x),
        "col_squares": epi.col_sum_of_squares(x),
    }


@epi.fuse
def reduced_pairs(acc: Any) -> Any:
    gate, up = epi.pairs(acc)
    x = epi.silu(gate) * up
    return x, {
        "row_amax": epi.row_amax(x),
        "row_squares": epi.row_sum_of_squares(acc),
        "col_sum": epi.col_sum(x),
        "col_max": epi.col_max(x),
    }


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("K split")])
def test_reductions(way: str) -> None:
    m, n = (136, 200) if "out_major" not in WAYS[way] else (200, 136)
    check(reduced, (m, n, 320), {"bias": rand(n) + 1}, **WAYS[way])


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["one consumer", "cooperative", "ping-pong", "cluster", "StreamK"])
def test_reductions_of_pairs(way: str) -> None:
    check(reduced_pairs, (200, 208, 192), {}, **WAYS[way])


@pytest.mark.parametrize("way", ["one consumer", "swapped"])
def test_reductions_of_ragged_and_batched_products(way: str) -> None:
    check(reduced, (77, 53, 64), {"bias": rand(53) + 1}, **WAYS[way])
    check(reduced, (2, 77, 56, 64), {"bias": rand(56) + 1}, **WAYS[way])


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["one store buffer", "ping-pong", "swapped"])
def test_reductions_that_alone_read_an_operand(way: str) -> None:
    """Shared memory an operand lies in may be written again as soon as outputs are stored."""

    @epi.fuse
    def alone(acc: Any, bias: epi.Row, r: epi.Tile) -> Any:
        return acc, {"total": epi.row_sum(acc + bias + r)}

    operands = {"bias": rand(200), "r": rand(136, 200, dtype=torch.bfloat16)}
    watched = {"circumstances": {"check": True, "seed": 3, "resident": 1}}
    check(alone, (136, 200, 64), operands, **{**WAYS[way], **watched})


def test_reductions_do_not_lose_nan() -> None:
    bias = rand(40)
    bias[7] = float("nan")
    check(reduced, (72, 40, 64), {"bias": bias})


def test_reductions_have_the_same_bits_in_every_order() -> None:
    gemm = cutegemm.compile(
        (None, None, None), "bfloat16", epilogue=reduced, config=PINGPONG, target="sm_90a"
    )
    a, b = inputs(200, 136, 128)
    runs = [gemm.emulate(a, b, bias=rand(136), seed=seed) for seed in (None, 1, 2)]
    for run in runs[1:]:
        for name, values in run.outputs.items():
            assert torch.equal(values, runs[0].outputs[name])


# --- what is compiled --------------------------------------------------------------------------------------


def test_scalars_compile_nothing_and_equal_functions_compile_once() -> None:
    def first(acc: Any, scale: epi.Scalar) -> Any:
        return acc * scale + 0.125

    def second(acc: Any, scale: epi.Scalar) -> Any:
        return acc * scale + 0.125

    check(epi.fuse(first), (72, 40, 64), {"scale": 0.5})
    before = default_cache().stats().compiled
    check(epi.fuse(first), (72, 40, 64), {"scale": 7})
    check(epi.fuse(second), (72, 40, 64), {"scale": torch.tensor(2.0)})
    check(epi.fuse(second), (136, 48, 128), {"scale": -1.0})
    assert default_cache().stats().compiled == before

    def third(acc: Any, scale: epi.Scalar) -> Any:
        return acc * scale + 0.25

    check(epi.fuse(third), (72, 40, 64), {"scale": 0.5})
    assert default_cache().stats().compiled == before + 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "config",
    [GemmConfig(128, 256), GemmConfig(256, 128), GemmConfig(128, 160, schedule="pingpong"),
     GemmConfig(64, 256, consumers=1), GemmConfig(128, 128, swap_ab=True)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("n", [None, 1001])
def test_large_tiles_do_not_spill(config: GemmConfig, n: int | None) -> None:
    gemm = cutegemm.compile((None, n, None), "bfloat16", epilogue=everything, config=config, target="sm_90a")
    assert gemm.resources.spills == 0


def test_tiles_that_would_spill_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 192 accumulator registers .* beside a much fused store .* tile_n is 160"
    ):
        cutegemm.compile(
            (None, None, None),
            "bfloat16",
            epilogue=everything,
            config=GemmConfig(128, 192, schedule="pingpong"),
            target="sm_90a",
        )


def test_split_tiles_do_not_spill() -> None:
    for config in (GemmConfig(128, 192), GemmConfig(192, 128)):
        gemm = cutegemm.compile(
            (None, None, None),
            "bfloat16",
            epilogue=everything,
            config=config,
            scheduler=TileScheduler.splitting(2),
            target="sm_90a",
        )
        assert gemm.resources.spills == 0
