"""Whether the clusters of a launch can do without each other, so that they may run in different processes."""

import math
import os
import sys

from cutegemm.emulator.decode import Program
from cutegemm.emulator.machine import LaunchRecord
from cutegemm.emulator.ops_memory import order_of, space_of
from cutegemm.emulator.processors import Processors
from cutegemm.emulator.ptx import Statement
from cutegemm.errors import ProblemError

_WIDE_SCOPES = frozenset({"gpu", "sys", "gl"})  # of fences: those that reach other clusters


def processes_for(asked: int | None, program: Program, launch: LaunchRecord, processors: Processors) -> int:
    """How many processes a launch is divided among; 1 if its clusters depend on each other.

    asked   at most so many; None or 0: as many as there are CPUs for this process
    Raises ProblemError for a number below 0.
    """
    if asked is not None and asked < 0:
        raise ProblemError(
            f"processes is {asked}; give a number from 1 on, or 0 for as many as there are CPUs"
        )
    if sys.platform != "linux":
        return 1
    clusters = math.prod(launch.grid) // math.prod(launch.cluster)
    count = min(asked or len(os.sched_getaffinity(0)), clusters)
    return count if count > 1 and independent(program, processors) else 1


def independent(program: Program, processors: Processors) -> bool:
    """Whether no cluster can see what another one does, unless the kernel has a race.

    They can through words of global memory that are accessed atomically or with an ordering (work counters,
    sums, semaphores), through fences for the whole GPU, through launch control, which hands out the work of
    others, and through tensor memory where several CTAs share an SM's. The number of the SM depends on the
    others too.
    """
    if any(name.startswith("%smid") for name in program.specials):
        return False
    if program.uses_tensor_memory and processors.each > 1:
        return False
    return not any(_reaches_others(statement) for statement in program.module.statements)


def _reaches_others(statement: Statement) -> bool:
    parts = statement.opcode.split(".")
    if parts[0] in ("clusterlaunchcontrol", "multimem"):
        return True
    if parts[0] in ("fence", "membar"):
        return not _WIDE_SCOPES.isdisjoint(parts)
    if parts[:2] == ["cp", "reduce"]:
        return "global" in parts
    elsewhere = space_of(statement.opcode) != "shared"
    if parts[0] in ("ld", "st"):
        return elsewhere and order_of(parts) != "plain"
    return elsewhere and parts[0] in ("atom", "red")
