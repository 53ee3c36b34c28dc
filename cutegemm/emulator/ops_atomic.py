"""atom and red: lane after lane; the order among warps is the scheduler's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cutegemm.emulator.decode import SINK, Decoder, Op, opcode
from cutegemm.emulator.ops_integer import type_of
from cutegemm.emulator.ops_memory import SHARED_END, by_cta, space_of
from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import LANES, UNSIGNED, Lanes, distance, float_bits, floats, lanes, mask_of

_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
    "exch": lambda old, x: x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "min": min,
    "max": max,
}


Change = Callable[[Lanes, list[Lanes]], Lanes]


def _change(name: str, kind: str, bits: int) -> Change:
    """New values of words that are all different, from the old ones and the lanes' operands."""

    def combine(old: int, values: list[int]) -> int:
        if name == "cas":
            return values[1] if old == values[0] else old
        if kind == "s" and name in ("min", "max"):
            as_signed = [v - (1 << bits) if v >> (bits - 1) else v for v in (old, values[0])]
            return int(_ATOMIC[name](*as_signed)) & mask_of(bits)
        return int(_ATOMIC[name](old, values[0])) & mask_of(bits)

    def change(old: Lanes, operands: list[Lanes]) -> Lanes:
        if name == "add" and kind == "f":
            return np.asarray(float_bits(floats(old, bits) + floats(operands[0], bits), bits))
        if name == "add":
            return old + operands[0]
        values = zip(*(operand.tolist() for operand in operands), strict=True)
        return np.array(
            [combine(before, list(given)) for before, given in zip(old.tolist(), values, strict=True)],
            dtype=UNSIGNED[bits],
        )

    return change


def _exchange(
    warp: Any, places: Lanes, width: int, space: str, change: Change, operands: list[Lanes]
) -> Lanes:
    """Replaces words, all different, by what they change to; returns the old ones."""
    machine = warp.cta.machine
    if space == "global" or (space == "generic" and int(places[0]) >= SHARED_END):
        old: Lanes = machine.memory.load(places, width, warp.site()).copy()
        machine.memory.store(places, change(old, operands), width, warp.site())
        machine.events += 1
        return old

    def in_shared(cta: Any, offsets: Lanes, chosen: Lanes) -> Lanes:
        before: Lanes = machine.hooks.load(warp, cta, offsets, width)
        machine.hooks.store(warp, cta, offsets, change(before, operands), width)
        return before

    return by_cta(warp, places, in_shared)


@opcode("atom", "red")
def _atomic(statement: Statement, decoder: Decoder) -> Op:
    """A vector is as many words one after another."""
    parts = statement.opcode.split(".")
    kind, bits = type_of(statement)
    operands = list(statement.operands)
    d = decoder.result(operands.pop(0), statement) if parts[0] == "atom" else SINK
    base, offset = decoder.address(operands.pop(0), statement)
    name = next((part for part in parts if part in _ATOMIC or part == "cas"), "")
    members = decoder.vector(operands[0])
    if not name or (kind == "f" and name not in ("add", "exch")) or (len(members) > 1 and d != SINK):
        raise decoder.unknown(statement)
    sources = [
        [decoder.source(text, statement, bits) for text in (member, *operands[1:])] for member in members
    ]
    space, width = space_of(statement.opcode), bits // 8
    change = _change(name, kind, bits)
    # From a sum of floats nobody learns how far others are.
    tells = space != "shared" and not (parts[0] == "red" and kind == "f")
    releases = not {"release", "acq_rel"}.isdisjoint(parts)
    acquires = not {"acquire", "acq_rel"}.isdisjoint(parts)

    def op(warp: Any) -> None:
        active, hooks = warp.active(), warp.cta.machine.hooks
        addresses = (lanes(warp.r[base], 64) + distance(offset))[active]
        if tells:
            hooks.release_global(warp, addresses, not releases)
        results: Lanes = np.zeros(LANES, dtype=UNSIGNED[bits])
        for i, slots in enumerate(sources):
            places = addresses + np.uint64(i * width)
            given = [lanes(warp.r[slot], bits)[active] for slot in slots]
            apart = len(np.unique(places)) == len(places)
            steps = [slice(None)] if apart else [slice(n, n + 1) for n in range(len(places))]
            olds = [_exchange(warp, places[s], width, space, change, [g[s] for g in given]) for s in steps]
            results[active] = np.concatenate(olds)
        if tells:
            hooks.acquire_global(warp, addresses, not acquires)
        if d != SINK:
            warp.r[d] = int(results[active][0]) if active.sum() == 1 and warp.mask is None else results

    return op
