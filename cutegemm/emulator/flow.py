"""What follows from a kernel's control flow: which registers are still read, and who a warp is."""

from collections.abc import Callable, Iterator, Sequence
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

    def entries(self) -> set[int]:
        """Statements that are reached otherwise than from the one before, or from there not always."""
        places: set[int] = set()
        for pc, following in enumerate(self.successors):
            if following != (pc + 1,):
                places.update(following)
                places.add(pc + 1)
        return places

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


def members(bits: int) -> Iterator[int]:
    """The registers of a set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _loaded_by(
    statements: Sequence[Statement], read: Sequence[int], written: Sequence[int]
) -> dict[int, int]:
    """By register: the tcgen05.ld (a set of one bit for each statement) whose result it holds or copies."""
    loads: dict[int, int] = {}
    for pc, statement in enumerate(statements):
        if statement.opcode.startswith("tcgen05.ld"):
            loads.update((register, loads.get(register, 0) | 1 << pc) for register in members(written[pc]))
    changed = bool(loads)
    while changed:
        changed = False
        for pc, statement in enumerate(statements):
            if not statement.opcode.startswith("mov."):
                continue
            origin = 0
            for register in members(read[pc]):
                origin |= loads.get(register, 0)
            for register in members(written[pc]) if origin else ():
                if origin & ~loads.get(register, 0):
                    loads[register] = loads.get(register, 0) | origin
                    changed = True
    return loads


def first_uses(
    statements: Sequence[Statement], reach: Reach, read: Sequence[int], written: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Statements that may be the first after tcgen05.ld to use its results: which loads each of them uses.

    Nothing is a use after tcgen05.wait::ld. Moves are none either: compilers put them anywhere, and the
    assembler drops them. Sets of registers are numbers with one bit for each.
    """
    loads = _loaded_by(statements, read, written)
    groups: dict[int, int] = {}
    for register, origin in loads.items():
        for load in members(origin):
            groups[load] = groups.get(load, 0) | 1 << register
    before = [0] * (len(reach.successors) + 1)
    uses: dict[int, int] = {}
    pending = list(range(len(statements))) if loads else []
    while pending:
        pc = pending.pop()
        opcode, flying = statements[pc].opcode, before[pc]
        touched = read[pc] & flying
        if opcode.startswith("tcgen05.wait::ld"):
            flying = 0
        elif touched and not opcode.startswith("mov."):
            for register in members(touched):
                uses[pc] = uses.get(pc, 0) | loads[register]
            for load in members(uses[pc]):
                flying &= ~groups[load]
        if opcode.startswith("tcgen05.ld") or (touched and opcode.startswith("mov.")):
            flying |= written[pc]
        else:
            flying &= ~written[pc]
        for following in reach.successors[pc]:
            if flying & ~before[following]:
                before[following] |= flying
                if following < len(statements):
                    pending.append(following)
    return {pc: tuple(members(origin)) for pc, origin in uses.items()}


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
