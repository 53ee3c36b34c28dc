"""Faults planted in the PTX of working kernels: each is found, by the right exception, its cause named."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from emulation import kernel, replaced, with_ptx
from gpu_checks import Case

from cutegemm import GemmConfig
from cutegemm.emulator import (
    BarrierCountError,
    DeadlockError,
    EmulationError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
    UnknownInstructionError,
)
from cutegemm.emulator.product import Circumstances
from cutegemm.gemm import Gemm

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

CASE = Case(256, 256, 576)
CONFIG = GemmConfig(128, 128)
CLUSTERED = GemmConfig(128, 128, cluster_m=2)
SEEDS = (None, *range(19))


def consumers(ptx: str) -> int:
    """Where the consumers' code begins."""
    return ptx.index("setmaxnreg.inc")


def in_consumers(pattern: str, new: str) -> Callable[[str], str]:
    """A mutation of the consumers' code only."""

    def mutate(ptx: str) -> str:
        cut = consumers(ptx)
        return ptx[:cut] + replaced(ptx[cut:], pattern, new)

    return mutate


def in_producer(pattern: str, new: str) -> Callable[[str], str]:
    """A mutation of the producer's code only."""

    def mutate(ptx: str) -> str:
        start, cut = ptx.index("setmaxnreg.dec"), consumers(ptx)
        return ptx[:start] + replaced(ptx[start:cut], pattern, new) + ptx[cut:]

    return mutate


def anywhere(pattern: str, new: str, count: int = 0) -> Callable[[str], str]:
    """A mutation of the whole kernel."""
    return lambda ptx: replaced(ptx, pattern, new, count)


def released_before_waiting(ptx: str) -> str:
    """The stage is handed back before its MMAs are known to be done."""
    body = r"(wgmma\.wait_group\.sync\.aligned\s+1;)(.*?mbarrier\.arrive\.[^;]*;\n\s*\$L__BB\w+:)"
    changed, found = re.subn(body, r"\2\1", ptx, count=1, flags=re.DOTALL)
    assert found == 1
    return changed


WAIT_LOOP = r"mbarrier\.try_wait[^}]*\}"
ARRIVE = r"mbarrier\.arrive\.shared\S*\s[^;]*;"


@dataclass(frozen=True)
class Fault:
    """A mutation, what may find it, and words of the report."""

    mutate: Callable[[str], str]
    found_by: tuple[type[EmulationError], ...]
    words: str = ""
    config: GemmConfig = CONFIG


FAULTS = {
    "consumer never releases a stage": Fault(
        in_consumers(ARRIVE, ""), (DeadlockError,), r"producer warp 0 .*8 of 8 arrivals missing"
    ),
    "full barrier counts one arrival too many": Fault(
        anywhere(r"mov\.b32 (\s*%r\d+), 1;(\s*mbarrier\.init)", r"mov.b32 \1, 2;\2"),
        (DeadlockError,),
        "1 of 2 arrivals missing",
    ),
    "empty barrier counts half the consumers": Fault(
        anywhere(r"mov\.b32 (\s*%r\d+), 8;(\s*mbarrier\.init)", r"mov.b32 \1, 4;\2"),
        (RaceError, BarrierCountError, DeadlockError),
    ),
    "empty barrier counts twice the consumers": Fault(
        anywhere(r"mov\.b32 (\s*%r\d+), 8;(\s*mbarrier\.init)", r"mov.b32 \1, 16;\2"),
        (DeadlockError,),
        "8 of 16 arrivals missing",
    ),
    "fewer bytes announced than loaded": Fault(
        anywhere(r"(mov\.b32\s+%r\d+), 32768;", r"\1, 16384;"),
        (RaceError, UninitializedReadError, DeadlockError),
    ),
    "more bytes announced than loaded": Fault(
        anywhere(r"(mov\.b32\s+%r\d+), 32768;", r"\1, 32784;"),
        (DeadlockError,),
        "16 announced bytes have not arrived",
    ),
    "no proxy fence before the TMA store": Fault(
        anywhere(r"fence\.proxy\.async[^;]*;", ""), (RaceError,), "fence.proxy.async"
    ),
    "stage released before its MMAs are done": Fault(
        anywhere(r"wgmma\.wait_group\.sync\.aligned\s+1;", "wgmma.wait_group.sync.aligned 7;"),
        (RaceError,),
        "write-after-read.*MMA",
    ),
    "arrival before the wait for the MMAs": Fault(
        released_before_waiting, (RaceError,), "write-after-read.*MMA"
    ),
    "accumulators read before they are there": Fault(
        anywhere(r"wgmma\.wait_group\.sync\.aligned\s+0;", ""), (RaceError,), "accumulator"
    ),
    "output buffer reused while TMA reads it": Fault(
        anywhere(r"cp\.async\.bulk\.wait_group\.read\s+1;", ""), (RaceError,), "write-after-read.*TMA store"
    ),
    "exit while TMA reads the output buffer": Fault(
        anywhere(r"cp\.async\.bulk\.wait_group\.read\s+0;", ""), (RaceError,), "exits"
    ),
    "no barrier between the fill and the store of a buffer": Fault(
        anywhere(r"(fence\.proxy\.async[^;]*;\s*)bar\.sync[^;]*;", r"\1"),
        (RaceError, UninitializedReadError),
        "TMA|bulk",
    ),
    "consumer does not wait for its data": Fault(
        in_consumers(WAIT_LOOP, "}"), (RaceError, UninitializedReadError), "wgmma"
    ),
    "producer does not wait for free stages": Fault(
        in_producer(WAIT_LOOP, "}"), (RaceError, BarrierCountError)
    ),
    "one try_wait instead of a loop": Fault(
        in_consumers(r"bra\.uni\s+LAB_WAIT;", ""), (RaceError, UninitializedReadError)
    ),
    "ring believed one stage longer": Fault(
        in_consumers(r"(setp\.eq\.b32\s+%p\d+, %r\d+), 6;", r"\1, 7;"),
        (BarrierCountError, DeadlockError, RaceError, UninitializedReadError),
    ),
    "ring believed one stage shorter": Fault(
        in_consumers(r"(setp\.eq\.b32\s+%p\d+, %r\d+), 6;", r"\1, 5;"),
        (DeadlockError, RaceError, UninitializedReadError),
    ),
    "producer's parity does not start over": Fault(
        in_producer(r"xor\.b32(\s+%r\d+, %r\d+), 1;", r"or.b32\1, 1;"),
        (DeadlockError, RaceError, BarrierCountError),
    ),
    "barriers not initialised": Fault(
        anywhere(r"mbarrier\.init\.[^;]*;", "", 1), (BarrierCountError,), "no initialised mbarrier"
    ),
    "operand descriptor off by one tile": Fault(
        in_consumers(r"(add\.s32\s+%r\d+, %r1), 99328;", r"\1, 230400;"),
        (OutOfBoundsError, UninitializedReadError, RaceError),
    ),
    "operand stage beyond shared memory": Fault(
        in_producer(r"\+99328\]", "+232448]"), (OutOfBoundsError,), "shared memory of CTA"
    ),
    "barrier for more threads than there are": Fault(
        in_consumers(r"bar\.sync(\s+%r\d+), 128;", r"bar.sync\1, 160;"),
        (DeadlockError,),
        "128 of 160 threads",
    ),
    "barrier shared by both warpgroups": Fault(
        in_consumers(r"bar\.sync\s+%r\d+, 128;", "bar.sync 1, 128;"), (RaceError, UninitializedReadError)
    ),
    "cluster not synchronised before use": Fault(
        anywhere(r"barrier\.cluster\.(arrive\.relaxed|wait);", ""),
        (BarrierCountError, RaceError),
        config=CLUSTERED,
    ),
    "CTA leaves while its peer still arrives": Fault(
        lambda ptx: _without_tail(ptx), (OutOfBoundsError,), "exited", config=CLUSTERED
    ),
    "peer's arrival sent to oneself": Fault(
        anywhere(r"mapa\.shared::cluster\.u32(\s+%r\d+, %r\d+), %r\d+;", r"mapa.shared::cluster.u32\1, 0;"),
        (BarrierCountError, DeadlockError, RaceError),
        config=CLUSTERED,
    ),
    "no wgmma.fence": Fault(
        anywhere(r"wgmma\.fence\.sync\.aligned;", ""), (RaceError,), r"before any wgmma\.fence"
    ),
    "a tile handed out twice": Fault(
        anywhere(r"mov\.u32(\s+%r\d+), %ctaid\.x;", r"and.b32\1, %ctaid.x, -2;"),
        (RaceError,),
        r"write-after-write in global memory, element \d+ of argument 2: .*bulk_group\S* .* by consumer .* "
        r"of CTA 1 meets the write of a TMA store of consumer .* of CTA 0 at",
    ),
    "multicast to one CTA only": Fault(
        anywhere(r"\.multicast::cluster(\S*\s+[^;]*\}\], \[%r\d+\]), %rs\d+,", r".multicast::cluster\1, 1,"),
        (DeadlockError, BarrierCountError),
        config=CLUSTERED,
    ),
}


def _without_tail(ptx: str) -> str:
    """The producer's last waits, which keep its CTA alive, removed: all but those of the main loop."""
    start, cut = ptx.index("setmaxnreg.dec"), consumers(ptx)
    producer = ptx[start:cut]
    waits = list(re.finditer(WAIT_LOOP, producer))
    assert len(waits) > 2
    for wait in reversed(waits[1:]):
        producer = producer[: wait.start()] + "}" + producer[wait.end() :]
    return ptx[:start] + producer + ptx[cut:]


def caught(
    gemm: Gemm, ptx: str, seed: int | None, kinds: tuple[type[EmulationError], ...]
) -> EmulationError | None:
    """What a run with the checker raises, if it is of these kinds; None if it runs through."""
    try:
        with_ptx(gemm, CASE, ptx, Circumstances(check=True, seed=seed, resident=2))
    except kinds as error:
        return error
    return None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    gemm = kernel(fault.config, CASE)
    ptx = fault.mutate(gemm.ptx)
    assert ptx != gemm.ptx
    found = next(
        (error for seed in SEEDS if (error := caught(gemm, ptx, seed, fault.found_by)) is not None), None
    )
    assert found is not None
    assert re.search(fault.words, str(found), re.DOTALL), str(found)


@pytest.mark.parametrize("config", [CONFIG, CLUSTERED], ids=["one CTA", "cluster"])
def test_the_unmutated_kernels_raise_no_alarm(config: GemmConfig) -> None:
    gemm = kernel(config, CASE)
    for seed in SEEDS[:6]:
        with_ptx(gemm, CASE, gemm.ptx, Circumstances(check=True, seed=seed, resident=2)).judge(seed)


def test_a_deadlock_names_who_waits_for_what() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = in_consumers(ARRIVE, "")(gemm.ptx)
    with pytest.raises(DeadlockError) as raised:
        with_ptx(gemm, CASE, ptx, Circumstances(resident=1))
    report = str(raised.value)
    # Six stages are filled once; the producer waits for the first of them to be free again.
    assert re.search(r"producer warp 0 of CTA 0 at mbarrier\.try_wait\S* \(PTX line \d+[^)]*\)", report)
    assert "inputs_consumed[0], mbarrier at shared offset 48 of CTA 0: parity 0, phase 0, 8 of 8" in report
    assert len(re.findall(r"consumer warp \d+ of CTA 0 .*inputs_arrived\[0\], .*parity 1", report)) == 8
    assert "supplied before by producer warp 0 of CTA 0, TMA loads of producer warp 0 of CTA 0" in report


def test_deadlocks_are_found_without_the_checker_and_in_any_order() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = anywhere(r"(mov\.b32\s+%r\d+), 32768;", r"\1, 32784;")(gemm.ptx)
    for seed in (None, 1, 2):
        with pytest.raises(DeadlockError, match="16 announced bytes"):
            with_ptx(gemm, CASE, ptx, Circumstances(seed=seed, resident=1))


def test_an_instruction_nobody_knows_is_named_with_its_line() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = replaced(gemm.ptx, r"griddepcontrol\.wait;", "clusterlaunchcontrol.frobnicate.b128 [%r1];", 1)
    line = ptx[: ptx.index("frobnicate")].count("\n") + 1
    with pytest.raises(
        UnknownInstructionError, match=rf"clusterlaunchcontrol\.frobnicate\S* \(PTX line {line}\)"
    ):
        with_ptx(gemm, CASE, ptx, Circumstances())


def test_a_wrong_result_without_a_race_is_still_a_wrong_result() -> None:
    """The emulator computes what the code says: swapped coordinates of a store give a wrong product."""
    gemm = kernel(CONFIG, CASE)
    ptx = replaced(gemm.ptx, r"(bulk_group\S* \[%rd\d+, \{)(%r\d+), (%r\d+)\}", r"\1\3, \2}")
    with pytest.raises(AssertionError, match=r"relative error|NaN"):
        with_ptx(gemm, CASE, ptx, Circumstances()).judge()
