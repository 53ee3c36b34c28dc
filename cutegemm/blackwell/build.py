"""Turns a BlackwellPlan into compiled files: the fake operands a kernel is traced with, and its identity."""

import tvm_ffi  # noqa: F401 - the compiler needs it for the first kernel, and would import it only then

from cutegemm.artifact import compile_to_files
from cutegemm.blackwell.kernel import BlackwellGemm
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.parts.tensors import fake_operands
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler

# Neutral symbols: the assembler has been seen to choose differently by name.
BlackwellGemm.kernel.set_name_prefix("gemm_sm100a", remove_cutlass_symbol=True, keep_mangled_name=False)
BlackwellGemm.__call__.set_name_prefix(
    "gemm_sm100a_host", remove_cutlass_symbol=True, keep_mangled_name=False
)


def build(
    plan: BlackwellPlan, problem: GemmProblem, scheduler: TileScheduler, target: str, options: str = ""
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
        BlackwellGemm(plan, seen, scheduler),
        fake_operands(problem, plan.paths.swapped() if plan.config.swap_ab else plan.paths),
        target=target,
        facts=facts,
        options=options,
    )
