"""Branches, barriers of a CTA and of a cluster, exchange between lanes, hints without effect here."""

from typing import Any

import numpy as np

from cutegemm.emulator.decode import EXITED, Decoder, Op, opcode
from cutegemm.emulator.mbarrier import RendezvousWait
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import LANE_NUMBERS, LANES, lanes, lanes_of, predicate_lanes


@opcode("bra")
def _branch(statement: Statement, decoder: Decoder) -> Op:
    target = decoder.target(statement.operands[0], statement)
    return lambda warp: target


@opcode("ret", "exit")
def _exit(statement: Statement, decoder: Decoder) -> Op:
    return lambda warp: EXITED


@opcode("trap")
def _trap(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> None:
        raise decoder.unknown(statement, f"{warp.name} stopped the kernel")

    return op


@opcode(
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
    "prefetch",
    "prefetchu",
    "cp.async.bulk.prefetch.tensor",
    "nanosleep.u32",
    "discard",
)
def _hint(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> None:
        return None

    return op


@opcode("elect.sync")
def _elect(statement: Statement, decoder: Decoder) -> Op:
    """The lowest lane is elected; all lanes must be there."""
    lane, _, chosen = statement.operands[0].partition("|")
    d = decoder.result(lane.strip(), statement)
    p = decoder.result(chosen.strip(), statement)

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        warp.r[d], warp.r[p] = warp.first, lanes_of(1 << warp.first)
        return None

    return op


@opcode("shfl.sync.idx.b32", "shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32")
def _shuffle(statement: Statement, decoder: Decoder) -> Op:
    target, _, predicate = statement.operands[0].partition("|")
    d = decoder.result(target.strip(), statement)
    p = decoder.result(predicate.strip(), statement) if predicate else None
    x, by, clamp = (decoder.source(text, statement, 32) for text in statement.operands[1:4])
    mode = statement.opcode.split(".")[2]

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        r = warp.r
        value, lane, control = r[x], r[by], r[clamp]
        if mode == "idx" and p is None and type(lane) is int and control == 31:
            r[d] = value if type(value) is int else int(value[lane & 31])
            return None
        segment = lanes(control, 32) >> 8 & 31
        bound = lanes(control, 32) & 31
        low = LANE_NUMBERS & segment
        high = low | (bound & ~segment)
        amount = lanes(lane, 32)
        if mode == "idx":
            source = low | (amount & ~segment & 31)
            valid = source <= high
        elif mode == "up":
            source = LANE_NUMBERS - amount
            valid = source.astype(np.int32) >= high.astype(np.int32)
        elif mode == "down":
            source = LANE_NUMBERS + amount
            valid = source <= high
        else:
            source = LANE_NUMBERS ^ (amount & 31)
            valid = source <= high
        source = np.where(valid, source, LANE_NUMBERS)
        r[d] = lanes(value, 32)[source]
        if p is not None:
            r[p] = valid
        return None

    return op


@opcode("vote.sync.any.pred", "vote.sync.all.pred", "vote.sync.ballot.b32")
def _vote(statement: Statement, decoder: Decoder) -> Op:
    d = decoder.result(statement.operands[0], statement)
    p = decoder.source(statement.operands[1], statement, 1)
    mode = statement.opcode.split(".")[2]

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        value = predicate_lanes(warp.r[p]) & warp.active()
        if mode == "any":
            warp.r[d] = bool(value.any())
        elif mode == "all":
            warp.r[d] = bool(value[warp.active()].all())
        else:
            warp.r[d] = int(np.packbits(value, bitorder="little").view(np.uint32)[0])
        return None

    return op


@opcode("bar.warp.sync")
def _warp_barrier(statement: Statement, decoder: Decoder) -> Op:
    return lambda warp: warp.wait_for_lanes() if warp.must_converge() else None


@opcode("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive", "barrier.sync.aligned")
def _barrier(statement: Statement, decoder: Decoder) -> Op:
    arrive_only = ".arrive" in statement.opcode
    number = decoder.source(statement.operands[0], statement, 32)
    threads = decoder.source(statement.operands[1], statement, 32) if len(statement.operands) > 1 else None
    key = object()

    def op(warp: Any) -> int | None:
        if warp.must_converge():
            return warp.wait_for_lanes()
        waiting = warp.pending.get(key)
        if waiting is None:
            cta = warp.cta
            barrier = cta.barrier(warp.scalar(warp.r[number]))
            barrier.whole = threads is None
            expected = cta.live_threads() if threads is None else warp.scalar(warp.r[threads])
            generation = cta.machine.hooks.arrive(warp, barrier, LANES, expected)
            if arrive_only:
                return None
            waiting = RendezvousWait(barrier, generation)
            warp.pending[key] = waiting
        if not waiting.ready():
            return warp.block(waiting)
        del warp.pending[key]
        warp.cta.machine.hooks.acquire(warp, waiting.barrier)
        return None

    return op


@opcode(
    "barrier.cluster.arrive",
    "barrier.cluster.arrive.relaxed",
    "barrier.cluster.arrive.release",
    "barrier.cluster.arrive.aligned",
    "barrier.cluster.arrive.relaxed.aligned",
    "barrier.cluster.arrive.release.aligned",
)
def _cluster_arrive(statement: Statement, decoder: Decoder) -> Op:
    relaxed = ".relaxed" in statement.opcode

    def op(warp: Any) -> None:
        cluster = warp.cta.cluster
        generation = warp.cta.machine.hooks.arrive(
            warp, cluster.barrier, warp.bits.bit_count(), cluster.threads, relaxed
        )
        warp.pending["cluster"] = RendezvousWait(cluster.barrier, generation)

    return op


@opcode(
    "barrier.cluster.wait",
    "barrier.cluster.wait.acquire",
    "barrier.cluster.wait.aligned",
    "barrier.cluster.wait.acquire.aligned",
)
def _cluster_wait(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> int | None:
        waiting = warp.pending.get("cluster")
        if waiting is None:
            raise decoder.unknown(statement, f"{warp.name} has not arrived at the cluster barrier")
        if not waiting.ready():
            return warp.block(waiting)
        del warp.pending["cluster"]
        warp.cta.machine.hooks.acquire(warp, waiting.barrier)
        return None

    return op
