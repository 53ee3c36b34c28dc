"""WGMMA instructions: collected at issue, computed for a whole group of them at once.

A warp computes its own 16 rows; that the four warps of a warpgroup issue the same instruction is checked
neither by hardware nor here.
"""

import re
from typing import Any

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.mma import Kind, Mma, queue_of
from cutegemm.emulator.ptx import Statement

_SHAPE = re.compile(r"m64n(\d+)k16")


@opcode("wgmma.mma_async.sync.aligned")
def _issue(statement: Statement, decoder: Decoder) -> Op:
    parts = statement.opcode.split(".")
    shape = _SHAPE.fullmatch(parts[4])
    if shape is None or parts[5:] not in (["f32", "bf16", "bf16"], ["f32", "f16", "f16"]):
        raise decoder.unknown(statement)
    operands = statement.operands
    slots = tuple(decoder.updated(text, statement) for text in decoder.vector(operands[0]))
    a, b = (decoder.source(text, statement, 64) for text in operands[1:3])
    if operands[1].startswith("{") or len(operands) != 8 or operands[4:6] != ("1", "1"):
        raise decoder.unknown(statement, "operands in registers or negated operands")
    scale = decoder.source(operands[3], statement, 1)
    kind = Kind(int(shape[1]), parts[6], operands[6] == "1", operands[7] == "1")
    if len(slots) * 2 != kind.n:
        raise decoder.unknown(statement, f"{len(slots)} accumulator registers for {kind.n} columns")
    where = statement.where

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        r = warp.r
        scalar = warp.scalar
        queue_of(warp).open.append(
            Mma(kind, scalar(r[a]), scalar(r[b]), slots, bool(scalar(r[scale])), where)
        )
        return None

    return op


@opcode("wgmma.fence.sync.aligned")
def _fence(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> int | None:
        return warp.wait_for_lanes() if warp.must_converge() else None

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
