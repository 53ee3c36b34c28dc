"""The fuzzer finds what is planted, shrinks it, and prints a line that repeats it."""

import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from fuzz_products import (
    Dies,
    Hangs,
    Leaks,
    LeavesOut,
    OtherBits,
    Refuses,
    ReturnsAnother,
    Stumbles,
    Tires,
    TorchProduct,
    WritesBeside,
    WritesInput,
    WrongElement,
)
from gpu_checks import fresh_seed

from cutegemm import GemmConfig, cli
from cutegemm.errors import ConfigError, DeviceError
from cutegemm.fuzz import campaign, command
from cutegemm.fuzz.campaign import Plan, run
from cutegemm.fuzz.case import Case, Strided, parse_case
from cutegemm.fuzz.drawing import GPU, Limits
from cutegemm.fuzz.product import EmulatedProduct, GpuProduct, Ways
from cutegemm.fuzz.report import reproducer
from cutegemm.fuzz.tally import Tally
from cutegemm.fuzz.trial import Trial, Verdict
from cutegemm.hardware import current_target

SMALL = Limits(small=12, middle=20, most=40, most_k=40, elements=1 << 14, work=1 << 16, batch=3, block=50)
SEED = 20


def plan_for(product: TorchProduct, **changes: object) -> Plan:
    return replace(Plan(SEED, product, SMALL, cases=250, failures=1), **changes)  # type: ignore[arg-type]


class InProcess:
    """In an Executor's place: tries cases here, and remembers them."""

    tried: list[Case]

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.renew()

    def renew(self) -> None:
        """Nothing is kept from one case to the next."""

    def verdict(self, case: Case) -> Verdict:
        InProcess.tried.append(case)
        return Trial(case, self._plan.product, self._plan.refusals).verdict()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases are tried in this process, and listed here."""
    InProcess.tried = []
    monkeypatch.setattr(campaign, "Executor", InProcess)
    monkeypatch.setattr(command, "Executor", InProcess)
    return InProcess.tried


# --- what is planted is found ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "kind", "smallest"),
    [
        (WrongElement(), "wrong numbers", Case(3, 5, 2)),
        (WritesBeside(), "wrote outside", None),
        (Leaks(), "special values", None),
        (WritesInput(), "wrote an input", None),
        (OtherBits(), "other bits", Case(1, 1, 1, l=1, seed=1)),
        (LeavesOut(), "special values", None),
        (ReturnsAnother(), "wrong result", None),
        (Refuses(), "error", None),
        (Stumbles(), "error", Case(7, 1, 1, out_dtype="float32")),
    ],
    ids=str,
)
def test_a_planted_fault_is_found_and_shrunk(
    tried: list[Case], product: TorchProduct, kind: str, smallest: Case | None
) -> None:
    tally = run(plan_for(product), Tally())
    [finding] = tally.findings
    assert finding.verdict.kind == kind
    assert finding.alone
    case = finding.smallest
    if smallest is not None:
        assert case == smallest
    assert max(case.m, case.n, case.k) <= 9
    assert (case.config, case.scheduler, case.dtype) == (None, None, "bfloat16")
    # The line that is printed repeats it, and the library itself does not fail there.
    words = shlex.split(reproducer(finding, "sm_90a"))
    again = parse_case(words[words.index("--case") + 1])
    assert again == case
    assert Trial(again, product).verdict().kind == kind
    assert not Trial(again, TorchProduct()).verdict().failed


def test_no_fault_no_finding(tried: list[Case]) -> None:
    tally = run(plan_for(TorchProduct(), cases=120), Tally())
    assert (tally.findings, tally.cases, len(tried)) == ([], 120, 120)
    assert sum(counts["right"] for counts in tally.by_path.values()) == 120


def test_a_failure_that_is_known_does_not_end_the_run(tried: list[Case]) -> None:
    tally = run(plan_for(Stumbles(), failures=5), Tally())
    assert len(tally.findings) == 1
    assert tally.cases == 250
    assert sum(counts["failed"] for counts in tally.by_path.values()) > 1


def test_refusals_count_apart_where_they_are_allowed(tried: list[Case]) -> None:
    tally = run(plan_for(Refuses(), refusals=True), Tally())
    assert not tally.findings
    refused = sum(counts["refused"] for counts in tally.by_path.values())
    assert refused == tally.messages.total() > 20
    assert all("a starts" in message for message in tally.messages)


@dataclass(frozen=True)
class Picky(TorchProduct):
    """Has no kernel, and says so or should not."""

    exist: bool = False

    def run(self, *_: object) -> torch.Tensor:
        raise ConfigError("no such kernel")

    def ways(self, *_: object) -> Ways:
        return Ways("tma", "tma", "direct", exist=self.exist)


def test_a_configuration_without_a_kernel_is_refused_rightly() -> None:
    assert Trial(Case(8, 8, 8), Picky()).verdict().kind == "refused"
    assert Trial(Case(8, 8, 8), Picky(exist=True)).verdict().kind == "error"


def test_a_configuration_may_have_no_kernel_for_every_layout() -> None:
    case = Case(8, 8, 8, config=GemmConfig(64, 64, cluster_m=2), call="known")
    product = EmulatedProduct("sm_90a")
    assert Trial(case, product).verdict().kind == "right"
    verdict = Trial(replace(case, a=Strided((9, 1))), product).verdict()
    assert (verdict.kind, verdict.ways) == ("refused", Ways("realigned", "tma", "tma", exist=False))


# --- seeds -------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_cases_for_any_number_of_workers(tried: list[Case]) -> None:
    def drawn(seed: int, jobs: int) -> list[str]:
        tried.clear()
        run(plan_for(TorchProduct(), seed=seed, jobs=jobs, cases=80), Tally())
        return sorted(map(repr, tried))

    first = drawn(3, 1)
    assert len(first) == 80
    assert drawn(3, 3) == first
    assert drawn(4, 1) != first


def test_time_ends_a_run(tried: list[Case]) -> None:
    tally = run(plan_for(TorchProduct(), cases=None, seconds=5), Tally())
    assert 0 < tally.cases < 15000


# --- workers -----------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """In which workers find the faulty products."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.parametrize(("product", "kind", "tries"), [(Hangs(), "hang", 0), (Dies(), "crash", 0)], ids=str)
def test_a_worker_that_hangs_or_dies_is_a_failure_that_shrinks(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, product: TorchProduct, kind: str, tries: int
) -> None:
    """Few cases are tried: each costs a worker."""
    monkeypatch.setattr(campaign, "SHRINK_TRIES", tries)
    tally = run(plan_for(product, hang=1.0, environment=environment), Tally())
    [finding] = tally.findings
    assert finding.verdict.kind == kind
    assert finding.alone
    assert finding.tries == tries
    assert finding.smallest.k > 5 if kind == "hang" else finding.smallest.n > 3


def test_without_a_worker_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(DeviceError, match=r"no worker process is to be had: .*died"):
        run(plan_for(TorchProduct()), Tally())


def test_a_failure_that_needs_a_history_is_told_apart(environment: dict[str, str]) -> None:
    tally = run(plan_for(Tires(), environment=environment, cases=20), Tally())
    [finding] = tally.findings
    assert not finding.alone


# --- the command line --------------------------------------------------------------------------------------


@pytest.fixture
def faulty(tried: list[Case], monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The command line fuzzes a product with a fault."""
    monkeypatch.setattr(command, "EmulatedProduct", lambda target: WrongElement())
    monkeypatch.setattr(command, "EMULATOR", SMALL)
    return tried


def test_the_command_line_reports_a_failure_and_repeats_it(
    faulty: list[Case], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = f"fuzz --target sm_90a --cases 200 --seed 5 --jobs 1 --json {tmp_path / 'f.json'}"
    assert cli.main(words.split()) == 1
    said = capsys.readouterr()
    assert "seed 5" in said.err
    assert "seed 5: " in said.out
    assert "cases by path" in said.out
    [line] = [line for line in said.out.splitlines() if line.startswith("python -m cutegemm")]
    written = json.loads((tmp_path / "f.json").read_text())
    assert written["seed"] == 5
    assert written["cases"] == sum(
        sum(v for v in row.values() if isinstance(v, int)) for row in written["paths"]
    )
    [failure] = written["failures"]
    assert parse_case(failure["case"]) == Case(3, 5, 2)

    assert cli.main(shlex.split(line)[3:]) == 1
    assert "wrong numbers" in capsys.readouterr().out
    assert cli.main(["fuzz", "--target", "sm_90a", "--case", "Case(m=2, n=5, k=2)"]) == 0
    assert "right" in capsys.readouterr().out


def test_a_seed_is_shown_where_none_is_given(
    tried: list[Case], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "EmulatedProduct", lambda target: TorchProduct())
    seeds = set()
    for _ in range(2):
        assert cli.main(["fuzz", "--target", "sm_90a", "--cases", "5", "--jobs", "1"]) == 0
        [line] = capsys.readouterr().err.splitlines()
        seeds.add(line.split(",")[0])
    assert len(seeds) == 2


@pytest.mark.parametrize("words", ["--case Case(", "--case 1", "--case GemmConfig(64,64)", "--seconds 0",
                                   "--target sm_12", "--cases 0", "--case Case(m=-1,n=1,k=1)"])  # fmt: skip
def test_what_is_no_wish(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["fuzz", "--target", "sm_90a", *words.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert len(capsys.readouterr().err.strip().splitlines()[-1]) > 10


# --- the library -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "cases"), [("sm_90a", 40), ("sm_100a", 15)])
def test_the_library_is_right_on_the_emulator(target: str, cases: int) -> None:
    """A few dozens of cases; the fuzzer draws others on every run."""
    tally = run(Plan(fresh_seed(), EmulatedProduct(target), SMALL, cases=cases), Tally())
    assert not tally.findings, tally.findings
    assert tally.cases == cases


@pytest.mark.gpu
@pytest.mark.slow
def test_the_library_is_right_on_the_gpu() -> None:
    product, jobs = GpuProduct(current_target()), min(8, os.cpu_count() or 1)
    tally = run(Plan(fresh_seed(), product, GPU, jobs=jobs, cases=300), Tally())
    assert not tally.findings, tally.findings
    assert tally.cases == 300
