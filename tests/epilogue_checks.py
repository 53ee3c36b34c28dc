"""What the tests of epilogues share: one fused product in the emulator, judged by its own reference."""

from collections.abc import Mapping
from typing import Any

import torch

import cutegemm
from cutegemm import GemmConfig
from cutegemm.emulator import Emulation
from cutegemm.epilogue import Fused
from cutegemm.scheduler import TileScheduler

SMALL = GemmConfig(64, 64, 64, consumers=1)
FLOAT32 = 2e-5  # of the largest value: sums in another order, functions to a few units of the last place


def inputs(
    m: int,
    n: int,
    k: int,
    l: int | None = None,  # noqa: E741 - the mode's own name
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random a (M, K) and b (K, N), K contiguous, with results around 1."""
    generator = torch.Generator().manual_seed(seed)
    lead = () if l is None else (l,)
    a = torch.randn((*lead, m, k), generator=generator)
    b = torch.randn((*lead, n, k), generator=generator) * max(1, k) ** -0.5
    return a.bfloat16(), b.bfloat16().transpose(-1, -2)


def complaint(result: torch.Tensor, truth: torch.Tensor) -> str | None:
    """What is wrong with a result; None if it is the truth but for rounding."""
    if tuple(result.shape) != tuple(truth.shape):
        return f"shape {tuple(result.shape)}, not {tuple(truth.shape)}"
    got, truth = result.double(), truth.double()
    if not torch.equal(got.isnan(), truth.isnan()):
        return f"NaN in {int(got.isnan().sum())} places, not in {int(truth.isnan().sum())}"
    finite = truth.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), truth[~finite].nan_to_num()):
        return "infinities differ"
    got, truth = got[finite], truth[finite]
    if not truth.numel():
        return None
    # Half a unit in the last place for the rounding, and as much again for a value next to a boundary.
    allowed = torch.finfo(result.dtype).eps * truth.abs() + FLOAT32 * truth.abs().max() + 1e-30
    wrong = ~((got - truth).abs() <= allowed)
    if wrong.any():
        return f"{int(wrong.sum())} of {truth.numel()} wrong, by up to {float((got - truth).abs().max()):.3e}"
    return None


def judge(emulation: Emulation, truth: Any) -> None:
    """Fails unless the outputs are what the reference says."""
    main, further = truth if isinstance(truth, tuple) else (truth, {})
    assert emulation.out is not None
    found = {"out": complaint(emulation.out, main)}
    assert set(emulation.outputs) == set(further)
    found |= {name: complaint(emulation.outputs[name], value) for name, value in further.items()}
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, wrong


def check(
    fused: Fused,
    sizes: tuple[int, ...],
    operands: Mapping[str, Any],
    *,
    config: GemmConfig | None = SMALL,
    scheduler: TileScheduler | None = None,
    circumstances: Mapping[str, Any] | None = None,
    target: str = "sm_90a",
    **problem: Any,
) -> Emulation:
    """Emulates epilogue(a @ b) of sizes (M, N, K) or (L, M, N, K) and judges every output."""
    gemm = cutegemm.compile(
        (None,) * len(sizes),
        "bfloat16",
        epilogue=fused,
        config=config,
        scheduler=scheduler,
        target=target,
        **problem,
    )
    lead = sizes[0] if len(sizes) == 4 else None
    a, b = inputs(*sizes[-3:], lead)
    emulation = gemm.emulate(a, b, **operands, **(circumstances or {}))
    judge(emulation, fused.reference(a, b, **operands))
    return emulation


def operands_for(fused: Fused, m: int, n: int, seed: int = 1) -> dict[str, Any]:
    """Random operands of an epilogue beside a product of m rows and n columns, of every dtype in turn."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    found: dict[str, Any] = {}
    for i, (name, kind) in enumerate(fused.kinds.items()):
        if not kind.modes:
            number = torch.rand((), generator=generator)
            found[name] = 7 if kind.type == "int" else float(number)
            continue
        columns = n >> 1 if kind.width < 0 else n << kind.width
        shape = [{"m": m, "n": columns}[mode] for mode in kind.modes]
        dtype = getattr(torch, kind.dtype) if kind.dtype else dtypes[i % 3]
        found[name] = torch.randn(shape, generator=generator).to(dtype)
    return found
