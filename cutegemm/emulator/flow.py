"""What follows from a kernel's control flow: which registers are still read, and who a warp is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cutegemm.emulator.ptx import Statement

T = TypeVar("T")


@dataclass(frozen=True)
class Reach:
    """For each statement, the indices of those that may come next; the last index is the end."""

    successors: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, statements: Sequence[Statement], jumps: Sequence[int | None]) -> "Reach":
        """jumps: where each statement may branch to, None if it is no branch."""
        successors = []
        for pc, (statement, jump) in enumerate(zip(statements, jumps, strict=True)):
            leaves = statement.opcode.split(".")[0] in ("bra", "ret", "exit") and statement.guard is None
            following = () if leaves else (pc + 1,)
            successors.append(following if jump is None else (*following, jump))
        return cls(tuple(successors))

    def backward(self, start: T, step: Callable[[int, list[T]], T]) -> list[T]:
        """The smallest solution of value[pc] = step(pc, values of what comes next), from ``start`` upward."""
        values = [start] * (len(self.successors) + 1)
        changed = True
        while changed:
            changed = False
            for pc in reversed(range(len(self.successors))):
                value = step(pc, [values[following] for following in self.successors[pc]])
                if value != values[pc]:
                    values[pc] = value
                    changed = True
        return values


def live_registers(reach: Reach, read: Sequence[int], replaced: Sequence[int]) -> list[int]:
    """For each statement and the end, the registers a lane that is there may still read.

    Sets of registers are numbers with one bit for each. replaced: registers a statement writes in every lane
    that executes it.
    """

    def step(pc: int, following: list[int]) -> int:
        needed = 0
        for later in following:
            needed |= later
        return read[pc] | needed & ~replaced[pc]

    return reach.backward(0, step)


def first_uses(
    statements: Sequence[Statement], reach: Reach, read: Sequence[int], written: Sequence[int]
) -> list[int]:
    """Statements that may use a result of tcgen05.ld before any tcgen05.wait::ld.

    Moves are no uses: compilers put them anywhere, and what they copy is as little there as before. Of
    several uses on a way only the first counts. Sets of registers are numbers with one bit for each.
    """
    before = [0] * (len(reach.successors) + 1)
    uses: set[int] = set()
    pending = list(range(len(statements)))
    while pending:
        pc = pending.pop()
        opcode, flying = statements[pc].opcode, before[pc]
        touched = read[pc] & flying
        if opcode.startswith("tcgen05.wait::ld"):
            flying = 0
        elif touched and not opcode.startswith("mov."):
            uses.add(pc)
            flying = 0
        if opcode.startswith("tcgen05.ld") or (touched and flying):
            flying |= written[pc]
        else:
            flying &= ~written[pc]
        for following in reach.successors[pc]:
            if flying & ~before[following]:
                before[following] |= flying
                if following < len(statements):
                    pending.append(following)
    return sorted(uses)


def role_of(opcode: str) -> str:
    """Who executes an instruction, "" if anybody may."""
    if "mbarrier::complete_tx::bytes" in opcode:
        return "scheduler" if opcode.startswith("clusterlaunchcontrol") else "producer"
    if "wgmma.mma_async" in opcode:
        return "consumer"
    if opcode.startswith("tcgen05.mma"):
        return "MMA"
    return "epilogue" if opcode.startswith("tcgen05.ld") else ""


def roles(statements: Sequence[Statement], reach: Reach) -> list[str]:
    """Who a warp is at each statement: what it can still reach is for one role only, else ""."""
    own = [frozenset({role_of(statement.opcode)} - {""}) for statement in statements]
    nobody: frozenset[str] = frozenset()
    marks = reach.backward(nobody, lambda pc, following: own[pc].union(*following))
    return [next(iter(found)) if len(found) == 1 else "" for found in marks]
