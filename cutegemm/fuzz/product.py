"""What is fuzzed: the library's own product, on a GPU or emulated. Tests put faulty ones in their place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

import cutegemm
from cutegemm.bench.gpu import DeviceLostError
from cutegemm.fuzz.case import Case
from cutegemm.gemm import Gemm
from cutegemm.operands import operand_rules, store_path

GEMMS_KEPT = 512


class Product(Protocol):
    """A way to compute a case. Picklable: it is made in one process and used in another."""

    @property
    def device(self) -> str:
        """Where its operands lie."""

    def run(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, turn: int
    ) -> torch.Tensor:
        """The product, finished; ``turn`` counts the times that the same operands were passed before."""

    def paths(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[str, str, str]:
        """How A and B are loaded and D is stored."""


@dataclass(frozen=True)
class GpuProduct:
    """On the current GPU."""

    device: str = "cuda"

    def run(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, turn: int
    ) -> torch.Tensor:
        """See Product. Raises DeviceLostError where the GPU can do no more in this process."""
        try:
            result = _computation(case, None)(a, b, out=out)
            torch.cuda.synchronize()
        except RuntimeError as error:
            if is_lost(error):
                raise DeviceLostError(str(error).splitlines()[0]) from error
            raise
        return result

    def paths(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[str, str, str]:
        """See Product."""
        return _paths(case, gemm_of(case, None), a, b, out)


@dataclass(frozen=True)
class EmulatedProduct:
    """In the emulator, for a target; the second time in another order, which must not matter."""

    target: str
    device: str = "cpu"

    def run(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, turn: int
    ) -> torch.Tensor:
        """See Product."""
        order = case.adverse if turn == 0 else case.seed
        check = turn == 0 and case.adverse is not None
        emulation = gemm_of(case, self.target).emulate(
            a, b, out=out, seed=order, check=check, resident=case.resident
        )
        if emulation.out is None:
            raise RuntimeError("the emulator returned no result")
        return emulation.out

    def paths(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[str, str, str]:
        """See Product."""
        return _paths(case, gemm_of(case, self.target), a, b, out)


def is_lost(error: BaseException) -> bool:
    """Whether the CUDA context is beyond use after this error."""
    return "CUDA error" in str(error) and "out of memory" not in str(error)


def gemm_of(case: Case, target: str | None) -> Gemm:
    """The Gemm that a case is computed with; the same one for cases that differ in sizes only."""
    sizes: tuple[int | None, ...] = (case.m, case.n, case.k)
    if case.l is not None:
        sizes = (case.l, *sizes)
    if case.call != "known":
        sizes = (None,) * len(sizes)
    return _gemm(sizes, case.dtype, case.out_dtype, case.majors, case.config, case.scheduler, target)


@lru_cache(maxsize=GEMMS_KEPT)
def _gemm(sizes, dtype, out_dtype, majors, config, scheduler, target) -> Gemm:  # type: ignore[no-untyped-def]
    a_major, b_major, out_major = majors
    return cutegemm.compile(
        sizes,
        dtype,
        out_dtype=out_dtype,
        a_major=a_major,
        b_major=b_major,
        out_major=out_major,
        config=config,
        scheduler=scheduler,
        target=target,
    )


def _computation(case: Case, target: str | None) -> Callable[..., torch.Tensor]:
    return cutegemm.matmul if case.call == "matmul" else gemm_of(case, target)


def _paths(
    case: Case, gemm: Gemm, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> tuple[str, str, str]:
    """Asked of the library, where it decides."""
    device = "cuda" if a.is_cuda else "cpu"
    loads = []
    for rule, tensor in zip(operand_rules(gemm.problem, device), (a, b), strict=False):
        loads.append("TMA" if rule.misalignment(tensor) is None else "not TMA")
    store = store_path(gemm.problem, case.sizes, out)
    splits = case.scheduler.splits if case.scheduler is not None else 1
    return loads[0], loads[1], "split" if splits > 1 else store
