"""The sm_100a kernel in the emulator, every check on: whatever is legal is right, whoever runs first.

The kernels are few, so that little is compiled; sizes, clusters at a time and orders of execution are drawn.
With CUTEGEMM_BLACKWELL_CASES=2000 so many cases of drawn kernels run, half an hour of a CPU; a run that is
cut short, or ended by CUTEGEMM_BLACKWELL_SECONDS, goes on where it stopped.
"""

import itertools
import os
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import blackwell_trials
import pytest
from blackwell_space import (
    ASSIGNMENTS,
    F16,
    F32,
    ORDERS,
    SHIFTS,
    TARGET,
    Kind,
    drawn_kind,
    drawn_trials,
    judgeable,
    longest,
    pair,
    units,
)
from blackwell_trials import TRIALS, DrawnKernel, trial_worker
from emulation import gemm_of, judged
from gpu_checks import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from legal_space import Findings, report_all, worker_environment

from cutegemm import GemmConfig
from cutegemm.blackwell.plan import CLUSTER_M, CLUSTER_N, TILE_M
from cutegemm.fingerprint import source_hash
from cutegemm.gemm import Gemm
from cutegemm.scheduler import (
    Blocked,
    Dynamic,
    GroupedN,
    Hilbert,
    Morton,
    SplitK,
    Static,
    StreamK,
    TileScheduler,
)

EXAMPLES = 7  # of each listed kernel: some 200 in all
DRAWN_KERNELS, CASES_EACH = 5, 2  # in every run
LONG_RUN = int(os.environ.get("CUTEGEMM_BLACKWELL_CASES", "0"))

KINDS = {
    "128x128": Kind(GemmConfig(128, 128)),
    "128x256, one epilogue warpgroup": Kind(
        GemmConfig(128, 256, consumers=1), Case(0, 0, 0, dtype=F16, out_dtype=F16), TileScheduler(Hilbert())
    ),
    "64x24": Kind(GemmConfig(64, 24, consumers=1), Case(0, 0, 0, a_major="m")),
    "64x8, two stages": Kind(GemmConfig(64, 8, stages=2), Case(0, 0, 0, l=0, out_dtype=F32)),
    "128x208, ragged chunks": Kind(GemmConfig(128, 208), Case(0, 0, 0, b_major="n", out_major="m")),
    "stages of 128": Kind(GemmConfig(64, 96, 128), Case(0, 0, 0, a_major="m", b_major="n", dtype=F16)),
    "batch, float32": Kind(
        GemmConfig(128, 80), Case(0, 0, 0, l=0, out_dtype=F32), TileScheduler(Morton(), Static())
    ),
    "cluster 2x1": Kind(GemmConfig(128, 64, cluster_m=2), Case(0, 0, 0, b_major="n")),
    "cluster 1x2": Kind(GemmConfig(64, 128, cluster_n=2), Case(0, 0, 0, a_major="m", dtype=F16)),
    "cluster 4x2": Kind(GemmConfig(64, 64, cluster_m=4, cluster_n=2), Case(0, 0, 0, out_dtype=F32)),
    "swapped": Kind(GemmConfig(128, 16, swap_ab=True), Case(0, 0, 0, b_major="n")),
    "direct store": Kind(GemmConfig(128, 112), Case(0, 0, 0, out_shift=1)),
    "direct store, m-major": Kind(GemmConfig(64, 40), Case(0, 0, 0, out_shift=3, out_major="m")),
    "pair 256x256": Kind(pair(256, 256), Case(0, 0, 0)),
    "pair 256x128, m-major D": Kind(pair(256, 128), Case(0, 0, 0, out_major="m", a_major="m")),
    "pair 128x96": Kind(pair(128, 96), Case(0, 0, 0, b_major="n", dtype=F16), TileScheduler(GroupedN(2))),
    "pair 128x256, float32": Kind(pair(128, 256, consumers=1), Case(0, 0, 0, out_dtype=F32)),
    "pairs 2x2": Kind(pair(256, 64, cluster_m=4), Case(0, 0, 0, l=0)),
    "pairs 4x2": Kind(
        pair(128, 64, cluster_m=4, cluster_n=2), Case(0, 0, 0, a_major="m", b_major="n", out_dtype=F32)
    ),
    "dynamic": Kind(GemmConfig(64, 48), Case(0, 0, 0, l=0), TileScheduler(assignment=Dynamic())),
    "pairs, dynamic": Kind(
        pair(256, 64, cluster_m=4), Case(0, 0, 0, out_dtype=F32), TileScheduler(Morton(), Dynamic())
    ),
    "split 2": Kind(GemmConfig(128, 96), Case(0, 0, 0, b_major="n"), TileScheduler(assignment=SplitK(2))),
    "split 8, ragged chunks": Kind(
        GemmConfig(64, 72), Case(0, 0, 0, l=0, out_dtype=F32, out_major="m"),
        TileScheduler(assignment=SplitK(8)),
    ),
    "stream": Kind(GemmConfig(128, 96), Case(0, 0, 0, out_shift=1), TileScheduler(assignment=StreamK())),
    "pairs, stream": Kind(
        pair(128, 96, cluster_m=4), Case(0, 0, 0, out_major="m"),
        TileScheduler(GroupedN(2), StreamK(ordered=False)),
    ),
    "pair, direct store": Kind(pair(128, 160), Case(0, 0, 0, out_shift=1), TileScheduler(Blocked(2, 2))),
    "pair, direct store, m-major": Kind(pair(256, 96), Case(0, 0, 0, out_shift=1, out_major="m")),
    "off 16 bytes": Kind(GemmConfig(128, 96), Case(0, 0, 0, l=0, shifts=(1, 3))),
    "pair, off 16 bytes": Kind(
        pair(256, 128), Case(0, 0, 0, a_major="m", b_major="n", shifts=(2, 7)), TileScheduler(Blocked(2, 2))
    ),
    "pair, B off 16 bytes, dynamic": Kind(
        pair(128, 64), Case(0, 0, 0, a_major="m", shifts=(0, 5)), TileScheduler(assignment=Dynamic())
    ),
    "A off 16 bytes, swapped, split 2": Kind(
        GemmConfig(64, 32, consumers=1, swap_ab=True), Case(0, 0, 0, dtype=F16, shifts=(4, 0), out_shift=1),
        TileScheduler(assignment=SplitK(2)),
    ),
}  # fmt: skip


@cache
def gemm(name: str) -> Gemm:
    """The Gemm of a listed kernel, for any sizes."""
    kind = KINDS[name]
    return gemm_of(kind.case, kind.config, kind.scheduler, TARGET)


@st.composite
def cases(draw: st.DrawFn, kind: Kind) -> Case:
    """Sizes up to a few tiles each way, ragged or whole."""
    sizes = []
    for longest_, unit in zip(longest(kind), (*units(kind.case), 1), strict=True):
        sizes.append(draw(st.integers(1, longest_ // unit)) * unit)
    batch = None if kind.case.l is None else draw(st.integers(1, 3))
    return judgeable(replace(kind.case, m=sizes[0], n=sizes[1], k=sizes[2], l=batch))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_product_is_right_in_any_order(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(KINDS[name]))
    seed = data.draw(st.none() | st.integers(0, 2**31 - 1))
    resident = data.draw(st.integers(1, 4))
    judged(gemm(name), case, seed=seed, resident=resident, check=True)


# --- kernels that are drawn too ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(DRAWN_KERNELS))
def test_any_kernel_is_right(number: int) -> None:
    chance = random.Random(number)
    kind = drawn_kind(chance)
    found = gemm_of(kind.case, kind.config, kind.scheduler, TARGET)
    for trial in drawn_trials(kind, chance, CASES_EACH):
        judged(found, trial.case, seed=trial.seed, resident=trial.resident, check=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not LONG_RUN, reason="half an hour; set CUTEGEMM_BLACKWELL_CASES=2000")
def test_many_kernels_are_right(capfd: pytest.CaptureFixture[str]) -> None:
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("cutegemm")) / "blackwell-trials"
    findings = Findings(folder / f"{source_hash()[:16]}.jsonl")
    seconds = float(os.environ.get("CUTEGEMM_BLACKWELL_SECONDS", "inf"))
    kernels = [DrawnKernel(number) for number in range(-(-LONG_RUN // TRIALS))]
    with tempfile.TemporaryDirectory() as cache, capfd.disabled():
        done, bad = report_all(kernels, trial_worker(worker_environment(cache)), findings, seconds)
    assert not bad, f"{len(bad)} of {done} kernels (see {findings.path}):\n" + "\n".join(bad)


def test_what_is_wrong_with_a_drawn_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial's own complaint, and the others are made all the same."""
    made = []

    def wrong_at_times(gemm: Gemm, case: Case, **circumstances: object) -> None:
        made.append(case)
        if len(made) == 2:
            raise AssertionError("elements are NaN")

    monkeypatch.setattr(blackwell_trials, "judged", wrong_at_times)
    (found,) = DrawnKernel.from_json(DrawnKernel(3).to_json()).complaints()
    assert len(made) == TRIALS
    assert "AssertionError: elements are NaN" in found
    assert f"m={made[1].m}, n={made[1].n}, k={made[1].k}" in found


def test_every_family_is_drawn_in_a_long_run() -> None:
    """Of 500 kernels: every tile, cluster, MMA, major, dtype and order."""
    kinds = [drawn_kind(random.Random(number)) for number in range(500)]
    shown = {
        (kind.config.mma_ctas, kind.config.tile_m, kind.config.cluster_m, kind.config.cluster_n)
        for kind in kinds
    }
    wanted = {
        (ctas, tile_m, m, n)
        for ctas, tiles in TILE_M.items()
        for tile_m, m, n in itertools.product(tiles, CLUSTER_M, CLUSTER_N)
        if m % ctas == 0
    }
    assert shown == wanted
    majors = {(kind.case.a_major, kind.case.b_major, kind.case.out_major) for kind in kinds}
    assert len(majors) == 8
    assert {kind.scheduler.order for kind in kinds} == set(ORDERS)
    assert {kind.scheduler.assignment for kind in kinds} == set(ASSIGNMENTS)
    assert len({(kind.case.dtype, kind.case.out_dtype, kind.case.out_shift) for kind in kinds}) == 8
    loads = {(kind.config.mma_ctas, kind.case.shifts) for kind in kinds}
    assert loads == set(itertools.product((1, 2), SHIFTS))
