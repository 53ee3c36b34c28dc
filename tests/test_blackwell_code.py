"""What the compiled sm_100a kernels are made of: facts of their PTX and SASS, over the legal space."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from blackwell_space import F32, TARGET, Kind, drawn_kind, pair
from emulation import gemm_of, judged, replaced, with_ptx
from gpu_checks import Case
from legal_space import multicast_of_loads

from cutegemm import GemmConfig
from cutegemm.artifact import Artifact, instruction_histogram
from cutegemm.emulator import EmulationError
from cutegemm.emulator.product import Circumstances
from cutegemm.kernels import Choice
from cutegemm.scheduler import Dynamic, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

DRAWN = 7
LISTED = {
    "one CTA, widest": Kind(GemmConfig(128, 256, consumers=1)),
    "pair, widest": Kind(pair(256, 256)),
    "pairs 4x2": Kind(pair(128, 64, cluster_m=4, cluster_n=2), Case(0, 0, 0, a_major="m", b_major="n")),
    "cluster 4x2, dynamic": Kind(
        GemmConfig(64, 64, cluster_m=4, cluster_n=2), scheduler=TileScheduler(assignment=Dynamic())
    ),
    "direct store": Kind(GemmConfig(64, 256), Case(0, 0, 0, out_shift=1, out_major="m")),
    "widest, shared": Kind(GemmConfig(128, 256), scheduler=TileScheduler(assignment=StreamK())),
    "pair, widest, shared": Kind(
        pair(256, 256), Case(0, 0, 0, out_shift=1), scheduler=TileScheduler(assignment=StreamK())
    ),
    "off 16 bytes, widest": Kind(GemmConfig(128, 192), Case(0, 0, 0, out_dtype=F32, shifts=(1, 1))),
    "pair, off 16 bytes": Kind(pair(256, 256), Case(0, 0, 0, l=0, a_major="m", shifts=(1, 1))),
}


def kinds() -> dict[str, Kind]:
    """The listed kernels, and some drawn from the legal space."""
    return LISTED | {f"drawn {i}": drawn_kind(random.Random(1000 + i)) for i in range(DRAWN)}


@cache
def built(name: str) -> tuple[Kind, Artifact]:
    """A kernel, compiled."""
    kind = kinds()[name]
    gemm = gemm_of(kind.case, kind.config, kind.scheduler, TARGET)
    choice = Choice(kind.plan.config, kind.scheduler, kind.paths, TARGET)
    return kind, gemm._kernels.artifact(choice)


def descriptor(kind: Kind) -> int:
    """The instruction descriptor of the kind's MMA: types, majors, N / 8 and M / 16, as PTX lays it down."""
    seen, config = kind.seen, kind.config
    types = {"float16": 0, "bfloat16": 1}
    bits = 1 << 4 | types[seen.a_dtype] << 7 | types[seen.b_dtype] << 10
    bits |= (seen.a_major == "m") << 15 | (seen.b_major == "n") << 16
    return bits | config.tile_n // 8 << 17 | config.tile_m // 16 << 24


def wrong(kind: Kind, artifact: Artifact) -> Iterator[str]:
    """What contradicts the plan in a kernel's code; nothing if all is well."""
    plan, config = kind.plan, kind.config
    ptx, sass = artifact.ptx, artifact.sass
    resources, histogram = artifact.resources, instruction_histogram(sass)
    if resources.spills or ".local" in ptx or histogram["local memory"]:
        yield f"local memory: {resources}"
    if (resources.threads, resources.smem_bytes) != (plan.threads, plan.smem_bytes):
        yield f"{resources} instead of {plan.threads} threads, {plan.smem_bytes} bytes"
    if resources.registers * resources.threads > 65536:
        yield f"{resources.registers} registers for {resources.threads} threads"
    # The first stage of a tile overwrites the accumulator, all others add to it: the code has both.
    mmas = Counter(re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::f16", ptx))
    if mmas != {str(config.mma_ctas): 2 * config.tile_k // 16}:
        yield f"MMAs {mmas}"
    issued = Counter(re.findall(r"\bUTCHMMA\S*", sass))
    if issued != {("UTCHMMA", "UTCHMMA.2CTA")[config.mma_ctas - 1]: mmas.total()}:
        yield f"SASS has {issued}"
    if not re.search(rf"\b{descriptor(kind)}\b", ptx):
        yield f"no MMA of {config.tile_m} x {config.tile_n}: {descriptor(kind):#x}"
    allocated = re.findall(r"tcgen05\.alloc\.cta_group::(\d)\S+ \s*\[\S+\], (\S+);", ptx)
    if [ctas for ctas, _ in allocated] != [str(config.mma_ctas)] or plan.tmem_columns > 512:
        yield f"allocations {allocated}"
    shared = {"A": config.cluster_n > 1, "B": plan.teams_m > 1}
    if plan.moving_warps:
        yield from _wrong_lines(kind, ptx)
    elif multicast_of_loads(ptx) != shared:
        yield f"loads {multicast_of_loads(ptx)}, the cluster shares {shared}"
    if (histogram["TMA store"] > 0) != (plan.paths.store == "tma"):
        yield f"{histogram['TMA store']} TMA stores, planned a {plan.paths.store} store"
    waited = ptx.index("griddepcontrol.wait")
    touched = [ptx.find(word) for word in ("cp.async.bulk.tensor", "st.global", "atom.", "try_cancel")]
    if min(place for place in touched if place >= 0) < waited:
        yield "global memory is touched before the kernel before this one is known to be done"
    if "cutlass" in artifact.kernel_name.lower():
        yield artifact.kernel_name


def _wrong_lines(kind: Kind, ptx: str) -> Iterator[str]:
    """Of a kernel that moves lines: eight loads of each such operand, one of the other, none multicast."""
    loads = re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::\S+", ptx)
    boxes = kind.plan.line_boxes.both
    if len(loads) != sum(8 if box else 1 for box in boxes):
        yield f"{len(loads)} loads of a stage"
    if any("multicast" in load for load in loads):
        yield "multicast of lines that each CTA puts in place itself"
    # For a tile's first stage and for the others, where movers of another CTA arrive too.
    waits = {1: 0, 2: 2}[kind.config.mma_ctas]
    found = ptx.count("mbarrier.try_wait.parity.acquire.cluster")
    if found != waits:
        yield f"{found} waits that acquire what the other CTA wrote, {waits} planned"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", kinds())
def test_code_is_what_was_planned(name: str) -> None:
    kind, artifact = built(name)
    assert not list(wrong(kind, artifact)), kind


def test_code_of_another_kernel_is_found_out() -> None:
    _, artifact = built("one CTA, widest")
    for other in (LISTED["pair, widest"], Kind(GemmConfig(128, 240, consumers=1, cluster_n=2))):
        found = list(wrong(other, artifact))
        assert any(line.startswith("no MMA of") for line in found)
        assert any(line.startswith(("loads", "MMAs")) for line in found)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LISTED)
def test_tensor_memory_is_freed_once_after_everybody_has_met(name: str) -> None:
    _, artifact = built(name)
    ptx = artifact.ptx
    for word in ("alloc", "relinquish_alloc_permit", "dealloc"):
        assert len(re.findall(rf"tcgen05\.{word}\.", ptx)) == 1
    freed = ptx.index("tcgen05.dealloc")
    met = max(ptx.rfind("barrier.cluster.wait", 0, freed), ptx.rfind("bar.sync", 0, freed))
    # Nothing touches tensor memory, or another CTA's barriers, after the last meeting.
    for word in ("tcgen05.ld", "tcgen05.mma", "tcgen05.commit", "mbarrier.arrive"):
        assert ptx.rfind(word) < met
    assert freed > met


@pytest.mark.parametrize(
    ("config", "ctas"), [(GemmConfig(128, 64), {0, 1}), (pair(256, 64, cluster_m=4), {0, 2})]
)
def test_one_thread_of_one_warp_issues_all_mmas(config: GemmConfig, ctas: set[int]) -> None:
    """Of a pair the leader's; as many MMAs are done as the sums need, so that no lane repeats them."""
    case = Case(2 * 256, 64, 192)
    result = judged(gemm_of(case, config, None, TARGET), case, resident=2)
    mmas = [event for event in result.trace.events if event.kind == "mma"]
    assert {event.cta for event in mmas} == ctas
    assert {event.warp for event in mmas} == {4 * config.consumers}
    assert len(mmas) == 512 // config.tile_m * 3
    assert all(event.detail.startswith("4 x ") for event in mmas)


SMALL = GemmConfig(128, 64, consumers=1)
PLANTED = {
    "tensor memory is never freed": (r"tcgen05\.dealloc[^;]*;", "", "freed|dealloc"),
    "the epilogue does not wait for its loads": (r"tcgen05\.wait::ld[^;]*;", "", "tcgen05.wait"),
    "nobody says that a sum is complete": (
        r"(tcgen05\.commit[^;]*;)(?![\s\S]*tcgen05\.commit)", "", "result_ready|Deadlock|wait",
    ),
    "less memory than two accumulators": (
        r"(tcgen05\.alloc\S+ \s*\[\S+\], )\S+;", r"\g<1>64;", "column|alloc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    pattern, new, said = PLANTED[name]
    case = Case(128, 256, 128)
    gemm = gemm_of(case, SMALL, None, TARGET)
    ptx = replaced(gemm.ptx, pattern, new)
    with pytest.raises(EmulationError, match=said):
        with_ptx(gemm, case, ptx, Circumstances(check=True, seed=2, resident=1))
