"""WGMMA instructions: collected at issue, computed for a whole group of them at once.

A warp computes its own 16 rows; that the four warps of a warpgroup issue the same instruction is checked
neither by hardware nor here.
"""

import re
from itertools import product
from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, literal_value, opcode
from cutegemm.emulator.elements import BYTES
from cutegemm.emulator.mma import Kind, Mma, issue, queue_of
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import lanes
from cutegemm.emulator.wgmma import from_registers

_FORM = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?"
    r"\.(f32|f16|s32)\.(\w+)\.(\w+)(\.satfinite)?"
)
# Types of A and B that go together, by the type of D.
_FLOAT8, _INTEGER8 = ("e4m3", "e5m2"), ("s8", "u8")
_TYPES = {
    "f32": {("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), *product(_FLOAT8, _FLOAT8)},
    "f16": {("f16", "f16"), *product(_FLOAT8, _FLOAT8)},
    "s32": set(product(_INTEGER8, _INTEGER8)),
}


def _kind(statement: Statement, decoder: Decoder, in_registers: bool) -> Kind:
    """From the opcode and the immediates at the end: signs of A and B, which are contiguous along M or N."""
    form = _FORM.fullmatch(statement.opcode)
    if form is None or form.group(5, 6) not in _TYPES[form[4]]:
        raise decoder.unknown(statement)
    n, d, a, b = int(form[1]), form[4], form[5], form[6]
    immediates = [literal_value(text) for text in statement.operands[4:]]
    wide = BYTES[a] == 2
    count = (0 if d == "s32" else 2) + ((1 if in_registers else 2) if wide else 0)
    signs, majors = immediates[:2], immediates[2:]
    if len(immediates) != count or not set(signs) <= {1, -1} or not set(majors) <= {0, 1}:
        raise decoder.unknown(statement, f"{len(immediates)} immediates at the end, {count} are expected")
    a_along_m = bool(wide and not in_registers and majors[0])
    sign = -1 if signs in ([1, -1], [-1, 1]) else 1
    kind = Kind(n, a, b, d, a_along_m, bool(wide and majors[-1]), sign, bool(form[3] or form[7]))
    if int(form[2]) != kind.k:
        raise decoder.unknown(statement)
    return kind


@opcode("wgmma.mma_async.sync.aligned")
def _issue(statement: Statement, decoder: Decoder) -> Op:
    operands = statement.operands
    in_registers = operands[1].startswith("{")
    kind = _kind(statement, decoder, in_registers)
    slots = tuple(decoder.updated(text, statement) for text in decoder.vector(operands[0]))
    a = [decoder.source(text, statement, 32 if in_registers else 64) for text in decoder.vector(operands[1])]
    b = decoder.source(operands[2], statement, 64)
    scale = decoder.source(operands[3], statement, 1)
    if len(slots) != kind.n // (4 if kind.d == "f16" else 2):
        raise decoder.unknown(statement, f"{len(slots)} accumulator registers for {kind.n} columns")
    where = statement.where

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        r, scalar = warp.r, warp.scalar
        left = (
            from_registers(np.stack([lanes(r[slot], 32) for slot in a])) if in_registers else scalar(r[a[0]])
        )
        issue(warp, queue_of(warp), Mma(kind, left, scalar(r[b]), slots, bool(scalar(r[scale])), where))
        return None

    return op


@opcode("wgmma.fence.sync.aligned")
def _fence(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        warp.cta.machine.hooks.fence_mmas(warp)
        return None

    return op


@opcode("wgmma.commit_group.sync.aligned")
def _commit(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        warp.cta.machine.hooks.commit_mmas(warp, queue_of(warp))
        return None

    return op


@opcode("wgmma.wait_group.sync.aligned")
def _wait(statement: Statement, decoder: Decoder) -> Op:
    pending = decoder.source(statement.operands[0], statement, 32)

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        warp.cta.machine.hooks.wait_mmas(warp, queue_of(warp), warp.scalar(warp.r[pending]))
        return None

    return op
