"""Cluster launch control: running clusters take over the work of clusters that have not been launched yet.

The 16 bytes of an answer are the hardware's own business; here they are the first CTA's three coordinates and
a word that says whether a cluster was cancelled. With a seed the answer is now and then no although there is
work left, as when the GPU is wanted for something else: those clusters are then launched as usual.
"""

from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.engines import SYNC_CYCLES, Task
from cutegemm.emulator.faults import OutOfBoundsError
from cutegemm.emulator.memory import RANK_SHIFT, offset_of
from cutegemm.emulator.ops_mbarrier import barrier_at
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import Lanes

ANSWER_BYTES = 16
ANSWER_CYCLES = 300  # from the question to the answer, in the cost model
REFUSAL = 0.1  # with a seed: chance of a no while clusters wait


def _answer(machine: Any) -> Lanes:
    """Takes the next waiting cluster, if there is one and chance does not refuse it."""
    refused = machine.chance is not None and machine.chance.random() < REFUSAL
    if refused or not machine.waiting:
        return np.array([0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0], dtype=np.uint32)
    sizes = machine.launch.cluster
    first = [c * size for c, size in zip(machine.waiting.pop(), sizes, strict=True)]
    return np.array([*first, 1], dtype=np.uint32)


@opcode("clusterlaunchcontrol.try_cancel.async")
def _try_cancel(statement: Statement, decoder: Decoder) -> Op:
    parts = statement.opcode.split(".")
    base, offset = decoder.address(statement.operands[0], statement)
    barrier_base, barrier_offset = decoder.address(statement.operands[1], statement)
    everywhere = "multicast::cluster::all" in parts
    if "mbarrier::complete_tx::bytes" not in parts:
        raise decoder.unknown(statement)

    def op(warp: Any) -> None:
        r, scalar, cluster = warp.r, warp.scalar, warp.cta.cluster
        machine, where = warp.cta.machine, warp.site()
        hooks = machine.hooks
        place = offset_of(scalar(r[base]) + offset)
        barrier = barrier_at(warp, scalar(r[barrier_base]) + barrier_offset)
        targets = [(warp.cta, barrier)]
        if everywhere:
            targets = [
                (cluster.cta_of(cta.rank, warp), barrier_at(warp, cta.rank << RANK_SHIFT | barrier.offset))
                for cta in cluster.ctas
            ]
        for cta, _ in targets:
            cta.shared.check(place, place + ANSWER_BYTES, where)
        if place % ANSWER_BYTES:
            raise OutOfBoundsError(f"{where}: the answer goes to shared address {place}, no multiple of 16")
        warp.does = warp.does or "scheduler"
        token = hooks.load_begins(warp, ANSWER_BYTES, place, targets, after_reads=True)
        finish = warp.clock + ANSWER_CYCLES
        warp.clock += SYNC_CYCLES

        def work() -> None:
            answer = _answer(machine)
            for cta, barrier in targets:
                cta.shared.views[4][place // 4 : place // 4 + 4] = answer
                cta.shared.touched(place, place + ANSWER_BYTES)
                machine.events += 1
                hooks.load_ends(barrier, token)
                barrier.complete(ANSWER_BYTES, warp, finish, what="launch control for ")

        hooks.start(Task(object(), work))

    return op


def _words(warp: Any, slot: int) -> Lanes:
    """An answer in a register, (lanes, 4 words)."""
    words: Lanes = np.ascontiguousarray(warp.r[slot]).view(np.uint32).reshape(-1, 4)
    return words


@opcode("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128")
def _is_canceled(statement: Statement, decoder: Decoder) -> Op:
    p = decoder.result(statement.operands[0], statement)
    answer = decoder.source(statement.operands[1], statement, 128)

    def op(warp: Any) -> None:
        flags = _words(warp, answer)[:, 3]
        warp.r[p] = bool(flags[0]) if (flags == flags[0]).all() else flags == 1

    return op


@opcode("clusterlaunchcontrol.query_cancel.get_first_ctaid")
@opcode(*(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"))
def _first_cta(statement: Statement, decoder: Decoder) -> Op:
    """A coordinate, or all three and a zero."""
    axis = statement.opcode.split("get_first_ctaid")[1].removeprefix("::")[:1]
    slots = [decoder.result(text, statement) for text in decoder.vector(statement.operands[0])]
    answer = decoder.source(statement.operands[1], statement, 128)
    columns = ["xyz".index(axis)] if axis in ("x", "y", "z") else [0, 1, 2]

    def op(warp: Any) -> None:
        words = _words(warp, answer)
        for slot, column in zip(slots, columns, strict=False):
            values = words[:, column]
            warp.r[slot] = int(values[0]) if (values == values[0]).all() else values.copy()
        for slot in slots[len(columns) :]:
            warp.r[slot] = 0

    return op
