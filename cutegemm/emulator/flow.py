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


def roles(statements: Sequence[Statement], reach: Reach) -> list[str]:
    """Who a warp is at each statement, by what it can still reach: TMA loads only, or WGMMAs only."""

    def step(pc: int, following: list[tuple[bool, bool]]) -> tuple[bool, bool]:
        opcode = statements[pc].opcode
        load = "mbarrier::complete_tx::bytes" in opcode or any(loads for loads, _ in following)
        return load, "mma_async" in opcode or any(multiplies for _, multiplies in following)

    names = {(True, False): "producer", (False, True): "consumer"}
    return [names.get(pair, "") for pair in reach.backward((False, False), step)]
