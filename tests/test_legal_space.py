"""No legal configuration spills, touches local memory or compiles to another kernel than the plan says.

By default a seeded sample in which every kind of kernel occurs, drawn from an eighth of the space, since to
list all takes half a minute; with CUTEGEMM_FULL_SPACE=1 all of them, which takes hours and goes on where
it stopped (CUTEGEMM_FULL_SPACE_SECONDS ends it earlier).
"""

import os
import sys
import tempfile
from pathlib import Path

import legal_space
import pytest
from legal_space import (
    Findings,
    Kernel,
    Worker,
    examine_all,
    multicast_of_loads,
    report_all,
    worker_environment,
)

from cutegemm import GemmConfig, GemmProblem
from cutegemm.cache import cache_dir
from cutegemm.fingerprint import source_hash

SEED = 7
SAMPLE = 32
FULL = os.environ.get("CUTEGEMM_FULL_SPACE", "0") not in ("", "0")
PART = 1 if FULL else 8  # one in so many of all combinations is looked at


@pytest.fixture(scope="module")
def space() -> list[Kernel]:
    """Every legal kernel, or those of a part."""
    return legal_space.legal_space(PART)


@pytest.fixture(scope="module")
def sampled(space: list[Kernel]) -> list[Kernel]:
    """Kernels that show everything there is to show."""
    return legal_space.sample(space, SEED, SAMPLE)


@pytest.fixture(scope="module")
def worker():
    """One compile worker for the tests of this file."""
    worker = Worker(worker_environment(cache_dir()))
    yield worker
    worker.close()


def test_space_is_large_and_free_of_duplicates(space: list[Kernel]) -> None:
    assert len(space) > 40_000 / PART
    assert len({kernel.to_json() for kernel in space}) == len(space)


def test_kernels_survive_json(space: list[Kernel]) -> None:
    for kernel in space[:: 997 // PART]:
        assert Kernel.from_json(kernel.to_json()) == kernel


def test_sample_shows_every_feature(space: list[Kernel], sampled: list[Kernel]) -> None:
    wanted = set().union(*(legal_space.features(kernel) for kernel in space[:: max(1, 5 // PART)]))
    shown = set().union(*(legal_space.features(kernel) for kernel in sampled))
    assert not wanted - shown
    assert {value for name, value in shown if name == "tile_n"} >= set(legal_space.RAGGED_TILES_N)
    assert {value for name, value in shown if name == "majors"} == set(legal_space.MAJORS)


@pytest.mark.parametrize("number", range(SAMPLE))
def test_sampled_kernel(number: int, sampled: list[Kernel], worker: Worker) -> None:
    kernel = sampled[number]
    found = worker.examine(kernel)
    assert not found, f"{kernel} (seed {SEED}, number {number}): {'; '.join(found)}"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not FULL, reason="hours; set CUTEGEMM_FULL_SPACE=1")
def test_full_space(space: list[Kernel], capfd: pytest.CaptureFixture[str]) -> None:
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("cutegemm")) / "legal-space"
    findings = Findings(folder / f"{source_hash()[:16]}.jsonl")
    seconds = float(os.environ.get("CUTEGEMM_FULL_SPACE_SECONDS", "inf"))
    # A fixed shuffle: a run cut short has seen a bit of everything.
    kernels = legal_space.sample(space, SEED, len(space))
    with tempfile.TemporaryDirectory() as cache, capfd.disabled():
        done, bad = report_all(kernels, Worker(worker_environment(cache)), findings, seconds)
    assert not bad, f"{len(bad)} of {done} kernels (see {findings.path}):\n" + "\n".join(bad)


# --- the examination itself can fail -----------------------------------------------------------------------

SMALL = Kernel(GemmConfig(64, 8, consumers=1), GemmProblem(None, None, None))


def test_a_compiler_that_dies_is_a_finding_and_is_replaced(tmp_path: Path) -> None:
    aborting = (
        "import os, sys\nfor line in sys.stdin:\n    os.abort() if '24' in line else print('[]', flush=True)"
    )
    worker = Worker(worker_environment(tmp_path), (sys.executable, "-c", aborting))
    try:
        assert worker.examine(SMALL) == []
        fatal = Kernel(GemmConfig(64, 24, consumers=1), SMALL.problem)
        assert worker.examine(fatal) == ["the compiler died with exit code -6"]
        assert worker.examine(SMALL) == []
    finally:
        worker.close()


def test_a_compiler_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legal_space, "KERNEL_SECONDS", 1)
    worker = Worker(worker_environment(tmp_path), (sys.executable, "-c", "import time; time.sleep(60)"))
    try:
        assert worker.examine(SMALL) == ["no answer in 1 s"]
    finally:
        worker.close()


def test_an_error_while_compiling_is_a_finding(worker: Worker) -> None:
    illegal = Kernel(GemmConfig(64, 12, consumers=1), GemmProblem(None, None, None))
    (found,) = worker.examine(illegal)
    assert found.startswith("ConfigError: tile_n=12")


def test_code_of_another_kernel_is_found_out(space: list[Kernel]) -> None:
    import cutegemm
    from cutegemm.artifact import Resources, instruction_histogram

    gemm = cutegemm.compile((None, None, None), "bfloat16", target="sm_90a", config=SMALL.config)
    other = Kernel(
        GemmConfig(64, 16, cluster_m=2, consumers=1), GemmProblem(None, None, None, a_dtype="float16")
    )
    found = list(legal_space._ptx_violations(gemm.ptx, other))
    assert any(line.startswith("WGMMA") for line in found)
    assert any(line.startswith("multicast") for line in found)
    assert any(line.startswith("cluster barrier") for line in found)
    histogram = {**instruction_histogram(gemm.sass), "local memory": 2}
    found = list(legal_space._sass_violations(gemm.sass, histogram, other.plan))
    assert found == [
        "2 local memory instructions",
        "SASS has ['HGMMA.64x8x16.F32'], planned HGMMA.64x16x16.F32",
    ]
    assert not list(legal_space._serialisations(gemm.ptx, gemm.sass))
    one_by_one = gemm.sass.replace("HGMMA", "WARPGROUP.DEPBAR.LE gsb0, 0x0\n HGMMA")
    assert "WGMMAs serialised: 2 of" in next(legal_space._serialisations(gemm.ptx, one_by_one))
    planned = SMALL.plan
    few = Resources(128, 16, planned.smem_bytes, planned.stages, planned.threads)
    found = list(legal_space._resource_violations(few, planned))
    assert found[0] == "spills 16 bytes"
    assert "would wait for ever" in found[1]
    assert multicast_of_loads(gemm.ptx) == {"A": False, "B": False}


def test_findings_go_on_where_they_stopped(tmp_path: Path) -> None:
    path = tmp_path / "findings.jsonl"
    Findings(path).add(SMALL, ["spills 8 bytes"])
    with path.open("a") as file:
        file.write('{"kernel": "cut off')
    findings = Findings(path)
    assert findings.known == {SMALL.to_json(): ["spills 8 bytes"]}
    # Known already: no worker is needed, no time either.
    worker = Worker(worker_environment(tmp_path))
    assert list(examine_all([SMALL], worker, findings, 0)) == [(SMALL, ["spills 8 bytes"])]
