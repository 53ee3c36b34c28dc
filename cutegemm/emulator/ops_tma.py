"""TMA instructions: tensor loads with or without multicast, tensor stores and their groups."""

import re
from typing import Any

from cutegemm.emulator.decode import PARAM_SPACE, Decoder, Op, opcode
from cutegemm.emulator.memory import RANK_SHIFT, offset_of, rank_of
from cutegemm.emulator.ops_mbarrier import barrier_at
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.tma import TensorMap, decode_map
from cutegemm.emulator.values import signed


def _coordinate_operand(text: str) -> tuple[str, list[str]]:
    """``[map, {c0, c1}]`` as the map's register and the coordinates."""
    found = re.fullmatch(r"\[\s*([%\w$]+)\s*,\s*\{([^}]*)\}\s*\]", text)
    if found is None:
        return "", []
    return found[1], [part.strip() for part in found[2].split(",")]


def tensor_map_at(warp: Any, address: int) -> TensorMap:
    """The tensor map at a parameter or global address, as it is now."""
    machine = warp.cta.machine
    if address >= PARAM_SPACE:
        start = address - PARAM_SPACE
        return decode_map(bytes(machine.params[start : start + 128]))
    region = machine.memory.locate(address, address + 128, warp.site())
    return decode_map(region.data[address - region.base : address - region.base + 128].tobytes())


@opcode("cp.async.bulk.tensor")
def _tensor_copy(statement: Statement, decoder: Decoder) -> Op:
    parts = statement.opcode.split(".")
    if "im2col" in parts:
        raise decoder.unknown(statement)
    spaces = [part for part in parts if part in ("global", "shared::cta", "shared::cluster")]
    if spaces[0] == "global":
        return _store(statement, decoder)
    return _load(statement, decoder, "multicast::cluster" in parts, "cta_group::2" in parts)


def _load(statement: Statement, decoder: Decoder, multicast: bool, pairs: bool) -> Op:
    """To one CTA or those of a mask. For pairs each target's bytes go to the barrier of the one of its pair
    whose rank is even or odd as that of the CTA the barrier is named in, else to the target's own.
    """
    base, offset = decoder.address(statement.operands[0], statement)
    map_register, names = _coordinate_operand(statement.operands[1])
    if not names:
        raise decoder.unknown(statement)
    tensor_map = decoder.source(map_register, statement, 64)
    coordinates = [decoder.source(text, statement, 32) for text in names]
    barrier_base, barrier_offset = decoder.address(statement.operands[2], statement)
    mask = decoder.source(statement.operands[3], statement, 16) if multicast else None

    def op(warp: Any) -> None:
        r, scalar = warp.r, warp.scalar
        where = scalar(r[base]) + offset
        barrier = barrier_at(warp, scalar(r[barrier_base]) + barrier_offset)
        targets = [(warp.cta.cluster.cta_of(rank_of(where), warp), barrier)]
        if mask is not None:
            bits = scalar(r[mask])
            ranks = [rank for rank in range(16) if bits >> rank & 1]
            side = barrier.cta.rank & 1
            told = [rank & ~1 | side if pairs else rank for rank in ranks]
            targets = [
                (warp.cta.cluster.cta_of(rank, warp), barrier_at(warp, to << RANK_SHIFT | barrier.offset))
                for rank, to in zip(ranks, told, strict=True)
            ]
        warp.cta.machine.hooks.tma_load(
            warp,
            tensor_map_at(warp, scalar(r[tensor_map])),
            tuple(signed(scalar(r[slot]), 32) for slot in coordinates),
            offset_of(where),
            targets,
        )

    return op


def _store(statement: Statement, decoder: Decoder) -> Op:
    map_register, names = _coordinate_operand(statement.operands[0])
    if not names or "tile" not in statement.opcode.split("."):
        raise decoder.unknown(statement)
    tensor_map = decoder.source(map_register, statement, 64)
    coordinates = [decoder.source(text, statement, 32) for text in names]
    base, offset = decoder.address(statement.operands[1], statement)

    def op(warp: Any) -> None:
        r, scalar = warp.r, warp.scalar
        warp.cta.machine.hooks.tma_store(
            warp,
            tensor_map_at(warp, scalar(r[tensor_map])),
            tuple(signed(scalar(r[slot]), 32) for slot in coordinates),
            offset_of(scalar(r[base]) + offset),
        )

    return op


@opcode("cp.async.bulk.commit_group")
def _commit(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> None:
        warp.cta.machine.hooks.commit_stores(warp)

    return op


@opcode("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read")
def _wait(statement: Statement, decoder: Decoder) -> Op:
    pending = decoder.source(statement.operands[0], statement, 32)
    only_read = statement.opcode.endswith(".read")

    def op(warp: Any) -> None:
        hooks = warp.cta.machine.hooks
        hooks.wait_stores(warp, warp.scalar(warp.r[pending]))
        if not only_read:
            hooks.stores_written(warp)

    return op
