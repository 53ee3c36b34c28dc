"""Turns a plan into compiled files: traced with symbolic operands, and its facts beside them."""

from collections.abc import Callable
from typing import Any

import tvm_ffi  # noqa: F401 - the compiler needs it for the first kernel, and would import it only then

from cutegemm.artifact import compile_to_files
from cutegemm.parts.plan import KernelPlan
from cutegemm.parts.tensors import fake_operands
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler


def build_kernel(
    kernel: Callable[[Any, GemmProblem, TileScheduler], Any],
    plan: KernelPlan,
    problem: GemmProblem,
    scheduler: TileScheduler,
    target: str,
    options: str = "",
) -> dict[str, bytes]:
    """Compiles one kernel; sizes and strides stay run-time values.

    kernel    makes the kernel of a plan, a problem as the kernel sees it, and a scheduler
    problem   the user's (not yet swapped); options: further ones of the compiler.
    Returns the files of ``artifact.compile_to_files``. Raises BuildError.
    """
    swap = plan.config.swap_ab
    facts = {
        "smem_bytes": plan.smem_bytes,
        "stages": plan.stages,
        "threads": plan.threads,
        "problem": str(problem),
        "config": str(plan.config),
        "scheduler": str(scheduler),
    }
    return compile_to_files(
        kernel(plan, problem.swapped() if swap else problem, scheduler),
        fake_operands(problem, plan.paths.swapped() if swap else plan.paths),
        target=target,
        facts=facts,
        options=options,
    )
