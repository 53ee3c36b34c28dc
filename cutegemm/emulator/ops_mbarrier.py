"""mbarrier instructions and the fences around them."""

from typing import Any

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.faults import BarrierCountError
from cutegemm.emulator.mbarrier import Mbarrier, MbarrierWait
from cutegemm.emulator.memory import SHARED_BASE, offset_of, rank_of
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import lanes

PATIENCE = 2  # failed peeks at a barrier after which a warp waits for it instead


def barrier_at(warp: Any, address: int) -> Mbarrier:
    """The mbarrier at a shared address. Raises BarrierCountError if there is none."""
    cta = warp.cta.cluster.cta_of(rank_of(address), warp)
    barrier = cta.mbarriers.get(offset_of(address))
    if barrier is None:
        raise BarrierCountError(
            f"{warp.here()}: there is no initialised mbarrier at shared offset "
            f"{offset_of(address) - SHARED_BASE} of CTA {cta.number}"
        )
    return barrier


@opcode("mbarrier.init.shared.b64", "mbarrier.init.shared::cta.b64")
def _init(statement: Statement, decoder: Decoder) -> Op:
    base, offset = decoder.address(statement.operands[0], statement)
    n = decoder.source(statement.operands[1], statement, 32)

    def op(warp: Any) -> None:
        label = warp.cta.machine.barrier_labels.get
        for address in _addresses(warp, warp.r[base]):
            address += offset
            cta = warp.cta.cluster.cta_of(rank_of(address), warp)
            where = offset_of(address)
            cta.shared.check(where, where + 8, warp.site())
            count, name = warp.scalar(warp.r[n]), label(where - SHARED_BASE, "")
            barrier = cta.mbarriers[where] = Mbarrier(where, count, cta, label=name, origin=statement.place)
            warp.cta.machine.hooks.made_mbarrier(warp, barrier)

    return op


def _addresses(warp: Any, value: Any) -> list[int]:
    """The different addresses the executing lanes have."""
    if type(value) is int:
        return [value]
    return list(dict.fromkeys(lanes(value, 64)[warp.active()].tolist()))


@opcode("mbarrier.inval.shared.b64", "mbarrier.inval.shared::cta.b64")
def _invalidate(statement: Statement, decoder: Decoder) -> Op:
    base, offset = decoder.address(statement.operands[0], statement)

    def op(warp: Any) -> None:
        for address in _addresses(warp, warp.r[base]):
            barrier = barrier_at(warp, address + offset)
            del barrier.cta.mbarriers[barrier.offset]

    return op


_ARRIVE = [
    f"mbarrier.arrive{kind}{order}.{space}.b64"
    for kind in ("", ".expect_tx")
    for order in ("", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster")
    for space in ("shared", "shared::cta", "shared::cluster")
]


@opcode(*_ARRIVE)
def _arrive(statement: Statement, decoder: Decoder) -> Op:
    """One arrival for each active lane, at that lane's barrier."""
    operands = list(statement.operands)
    if not operands[0].startswith("["):
        decoder.result(operands.pop(0), statement)  # the phase token; nobody waits by it here
    base, offset = decoder.address(operands[0], statement)
    expects = ".expect_tx" in statement.opcode
    relaxed = ".relaxed" in statement.opcode
    n = decoder.source(operands[1], statement, 32) if len(operands) > 1 else decoder.literal(1)

    def op(warp: Any) -> None:
        address, amount = warp.r[base], warp.r[n]
        hooks = warp.cta.machine.hooks
        if type(address) is int and type(amount) is int:
            places = [(address + offset, amount, warp.bits.bit_count())]
        else:
            active = warp.active()
            pairs = zip(lanes(address, 64)[active].tolist(), lanes(amount, 32)[active].tolist(), strict=True)
            places = [(where + offset, count, 1) for where, count in pairs]
        for where, count, times in places:
            barrier = barrier_at(warp, where)
            if expects:
                hooks.expect(warp, barrier, count * times)
                hooks.arrive_mbarrier(warp, barrier, times, relaxed)
            else:
                hooks.arrive_mbarrier(warp, barrier, count * times, relaxed)

    return op


@opcode("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", "mbarrier.expect_tx.relaxed.cta.shared.b64")
def _expect(statement: Statement, decoder: Decoder) -> Op:
    base, offset = decoder.address(statement.operands[0], statement)
    n = decoder.source(statement.operands[1], statement, 32)

    def op(warp: Any) -> None:
        barrier = barrier_at(warp, warp.scalar(warp.r[base]) + offset)
        warp.cta.machine.hooks.expect(warp, barrier, warp.scalar(warp.r[n]))

    return op


_TRY = [
    f"mbarrier.{verb}.parity{order}.{space}.b64"
    for verb in ("try_wait", "test_wait")
    for order in ("", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster")
    for space in ("shared", "shared::cta")
]


@opcode(*_TRY)
def _try_wait(statement: Statement, decoder: Decoder) -> Op:
    """With a time hint the warp waits; without, it looks and goes on (and waits if it keeps looking)."""
    p = decoder.result(statement.operands[0], statement)
    base, offset = decoder.address(statement.operands[1], statement)
    parity = decoder.source(statement.operands[2], statement, 32)
    hinted = len(statement.operands) > 3
    relaxed = ".relaxed" in statement.opcode
    key = object()

    def op(warp: Any) -> int | None:
        r = warp.r
        barrier = barrier_at(warp, warp.scalar(r[base]) + offset)
        phase = warp.scalar(r[parity])
        hooks = warp.cta.machine.hooks
        if hooks.spurious_failure():
            r[p] = False
            return None
        if (barrier.phase & 1) != phase:
            r[p] = True
            warp.pending.pop(key, None)
            hooks.acquire_mbarrier(warp, barrier, relaxed)
            return None
        if not hinted:
            peeks = warp.pending.get(key, 0) + 1
            warp.pending[key] = peeks
            if peeks <= PATIENCE:
                r[p] = False
                return None
        return warp.block(MbarrierWait(barrier, phase))

    return op


@opcode("fence.proxy.async")
def _proxy_fence(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> None:
        warp.cta.machine.hooks.proxy_fence(warp)

    return op


@opcode("fence.mbarrier_init")
def _barrier_fence(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> None:
        warp.cta.machine.hooks.barrier_fence(warp)

    return op


@opcode("fence.acq_rel", "fence.sc", "membar")
def _memory_fence(statement: Statement, decoder: Decoder) -> Op:
    """Memory is sequentially consistent here; what moves is the checker's clocks."""
    gpu = statement.opcode.split(".")[-1] in ("gpu", "gl", "sys")

    def op(warp: Any) -> None:
        warp.cta.machine.hooks.memory_fence(warp, gpu)

    return op


@opcode("fence.proxy.tensormap::generic")
def _map_fence(statement: Statement, decoder: Decoder) -> Op:
    """Tensor maps are read as they are."""
    return lambda warp: None
