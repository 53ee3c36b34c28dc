"""Faults planted in sm_100a kernels: each is found, by the right exception, its cause named."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from blackwell_kernels import BARRIER_LABELS, compiled, operands
from emulation import replaced

from cutegemm import emulator
from cutegemm.emulator import (
    BarrierCountError,
    DeadlockError,
    EmulationError,
    MisuseError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

SIZE = (256, 192, 256)  # three tiles of a pair, six of a CTA; four steps of K through three stages
SEEDS = (None, *range(19))
WAIT_LOOP = r"mbarrier\.try_wait[^}]*\}"
# CTAs or pairs that share their loads need tiles below each other.
WIDE = (1024, 64, 256)
ALONE, PAIR, PAIRS = "one CTA", "pair", "two pairs"


def anywhere(pattern: str, new: str, count: int = 0) -> Callable[[str], str]:
    """A mutation of the whole kernel."""
    return lambda ptx: replaced(ptx, pattern, new, count)


def part(begin: str, end: str, pattern: str, new: str, count: int = 0) -> Callable[[str], str]:
    """A mutation of what lies between the first match of ``begin`` and the next one of ``end``."""

    def mutate(ptx: str) -> str:
        first = re.search(begin, ptx)
        assert first is not None
        last = re.compile(end).search(ptx, first.end())
        assert last is not None
        middle = replaced(ptx[first.start() : last.start()], pattern, new, count)
        return ptx[: first.start()] + middle + ptx[last.start() :]

    return mutate


def last_of(pattern: str, new: str) -> Callable[[str], str]:
    """A mutation of the last match."""

    def mutate(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        assert found
        return ptx[: found[-1].start()] + new + ptx[found[-1].end() :]

    return mutate


def without_wait(before: str, back: int = 1) -> Callable[[str], str]:
    """The last waiting loop before the first match of a pattern removed, or the ``back``-th last."""

    def mutate(ptx: str) -> str:
        where = re.search(before, ptx)
        assert where is not None
        loop = list(re.finditer(WAIT_LOOP, ptx[: where.start()]))[-back]
        return ptx[: loop.start()] + "}" + ptx[loop.end() :]

    return mutate


def with_fences(ptx: str) -> str:
    """The kernel as one that uses tcgen05.fence, wherever threads wait for each other or signal."""
    ptx = replaced(ptx, rf"({WAIT_LOOP})", r"\1 tcgen05.fence::after_thread_sync;")
    ptx = replaced(
        ptx, r"((?:bar\.sync|barrier\.cluster\.wait)[^;]*;)", r"\1 tcgen05.fence::after_thread_sync;"
    )
    return replaced(
        ptx,
        r"(mbarrier\.arrive\.shared|bar\.sync|barrier\.cluster\.arrive)",
        r"tcgen05.fence::before_thread_sync; \1",
    )


def descriptor(change: Callable[[int], int]) -> Callable[[str], str]:
    """The instruction descriptor with its columns changed."""

    def mutate(ptx: str) -> str:
        def new(found: re.Match[str]) -> str:
            bits = int(found[2])
            columns = change((bits >> 17 & 0x3F) * 8)
            return f"{found[1]}{bits & ~(0x3F << 17) | columns // 8 << 17}"

        # M, float32 result, float16 operands; M and N in their fields.
        pattern = r"([ ,])(\d{9})(?=[;,])"
        changed, count = re.subn(pattern, lambda m: new(m) if int(m[2]) & 0xFFFF == 0x10 else m[0], ptx)
        assert count
        assert changed != ptx
        return changed

    return mutate


@dataclass(frozen=True)
class Fault:
    """A mutation, what may find it, words of the report, and of which kernel."""

    mutate: Callable[[str], str]
    found_by: tuple[type[EmulationError], ...]
    words: str = ""
    of: str = ALONE


RESULT_COMMIT = r"tcgen05\.commit[^;]*\+48\][^;]*;"
STAGE_COMMIT = r"tcgen05\.commit[^;]*\+24\][^;]*;"
TAKEN_ARRIVAL = r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;"

FAULTS = {
    "tensor memory freed while it is read": Fault(
        last_of(r"bar\.sync[^;]*;", ""),
        (RaceError, OutOfBoundsError),
        "free-after|has none allocated",
    ),
    "tensor memory never freed": Fault(
        anywhere(r"tcgen05\.dealloc[^;]*;", ""),
        (MisuseError,),
        "leaves 128 columns .* tcgen05.dealloc is missing",
    ),
    "half of the tensor memory freed": Fault(
        part(
            r"bar\.sync[^;]*;(?=[^~]*dealloc)",
            r"\Z",
            r"tcgen05\.dealloc(\S*\s+\S+) %r\d+;",
            r"tcgen05.dealloc\1 64;",
        ),
        (MisuseError,),
        "frees 64 columns .* 128 of 1 were allocated",
    ),
    "too few columns allocated": Fault(
        anywhere(r"(tcgen05\.alloc[^;]*, )%r\d+;", r"\g<1>32;"), (OutOfBoundsError,), r"columns 0\.\.63"
    ),
    "a number of columns that cannot be allocated": Fault(
        anywhere(r"(tcgen05\.alloc[^;]*, )%r\d+;", r"\g<1>96;"), (MisuseError,), "96 columns"
    ),
    "address read before it is there": Fault(
        anywhere(r"bar\.sync[^;]*;", "", 1),
        (UninitializedReadError, BarrierCountError),
    ),
    "results never committed": Fault(
        anywhere(RESULT_COMMIT, ""), (DeadlockError, RaceError), r"epilogue warp 0 .*result_ready\[0\]"
    ),
    "stages never committed": Fault(
        anywhere(STAGE_COMMIT, ""), (DeadlockError,), r"producer warp 5 .*inputs_consumed\[0\]"
    ),
    "loads not waited for": Fault(
        anywhere(r"tcgen05\.wait::ld[^;]*;", ""), (RaceError,), r"write-after-read in tensor memory.*wait::ld"
    ),
    "accumulator overwritten before it is taken": Fault(
        without_wait(r"tcgen05\.mma", back=2), (RaceError,), "write-after-read in tensor memory.*MMA warp 4"
    ),
    "operands not waited for": Fault(
        without_wait(r"tcgen05\.mma"), (RaceError, UninitializedReadError), r"shared memory.*tcgen05\.mma"
    ),
    "operand descriptor of no known layout": Fault(
        anywhere(r"(tcgen05\.mma[^;]*\], )(%rd\d+)", r"or.b64 \2, \2, 0x2000000000000000; \1\2"),
        (MisuseError,),
        r"PTX line \d+.* has swizzle 3, version 1",
    ),
    "accumulator never given back": Fault(
        last_of(TAKEN_ARRIVAL, ""),
        (DeadlockError,),
        r"MMA warp 4 .*result_taken\[0\].*4 of 4 arrivals missing",
    ),
    "accumulator read before it is ready": Fault(
        without_wait(r"tcgen05\.ld"), (RaceError, UninitializedReadError), "tensor memory"
    ),
    "one try_wait instead of a loop": Fault(
        part(r"tcgen05\.commit(?![^~]*tcgen05\.commit)", r"tcgen05\.ld", r"bra\.uni\s+LAB_WAIT;", ""),
        (RaceError, UninitializedReadError),
        "tensor memory",
    ),
    "fewer bytes announced than loaded": Fault(
        anywhere(r"(mov\.b32\s+%r\d+), 24576;", r"\1, 16384;"),
        (RaceError, UninitializedReadError, DeadlockError),
    ),
    "more bytes announced than loaded": Fault(
        anywhere(r"(mov\.b32\s+%r\d+), 24576;", r"\1, 24592;"), (DeadlockError,), "16 announced bytes"
    ),
    "half the columns": Fault(descriptor(lambda n: n // 2), (UninitializedReadError,), "column 32"),
    "twice the columns": Fault(
        descriptor(lambda n: n * 2), (RaceError, UninitializedReadError, OutOfBoundsError)
    ),
    "columns that no MMA has": Fault(descriptor(lambda n: n + 8), (MisuseError,), "N = 72"),
    "first step adds": Fault(
        anywhere(r"(tcgen05\.mma[^;]*), %p\d+;", r"\1, 1;"), (UninitializedReadError,), "tensor memory"
    ),
    "MMA issued by all lanes": Fault(
        part(
            r"elect\.sync[^;]*;(?=[^~]{0,900}tcgen05\.mma)",
            r"tcgen05\.mma",
            r"not\.pred(\s+%p\d+), %p\d+;",
            r"mov.pred\1, 0;",
            1,
        ),
        (MisuseError,),
        "32 threads issue an MMA",
    ),
    "lanes of another warp": Fault(
        anywhere(r"(and\.b32\s+%r\d+, %r\d+), 14680064;", r"\1, 2097152;"),
        (OutOfBoundsError,),
        r"this warp reaches lanes 64\.\.95",
    ),
    "no fence after the wait": Fault(
        lambda ptx: replaced(with_fences(ptx), r"tcgen05\.fence::after_thread_sync;", ""),
        (RaceError,),
        "after_thread_sync is missing",
    ),
    "no fence before the arrival": Fault(
        lambda ptx: replaced(
            with_fences(ptx), r"tcgen05\.fence::before_thread_sync; (mbarrier\.arrive)", r"\1"
        ),
        (RaceError,),
        "before_thread_sync",
    ),
    "commit to one CTA of the pair": Fault(
        anywhere(r"(mov\.b16\s+%rs\d+), 3;", r"\1, 1;"), (DeadlockError,), "CTA 1", PAIR
    ),
    "commit to a CTA that is not there": Fault(
        anywhere(r"(mov\.b16\s+%rs\d+), 3;", r"\1, 7;"), (OutOfBoundsError,), "rank 2 of a cluster of 2", PAIR
    ),
    "pair allocated as single CTAs": Fault(
        anywhere(r"cta_group::2(\.sync\.aligned)", r"cta_group::1\1"),
        (MisuseError,),
        r"is for 2 CTA\(s\).*allocated for 1",
        PAIR,
    ),
    "bytes of the peer not announced": Fault(
        anywhere(r"(mov\.b32\s+%r\d+), 40960;", r"\1, 20480;"),
        (RaceError, UninitializedReadError, DeadlockError),
        "",
        PAIR,
    ),
    "accumulator given back to oneself": Fault(
        anywhere(
            r"mapa\.shared::cluster\.u32(\s+%r\d+, %r\d+), 0;",
            r"mapa.shared::cluster.u32\1, %cluster_ctarank;",
        ),
        (DeadlockError, BarrierCountError),
        "",
        PAIR,
    ),
    "stage given back to one pair only": Fault(
        anywhere(r"(mov\.b16\s+%rs\d+), 15;", r"\1, 3;"),
        (DeadlockError, BarrierCountError),
        r"inputs_consumed\[\d\]",
        PAIRS,
    ),
    "stage believed free after one pair": Fault(
        anywhere(r"(mov\.b32\s+%r\d+), 2;(?=\s+mbarrier\.init)", r"\1, 1;"),
        (BarrierCountError, RaceError),
        "",
        PAIRS,
    ),
    "load shared with oneself only": Fault(
        anywhere(r"(mov\.b16\s+%rs\d+), 5;", r"\1, 1;"),
        (DeadlockError,),
        "announced bytes have not arrived",
        PAIRS,
    ),
    "peer leaves while it is needed": Fault(
        last_of(r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;", ""),
        (RaceError, OutOfBoundsError, MisuseError),
        "",
        PAIR,
    ),
}


def kernel(of: str) -> tuple[Any, tuple[int, int, int]]:
    """The kernel, and the size it is for."""
    size = WIDE if of == PAIRS else SIZE
    return compiled(*size, pair=of != ALONE, teams=2 if of == PAIRS else 1), size


def run(ptx: str | None, of: str, seed: int | None) -> float:
    """The kernel, or device code in its place, with the checker; returns the largest error."""
    original, size = kernel(of)
    a, b, d = operands(*size)
    emulator.run(original, a, b, d, ptx=ptx, seed=seed, check=True, barrier_labels=BARRIER_LABELS)
    return (d.double() - a.double() @ b.double().T).abs().max().item()


def caught(ptx: str, fault: Fault, seed: int | None) -> EmulationError | None:
    """What a run raises, if the fault may be found by it; None if it runs through, be the result wrong."""
    try:
        run(ptx, fault.of, seed)
    except fault.found_by as error:
        return error
    return None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    original = kernel(fault.of)[0].__ptx__
    ptx = fault.mutate(original)
    assert ptx != original
    found = next(
        (error for seed in SEEDS if (error := caught(ptx, fault, seed)) is not None),
        None,
    )
    assert found is not None
    assert re.search(fault.words, str(found), re.DOTALL), str(found)


@pytest.mark.parametrize("of", [ALONE, PAIR, PAIRS])
@pytest.mark.parametrize("fences", [False, True], ids=["no fences", "fences"])
def test_the_unmutated_kernels_raise_no_alarm(of: str, fences: bool) -> None:
    ptx = kernel(of)[0].__ptx__
    for seed in SEEDS[:5]:
        assert run(with_fences(ptx) if fences else None, of, seed) < 1e-4


def test_a_deadlock_names_who_waits_for_what() -> None:
    ptx = last_of(TAKEN_ARRIVAL, "")(kernel(ALONE)[0].__ptx__)
    with pytest.raises(DeadlockError) as raised:
        run(ptx, ALONE, None)
    report = str(raised.value)
    assert re.search(r"MMA warp 4 of CTA 0 at mbarrier\.try_wait\S* \(PTX line \d+[^)]*\)", report)
    assert re.search(r"result_ready\[0\], .* supplied before by MMAs of MMA warp 4 of CTA 0", report)
