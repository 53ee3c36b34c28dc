"""Tensors that say they lie on a GPU, for tests of what happens before a launch, on machines without one.

Memory, strides and addresses are those of a CPU tensor; only the device is claimed. The launch itself is
replaced by torch's product.
"""

import ctypes
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import Gemm, GemmConfig
from cutegemm.alignment import paths_of
from cutegemm.callrecord import CallRecord, Outcome
from cutegemm.gemm import Launch
from cutegemm.operands import byte_span
from cutegemm.parts.paths import Paths


class OnGpu(torch.Tensor):
    """A tensor that claims to lie on the first GPU; views of it claim the same."""

    index = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The claimed device."""
        return torch.device("cuda", self.index)

    def get_device(self) -> int:
        """The claimed device's index."""
        return self.index


class OnSecondGpu(OnGpu):
    """A tensor that claims to lie on the second GPU."""

    index = 1


def on_gpu(tensor: torch.Tensor, kind: type[OnGpu] = OnGpu) -> torch.Tensor:
    """The same memory under another name."""
    return tensor.as_subclass(kind)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A dense tensor of a claimed GPU, 16-byte aligned as every allocation is."""
    tensor = torch.zeros(shape, dtype=dtype)
    assert tensor.data_ptr() % 16 == 0
    return on_gpu(tensor)


SMALL = GemmConfig(64, 8, consumers=1)


def torch_in_place_of_the_host_code(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, record_address: int, outcome_address: int
) -> None:
    """Refuses what the compiled host code refuses; otherwise torch's product."""
    record = CallRecord.from_address(record_address)
    outcome = ctypes.c_int32.from_address(outcome_address)
    batches = a.shape[0] if a.dim() == 3 else record.l
    first, end = out.data_ptr(), out.data_ptr() + byte_span(out)
    meets = any(first < x.data_ptr() + byte_span(x) and x.data_ptr() < end for x in (a, b))
    if (batches, a.shape[-2], b.shape[-1], a.shape[-1]) != (record.l, record.m, record.n, record.k):
        outcome.value = Outcome.OTHER_SIZES
    elif meets and not record.disjoint:
        outcome.value = Outcome.MAY_OVERLAP
    else:
        outcome.value = Outcome.LAUNCHED
        with torch.no_grad():
            out.copy_(a.float() @ b.float())


def gemm_on_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int | None, ...] = (None, None, None), **options: Any
) -> tuple[Gemm, list[tuple[Any, ...]]]:
    """A Gemm whose launches are torch's product, and the launches prepared: (l, m, n, k, device, paths)."""
    prepared: list[tuple[Any, ...]] = []

    def prepare(self: Gemm, sizes: tuple[int, ...], device: int, paths: Paths) -> Launch:
        prepared.append((*sizes, device, paths))

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, record: int, outcome: int) -> None:
            allowed = paths_of(self.problem, sizes, a, b, out)
            ways = list(zip(vars(paths).values(), vars(allowed).values(), strict=True))
            if any(built == "tma" != found for built, found in ways):
                raise ValueError("Misaligned Tensor data")
            if any(found == "tma" != built for built, found in ways):
                ctypes.c_int32.from_address(outcome).value = Outcome.OTHER_PATHS
                return
            torch_in_place_of_the_host_code(a, b, out, record, outcome)

        shape = (*sizes[:1], *sizes[1:3]) if self.problem.batched else sizes[1:3]

        def new_result() -> torch.Tensor:
            return on_gpu(torch.empty(shape, dtype=self.problem.out_torch))

        return Launch(launch, *(CallRecord(*sizes, 1, known) for known in (0, 1)), new_result)

    def allocate(self: Gemm, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shape = (*a.shape[:-1], b.shape[-1])
        return on_gpu(torch.empty(shape, dtype=self.problem.out_torch), type(a))  # type: ignore[arg-type]

    monkeypatch.setattr(Gemm, "_prepare_launch", prepare)
    monkeypatch.setattr(Gemm, "_allocate", allocate)
    dtype = options.pop("dtype", torch.bfloat16)
    return cutegemm.compile(shape, dtype, target="sm_90a", config=SMALL, **options), prepared
