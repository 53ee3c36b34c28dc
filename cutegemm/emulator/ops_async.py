"""st.async: stores to the shared memory of a cluster that tell an mbarrier when they have arrived."""

from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.engines import SYNC_CYCLES, Task
from cutegemm.emulator.faults import OutOfBoundsError
from cutegemm.emulator.memory import offset_of, rank_of
from cutegemm.emulator.ops_integer import type_of
from cutegemm.emulator.ops_mbarrier import barrier_at
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import Lanes, lanes

STORE_CYCLES = 200  # until the bytes are in another CTA's shared memory


@opcode("st.async")
def _store_async(statement: Statement, decoder: Decoder) -> Op:
    """Each lane's words, whole, to one CTA and to a barrier of the same CTA."""
    parts = statement.opcode.split(".")
    if "shared::cluster" not in parts or "mbarrier::complete_tx::bytes" not in parts:
        raise decoder.unknown(statement)
    base, offset = decoder.address(statement.operands[0], statement)
    _, bits = type_of(statement)
    sources = [decoder.source(text, statement, bits) for text in decoder.vector(statement.operands[1])]
    barrier_base, barrier_offset = decoder.address(statement.operands[2], statement)
    size = len(sources) * bits // 8

    def op(warp: Any) -> None:
        r = warp.r
        values = np.stack([lanes(r[slot], bits) for slot in sources], axis=1)
        addresses, barriers = lanes(r[base], 64), lanes(r[barrier_base], 64)
        for lane in np.flatnonzero(warp.active()).tolist():
            place, told = int(addresses[lane]) + offset, int(barriers[lane]) + barrier_offset
            if place % size or rank_of(place) != rank_of(told):
                raise OutOfBoundsError(
                    f"{warp.here()}: {size} bytes go to shared address {offset_of(place)} of rank "
                    f"{rank_of(place)} and tell a barrier of rank {rank_of(told)}; the address must be a "
                    "multiple of the size and the rank the same"
                )
            _store(warp, place, values[lane], told)

    return op


def _store(warp: Any, place: int, values: Lanes, told: int) -> None:
    """One lane's store."""
    machine, where = warp.cta.machine, warp.site()
    hooks = machine.hooks
    cta, offset = warp.cta.cluster.cta_of(rank_of(place), warp), offset_of(place)
    barrier = barrier_at(warp, told)
    size = values.nbytes
    cta.shared.check(offset, offset + size, where)
    token = hooks.load_begins(warp, size, offset, [(cta, barrier)], asynchronous=False)
    warp.clock += SYNC_CYCLES
    finish = warp.clock + STORE_CYCLES

    def work() -> None:
        cta.shared.data[offset : offset + size] = values.view(np.uint8)
        cta.shared.touched(offset, offset + size)
        machine.events += 1
        hooks.load_ends(barrier, token)
        barrier.complete(size, warp, finish, what="stores of ")

    hooks.start(Task(object(), work))
