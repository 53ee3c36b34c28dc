"""Clusters divided among processes: the same as one process gives, whatever happens to the others."""

import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulation import GPU, gemm_of, kernel
from gpu_checks import Case, Operands
from ptx_kernels import HEADER

from cutegemm import GemmConfig, cli
from cutegemm.emulator import (
    DeadlockError,
    Emulation,
    EmulationError,
    OutOfBoundsError,
    Progress,
    RaceError,
    processes,
)
from cutegemm.emulator.independence import independent
from cutegemm.emulator.machine import LaunchRecord, Machine
from cutegemm.emulator.memory import GlobalMemory, tensor_region
from cutegemm.emulator.processes import divide, run_divided
from cutegemm.emulator.product import Circumstances, emulate
from cutegemm.emulator.run import program_of
from cutegemm.emulator.trace import Trace
from cutegemm.errors import ProblemError
from cutegemm.gemm import Gemm
from cutegemm.scheduler import Assignment, Dynamic, SplitK, StreamK, TileScheduler

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

CASE = Case(256, 264, 200)
CONFIG = GemmConfig(64, 128, consumers=1)  # four times three tiles
FAMILIES = {
    "cooperative": (CASE, GemmConfig(128, 64), None),
    "ping-pong, few clusters": (CASE, GemmConfig(64, 64, schedule="pingpong"), 3),
    "cluster 2x1": (CASE, GemmConfig(64, 64, cluster_m=2), 3),
    "direct store": (Case(200, 101, 136), GemmConfig(64, 64), None),
}


def children() -> set[int]:
    """Processes of this one's making, those that have ended and were not waited for among them."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.add(int(process.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, no file descriptor beyond those of other tests."""
    before = sorted(os.listdir("/proc/self/fd")), children()
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before[0]
    assert children() <= before[1]


def run(gemm: Gemm, case: Case, count: int, **circumstances: Any) -> tuple[Emulation, torch.Tensor]:
    """Emulates a case between canaries; the result is right, nothing else was written."""
    operands = Operands.make(case, "cpu", seed=1)
    tensors = (operands.a.tensor, operands.b.tensor, operands.out.tensor)
    result = emulate(gemm._kernels, GPU, tensors, Circumstances(processes=count, **circumstances))
    operands.judge(circumstances)
    return result, operands.out.tensor


def fault(gemm: Gemm, ptx: str, count: int, **circumstances: Any) -> EmulationError:
    """What a changed kernel is guilty of."""
    with pytest.raises(EmulationError) as caught:
        run(gemm, CASE, count, ptx=ptx, **circumstances)
    return caught.value


def told(error: EmulationError) -> str:
    """A report without the addresses of the operands, which differ from run to run."""
    return re.sub(r"0x\w+", "", str(error))


def in_cta(ptx: str, condition: str, instruction: str) -> str:
    """PTX with an instruction put where CTAs read their number, for those that fulfil a condition."""
    code = (
        r"\g<0> {{ .reg .pred %chosen; .reg .b64 %nowhere; mov.b64 %nowhere, 0x7000000000000000;"
        rf" setp.{condition}; @%chosen {instruction}; }}}}"
    ).format("\\1")
    changed, found = re.subn(r"mov\.u32\s+(%r\d+), %ctaid\.x;", code, ptx, count=1)
    assert found == 1
    return changed


def small(body: str, out: torch.Tensor, grid: int, **options: Any) -> Any:
    """Builds machines for a kernel written in PTX, with %rd0 = address of ``out`` and %r1 = CTA."""
    memory = GlobalMemory()
    memory.add(tensor_region("out", out))
    params = struct.pack("<Q", out.data_ptr())
    record = LaunchRecord((grid, 1, 1), (32, 1, 1), (1, 1, 1), 1024, params)
    program = program_of(HEADER + body + "\nret;\n}\n")
    return lambda number=0: Machine(program, record, memory, **options)


# --- the same as one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("check", [False, True])
def test_results_trace_and_counts_are_those_of_one_process(name: str, check: bool) -> None:
    case, config, resident = FAMILIES[name]
    gemm = kernel(config, case)
    alone, expected = run(gemm, case, 1, resident=resident, check=check)
    divided, out = run(gemm, case, 3, resident=resident, check=check)
    assert (alone.processes, divided.processes) == (1, 3)
    assert torch.equal(out, expected)
    assert divided.instructions == alone.instructions
    assert divided.trace == alone.trace
    assert divided.launch is not None
    assert alone.launch is not None
    assert divided.launch.grid == alone.launch.grid


@pytest.mark.parametrize("seed", range(3))
def test_adverse_orders_give_the_same_bits(seed: int) -> None:
    gemm = kernel(CONFIG, CASE)
    _, expected = run(gemm, CASE, 1)
    divided, out = run(gemm, CASE, 2, seed=seed, check=True)
    assert divided.processes == 2
    assert torch.equal(out, expected)
    again, _ = run(gemm, CASE, 2, seed=seed, check=True)
    assert again.trace == divided.trace


def test_split_k_through_distributed_shared_memory_is_independent() -> None:
    case = Case(136, 101, 520)
    gemm = gemm_of(case, GemmConfig(64, 64), TileScheduler(assignment=SplitK(2)))
    _, expected = run(gemm, case, 1)
    divided, out = run(gemm, case, 2)
    assert divided.processes == 2
    assert torch.equal(out, expected)


def test_turns_are_replayed_as_one_machine_gives_them() -> None:
    """Five clusters on one SM that takes two: the others wait for room, and each needs several turns."""
    body = """
        setp.ne.b32 %p1, %r0, 0; mov.b32 %r10, 0; mad.lo.s32 %r11, %r1, 700, 3000;
        @%p1 bra READY; mbarrier.init.shared.b64 [%r3], 1; READY: bar.warp.sync -1;
        SPIN: add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, %r11; @%p2 bra SPIN;
        mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd0, %rd2; st.global.b32 [%rd3], %r10;
    """
    expected, out = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    alone = small(body, expected, 5, sms=1)()
    alone.trace.add = lambda *_, **__: None
    # Neither copies nor MMAs here: a turn that is noted in the trace shows the order.
    turn = Machine._turn

    def noted(machine: Machine, cluster: Any) -> bool:
        Trace.add(machine.trace, cluster.ctas[0].warps[0], "turn", "", 0, 1)
        return turn(machine, cluster)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "_turn", noted)
        alone.run()
        found = run_divided(small(body, out, 5, sms=1), divide(5, 2), None)
    assert found is not None
    assert out.tolist() == expected.tolist() == [3000 + 700 * i for i in range(5)]
    assert len(alone.trace.events) > 10
    assert found[0].events == alone.trace.events
    assert found[1] == alone.instructions


def test_progress_adds_up() -> None:
    reports: list[Progress] = []
    result, _ = run(kernel(CONFIG, CASE), CASE, 2, progress=reports.append)
    assert result.launch is not None
    ctas = int(np.prod(result.launch.grid))
    assert reports[-1] == Progress(ctas, ctas, result.instructions)
    assert reports == sorted(reports)


def test_a_grid_is_divided_evenly_and_completely() -> None:
    for clusters in (1, 2, 7, 132):
        for count in (1, 2, 3, 7):
            parts = divide(clusters, count)
            assert [n for part in parts for n in part] == list(range(clusters))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_used_from_a_thread_while_others_work() -> None:
    gemm = kernel(CONFIG, CASE)
    _, expected = run(gemm, CASE, 1)
    stop = threading.Event()
    results: list[torch.Tensor] = []

    def work() -> None:
        matrix = np.ones((96, 96), dtype=np.float32)
        while not stop.is_set():
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            matrix = np.sqrt(matrix @ matrix / 96)

    def use() -> None:
        results.extend(run(gemm, CASE, 2)[1] for _ in range(2))

    busy, users = threading.Thread(target=work), [threading.Thread(target=use) for _ in range(2)]
    for thread in (busy, *users):
        thread.start()
    for thread in users:
        thread.join()
    stop.set()
    busy.join()
    assert len(results) == 4
    assert all(torch.equal(out, expected) for out in results)


# --- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "instruction", "kind"),
    [
        ("eq.u32 %chosen, {0}, 9", "st.global.b32 [%nowhere], {0}", OutOfBoundsError),
        ("gt.u32 %chosen, {0}, 1", "st.global.b32 [%nowhere], {0}", OutOfBoundsError),
        ("eq.u32 %chosen, {0}, 9", "bar.sync 9, 1024", DeadlockError),
        ("gt.u32 %chosen, {0}, 1", "bar.sync 9, 1024", DeadlockError),
    ],
)
def test_faults_are_those_of_one_process(condition: str, instruction: str, kind: type) -> None:
    """In one cluster of the second half of the grid, or in clusters of both."""
    gemm = kernel(CONFIG, CASE)
    ptx = in_cta(gemm.ptx, condition, instruction)
    alone, divided = fault(gemm, ptx, 1), fault(gemm, ptx, 2)
    assert type(divided) is type(alone) is kind
    assert told(divided) == told(alone)


def test_a_fault_counts_before_a_deadlock_of_earlier_clusters() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = in_cta(gemm.ptx, "eq.u32 %chosen, {0}, 1", "bar.sync 9, 1024")
    ptx = in_cta(ptx, "eq.u32 %chosen, {0}, 9", "st.global.b32 [%nowhere], {0}")
    alone, divided = fault(gemm, ptx, 1), fault(gemm, ptx, 2)
    assert type(divided) is type(alone) is OutOfBoundsError
    assert told(divided) == told(alone)


def test_a_tile_taken_in_two_processes_is_a_race() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = re.sub(r"mov\.u32(\s+%r\d+), %ctaid\.x;", r"and.b32\1, %ctaid.x, 7;", gemm.ptx)
    alone, divided = fault(gemm, ptx, 1, check=True), fault(gemm, ptx, 2, check=True)
    assert type(divided) is RaceError
    assert "write-after-write in global memory" in str(divided)
    assert told(divided) == told(alone)


@pytest.mark.parametrize(
    ("body", "collides"),
    [
        ("st.global.b32 [%rd3], %r1;", False),
        ("st.global.b32 [%rd0], %r1;", True),
        ("ld.global.b32 %r10, [%rd0]; st.global.b32 [%rd3], %r10;", True),
        ("ld.global.b32 %r10, [%rd0+4]; st.global.b32 [%rd3], %r10;", True),
        ("ld.global.b32 %r10, [%rd0+32]; st.global.b32 [%rd3], %r1;", False),
    ],
)
def test_what_two_processes_touch_is_seen_with_checks_only(body: str, collides: bool) -> None:
    body = "mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd0, %rd2;" + body
    out = torch.full((9,), -1, dtype=torch.int32)
    found = run_divided(small(body, out, 2, check=True), divide(2, 2), None)
    assert (found is None) == collides
    assert (out == -1).all() == collides
    assert run_divided(small(body, out, 2), divide(2, 2), None) is not None


def test_a_fault_leaves_memory_as_it_was() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = in_cta(gemm.ptx, "eq.u32 %chosen, {0}, 9", "st.global.b32 [%nowhere], {0}")
    operands = Operands.make(CASE, "cpu", seed=1)
    before = operands.out.tensor.clone()
    tensors = (operands.a.tensor, operands.b.tensor, operands.out.tensor)
    with pytest.raises(OutOfBoundsError):
        emulate(gemm._kernels, GPU, tensors, Circumstances(processes=2, ptx=ptx))
    assert torch.equal(operands.out.tensor.view(torch.int16), before.view(torch.int16))


# --- accidents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = processes._share_of

    def die(machine: Machine) -> Any:
        if machine.share is not None and machine.share.start:
            os.kill(os.getpid(), number)
        return gather(machine)

    monkeypatch.setattr(processes, "_share_of", die)
    with pytest.raises(
        EmulationError, match=rf"process 2, .* clusters 6\.\.11, was ended by signal {number} "
    ):
        run(kernel(CONFIG, CASE), CASE, 2)


@pytest.mark.parametrize(
    "problem", [ValueError("odd"), KeyboardInterrupt(), type("Local", (Exception,), {})()]
)
def test_an_error_of_the_emulator_itself_arrives(
    problem: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(machine: Machine) -> Any:
        raise problem

    monkeypatch.setattr(processes, "_share_of", fail)
    known = type(problem).__name__ != "Local"
    with pytest.raises(type(problem) if known else EmulationError) as caught:
        run(kernel(CONFIG, CASE), CASE, 2)
    said = str(caught.value) if not known else "".join(caught.value.__notes__)
    assert "in fail" in said


def test_ctrl_c_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    # A test runner's own process may ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(kernel(CONFIG, CASE), CASE, 2, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def test_nobody_need_wait_for_children() -> None:
    """With SIGCHLD ignored the system forgets them itself."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run(kernel(CONFIG, CASE), CASE, 2)[0].processes == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Killed, it can tell them nothing."""
    note = tmp_path / "children"
    program = f"""
import os, pathlib, signal, time
from cutegemm.emulator import processes
gather = processes._share_of
pathlib.Path({str(note)!r}).write_text("")
def slow(machine):
    with open({str(note)!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    while True:
        time.sleep(0.05)
        machine._last_told = 0.0
        machine._tell()
processes._share_of = slow
from cutegemm import cli
cli.main("emulate 200 136 64 --tile 64x64x64 --processes 2".split())
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as parent:
        deadline = time.monotonic() + 60
        while not (note.exists() and len(note.read_text().split()) == 2):
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    children = [int(word) for word in note.read_text().split()]
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody may be there to collect it


def test_no_more_processes_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork
    started: list[int] = []

    def second_fails() -> int:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", second_fails)
    with pytest.raises(EmulationError, match="process 2 cannot be started: Resource"):
        run(kernel(CONFIG, CASE), CASE, 2)


# --- which kernels, how many ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("red.global.add.u32 [%rd0], 1;", False),
        ("atom.global.add.u32 %r10, [%rd0], 1;", False),
        ("atom.add.u32 %r10, [%rd0], 1;", False),
        ("atom.shared.add.u32 %r10, [%r3], 1;", True),
        ("ld.acquire.gpu.global.b32 %r10, [%rd0];", False),
        ("ld.volatile.global.b32 %r10, [%rd0];", False),
        ("ld.volatile.shared.b32 %r10, [%r3];", True),
        ("st.release.gpu.global.b32 [%rd0], %r1;", False),
        ("st.relaxed.gpu.global.b32 [%rd0], %r1;", False),
        ("fence.acq_rel.gpu;", False),
        ("fence.acq_rel.cluster;", True),
        ("mov.u32 %r10, %smid;", False),
        ("ld.global.b32 %r10, [%rd0]; st.global.b32 [%rd0+4], %r10;", True),
        (
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
            "[%r3], [%r3+64];",
            False,
        ),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;", False),
    ],
)
def test_what_makes_clusters_depend_on_each_other(instruction: str, expected: bool) -> None:
    machine = small(instruction, torch.zeros(4, dtype=torch.int32), 2)()
    assert independent(machine.program, machine.processors) is expected


def test_tensor_memory_of_one_cta_an_sm_is_independent() -> None:
    build = small(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;",
        torch.zeros(4, dtype=torch.int32),
        2,
    )
    machine = build()
    machine.processors.each = 1
    assert independent(machine.program, machine.processors)


def test_a_kernel_with_a_counter_takes_one_process() -> None:
    gemm = kernel(CONFIG, CASE)
    ptx = in_cta(gemm.ptx, "eq.u32 %chosen, {0}, 4096", "red.global.add.u32 [%nowhere], 1")
    result, _ = run(gemm, CASE, 2, ptx=ptx)
    assert result.processes == 1


@pytest.mark.parametrize("assignment", [Dynamic(), StreamK()])
def test_work_counters_and_sums_in_global_memory_take_one_process(assignment: Assignment) -> None:
    case = Case(136, 200, 520)
    gemm = gemm_of(case, GemmConfig(64, 64), TileScheduler(assignment=assignment))
    assert run(gemm, case, 2, resident=5)[0].processes == 1


def test_exact_sums_are_the_same_too() -> None:
    case = Case(72, 136, 72)
    gemm = kernel(GemmConfig(64, 64), case)
    _, expected = run(gemm, case, 1, exact_sums=True)
    assert torch.equal(run(gemm, case, 2, exact_sums=True)[1], expected)


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = kernel(CONFIG, CASE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5})
    for asked in (0, None):
        assert run(gemm, CASE, asked)[0].processes == 3  # type: ignore[arg-type]
    assert run(gemm, CASE, 50)[0].processes == 12  # as many as there are clusters
    assert run(gemm, CASE, 2, resident=1)[0].processes == 1
    with pytest.raises(ProblemError, match="processes is -1"):
        run(gemm, CASE, -1)


def test_the_command_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "200", "136", "64", "--tile", "64x64x64", "--processes", "2"]) == 0
    said = capsys.readouterr()
    assert "by 2 processes" in " ".join(said.out.split())
    assert "in one process" in said.err
    assert cli.main(["emulate", "64", "64", "64", "--processes", "-1"]) == 2
    assert "--processes -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["emulate", "64", "64", "64", "--processes", "many"])
    assert "'many' is neither a number nor auto" in capsys.readouterr().err
