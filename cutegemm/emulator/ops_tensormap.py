"""Changes of tensor maps by the kernel itself, as grouped products make them; tma.py says what a map holds.

A load or store takes the map as it is when it is issued. That hardware may still know an older one without
fence.proxy.tensormap is not modelled.
"""

from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.memory import offset_of, rank_of
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import Lanes

WORDS = 16  # of 64 bits
MAP_BYTES = 8 * WORDS
ADDRESS_MASK = ((1 << 57) - 1) & ~0xF
WORD_STEPS = np.arange(0, MAP_BYTES, 8, dtype=np.uint64)


def _with(bits: int, position: int, width: int, value: int) -> int:
    """A map, as one number of 1024 bits, with some of them replaced."""
    mask = (1 << width) - 1
    return bits & ~(mask << position) | (value & mask) << position


def replaced(bits: int, field: str, place: int, value: int) -> int:
    """A map with a field of dimension ``place`` replaced; strides are in bytes, place 0 is dimension 1's."""
    if field == "global_address":
        return bits & ~ADDRESS_MASK | value & ADDRESS_MASK
    if field == "global_dim":
        return _with(bits, 256 + 32 * place, 32, value - 1)
    if field == "global_stride":
        low = _with(bits, 96 + 32 * place, 32, value >> 4)
        return _with(low, 224 + 4 * place, 4, value >> 36)
    if field == "box_dim":
        return _with(bits, 440 + 8 * place, 8, value - 1)
    return _with(bits, 68, 3, value)  # the rank, one less than it is


def _read(warp: Any, address: int, space: str) -> int:
    machine, places = warp.cta.machine, np.uint64(address) + WORD_STEPS
    if space == "global":
        words: Lanes = machine.memory.load(places, 8, warp.site())
    else:
        cta = warp.cta.cluster.cta_of(rank_of(address), warp)
        words = machine.hooks.load(warp, cta, offset_of(address) + WORD_STEPS.astype(np.int64), 8)
    return int.from_bytes(np.ascontiguousarray(words).tobytes(), "little")


def _write(warp: Any, address: int, space: str, bits: int) -> None:
    machine, places = warp.cta.machine, np.uint64(address) + WORD_STEPS
    words = np.frombuffer(bits.to_bytes(MAP_BYTES, "little"), dtype=np.uint64)
    if space == "global":
        machine.memory.store(places, words, 8, warp.site())
        machine.events += 1
    else:
        cta = warp.cta.cluster.cta_of(rank_of(address), warp)
        machine.hooks.store(warp, cta, offset_of(address) + WORD_STEPS.astype(np.int64), words, 8)


@opcode(
    *(
        f"tensormap.replace.tile.{field}.{space}.b1024.{kind}"
        for field in ("global_address", "global_dim", "global_stride", "box_dim", "rank")
        for space in ("global", "shared::cta")
        for kind in ("b32", "b64")
    )
)
def _replace(statement: Statement, decoder: Decoder) -> Op:
    field, space = statement.opcode.split(".")[3:5]
    base, offset = decoder.address(statement.operands[0], statement)
    *ordinal, new = statement.operands[1:]
    if len(ordinal) != (0 if field in ("global_address", "rank") else 1):
        raise decoder.unknown(statement, f"{len(statement.operands)} operands")
    place = int(ordinal[0]) if ordinal else 0
    value = decoder.source(new, statement, 64 if statement.opcode.endswith("b64") else 32)

    def op(warp: Any) -> None:
        address = warp.scalar(warp.r[base]) + offset
        changed = replaced(_read(warp, address, space), field, place, warp.scalar(warp.r[value]))
        _write(warp, address, space, changed)

    return op


@opcode("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic")
def _publish(statement: Statement, decoder: Decoder) -> Op:
    """Copies a map out of shared memory; all lanes execute it together."""
    to, to_offset = decoder.address(statement.operands[0], statement)
    origin, origin_offset = decoder.address(statement.operands[1], statement)
    if statement.operands[2] != str(MAP_BYTES):
        raise decoder.unknown(statement)

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        bits = _read(warp, warp.scalar(warp.r[origin]) + origin_offset, "shared")
        _write(warp, warp.scalar(warp.r[to]) + to_offset, "global", bits)
        return None

    return op
