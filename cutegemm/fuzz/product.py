"""What is fuzzed: the library's own product, on a GPU or emulated. Tests put faulty ones in their place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

import cutegemm
from cutegemm.alignment import one_at_a_time, paths_of
from cutegemm.bench.gpu import DeviceLostError
from cutegemm.fuzz.case import Case
from cutegemm.gemm import Gemm
from cutegemm.operands import operand_rules

GEMMS_KEPT = 512


@dataclass(frozen=True)
class Ways:
    """How the operands of a call travel; empty where nothing is launched.

    a, b      how A and B are loaded; d: how D is stored; "copied" for a tensor that is copied first
    singly    whether the products of a batch are launched one by one
    """

    a: str = ""
    b: str = ""
    d: str = ""
    singly: bool = False


NOT_LAUNCHED = Ways()


class Product(Protocol):
    """A way to compute a case. Picklable: it is made in one process and used in another."""

    @property
    def device(self) -> str:
        """Where its operands lie."""

    @property
    def target(self) -> str:
        """Architecture of its kernels."""

    def run(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, turn: int
    ) -> torch.Tensor:
        """The product, finished; ``turn`` counts the times that the same operands were passed before."""

    def ways(self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Ways:
        """How its operands travel. Raises what ``run`` raises."""


@dataclass(frozen=True)
class GpuProduct:
    """On the current GPU, which runs kernels of a target."""

    target: str
    device: str = "cuda"

    def run(
        self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, turn: int
    ) -> torch.Tensor:
        """See Product. Raises DeviceLostError where the GPU can do no more in this process."""
        try:
            result = _computation(case, self.target)(a, b, out=out)
            torch.cuda.synchronize()
        except RuntimeError as error:
            if is_lost(error):
                raise DeviceLostError(str(error).splitlines()[0]) from error
            raise
        return result

    def ways(self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Ways:
        """See Product."""
        return _ways(case, gemm_of(case, self.target), a, b, out)


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

    def ways(self, case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Ways:
        """See Product."""
        return _ways(case, gemm_of(case, self.target), a, b, out)


def is_lost(error: BaseException) -> bool:
    """Whether the CUDA context is beyond use after this error."""
    words = str(error).lower()
    return "cuda error" in words and "out of memory" not in words


def gemm_of(case: Case, target: str) -> Gemm:
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


def _computation(case: Case, target: str) -> Callable[..., torch.Tensor]:
    return cutegemm.matmul if case.call == "matmul" else gemm_of(case, target)


def _ways(case: Case, gemm: Gemm, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Ways:
    """Asked of the library, where it decides."""
    a_rule, b_rule, _ = operand_rules(gemm.problem, a.device.type)
    paths = paths_of(gemm.problem, case.sizes, a, b, out)
    of_a: str = paths.a if a_rule.is_contiguous(a) else "copied"
    of_b: str = paths.b if b_rule.is_contiguous(b) else "copied"
    if gemm.problem.batched and one_at_a_time(gemm.problem, a, b):
        of_a, of_b = f"{of_a} singly", f"{of_b} singly"
    return Ways(of_a, of_b, _store_of(case, paths.store))


def _store_of(case: Case, store: str) -> str:
    """Where CTAs share a tile's K there is but one way to store."""
    return "split" if case.scheduler is not None and case.scheduler.splits > 1 else store
