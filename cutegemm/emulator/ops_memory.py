"""Loads, stores, address conversion, stmatrix and ldmatrix."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from cutegemm.emulator.decode import PARAM_SPACE, Decoder, Op, opcode
from cutegemm.emulator.memory import CHUNK, OFFSET_MASK, RANK_SHIFT, offset_of, rank_of
from cutegemm.emulator.ops_integer import type_of
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import (
    LANES,
    SIGNED,
    UNSIGNED,
    Lanes,
    distance,
    lanes,
)

SHARED_END = 1 << 32  # generic addresses below are shared memory


@opcode("cvta")
def _generic(statement: Statement, decoder: Decoder) -> Op:
    """All spaces are parts of one address range here: a move."""
    d = decoder.result(statement.operands[0], statement)
    s = decoder.source(statement.operands[1], statement, 64)

    def op(warp: Any) -> None:
        warp.r[d] = warp.r[s]

    return op


@opcode("mapa.shared::cluster.u32", "mapa.shared::cluster.u64", "mapa.u64")
def _map_rank(statement: Statement, decoder: Decoder) -> Op:
    d = decoder.result(statement.operands[0], statement)
    s = decoder.source(statement.operands[1], statement, 64)
    k = decoder.source(statement.operands[2], statement, 32)

    def op(warp: Any) -> None:
        address, rank = warp.r[s], warp.r[k]
        if type(address) is int and type(rank) is int:
            warp.r[d] = offset_of(address) | rank << RANK_SHIFT
        else:
            warp.r[d] = (lanes(address, 32) & np.uint32(0xFFFFFF)) | (lanes(rank, 32) << np.uint32(24))

    return op


@opcode("ld.param")
def _load_param(statement: Statement, decoder: Decoder) -> Op:
    members = decoder.vector(statement.operands[0])
    results = [decoder.result(text, statement) for text in members]
    base, offset = decoder.address(statement.operands[1], statement)
    _, bits = type_of(statement)
    width = bits // 8

    def op(warp: Any) -> None:
        start = warp.scalar(warp.r[base]) - PARAM_SPACE + offset
        for i, slot in enumerate(results):
            piece = warp.cta.machine.params[start + i * width : start + (i + 1) * width]
            warp.r[slot] = int.from_bytes(piece, "little")

    return op


def lane_addresses(warp: Any, value: Any, offset: int) -> Lanes:
    """Addresses of the executing lanes."""
    return lanes(value, 64)[warp.active()] + distance(offset)


def space_of(opcode_text: str) -> str:
    """Which memory an opcode names: ``global``, ``shared``, or ``generic`` for either."""
    parts = opcode_text.split(".")
    if "global" in parts:
        return "global"
    return "shared" if any(part.startswith("shared") for part in parts) else "generic"


Order = Literal["plain", "relaxed", "ordered"]


def order_of(parts: list[str]) -> Order:
    """Whether others may learn from a load or store how far its warp is, and whether without any fence."""
    if not {"acquire", "release"}.isdisjoint(parts):
        return "ordered"
    return "plain" if {"volatile", "relaxed"}.isdisjoint(parts) else "relaxed"


def read(warp: Any, addresses: Lanes, width: int, space: str, order: Order) -> Lanes:
    """Elements at each address of global or shared memory."""
    machine = warp.cta.machine
    if space == "global" or (space == "generic" and int(addresses[0]) >= SHARED_END):
        if order == "plain":
            loaded: Lanes = machine.hooks.load_global(warp, addresses, width)
            return loaded
        values: Lanes = machine.memory.load(addresses, width, warp.site())
        machine.hooks.acquire_global(warp, addresses, order == "relaxed")
        return values
    return by_cta(warp, addresses, lambda cta, offsets, _: machine.hooks.load(warp, cta, offsets, width))


def write(warp: Any, addresses: Lanes, values: Lanes, width: int, space: str, order: Order) -> None:
    """Writes elements at each address of global or shared memory."""
    machine = warp.cta.machine
    if space == "global" or (space == "generic" and int(addresses[0]) >= SHARED_END):
        if order == "plain":
            machine.hooks.store_global(warp, addresses, values, width)
            return
        machine.hooks.release_global(warp, addresses, order == "relaxed")
        machine.memory.store(addresses, values, width, warp.site())
        machine.events += 1
        return

    def store(cta: Any, offsets: Lanes, chosen: Lanes) -> Lanes:
        machine.hooks.store(warp, cta, offsets, values[chosen], width)
        return values[chosen]

    by_cta(warp, addresses, store)


def by_cta(warp: Any, addresses: Lanes, access: Callable[[Any, Lanes, Lanes], Lanes]) -> Lanes:
    """Runs an access once for each CTA the addresses lie in."""
    places = addresses.view(np.int64)
    offsets = places & OFFSET_MASK
    cluster = warp.cta.cluster
    rank = rank_of(int(places[0]))
    if rank == rank_of(int(places.min())) == rank_of(int(places.max())):
        return access(cluster.cta_of(rank, warp), offsets, np.ones(len(addresses), dtype=bool))
    ranks = places >> RANK_SHIFT
    result: Lanes | None = None
    for rank in np.unique(ranks).tolist():
        chosen = ranks == rank
        part = access(cluster.cta_of(rank, warp), offsets[chosen], chosen)
        if result is None:
            result = np.zeros(len(addresses), dtype=part.dtype)
        result[chosen] = part
    return addresses if result is None else result


@opcode("ld.global", "ld.shared", "ld.shared::cta", "ld.shared::cluster", "ld.volatile", "ld.relaxed")
@opcode(
    "ld.acquire", "ld.b8", "ld.b16", "ld.b32", "ld.b64", "ld.u32", "ld.s32", "ld.u64", "ld.f32", "ld.weak"
)
def _load(statement: Statement, decoder: Decoder) -> Op:
    members = decoder.vector(statement.operands[0])
    results = [decoder.result(text, statement) for text in members]
    base, offset = decoder.address(statement.operands[1], statement)
    kind, bits = type_of(statement)
    width = bits // 8
    space = space_of(statement.opcode)
    order = order_of(statement.opcode.split("."))
    pieces = _pieces(width * len(results))

    def op(warp: Any) -> None:
        value = warp.r[base]
        uniform = type(value) is int
        addresses = (
            np.array([value + offset], dtype=np.uint64) if uniform else lane_addresses(warp, value, offset)
        )
        parts = [
            read(warp, addresses + np.uint64(start), size, space, order)
            .view(UNSIGNED[bits])
            .reshape(len(addresses), -1)
            for start, size in pieces
        ]
        columns = [part[:, i] for part in parts for i in range(part.shape[1])]
        for slot, part in zip(results, columns, strict=True):
            if kind == "s" and bits < 32:
                part = part.view(SIGNED[bits]).astype(np.int32).view(np.uint32)
            if uniform:
                warp.r[slot] = int(part[0])
            elif warp.mask is None:
                warp.r[slot] = part
            else:
                whole = np.zeros(LANES, dtype=part.dtype)
                whole[warp.mask] = part
                warp.r[slot] = whole

    return op


@opcode("st.global", "st.shared", "st.shared::cta", "st.shared::cluster", "st.volatile", "st.relaxed")
@opcode("st.release", "st.b8", "st.b16", "st.b32", "st.b64", "st.u32", "st.u64", "st.f32", "st.weak")
def _store(statement: Statement, decoder: Decoder) -> Op:
    base, offset = decoder.address(statement.operands[0], statement)
    _, bits = type_of(statement)
    members = decoder.vector(statement.operands[1])
    sources = [decoder.source(text, statement, bits) for text in members]
    width = bits // 8
    space = space_of(statement.opcode)
    order = order_of(statement.opcode.split("."))

    pieces = _pieces(width * len(sources))

    def op(warp: Any) -> None:
        mask = warp.mask
        addresses = lane_addresses(warp, warp.r[base], offset)
        columns = [lanes(warp.r[slot], bits) for slot in sources]
        values = columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1)
        if mask is not None:
            values = values[mask]
        for start, size in pieces:
            part = values[:, start // width : (start + size) // width]
            if size != width:
                part = np.ascontiguousarray(part).view(_whole(size))
            write(warp, addresses + np.uint64(start), part[:, 0], size, space, order)

    return op


def _pieces(size: int) -> list[tuple[int, int]]:
    """A vector's bytes as accesses of up to 16 bytes: (first byte, how many)."""
    return [(start, min(16, size)) for start in range(0, size, 16)]


def _whole(size: int) -> Any:
    """The type of elements of this many bytes."""
    return CHUNK if size == 16 else UNSIGNED[8 * size]


@opcode("stmatrix.sync.aligned.m8n8")
def _store_matrix(statement: Statement, decoder: Decoder) -> Op:
    """Lane 8j+r gives the address of row r of matrix j; register j holds its elements."""
    parts = statement.opcode.split(".")
    count = {"x1": 1, "x2": 2, "x4": 4}[parts[4]]
    transposed = "trans" in parts
    base, offset = decoder.address(statement.operands[0], statement)
    sources = [decoder.source(text, statement, 32) for text in decoder.vector(statement.operands[1])]
    if parts[-1] != "b16" or len(sources) != count:
        raise decoder.unknown(statement)

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        rows = lanes(warp.r[base], 64)[: 8 * count] + distance(offset)
        if (rows % np.uint64(16)).any():
            raise decoder.unknown(statement, f"{warp.name} gives a row address that is not 16-byte aligned")
        registers = np.stack([lanes(warp.r[slot], 32) for slot in sources])
        if transposed:
            # lane t: rows 2(t%4), 2(t%4)+1 of column t/4
            halves = registers.view(np.uint16).reshape(count, 8, 4, 2)
            matrix = halves.transpose(0, 2, 3, 1).reshape(8 * count, 8)
        else:
            matrix = registers.reshape(8 * count, 4)
        write(warp, rows, np.ascontiguousarray(matrix).view(CHUNK)[:, 0], 16, "shared", "plain")
        return None

    return op


@opcode("ldmatrix.sync.aligned.m8n8")
def _load_matrix(statement: Statement, decoder: Decoder) -> Op:
    """The inverse of stmatrix: lane 8j+r gives the address of row r of matrix j, which goes to register j."""
    parts = statement.opcode.split(".")
    count = {"x1": 1, "x2": 2, "x4": 4}[parts[4]]
    transposed = "trans" in parts
    results = [decoder.result(text, statement) for text in decoder.vector(statement.operands[0])]
    base, offset = decoder.address(statement.operands[1], statement)
    if parts[-1] != "b16" or len(results) != count:
        raise decoder.unknown(statement)

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        rows = lanes(warp.r[base], 64)[: 8 * count] + distance(offset)
        matrix = read(warp, rows, 16, "shared", "plain").view(np.uint16).reshape(count, 8, 8)
        if transposed:
            matrix = matrix.transpose(0, 2, 1)
        registers = np.ascontiguousarray(matrix).view(np.uint32).reshape(count, LANES)
        for slot, row in zip(results, registers, strict=True):
            warp.r[slot] = row
        return None

    return op
