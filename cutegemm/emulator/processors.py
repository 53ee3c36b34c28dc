"""SMs: where the CTAs of a cluster run, and how many fit on one."""

import random
from dataclasses import dataclass, field
from typing import Any

from cutegemm.emulator.lazy import lazy
from cutegemm.emulator.tmem import TensorMemory

SM_COUNT = {"sm_90": 132, "sm_100": 148}
SHARED_BYTES = 228 * 1024  # of an SM; each CTA takes 1 KiB more than it asks for
SYSTEM_BYTES = 1024
THREADS = 2048  # of an SM
CTAS = 32  # of an SM
HOPPER_CTAS = 2  # of an SM: enough for kernels that count on each other, whatever registers they use


@dataclass(eq=False)
class Sm:
    """One SM and the CTAs on it."""

    number: int
    ctas: set[Any] = field(default_factory=set)

    @lazy
    def memory(self) -> TensorMemory:
        """Its tensor memory."""
        return TensorMemory()


class Processors:
    """The SMs of a GPU. CTAs of a pair (ranks 2i and 2i+1 of a cluster) get SMs 2j and 2j+1.

    Without ``chance`` clusters spread over the SMs; with it they may as well be packed onto few of them. CTAs
    of one cluster are on different SMs as long as there are enough.
    """

    def __init__(self, count: int, each: int, chance: random.Random | None) -> None:
        self.sms = [Sm(i) for i in range(count)]
        self.each = each
        self.packed = chance is not None and chance.random() < 0.5
        self.full = False

    def place(self, ctas: int) -> list[Sm] | None:
        """SMs for the CTAs of a cluster, by rank; None if there is no room. All clusters are of one size."""
        if self.full:
            return None
        each, sms = self.each, self.sms
        load = {sm: len(sm.ctas) for sm in sms}
        chosen: list[Sm] = []
        step = 2 if ctas % 2 == 0 and len(sms) > 1 else 1
        groups = [sms[i : i + step] for i in range(0, len(sms) - step + 1, step)]
        while len(chosen) < ctas:
            able = [group for group in groups if all(load[sm] < each for sm in group)]
            if ctas <= len(sms):
                able = [group for group in able if group[0] not in chosen]
            if not able:
                self.full = True
                return None
            best = max(able, key=lambda g: load[g[0]]) if self.packed else min(able, key=lambda g: load[g[0]])
            for sm in best:
                load[sm] += 1
            chosen += best
        return chosen[:ctas]

    def leave(self, cta: Any) -> None:
        """A CTA has exited."""
        cta.sm.ctas.discard(cta)
        self.full = False


def occupancy(target: str, shared_bytes: int, threads: int) -> int:
    """CTAs that fit on an SM by shared memory and threads; registers are not known here."""
    if not target.startswith("sm_10"):
        return HOPPER_CTAS
    return max(1, min(CTAS, SHARED_BYTES // (shared_bytes + SYSTEM_BYTES), THREADS // max(threads, 1)))


def processors(target: str, shared_bytes: int, threads: int, count: int | None, chance: Any) -> Processors:
    """The SMs for a launch; ``count`` of them, or as many as an H200 or B200 has."""
    family = "sm_100" if target.startswith("sm_10") else "sm_90"
    return Processors(count or SM_COUNT[family], occupancy(target, shared_bytes, threads), chance)
