"""Faults name statements of the Python source, though kernels are compiled without line information."""

import re
from pathlib import Path

import pytest
from emulation import GPU, kernel, replaced, with_ptx
from gpu_checks import Case

from cutegemm import GemmConfig
from cutegemm.emulator import DeadlockError, EmulationError, RaceError, UnknownInstructionError
from cutegemm.emulator.lines import source_lines
from cutegemm.emulator.product import Circumstances
from cutegemm.emulator.ptx import parse
from cutegemm.errors import BuildError
from cutegemm.gemm import Gemm
from cutegemm.parts.paths import ALIGNED

CASE = Case(256, 256, 576)
CONFIG = GemmConfig(128, 128)
KERNELS = {
    "cooperative": CONFIG,
    "ping-pong cluster": GemmConfig(64, 64, cluster_m=2, schedule="pingpong"),
    "swapped": GemmConfig(128, 24, swap_ab=True),
}


def ptx_with_lines(gemm: Gemm) -> str:
    problem = gemm.problem.with_sizes(None, CASE.m, CASE.n, CASE.k)
    return gemm._kernels.ptx_with_lines(gemm._kernels.choice(problem, GPU, ALIGNED))


def raised(gemm: Gemm, ptx: str, **circumstances: object) -> EmulationError:
    with pytest.raises(EmulationError) as found:
        with_ptx(gemm, CASE, ptx, Circumstances(resident=1, **circumstances))  # type: ignore[arg-type]
    return found.value


def statements(text: str, opcode: str) -> list[str]:
    """The source lines, as written, that a report names for an opcode."""
    places = re.findall(rf"{opcode}\S* \(PTX line \d+, ([^:()]+):(\d+)\)", text)
    return [Path(file).read_text().splitlines()[int(line) - 1].strip() for file, line in places]


@pytest.mark.parametrize("name", KERNELS)
def test_line_information_changes_no_instruction(name: str) -> None:
    gemm = kernel(KERNELS[name], CASE)
    with_lines = ptx_with_lines(gemm)
    assert ".loc" in with_lines
    assert ".loc" not in gemm.ptx
    plain, located = parse(gemm.ptx).statements, parse(with_lines).statements
    assert [(s.opcode, s.operands, s.guard) for s in plain] == [
        (s.opcode, s.operands, s.guard) for s in located
    ]
    named = [s.source for s in located if s.source]
    assert len(named) > 0.9 * len(located)
    # The kernel's own lines, not those of the compiler's library.
    package = Path(__file__).parent.parent / "cutegemm"
    files = {Path(source.rpartition(":")[0]).absolute() for source in named}
    assert all(file.is_relative_to(package) for file in files)
    assert {"kernel.py", "ring.py", "mainloop.py", "producer.py", "store.py"} <= {f.name for f in files}


def test_a_race_names_the_statements_of_both_sides() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = replaced(gemm.ptx, r"fence\.proxy\.async[^;]*;", "")
    error = raised(gemm, ptx, check=True)
    assert type(error) is RaceError
    store, fill = statements(str(error), r"cp\.async\.bulk\.tensor"), statements(str(error), "stmatrix")
    assert len(store) == len(fill) == 1
    assert store[0].startswith("cute.copy(")
    assert fill[0].startswith("cute.copy(")
    assert store != fill
    assert len(re.findall(r"hopper/store\.py:\d+\)", str(error))) == 2


def test_a_deadlock_names_the_statement_each_warp_waits_at() -> None:
    gemm = kernel(CONFIG, CASE)
    start = gemm.ptx.index("setmaxnreg.inc")
    ptx = gemm.ptx[:start] + replaced(gemm.ptx[start:], r"mbarrier\.arrive\.shared\S*\s[^;]*;", "")
    error = raised(gemm, ptx)
    assert type(error) is DeadlockError
    waits = [line for line in str(error).splitlines() if "waits for" in line]
    places = {line.split()[0]: statements(line, "mbarrier") for line in waits}
    assert set(places) == {"producer", "consumer"}
    assert all("mbarrier_wait" in line for lines in places.values() for line in lines)
    assert places["producer"] != places["consumer"]


def test_an_unknown_instruction_names_its_statement() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = replaced(gemm.ptx, r"griddepcontrol\.wait;", "griddepcontrol.frobnicate;", 1)
    error = raised(gemm, ptx)
    assert type(error) is UnknownInstructionError
    # The compiled kernel has no such instruction, and so no statement for it: the PTX line has to do.
    assert re.search(r"griddepcontrol\.frobnicate \(PTX line \d+\)", str(error))
    located = replaced(ptx_with_lines(gemm), r"griddepcontrol\.wait;", "griddepcontrol.frobnicate;", 1)
    (statement,) = statements(str(raised(gemm, located)), "griddepcontrol")
    assert "griddepcontrol_wait" in statement


def test_lines_are_found_around_what_was_changed() -> None:
    gemm = kernel(CONFIG, CASE)
    with_lines = ptx_with_lines(gemm)
    changed = replaced(gemm.ptx, r"griddepcontrol\.wait;", "", 1)
    source_of = source_lines(changed, with_lines)
    by_line = {s.line: s.opcode for s in parse(changed).statements}
    known = [(opcode, source_of(line)) for line, opcode in by_line.items() if source_of(line)]
    expected = [(s.opcode, s.source) for s in parse(with_lines).statements if s.source]
    assert known == [pair for pair in expected if pair[0] != "griddepcontrol.wait"]


def test_without_the_compiler_a_report_names_lines_of_the_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = kernel(CONFIG, CASE)

    def refuse(*_: object) -> str:
        raise BuildError("no compiler here")

    monkeypatch.setattr(gemm._kernels, "ptx_with_lines", refuse)
    error = raised(gemm, replaced(gemm.ptx, r"fence\.proxy\.async[^;]*;", ""), check=True)
    assert type(error) is RaceError
    assert re.search(r"\(PTX line \d+\)", str(error))
