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
from cutegemm.fuzz.kinds import Kind, has_kernel
from cutegemm.gemm import Gemm
from cutegemm.operands import operand_rules

GEMMS_KEPT = 512


@dataclass(frozen=True)
class Ways:
    """How the operands of a call travel; empty where nothing is launched.

    a, b      how A and B are loaded; d: how D is stored; "copied" for a tensor that is copied first
    singly    whether the products of a batch are launched one by one
    exist     whether the configuration that the case asks for, if any, has a kernel for them
    """

    a: str = ""
    b: str = ""
    d: str = ""
    singly: bool = False
    exist: bool = True


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
        """How its operands travel."""


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
        return ways_of(case, self.target, a, b, out)


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
        return ways_of(case, self.target, a, b, out)


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


def ways_of(case: Case, target: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Ways:
    """Asked of the library, where it decides."""
    batched = case.l is not None
    kind = Kind(case.dtype, case.out_dtype, case.majors, batched, case.config, case.scheduler, target)
    problem = kind.problem
    paths = paths_of(problem, case.sizes, a, b, out)
    split = case.scheduler is not None and case.scheduler.splits > 1
    ways = (paths.a, paths.b, "split" if split else paths.store)
    of_a, of_b, of_d = (
        way if tensor is None or rule.is_contiguous(tensor) else "copied"
        for way, rule, tensor in zip(ways, operand_rules(problem, a.device.type), (a, b, out), strict=True)
    )
    return Ways(of_a, of_b, of_d, batched and one_at_a_time(problem, a, b), has_kernel(kind, paths))
