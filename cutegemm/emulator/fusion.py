"""Runs of simple instructions as one step: what costs time here is the step, not the arithmetic.

Two kinds of runs: integer instructions, compiled to one Python function for the case that all they read is
the same in every lane; and conversions to pairs of narrow floats, done as one array operation. Where the case
is not given, the instructions are executed one by one, as they always are while lanes are apart.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutegemm.emulator.formulas import Formula
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import LANES, Lanes, bfloat16_bits, float16_bits

Op = Callable[[Any], int | None]
SHORTEST = 2  # instructions that are worth it


@dataclass(frozen=True)
class PairConversion:
    """Two float32 registers to one of two narrow floats; ``low`` goes into the lower half."""

    kind: str
    result: int
    high: int
    low: int


Simple = Formula | PairConversion


def pair_conversion(statement: Statement, decoder: Any) -> PairConversion | None:
    """Of a statement without guard; None if it is no such conversion."""
    found = re.fullmatch(r"cvt\.rn\.(b?f16)x2\.f32", statement.opcode)
    if found is None or statement.guard is not None:
        return None
    d, high, low = statement.operands
    sources = [decoder.source(text, statement, 32) for text in (high, low)]
    return PairConversion(found[1], decoder.result(d, statement), *sources)


@dataclass(frozen=True)
class Fused:
    """What to do at each instruction while lanes are together, and how many instructions that covers."""

    ops: list[Op]
    counts: list[int]


def fuse(
    ops: Sequence[Op], simple: Sequence[Simple | None], entries: Iterable[int], live: Sequence[int]
) -> Fused:
    """Finds the runs.

    simple    what is known of each instruction that may be part of a run
    entries   instructions that may be reached otherwise than from the one before
    live      registers read later, by instruction, as numbers with one bit for each
    """
    fused, counts = list(ops), [1] * len(ops)
    starts = set(entries)
    start = 0
    while start < len(simple):
        end = start + 1
        while end < len(simple) and end not in starts and _alike(simple[start], simple[end]):
            end += 1
        members = [member for member in simple[start:end] if member is not None]
        if len(members) >= SHORTEST:
            one_by_one = _one_by_one(ops[start:end])
            formulas = [member for member in members if isinstance(member, Formula)]
            conversions = [member for member in members if isinstance(member, PairConversion)]
            fused[start] = (
                _uniform(formulas, live[end], end, one_by_one)
                if formulas
                else _conversions(conversions, end, one_by_one)
            )
            counts[start] = len(members)
        start = end
    return Fused(fused, counts)


def _alike(first: Simple | None, other: Simple | None) -> bool:
    if isinstance(first, PairConversion):
        return isinstance(other, PairConversion) and first.kind == other.kind
    return isinstance(first, Formula) and isinstance(other, Formula)


def _one_by_one(ops: Sequence[Op]) -> Op:
    """The instructions as they are, with the warp's place in the code kept up for reports and waits."""

    def run(warp: Any) -> int | None:
        for op in ops:
            following = op(warp)
            if following is not None:
                return following
            warp.pc += 1
        place: int = warp.pc
        return place

    return run


def _uniform(formulas: list[Formula], live: int, end: int, otherwise: Op) -> Op:
    """One function of Python numbers; only registers that are read later are written."""
    known: dict[int, str] = {}
    kinds: dict[int, str] = {}
    lines = []
    for formula in formulas:
        for slot, kind in formula.reads:
            if slot not in known:
                known[slot] = f"v{slot}"
                kinds[slot] = kind
        expressions = formula.expressions(known)
        for (slot, _), expression in zip(formula.writes, expressions, strict=True):
            lines.append(f"        w{slot} = {expression}")
        # All of an instruction's results at once: it may read a register that it writes.
        for slot, _ in formula.writes:
            known[slot] = f"w{slot}_{len(lines)}"
            lines.append(f"        {known[slot]} = w{slot}")
    given = [f"    v{slot} = r[{slot}]" for slot in kinds]
    condition = " and ".join(f"type(v{slot}) is {kind}" for slot, kind in kinds.items()) or "True"
    written = [
        f"        r[{slot}] = {name}" for slot, name in known.items() if name[0] == "w" and live >> slot & 1
    ]
    source = "\n".join(
        [
            "def run(warp):",
            "    r = warp.r",
            *given,
            f"    if {condition}:",
            *lines,
            *written,
            f"        return {end}",
            "    return otherwise(warp)",
        ]
    )
    names: dict[str, Any] = {"otherwise": otherwise}
    exec(source, names)
    run: Op = names["run"]
    return run


def _conversions(conversions: list[PairConversion], end: int, otherwise: Op) -> Op:
    sources = [slot for conversion in conversions for slot in (conversion.low, conversion.high)]
    results = [conversion.result for conversion in conversions]
    narrow = {"bf16": bfloat16_bits, "f16": float16_bits}[conversions[0].kind]
    inputs = set(sources)

    def run(warp: Any) -> int | None:
        r = warp.r
        given = [r[slot] for slot in sources]
        for value in given:
            if type(value) is not np.ndarray or value.dtype != np.uint32:
                return otherwise(warp)
        numbers = np.concatenate(given).view(np.float32)
        halves = narrow(numbers).reshape(len(results), 2, LANES)
        pairs: Lanes = halves[:, 0] | halves[:, 1].astype(np.uint32) << np.uint32(16)
        for slot, row in zip(results, pairs, strict=True):
            r[slot] = row
        return end

    # An input that an earlier instruction of the run has written would be read too early.
    return otherwise if inputs & set(results) else run
