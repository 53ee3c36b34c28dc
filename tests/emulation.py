"""What the emulator's tests share: one product on guarded CPU operands, and kernels with a planted fault."""

import re
from dataclasses import replace
from functools import cache

import torch
from gpu_checks import Case, Operands

import cutegemm
from cutegemm.config import GemmConfig
from cutegemm.emulator import Emulation
from cutegemm.emulator.product import Circumstances, emulate
from cutegemm.gemm import Gemm
from cutegemm.hardware import gpu_by_name
from cutegemm.scheduler import TileScheduler

TARGET = "sm_90a"
GPU = gpu_by_name("H200")


def gemm_of(
    case: Case, config: GemmConfig, scheduler: TileScheduler | None = None, target: str = TARGET
) -> Gemm:
    """The gemm of a case, for sizes known at the call."""
    shape: tuple[int | None, ...] = (None, None, None) if case.l is None else (None, None, None, None)
    return cutegemm.compile(
        shape,
        case.dtype,
        out_dtype=case.out_dtype,
        a_major=case.a_major,
        b_major=case.b_major,
        out_major=case.out_major,
        scheduler=scheduler or TileScheduler(),
        config=config,
        target=target,
    )


def judged(gemm: Gemm, case: Case, **circumstances: object) -> Emulation:
    """Emulates a case between canaries; fails unless the result is right and nothing else was written."""
    operands = Operands.make(case, "cpu")
    with torch.no_grad():
        result = gemm.emulate(
            operands.a.tensor,
            operands.b.tensor,
            out=operands.out.tensor,
            **circumstances,  # type: ignore[arg-type]
        )
    assert result.out is operands.out.tensor
    operands.judge(circumstances)
    return result


@cache
def kernel(config: GemmConfig, case: Case = Case(256, 256, 576)) -> Gemm:  # noqa: B008 - frozen
    """A gemm whose kernel is built once for all tests."""
    return gemm_of(case, config).build()


def with_ptx(gemm: Gemm, case: Case, ptx: str, circumstances: Circumstances) -> Operands:
    """Runs other device code in a gemm's place; returns the operands it ran on."""
    operands = Operands.make(case, "cpu", seed=1)
    tensors = (operands.a.tensor, operands.b.tensor, operands.out.tensor)
    emulate(gemm._kernels, GPU, tensors, replace(circumstances, ptx=ptx))
    return operands


def replaced(ptx: str, pattern: str, new: str, count: int = 0, least: int = 1) -> str:
    """PTX with matches of a pattern replaced; fails if there are fewer than ``least``."""
    changed, found = re.subn(pattern, new, ptx, count=count, flags=re.MULTILINE)
    assert found >= least, f"{pattern!r} is found {found} times"
    return changed
