"""tcgen05 instructions: tensor memory allocated and freed, MMAs and their commits, loads, stores, fences."""

from typing import Any

import numpy as np

from cutegemm.emulator import tcgen05, tmem
from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.faults import MisuseError, OutOfBoundsError
from cutegemm.emulator.memory import RANK_SHIFT, offset_of, rank_of
from cutegemm.emulator.ops_mbarrier import barrier_at
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import lanes

_GROUPS = ("cta_group::1", "cta_group::2")


def _group(statement: Statement, decoder: Decoder) -> int:
    """CTAs an instruction is for."""
    for part in statement.opcode.split("."):
        if part in _GROUPS:
            return int(part[-1])
    raise decoder.unknown(statement, "it names no cta_group")


def _one_lane(warp: Any, what: str) -> None:
    """Raises MisuseError if several threads issue what one thread has to."""
    count = warp.bits.bit_count()
    if count != 1:
        raise MisuseError(f"{warp.here()}: {count} threads issue {what} that one thread has to issue")


# --- allocation ----------------------------------------------------------------------------------------


@opcode(*(f"tcgen05.alloc.{group}.sync.aligned" for group in _GROUPS))
def _allocate(statement: Statement, decoder: Decoder) -> Op:
    base, offset = decoder.address(statement.operands[0], statement)
    n = decoder.source(statement.operands[1], statement, 32)
    group = _group(statement, decoder)
    key = object()

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        cta, hooks = warp.cta, warp.cta.machine.hooks
        waiting = warp.pending.get(key)
        if waiting is None:
            waiting = tmem.request(cta, warp.scalar(warp.r[n]), group, warp.site())
            warp.pending[key] = waiting
            cta.machine.events += 1
        if not waiting.ready():
            return warp.block(waiting)
        del warp.pending[key]
        place = np.array([offset_of(warp.scalar(warp.r[base]) + offset)], dtype=np.int64)
        hooks.store(warp, cta, place, np.array([waiting.start], dtype=np.uint32), 4)
        hooks.allocated(warp, waiting)
        return None

    return op


@opcode(*(f"tcgen05.dealloc.{group}.sync.aligned.b32" for group in _GROUPS))
def _free(statement: Statement, decoder: Decoder) -> Op:
    address, n = (decoder.source(text, statement, 32) for text in statement.operands)
    group = _group(statement, decoder)

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        r, scalar = warp.r, warp.scalar
        start, columns = scalar(r[address]), scalar(r[n])
        warp.cta.machine.hooks.freed(warp, start, columns)
        tmem.free(warp.cta, start, columns, group, warp.site())
        return None

    return op


@opcode(*(f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned" for group in _GROUPS))
def _relinquish(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        tmem.relinquish(warp.cta)
        return None

    return op


# --- MMAs ----------------------------------------------------------------------------------------------


@opcode("tcgen05.mma")
def _mma(statement: Statement, decoder: Decoder) -> Op:
    """D, A, B, descriptor[, {lanes of D that are not written}], whether D is added to."""
    parts = statement.opcode.split(".")
    group = _group(statement, decoder)
    kind = next((part[6:] for part in parts if part.startswith("kind::")), "")
    if kind not in tcgen05.OPERANDS:
        raise decoder.unknown(statement, f"the kind {kind!r}; known are {', '.join(tcgen05.OPERANDS)}")
    odd = [
        part
        for part in parts[2:]
        if part not in _GROUPS and not part.startswith(("kind::", "collector::a::"))
    ]
    operands = list(statement.operands)
    disabled: list[int] = []
    if len(operands) > 5 and operands[4].startswith("{"):
        disabled = [decoder.source(text, statement, 32) for text in decoder.vector(operands.pop(4))]
    if odd or len(operands) != 5:
        raise decoder.unknown(statement, f"its qualifiers {odd} or {len(statement.operands)} operands")
    d, d_offset = decoder.address(operands[0], statement)
    from_tensor_memory = operands[1].startswith("[")
    a, a_offset = (
        decoder.address(operands[1], statement)
        if from_tensor_memory
        else (
            decoder.source(operands[1], statement, 64),
            0,
        )
    )
    b = decoder.source(operands[2], statement, 64)
    descriptor = decoder.source(operands[3], statement, 32)
    scale = decoder.source(operands[4], statement, 1)

    def op(warp: Any) -> None:
        r, scalar = warp.r, warp.scalar
        _one_lane(warp, "an MMA")
        ctas = tmem.pair_of(warp.cta, group, warp.site())
        try:
            instruction = tcgen05.decode_instruction(scalar(r[descriptor]), kind, group)
        except MisuseError as error:
            raise MisuseError(f"{warp.here()}: {error}") from None
        a_value = scalar(r[a])
        mma = tcgen05.Mma(
            instruction,
            None if from_tensor_memory else a_value,
            (a_value + a_offset) & 0xFFFF if from_tensor_memory else 0,
            scalar(r[b]),
            scalar(r[d]) + d_offset,
            bool(scalar(r[scale])),
            _enabled([scalar(r[slot]) for slot in disabled], group),
            warp.site(),
        )
        _check_mma(warp, ctas, mma, a_value >> 16 if from_tensor_memory else 0)
        warp.cta.machine.hooks.issue_mma(warp, ctas, mma)

    return op


def _enabled(words: list[int], group: int) -> tuple[bool, ...] | None:
    """Lanes of D that are written, from the masks of those that are not; None if all are."""
    if not any(words):
        return None
    bits = np.unpackbits(np.array(words, dtype="<u4").view(np.uint8), bitorder="little")
    return tuple(bool(bit == 0) for bit in np.resize(bits, tmem.ROWS * group))


def _check_mma(warp: Any, ctas: tuple[Any, ...], mma: tcgen05.Mma, a_lane: int) -> None:
    """Raises MisuseError, OutOfBoundsError for addresses the MMA cannot have."""
    instruction = mma.instruction
    if mma.lane not in ((0, 16) if instruction.rows == 64 and not instruction.folded else (0,)):
        raise MisuseError(f"{warp.here()}: D of {instruction} cannot begin at lane {mma.lane}")
    if mma.a is None and (a_lane or instruction.rows != tmem.ROWS or instruction.a_along_m):
        raise MisuseError(
            f"{warp.here()}: A in tensor memory is known for 128 rows in each CTA, contiguous along K, from "
            f"lane 0 on; this is {instruction} from lane {a_lane}"
        )
    try:
        for operand in (mma.a_operand, mma.b_operand):
            if operand is not None:
                operand.units()
    except MisuseError as error:
        raise MisuseError(f"{warp.here()}: {error}") from None
    for cta in ctas:
        if all(other.done for other in cta.warps):
            raise OutOfBoundsError(f"{warp.here()}: the MMA's CTA {cta.number} has exited")
        cta.sm.memory.check(cta, mma.column, instruction.columns, warp.site())
        tmem.check_group(cta, mma.column, instruction.ctas, warp.site())
        if mma.a is None:
            cta.sm.memory.check(cta, mma.a_column, tcgen05.STEP_BYTES // 4, warp.site())


@opcode(*(f"tcgen05.commit.{group}.mbarrier::arrive::one" for group in _GROUPS))
def _commit(statement: Statement, decoder: Decoder) -> Op:
    """An arrival at a barrier, or at the same offset in every CTA of a mask, once the MMAs are done."""
    base, offset = decoder.address(statement.operands[0], statement)
    mask = decoder.source(statement.operands[1], statement, 16) if len(statement.operands) > 1 else None

    def op(warp: Any) -> None:
        _one_lane(warp, "a commit")
        r, scalar = warp.r, warp.scalar
        address = scalar(r[base]) + offset
        if mask is None:
            addresses = [address]
        else:
            bits = scalar(r[mask]) & 0xFFFF
            addresses = [rank << RANK_SHIFT | offset_of(address) for rank in range(16) if bits >> rank & 1]
        cluster = warp.cta.cluster
        targets = [(cluster.cta_of(rank_of(where), warp), barrier_at(warp, where)) for where in addresses]
        warp.cta.machine.hooks.commit_mmas_to(warp, targets)

    return op


# --- loads and stores ----------------------------------------------------------------------------------


def _window(warp: Any, taddr: int, shape: str, count: int, packed: bool, split: int) -> tmem.Window:
    """What a warp touches. Raises OutOfBoundsError if that is not its quarter of the lanes."""
    columns, rows, _ = tmem.SHAPES[shape]
    lane, column = taddr >> 16, taddr & 0xFFFF
    first = warp.index % 4 * 32
    if lane % rows or not first <= lane < first + 32:
        raise OutOfBoundsError(
            f"{warp.here()}: lane {lane} of tensor memory; this warp reaches lanes {first}..{first + 31}, "
            f"from a multiple of {rows} on"
        )
    width = columns * count * (2 if packed else 1) + split
    return tmem.Window(shape, count, column, width, lane, rows, packed, split)


def _access(statement: Statement, decoder: Decoder) -> tuple[str, int, bool]:
    """Shape, repetitions, whether columns are packed."""
    parts = statement.opcode.split(".")
    shape = next((part for part in parts if part in tmem.SHAPES), "")
    count = next((int(part[1:]) for part in parts if part[:1] == "x" and part[1:].isdigit()), 0)
    packed = "pack::16b" in parts or "unpack::16b" in parts
    known = {"tcgen05", "ld", "st", "sync", "aligned", "b32", "pack::16b", "unpack::16b", shape, f"x{count}"}
    if not shape or not count or set(parts) - known or (packed and shape == "16x32bx2"):
        raise decoder.unknown(statement)
    return shape, count, packed


@opcode("tcgen05.ld.sync.aligned")
def _load(statement: Statement, decoder: Decoder) -> Op:
    shape, count, packed = _access(statement, decoder)
    slots = tuple(decoder.result(text, statement) for text in decoder.vector(statement.operands[0]))
    base, offset = decoder.address(statement.operands[1], statement)
    split = int(statement.operands[2], 0) if shape == "16x32bx2" else 0
    if len(slots) != tmem.SHAPES[shape][2] * count:
        raise decoder.unknown(statement, f"{len(slots)} result registers")

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        window = _window(warp, warp.scalar(warp.r[base]) + offset, shape, count, packed, split)
        warp.cta.machine.hooks.load_tensor(warp, slots, window)
        return None

    return op


@opcode("tcgen05.st.sync.aligned")
def _store(statement: Statement, decoder: Decoder) -> Op:
    shape, count, packed = _access(statement, decoder)
    base, offset = decoder.address(statement.operands[0], statement)
    split = int(statement.operands[1], 0) if shape == "16x32bx2" else 0
    slots = [decoder.source(text, statement, 32) for text in decoder.vector(statement.operands[-1])]
    if len(slots) != tmem.SHAPES[shape][2] * count:
        raise decoder.unknown(statement, f"{len(slots)} registers")

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        window = _window(warp, warp.scalar(warp.r[base]) + offset, shape, count, packed, split)
        block = np.stack([lanes(warp.r[slot], 32) for slot in slots])
        warp.cta.machine.hooks.store_tensor(warp, block, window)
        return None

    return op


@opcode("tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned")
def _wait(statement: Statement, decoder: Decoder) -> Op:
    loads = "wait::ld" in statement.opcode

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        hooks = warp.cta.machine.hooks
        if loads:
            hooks.wait_loads(warp)
        else:
            hooks.wait_stores_to_tensor(warp)
        return None

    return op


@opcode("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(statement: Statement, decoder: Decoder) -> Op:
    after = "after" in statement.opcode

    def op(warp: Any) -> None:
        warp.cta.machine.hooks.fence_tensor(warp, after)

    return op
