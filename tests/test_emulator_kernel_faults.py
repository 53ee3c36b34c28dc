"""Faults planted in kernels that share K or fetch their tasks, and in those for sm_100a: each is found."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
from emulation import gemm_of, replaced
from gpu_checks import Case, Operands

from cutegemm import GemmConfig
from cutegemm.emulator import (
    BarrierCountError,
    DeadlockError,
    EmulationError,
    MisuseError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)
from cutegemm.emulator.product import Circumstances, emulate
from cutegemm.gemm import Gemm
from cutegemm.hardware import gpu_by_name
from cutegemm.scheduler import Dynamic, SplitK, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

SEEDS = (None, *range(19))
WAIT_LOOP = r"mbarrier\.try_wait[^}]*\}"
GPUS = {"sm_90a": "H200", "sm_100a": "B200"}
Mutation = Callable[[str], str]


@dataclass(frozen=True)
class Victim:
    """A kernel, a product for it, and how many clusters run at once."""

    case: Case
    config: GemmConfig
    target: str
    scheduler: TileScheduler = TileScheduler()  # noqa: RUF009 - frozen
    resident: int = 2


VICTIMS = {
    "persistent": Victim(Case(256, 256, 576), GemmConfig(128, 128), "sm_90a"),
    "cluster": Victim(Case(256, 256, 576), GemmConfig(128, 128, cluster_m=2), "sm_90a"),
    "dynamic cluster": Victim(
        Case(768, 256, 192), GemmConfig(128, 64, cluster_m=2), "sm_90a", TileScheduler(assignment=Dynamic())
    ),
    "split": Victim(
        Case(136, 104, 520), GemmConfig(128, 64), "sm_90a", TileScheduler(assignment=SplitK(2)), 1
    ),
    "stream": Victim(
        Case(192, 192, 2304), GemmConfig(64, 64, consumers=1), "sm_90a", TileScheduler(assignment=StreamK())
    ),
    "tensor memory": Victim(Case(384, 192, 576), GemmConfig(128, 64), "sm_100a"),
    "pair": Victim(Case(512, 256, 192), GemmConfig(256, 128, cluster_m=2, mma_ctas=2), "sm_100a", resident=1),
    "dynamic pair": Victim(
        Case(1024, 192, 192),
        GemmConfig(256, 64, cluster_m=2, mma_ctas=2),
        "sm_100a",
        TileScheduler(assignment=Dynamic()),
    ),
}


@cache
def kernel(name: str) -> Gemm:
    """The kernel of a victim, built once for all tests."""
    victim = VICTIMS[name]
    return gemm_of(victim.case, victim.config, victim.scheduler, victim.target).build()


def run(name: str, ptx: str | None, seed: int | None) -> Operands:
    """Runs device code in a victim's place, with the checker."""
    victim, gemm = VICTIMS[name], kernel(name)
    operands = Operands.make(victim.case, "cpu", seed=1)
    tensors = (operands.a.tensor, operands.b.tensor, operands.out.tensor)
    circumstances = Circumstances(check=True, seed=seed, resident=victim.resident, ptx=ptx)
    emulate(gemm._kernels, gpu_by_name(GPUS[victim.target]), tensors, circumstances)
    return operands


# --- mutations ---------------------------------------------------------------------------------------------


def anywhere(pattern: str, new: str, count: int = 0) -> Mutation:
    """Of the whole kernel."""
    return lambda ptx: replaced(ptx, pattern, new, count)


def each(*mutations: Mutation) -> Mutation:
    """One after the other."""

    def mutate(ptx: str) -> str:
        for mutation in mutations:
            ptx = mutation(ptx)
        return ptx

    return mutate


def behind(place: str, mutation: Mutation) -> Mutation:
    """Of what follows the last match of ``place``."""

    def mutate(ptx: str) -> str:
        cut = [found.start() for found in re.finditer(place, ptx)][-1]
        return ptx[:cut] + mutation(ptx[cut:])

    return mutate


def ahead(place: str, mutation: Mutation) -> Mutation:
    """Of what comes before the first match of ``place``."""

    def mutate(ptx: str) -> str:
        found = re.search(place, ptx)
        assert found is not None
        return mutation(ptx[: found.start()]) + ptx[found.start() :]

    return mutate


def last(pattern: str, new: str) -> Mutation:
    """Of the last match."""

    def mutate(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))[-1]
        return ptx[: found.start()] + found.expand(new) + ptx[found.end() :]

    return mutate


def committed_too_early(ptx: str) -> str:
    """A stage is committed before the last of its MMAs is issued."""
    mma = r"(\telect\.sync(?:(?!elect).)*?tcgen05\.mma[^;]*;\n\$L__BB0_\d+:\n)"
    commit = r"(\telect\.sync(?:(?!elect).)*?tcgen05\.commit[^;]*;\n\$L__BB0_\d+:\n)"
    changed, count = re.subn(mma + commit, r"\2\1", ptx, count=1, flags=re.DOTALL)
    assert count == 1
    return changed


@dataclass(frozen=True)
class Fault:
    """A mutation, of which kernel, what finds it, and words of the report."""

    of: str
    mutate: Mutation
    found_by: tuple[type[EmulationError], ...]
    words: str = ""


NO_INIT_FENCE = anywhere(r"fence\.mbarrier_init[^;]*;", "")
ANNOUNCED = (
    r"mbarrier\.arrive\.expect_tx(\.relaxed|\.release)\.cluster\.shared::cluster\.b64 _, \[(%r\d+)\], %r\d+;"
)
TO_ONESELF = anywhere(
    r"mapa\.shared::cluster\.u32(\s+%r\d+, %r\d+), %r\d+;", r"mapa.shared::cluster.u32\1, %cluster_ctarank;"
)


def partials_without(side: str) -> Fault:
    """StreamK's flags relaxed on one side, and no fence in their place."""
    fences = anywhere(r"fence\.acq_rel\.gpu;", "")
    flags = anywhere(rf"atom\.global\.{side}", "atom.global.relaxed")
    where = "read-after-write in global memory, element .* of partials"
    return Fault("stream", each(fences, flags), (RaceError,), where)


FAULTS = {
    "load tells the next stage's barrier": Fault(
        "persistent",
        anywhere(r"(shared::cta\.global[^;]*\+1024\][^;]*\[%r\d+)(\], %rd\d+;)", r"\1+8\2"),
        (DeadlockError, RaceError, UninitializedReadError),
    ),
    "one box too much announced": Fault(
        "persistent",
        anywhere(r"(mov\.b32\s+%r\d+), 32768;", r"\1, 49152;"),
        (DeadlockError,),
        "16384 announced bytes have not arrived",
    ),
    "MMAs never committed": Fault(
        "persistent", anywhere(r"wgmma\.commit_group\.sync\.aligned;", ""), (RaceError,), "accumulator"
    ),
    "barriers not fenced": Fault(
        "persistent", NO_INIT_FENCE, (RaceError,), r"initialisation .*fence\.mbarrier_init"
    ),
    "barriers of another CTA not fenced": Fault(
        "cluster", NO_INIT_FENCE, (RaceError,), r"initialisation .*fence\.mbarrier_init"
    ),
    "every warp stores the tile": Fault(
        "persistent",
        anywhere(r"@%p\d+ bra\s+\$L__BB0_\d+;(?=(?:(?!bra)[^@])*?bulk\.tensor\.2d\.global)", ""),
        (RaceError,),
        "write-after-write in global memory",
    ),
    "task's bytes not counted": Fault(
        "dynamic cluster",
        anywhere(ANNOUNCED, r"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [\2];"),
        (RaceError, DeadlockError, UninitializedReadError),
    ),
    "task read before it is there": Fault(
        "dynamic cluster", last(WAIT_LOOP, "}"), (RaceError, UninitializedReadError), r"ld\.shared"
    ),
    "task's slot never given back": Fault(
        "dynamic cluster",
        anywhere(r"mbarrier\.arrive\.shared::cluster\.b64[^;]*;", "", 1),
        (DeadlockError,),
        "1 of 5 arrivals missing|arrivals missing",
    ),
    "CTA gone before it got its last task": Fault(
        "dynamic cluster",
        ahead(r"setmaxnreg\.inc", behind(r"st\.async", anywhere(WAIT_LOOP, "}"))),
        (OutOfBoundsError,),
        "exited",
    ),
    "sums of K read at once": Fault(
        "split",
        ahead(
            r"ld\.shared::cluster",
            behind(r"mbarrier\.arrive\.release\.cluster", anywhere(WAIT_LOOP, "}")),
        ),
        (UninitializedReadError, RaceError),
        r"ld\.shared::cluster",
    ),
    "sums of K announced without release": Fault(
        "split",
        each(
            anywhere(r"fence\.acq_rel\.cluster;", ""),
            anywhere(r"mbarrier\.arrive\.release\.cluster", "mbarrier.arrive.relaxed.cluster"),
        ),
        (RaceError,),
        r"read-after-write in shared memory.*st\.shared",
    ),
    "partial sums published without release": partials_without("release"),
    "partial sums read without acquire": partials_without("acquire"),
    "stage committed before its last MMA": Fault(
        "tensor memory", committed_too_early, (RaceError,), "write-after-read in shared memory"
    ),
    "results not waited for": Fault(
        "tensor memory", anywhere(r"tcgen05\.wait::ld[^;]*;", ""), (RaceError,), "wait::ld"
    ),
    "tensor memory freed before it was read": Fault(
        "tensor memory",
        behind(r"tcgen05\.fence::before_thread_sync", anywhere(r"bar\.sync[^;]*;", "")),
        (RaceError, OutOfBoundsError),
        "free-after",
    ),
    "output not fenced": Fault(
        "tensor memory",
        anywhere(r"fence\.proxy\.async[^;]*;(\s*bar\.sync)", r"\1"),
        (RaceError,),
        "fence.proxy.async",
    ),
    "every lane commits": Fault(
        "tensor memory",
        anywhere(r"@%p\d+ bra\s+\$L__BB0_\d+;(?=(?:(?!bra)[^@])*?tcgen05\.commit)", ""),
        (MisuseError,),
        "32 threads issue a commit",
    ),
    "barriers of a pair neither fenced nor released": Fault(
        "pair",
        each(NO_INIT_FENCE, anywhere(r"barrier\.cluster\.arrive;", "barrier.cluster.arrive.relaxed;", 1)),
        (RaceError, UninitializedReadError),
    ),
    "accumulator given back to oneself": Fault(
        "pair", TO_ONESELF, (DeadlockError, BarrierCountError), "arrivals missing|which expects"
    ),
    "peer still at work when the pair ends": Fault(
        "pair",
        behind(r"tcgen05\.fence::before_thread_sync", anywhere(r"barrier\.cluster\.\w+;", "")),
        (RaceError, OutOfBoundsError, MisuseError),
    ),
    "answer overwritten before its readers are fenced": Fault(
        "dynamic pair",
        anywhere(r"fence\.proxy\.async[^;]*;(\s+bar\.warp)", r"\1"),
        (RaceError,),
        r"write-after-read .*try_cancel.*fence\.proxy\.async",
    ),
    "answer's bytes not counted": Fault(
        "dynamic pair",
        anywhere(ANNOUNCED, r"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [\2];"),
        (RaceError, DeadlockError, UninitializedReadError),
    ),
}


def caught(fault: Fault, ptx: str, seed: int | None) -> EmulationError | None:
    """What a run raises, if the fault may be found by it; None if it runs through, be the result wrong."""
    try:
        run(fault.of, ptx, seed)
    except fault.found_by as error:
        return error
    return None


@pytest.mark.sample(2)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    original = kernel(fault.of).ptx
    ptx = fault.mutate(original)
    assert ptx != original
    found = next((error for seed in SEEDS if (error := caught(fault, ptx, seed)) is not None), None)
    assert found is not None
    assert re.search(fault.words, str(found), re.DOTALL), str(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("of", VICTIMS)
def test_the_unmutated_kernels_raise_no_alarm(of: str) -> None:
    for seed in (None, 0):
        run(of, None, seed).judge(seed)
