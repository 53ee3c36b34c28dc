"""Turns a HopperPlan into compiled files: the fake operands a kernel is traced with, and its identity."""

from typing import Any

import cutlass
import cutlass.cute as cute
import tvm_ffi  # noqa: F401 - the compiler needs it for the first kernel, and would import it only then
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutegemm.artifact import compile_to_files
from cutegemm.hopper.kernel import HopperGemm
from cutegemm.hopper.layouts import CUTE_DTYPES
from cutegemm.hopper.plan import TMA_ALIGNMENT, HopperPlan
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler

# Neutral symbols: the assembler has been seen to choose differently by name.
HopperGemm.kernel.set_name_prefix("gemm_sm90a", remove_cutlass_symbol=True, keep_mangled_name=False)
HopperGemm.__call__.set_name_prefix("gemm_sm90a_host", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(
    plan: HopperPlan, problem: GemmProblem, scheduler: TileScheduler, target: str, options: str = ""
) -> dict[str, bytes]:
    """Compiles one kernel; sizes and strides stay run-time values.

    problem: the user's (not yet swapped); options: further ones of the compiler.
    Returns the files of ``artifact.compile_to_files``. Raises BuildError.
    """
    seen = problem.swapped() if plan.config.swap_ab else problem
    facts = {
        "smem_bytes": plan.smem_bytes,
        "stages": plan.stages,
        "threads": plan.threads,
        "problem": str(problem),
        "config": str(plan.config),
        "scheduler": str(scheduler),
    }
    return compile_to_files(
        HopperGemm(plan, seen, scheduler),
        _fake_operands(problem, plan),
        target=target,
        facts=facts,
        options=options,
    )


def _fake_operands(problem: GemmProblem, plan: HopperPlan) -> tuple[Any, ...]:
    """Symbolic A, B, D, the addresses of the call record and the outcome, the caller's current stream."""
    m, n, k = (cute.sym_int() for _ in range(3))
    batch = (cute.sym_int(),) if problem.batched else ()

    def operand(dtype_name: str, rows: Any, columns: Any, rows_contiguous: bool, tma: bool = True) -> Any:
        dtype = CUTE_DTYPES[dtype_name]
        alignment = TMA_ALIGNMENT if tma else dtype.width // 8
        divisibility = alignment * 8 // dtype.width

        def stride() -> Any:
            return cute.sym_int64(divisibility=divisibility)

        strides = (1, stride()) if rows_contiguous else (stride(), 1)
        return make_fake_tensor(
            dtype,
            (*batch, rows, columns),
            (*(stride() for _ in batch), *strides),
            assumed_align=alignment,
        )

    return (
        operand(problem.a_dtype, m, k, problem.a_major == "m"),
        operand(problem.b_dtype, k, n, problem.b_major == "k"),
        operand(problem.out_dtype, m, n, problem.out_major == "m", tma=plan.store == "tma"),
        cutlass.Int64(0),
        cutlass.Int64(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
