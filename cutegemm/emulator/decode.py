"""PTX statements to closures: each instruction is decoded once, for all warps of all CTAs.

An instruction becomes ``op(warp)``. It returns None to go on with the next one, the index to branch to, or
one of the negative codes below. Registers, literals and special registers are numbered slots of a warp's
register file, so that a closure finds every operand in the same way.

Opcode families live in modules of their own and enter themselves with ``@opcode``.
"""

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutegemm.emulator.faults import UnknownInstructionError
from cutegemm.emulator.flow import Reach, first_uses, live_registers, roles
from cutegemm.emulator.formulas import formula
from cutegemm.emulator.fusion import Fused, Simple, fuse, pair_conversion
from cutegemm.emulator.lazy import lazy
from cutegemm.emulator.ptx import Module, Scope, Statement
from cutegemm.emulator.values import ALL_BITS, LANES, bits_of, mask_of, merge

BLOCKED = -1  # try the same instruction again once warp.wait is over
DIVERGED = -2  # warp.split holds the branch target and the lanes that take it
EXITED = -3

Op = Callable[[Any], int | None]
SINK = 0  # slot for results nobody wants
PARAM_SPACE = 1 << 56  # where kernel parameters appear to lie; no tensor does
POISON: dict[str, Any] = {
    "pred": False,
    "b16": 0xFFFF,
    "b64": mask_of(64),
    "b128": np.full((LANES, 2), mask_of(64), dtype=np.uint64).view("V16")[:, 0],
}

_families: dict[str, Callable[[Statement, "Decoder"], Op]] = {}


def opcode(*names: str) -> Callable[[Any], Any]:
    """Registers a decoder for opcodes by their longest matching dotted prefix."""

    def register(decoder: Any) -> Any:
        for name in names:
            _families[name] = decoder
        return decoder

    return register


@dataclass
class Program:
    """A kernel ready to run.

    ops         one closure for each statement, and one that ends a warp that runs past the last
    fused       what to do instead while lanes are together, and how many statements that covers
    results     slots each statement writes; they are merged where only some lanes execute it
    written     the same as a number with one bit for each slot
    live        slots that a lane which is at a statement may still read, likewise
    template    initial register file: literals in place, everything else poisoned
    specials    slot of each special register, to be filled for each warp
    roles       for each op, what a warp that is there can still become: "producer", "consumer", "MMA",
                "epilogue", "scheduler", or more than one: ""
    """

    module: Module
    ops: list[Op] = field(default_factory=list)
    fused: Fused = field(default_factory=lambda: Fused([], []))
    results: list[tuple[int, ...]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    template: list[Any] = field(default_factory=list)
    specials: dict[str, int] = field(default_factory=dict)
    param_offsets: dict[str, int] = field(default_factory=dict)
    param_bytes: int = 0
    shared_offsets: dict[str, int] = field(default_factory=dict)
    static_shared_end: int = 0
    roles: list[str] = field(default_factory=list)

    @lazy
    def uses_tensor_memory(self) -> bool:
        """Whether there is any tcgen05 instruction."""
        return any(s.opcode.startswith("tcgen05.") for s in self.module.statements)

    @lazy
    def fences_tensor_memory(self) -> bool:
        """Whether the code has tcgen05.fence anywhere, and so needs it wherever threads hand over."""
        return any(s.opcode.startswith("tcgen05.fence") for s in self.module.statements)

    def statement(self, pc: int) -> Statement:
        """The statement at an index."""
        return self.module.statements[min(pc, len(self.module.statements) - 1)]


class Decoder:
    """Assigns slots and decodes statements."""

    def __init__(self, module: Module, shared_base: int) -> None:
        self.program = Program(module)
        self.program.template.append(0)  # SINK
        self._slots: dict[tuple[int, str], int] = {}
        self._literals: dict[tuple[str, int], int] = {}
        self._constants: set[int] = set()
        self._written: list[int] = []
        self._read: list[int] = []
        self._place_params()
        self._place_shared(shared_base)

    def decode(self) -> Program:
        """All statements. Raises UnknownInstructionError at the first that cannot be executed."""
        program = self.program
        read, replaced = [], []
        simple: list[Simple | None] = []
        for statement in program.module.statements:
            self._written, self._read = [], []
            op = self._one(statement)
            simple.append(formula(statement, self) or pair_conversion(statement, self))
            written = tuple(dict.fromkeys(s for s in self._written if s != SINK))
            program.ops.append(self._guarded(op, statement, written) if statement.guard else op)
            program.results.append(written)
            program.written.append(_bits(written))
            read.append(_bits(self._read))
            replaced.append(0 if statement.guard else _bits(written))
        program.ops.append(lambda warp: EXITED)
        program.results.append(())
        program.written.append(0)
        reach = Reach.of(program.module.statements, [self._jump(s) for s in program.module.statements])
        program.live = live_registers(reach, read, replaced)
        program.roles = roles(program.module.statements, reach)
        for pc, loads in first_uses(program.module.statements, reach, read, program.written).items():
            program.ops[pc] = _using_loads(program.ops[pc], loads)
            simple[pc] = None
        program.fused = fuse(program.ops, simple, reach.entries(), program.live)
        return program

    def _jump(self, statement: Statement) -> int | None:
        """Where a branch leads."""
        is_branch = statement.opcode.split(".")[0] == "bra"
        return self.target(statement.operands[0], statement) if is_branch else None

    def _one(self, statement: Statement) -> Op:
        parts = statement.opcode.split(".")
        for length in range(len(parts), 0, -1):
            family = _families.get(".".join(parts[:length]))
            if family is not None:
                return family(statement, self)
        raise self.unknown(statement)

    def unknown(self, statement: Statement, why: str = "") -> UnknownInstructionError:
        """The error for a statement no decoder takes."""
        return UnknownInstructionError(
            f"{statement.where} is not executed by this emulator{': ' + why if why else ''}"
        )

    # --- operands --------------------------------------------------------------------------------------

    def is_literal(self, slot: int) -> bool:
        """Whether a slot holds a constant."""
        return slot in self._constants

    def source(self, text: str, statement: Statement, bits: int = 32) -> int:
        """Slot of an operand that is read: register, literal, special register or address of a symbol."""
        literal = literal_value(text)
        if literal is not None:
            return self.literal(literal & mask_of(bits))
        program = self.program
        if text in program.param_offsets:
            return self.literal(PARAM_SPACE + program.param_offsets[text])
        if text in program.shared_offsets:
            return self._special(f"shared+{program.shared_offsets[text]}")
        slot = self._register(text, statement.scope)
        if slot is None:
            if text.startswith("%"):
                return self._special(text)
            raise self.unknown(statement, f"the operand {text!r} is not known")
        self._read.append(slot)
        return slot

    def result(self, text: str, statement: Statement) -> int:
        """Slot of a register that is written; ``_`` is nobody's."""
        if text == "_":
            return SINK
        slot = self._register(text, statement.scope)
        if slot is None:
            raise self.unknown(statement, f"the result {text!r} is no register")
        self._written.append(slot)
        return slot

    def updated(self, text: str, statement: Statement) -> int:
        """Slot of a register that is read now and written some time later, by no lane in particular."""
        slot = self.result(text, statement)
        self._written.remove(slot)
        self._read.append(slot)
        return slot

    def vector(self, text: str) -> list[str]:
        """The members of ``{a, b}``, or the one operand itself."""
        if text.startswith("{"):
            return [member.strip() for member in text[1:-1].split(",")]
        return [text]

    def address(self, text: str, statement: Statement) -> tuple[int, int]:
        """Slot and byte offset of ``[register+offset]``."""
        inner = text.strip()
        if not (inner.startswith("[") and inner.endswith("]")):
            raise self.unknown(statement, f"{text!r} is no address")
        found = re.fullmatch(r"([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*(-\s*\w+)?", inner[1:-1].strip())
        if found is None:
            raise self.unknown(statement, f"the address {text!r} has an unknown form")
        offset = literal_value(found[2] or (found[3] or "0").replace(" ", ""))
        return self.source(found[1], statement, 64), int(offset or 0)

    def target(self, text: str, statement: Statement) -> int:
        """Index of the instruction a label names."""
        index = statement.scope.label(text)
        if index is None:
            raise self.unknown(statement, f"the label {text!r} is not defined here")
        return index

    def literal(self, value: int | bool) -> int:
        """Slot of a constant."""
        key = (type(value).__name__, value)
        if key not in self._literals:
            self._literals[key] = len(self.program.template)
            self._constants.add(len(self.program.template))
            self.program.template.append(value)
        return self._literals[key]

    def _special(self, name: str) -> int:
        specials = self.program.specials
        if name not in specials:
            specials[name] = len(self.program.template)
            self.program.template.append(0)
        return specials[name]

    def _register(self, name: str, scope: Scope | None) -> int | None:
        while scope is not None:
            kind: str | None = None
            if name in scope.registers:
                kind = scope.registers[name][1]
            elif ranged := re.fullmatch(r"(.*?)(\d+)", name):
                kind = scope.ranges.get(ranged[1])
            if kind is not None:
                key = (id(scope), name)
                if key not in self._slots:
                    self._slots[key] = len(self.program.template)
                    self.program.template.append(POISON.get(kind, mask_of(32)))
                return self._slots[key]
            scope = scope.parent
        return None

    # --- memory layout ---------------------------------------------------------------------------------

    def _place_params(self) -> None:
        position = 0
        for param in self.program.module.params:
            position = -(-position // param.alignment) * param.alignment
            self.program.param_offsets[param.name] = position
            position += param.size
        self.program.param_bytes = position

    def _place_shared(self, base: int) -> None:
        position = base
        dynamic = []
        for symbol in self.program.module.shared:
            if symbol.size == 0:
                dynamic.append(symbol)
                continue
            position = -(-position // symbol.alignment) * symbol.alignment
            self.program.shared_offsets[symbol.name] = position
            position += symbol.size
        for symbol in dynamic:
            position = -(-position // symbol.alignment) * symbol.alignment
        for symbol in dynamic:
            self.program.shared_offsets[symbol.name] = position
        self.program.static_shared_end = position

    # --- guards ----------------------------------------------------------------------------------------

    def _guarded(self, op: Op, statement: Statement, written: tuple[int, ...]) -> Op:
        """``@p op``: for the lanes whose predicate holds."""
        name, negated = statement.guard or ("", False)
        predicate = self.source(name, statement)
        if statement.opcode.split(".")[0] in ("bra", "ret", "exit"):
            return _guarded_branch(op, predicate, negated)

        def run(warp: Any) -> int | None:
            value = warp.r[predicate]
            if isinstance(value, bool):
                return op(warp) if value != negated else None
            before = warp.bits
            active = (bits_of(value) ^ (ALL_BITS if negated else 0)) & before
            if not active:
                return None
            if active == before:
                return op(warp)
            old = [warp.r[slot] for slot in written]
            warp.execute_as(active)
            mask = warp.active()
            try:
                outcome = op(warp)
            finally:
                warp.execute_as(before)
            if outcome is not None:
                raise self.unknown(statement, "it may wait, and some lanes skip it")
            for slot, value in zip(written, old, strict=True):
                warp.r[slot] = merge(mask, warp.r[slot], value)
            return None

        return run


def _using_loads(op: Op, loads: tuple[int, ...]) -> Op:
    """For an instruction that uses what these loads from tensor memory got, and nobody has waited for."""

    def run(warp: Any) -> int | None:
        warp.cta.machine.hooks.use_loads(warp, loads)
        return op(warp)

    return run


def _bits(slots: Iterable[int]) -> int:
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits


def _guarded_branch(op: Op, predicate: int, negated: bool) -> Op:
    """A branch taken by some lanes, all, or none."""

    def run(warp: Any) -> int | None:
        value = warp.r[predicate]
        if isinstance(value, bool):
            return op(warp) if value != negated else None
        taken = (bits_of(value) ^ (ALL_BITS if negated else 0)) & warp.bits
        if not taken:
            return None
        if taken == warp.bits:
            return op(warp)
        target = op(warp)
        warp.split = (EXITED if target is None else target, taken)
        return DIVERGED

    return run


def literal_value(text: str) -> int | None:
    """A number as written in PTX, float literals as their bits; None if it is none."""
    if found := re.fullmatch(r"(-?)0[fF]([0-9a-fA-F]{8})", text):
        return int(found[2], 16) ^ (0x80000000 if found[1] else 0)
    if found := re.fullmatch(r"(-?)0[dD]([0-9a-fA-F]{16})", text):
        return int(found[2], 16) ^ (1 << 63 if found[1] else 0)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        number = text.rstrip("U")
        return int(number, 16 if "x" in number.lower() else 10)
    if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
        return int(struct.unpack("<I", struct.pack("<f", float(text)))[0])
    return None
