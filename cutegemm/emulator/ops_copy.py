"""cp.async: copies from global to shared memory by lanes, done when their group is waited for.

``check`` takes such a copy for an ordinary store where it is issued. That it is not waited for shows with a
seed: it is then done as late as the program allows.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cutegemm.emulator.decode import Decoder, Op, opcode
from cutegemm.emulator.engines import Task
from cutegemm.emulator.ops_memory import lane_addresses, read, write
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import Lanes, lanes


@dataclass
class Copies:
    """A warp's copies: those of the open group, and the groups not waited for."""

    open: list[Task] = field(default_factory=list)
    groups: list[list[Task]] = field(default_factory=list)


def _copies_of(warp: Any) -> Copies:
    copies: Copies = warp.engines.setdefault("copies", Copies())
    return copies


@opcode("cp.async.ca.shared", "cp.async.cg.shared", "cp.async.ca.shared::cta", "cp.async.cg.shared::cta")
def _copy(statement: Statement, decoder: Decoder) -> Op:
    """Bytes beyond the source size become zeros."""
    operands = [text for text in statement.operands if not text.startswith("%rd") or "[" in text]
    to, to_offset = decoder.address(operands[0], statement)
    origin, origin_offset = decoder.address(operands[1], statement)
    if not operands[2].isdecimal() or int(operands[2]) not in (4, 8, 16) or len(operands) > 4:
        raise decoder.unknown(statement)
    size = int(operands[2])
    valid = decoder.source(operands[3], statement, 32) if len(operands) > 3 else decoder.literal(size)

    def op(warp: Any) -> None:
        r, active = warp.r, warp.active()
        targets = lane_addresses(warp, r[to], to_offset)
        sources = lane_addresses(warp, r[origin], origin_offset)
        sizes = np.minimum(lanes(r[valid], 32)[active], size)
        copies = _copies_of(warp)
        data = np.zeros((len(targets), size), dtype=np.uint8)
        for count in np.unique(sizes[sizes > 0]).tolist():
            chosen = sizes == count
            whole = next(width for width in (8, 4, 2, 1) if count % width == 0)
            for at in range(0, count, whole):
                part = read(warp, sources[chosen] + np.uint64(at), whole, "global", "plain")
                data[chosen, at : at + whole] = np.ascontiguousarray(part).view(np.uint8).reshape(-1, whole)
        task = Task(copies, partial(_deliver, warp, targets, data))
        copies.open.append(task)
        warp.cta.machine.hooks.start(task)

    return op


def _deliver(warp: Any, targets: Lanes, data: Lanes) -> None:
    for at in range(0, data.shape[1], 4):
        words = np.ascontiguousarray(data[:, at : at + 4]).view(np.uint32)[:, 0]
        write(warp, targets + np.uint64(at), words, 4, "shared", "plain")


@opcode("cp.async.commit_group")
def _commit(statement: Statement, decoder: Decoder) -> Op:
    def op(warp: Any) -> None:
        copies = _copies_of(warp)
        copies.groups.append(copies.open)
        copies.open = []

    return op


@opcode("cp.async.wait_group", "cp.async.wait_all")
def _wait(statement: Statement, decoder: Decoder) -> Op:
    everything = statement.opcode.endswith("wait_all")
    pending = decoder.literal(0) if everything else decoder.source(statement.operands[0], statement, 32)

    def op(warp: Any) -> None:
        copies = _copies_of(warp)
        split = max(0, len(copies.groups) - warp.scalar(warp.r[pending]))
        done = copies.groups[:split] + ([copies.open] if everything else [])
        for group in done:
            for task in group:
                task.run()
        copies.groups = copies.groups[split:]

    return op
