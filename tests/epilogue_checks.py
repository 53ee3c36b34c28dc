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
ACCUMULATOR = 2e-6  # of the largest one: by how much products summed in another order differ


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


class Truth:
    """An epilogue's outputs by its own reference, and how far rounding in the product moves each of them.

    A difference of nearly equal values, or the smallest of many, may be all rounding.
    """

    def __init__(self, fused: Fused, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any]) -> None:
        accumulator = torch.matmul(a.float(), b.float())
        generator = torch.Generator(a.device).manual_seed(5)
        signs = torch.randn(accumulator.shape, generator=generator, device=a.device).sign()
        largest = accumulator.abs().max() if accumulator.numel() else 0.0
        self.outputs = self._named(fused.applied(accumulator, **operands))
        self.spread = {name: torch.zeros_like(value) for name, value in self.outputs.items()}
        for way in (signs, -signs):
            moved = self._named(fused.applied(accumulator + ACCUMULATOR * largest * way, **operands))
            for name, value in self.outputs.items():
                distance = (moved[name] - value).abs().nan_to_num(0.0, 0.0)
                self.spread[name] = torch.maximum(self.spread[name], distance)

    def judge(self, out: torch.Tensor, further: Mapping[str, torch.Tensor], what: object = "") -> None:
        """Fails unless a call's outputs are what the reference says."""
        found = {"out": out, **further}
        assert found.keys() == self.outputs.keys()
        complaints = {
            name: complaint(found[name].cpu(), value.cpu(), self.spread[name].cpu())
            for name, value in self.outputs.items()
        }
        wrong = {name: text for name, text in complaints.items() if text}
        assert not wrong, (what, wrong)

    @staticmethod
    def _named(outputs: Any) -> dict[str, torch.Tensor]:
        main, further = outputs if isinstance(outputs, tuple) else (outputs, {})
        return {"out": main, **further}


def complaint(result: torch.Tensor, truth: torch.Tensor, spread: torch.Tensor | None = None) -> str | None:
    """What is wrong with a result; None if it is the truth but for rounding. spread: see Truth."""
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
    if spread is not None:
        allowed += spread.double()[finite]
    wrong = ~((got - truth).abs() <= allowed)
    if wrong.any():
        return f"{int(wrong.sum())} of {truth.numel()} wrong, by up to {float((got - truth).abs().max()):.3e}"
    return None


def judge(emulation: Emulation, truth: Any) -> None:
    """Fails unless the outputs are what a reference says."""
    main, further = truth if isinstance(truth, tuple) else (truth, {})
    assert emulation.out is not None
    found, expected = {"out": emulation.out, **emulation.outputs}, {"out": main, **further}
    assert found.keys() == expected.keys()
    complaints = {name: complaint(found[name], value) for name, value in expected.items()}
    wrong = {name: text for name, text in complaints.items() if text}
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
    assert emulation.out is not None
    Truth(fused, a, b, operands).judge(emulation.out, emulation.outputs)
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
