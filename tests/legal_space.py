"""Every legal kernel of the sm_90a plan: listing, a covering sample, compiling, what must hold of the code.

Compiles run in a worker process, so that a compiler that aborts or hangs costs one kernel and is reported
like any other finding. As a script this file is that worker: kernels as JSON lines in, findings out.
"""

import hashlib
import itertools
import json
import os
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cutegemm import GemmConfig, GemmProblem
from cutegemm.errors import ConfigError
from cutegemm.hopper.plan import (
    MOVING_REGISTERS,
    HopperPlan,
    accumulator_budget,
    plan,
)
from cutegemm.parts.paths import LoadPath, Paths, StorePath

TARGET = "sm_90a"
REGISTER_FILE = 65536  # 32-bit registers of one SM
KERNEL_SECONDS = 120  # after which a compile counts as hung
KERNELS_PER_WORKER = 200  # a fresh process after this many bounds what the compiler leaves behind

TILES_M = (64, 128, 192, 256)
TILES_N = tuple(range(8, 257, 8))
TILES_K = (64, 128)
# What the CTAs of a cluster share: (cluster_m, cluster_n, splits), operands or else a tile's K.
CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8))
SCHEDULES = ((1, "cooperative"), (2, "cooperative"), (2, "pingpong"))
MAJORS = tuple(itertools.product("km", "kn", "nm"))
# How A and B are loaded, as the kernel sees them.
LOADS: tuple[tuple[LoadPath, LoadPath], ...] = tuple(itertools.product(("realigned", "tma"), repeat=2))
STORES: tuple[StorePath, ...] = ("tma", "direct")
OUT_DTYPES = ("bfloat16", "float16", "float32")
# Tile widths whose last output piece or swizzle span is narrower than the others.
RAGGED_TILES_N = (8, 24, 40, 72, 104, 144, 176, 200)


@dataclass(frozen=True)
class Kernel:
    """One kernel: a configuration, the problem kind it is built for (as the user sees it), how it stores.

    splits: CTAs of a cluster that share a tile's K; with more than one, the rest below decides nothing.
    work: the class of the assignment
    loads: how A and B are loaded, as the kernel sees them
    """

    config: GemmConfig
    problem: GemmProblem
    store: StorePath = "tma"
    splits: int = 1
    work: str = "Persistent"
    loads: tuple[LoadPath, LoadPath] = ("tma", "tma")

    @property
    def plan(self) -> HopperPlan:
        """The plan; raises ConfigError if the configuration is not legal for the problem."""
        return plan(self.config, self.seen, self.paths, self.splits, self.work == "StreamK")

    @property
    def paths(self) -> Paths:
        """The ways of the operands the kernel sees."""
        return Paths(*self.loads, self.store)

    @property
    def seen(self) -> GemmProblem:
        """The problem as the kernel sees it: operands exchanged if the configuration says so."""
        return self.problem.swapped() if self.config.swap_ab else self.problem

    def is_legal(self) -> bool:
        """Whether the plan accepts it."""
        try:
            return self.plan is not None
        except ConfigError:
            return False

    def __str__(self) -> str:
        batched = "batched " if self.problem.batched else ""
        split = f", K split {self.splits} ways" if self.splits > 1 else ""
        return f"{self.config}{split}, {self.work} | {batched}{self.problem}, {self.paths}"

    def to_json(self) -> str:
        """One line from which ``from_json`` makes an equal kernel."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> "Kernel":
        """The kernel of a line made by ``to_json``."""
        fields = json.loads(line)
        config, problem = GemmConfig(**fields["config"]), GemmProblem(**fields["problem"])
        return cls(config, problem, fields["store"], fields["splits"], fields["work"], tuple(fields["loads"]))


def legal_space(part: int = 1) -> list[Kernel]:
    """Every legal combination of tile, cluster, splits, schedule, majors, output dtype and store.

    part: of all combinations, legal or not, one in so many is looked at.

    Split tiles have one kind of store; they are listed once, as direct stores.
    Input dtype, batch mode and exchanged operands double the number of kernels each and share all code that
    depends on the rest; which of them a combination gets is drawn from its own text, so that half have each.
    So is the assignment of one that is not split: a quarter have Dynamic, a quarter StreamK; and the loads,
    among which three in four have an operand or both realigned, where that is legal.
    """
    combinations = itertools.product(
        itertools.product(MAJORS, OUT_DTYPES, STORES),
        itertools.product(TILES_M, TILES_N, TILES_K),
        CLUSTERS,
        SCHEDULES,
    )
    # Every eighth, say, of the list would have the same tile_k: which ones is drawn.
    chance = random.Random(part)
    return [
        kernel
        for (majors, *output), tile, cluster, schedule in combinations
        if (part == 1 or chance.randrange(part) == 0)
        and (kernel := _drawn(majors, tuple(output), tile, cluster, schedule)).is_legal()
        and (kernel.splits == 1 or kernel.store == "direct")
    ]


def _drawn(
    majors: tuple[str, str, str],
    output: tuple[Any, ...],
    tile: tuple[int, int, int],
    cluster: tuple[int, int, int],
    schedule: tuple[int, Any],
) -> Kernel:
    out_dtype, store = output
    *cluster_mn, splits = cluster
    text = repr((majors, out_dtype, tile, cluster, schedule)).encode()
    bits = hashlib.sha256(text).digest()[0]
    dtype = "float16" if bits & 1 else "bfloat16"
    batched = bool(bits & 2)
    problem = GemmProblem(None, None, None, None if batched else 1, dtype, dtype, out_dtype, *majors, batched)
    config = GemmConfig(
        *tile, *cluster_mn, consumers=schedule[0], schedule=schedule[1], swap_ab=bool(bits & 4)
    )
    work = {0: "Dynamic", 1: "StreamK"}.get(bits >> 3 & 3, "Persistent") if splits == 1 else "SplitK"
    # The kernel of an exchanged problem is that of its mirror image: exchanged here too, it is the one asked.
    user = problem.swapped() if config.swap_ab else problem
    kernel = Kernel(config, user, store, splits, work, LOADS[bits >> 5 & 3])
    return kernel if kernel.is_legal() else Kernel(config, user, store, splits, work)


def features(kernel: Kernel) -> set[tuple[str, Any]]:
    """What a sample has to show at least once."""
    config, problem = kernel.config, kernel.seen
    schedule = (config.consumers, config.schedule)
    path = "split" if kernel.splits > 1 else kernel.store
    moving = "realigned" in kernel.loads
    budget = accumulator_budget(config.consumers, problem.out_major, path, kernel.work == "StreamK", moving)
    return {
        ("tile_m", (config.tile_m, schedule)),
        ("tile_n", config.tile_n if config.tile_n in (*RAGGED_TILES_N, 256) else "other"),
        ("tile_k", config.tile_k),
        ("cluster", ((config.cluster_m, config.cluster_n), config.schedule)),
        ("majors", (problem.a_major, problem.b_major, problem.out_major)),
        ("dtypes", (problem.a_dtype, problem.out_dtype)),
        ("store", (path, problem.out_major, problem.out_dtype)),
        ("splits", (kernel.splits, config.consumers)),
        ("work", (kernel.work, schedule, config.cluster_size > 1)),
        ("work at the limit", (kernel.work, path, kernel.plan.accumulator_registers > budget - 8)),
        ("loads", (kernel.loads, problem.a_major, problem.b_major)),
        ("loads at the limit", (moving, kernel.plan.accumulator_registers > budget - 8)),
        ("batched", problem.batched),
        ("swapped", config.swap_ab),
        ("at the limit", (path, problem.out_major, kernel.plan.accumulator_registers > budget - 8)),
    }


def sample(space: list[Kernel], seed: int, count: int) -> list[Kernel]:
    """``count`` kernels that show every feature of the space: first a greedy cover, then random ones.

    Raises ValueError if ``count`` is too small for a cover.
    """
    shuffled = random.Random(seed).sample(space, len(space))
    pool = [(kernel, features(kernel)) for kernel in shuffled[:4000]]
    missing = set().union(*(found for _, found in pool))
    chosen: list[Kernel] = []
    while missing:
        kernel, found = max(pool, key=lambda entry: len(entry[1] & missing))
        chosen.append(kernel)
        missing -= found
    if len(chosen) > count:
        raise ValueError(f"{count} kernels are too few, a cover takes {len(chosen)}")
    rest = (kernel for kernel in shuffled if kernel not in chosen)
    return [*chosen, *itertools.islice(rest, count - len(chosen))]


# --- what must hold ----------------------------------------------------------------------------------------


def violations(kernel: Kernel) -> list[str]:
    """Compiles a kernel and says what is wrong with the code; an empty list if nothing is."""
    from cutegemm import scheduler as schedulers
    from cutegemm.artifact import instruction_histogram
    from cutegemm.hardware import gpu_by_name
    from cutegemm.kernels import Kernels

    problem = kernel.problem
    arguments = (kernel.splits,) if kernel.work == "SplitK" else ()
    scheduler = schedulers.TileScheduler(assignment=getattr(schedulers, kernel.work)(*arguments))
    kernels = Kernels(problem, kernel.config, scheduler, TARGET)
    paths = kernel.paths.swapped() if kernel.config.swap_ab else kernel.paths
    built = kernels.artifact(kernels.choice(problem, gpu_by_name("H200"), paths))
    return [
        *_resource_violations(built.resources, kernel.plan),
        *_ptx_violations(built.ptx, kernel),
        *_sass_violations(built.sass, instruction_histogram(built.sass), kernel.plan),
        *_serialisations(built.ptx, built.sass),
        *([f"symbol {built.kernel_name}"] if "cutlass" in built.kernel_name.lower() else []),
    ]


def _resource_violations(resources: Any, worked_out: HopperPlan) -> Iterator[str]:
    if resources.spills:
        yield f"spills {resources.spills} bytes"
    if resources.threads != worked_out.threads or resources.smem_bytes != worked_out.smem_bytes:
        yield f"built with {resources}, planned {worked_out.threads} threads, {worked_out.smem_bytes} bytes"
    at_entry = resources.registers * resources.threads
    consumers = worked_out.config.consumers * worked_out.consumer_registers
    movers = MOVING_REGISTERS if worked_out.staged_bytes else 0
    traded = 128 * (worked_out.producer_registers + consumers + movers)
    if at_entry > REGISTER_FILE:
        yield f"{at_entry} registers at entry, an SM has {REGISTER_FILE}"
    if at_entry < traded:
        yield f"{at_entry} registers at entry, after the trade {traded}: the consumers would wait for ever"


def _ptx_violations(ptx: str, kernel: Kernel) -> Iterator[str]:
    worked_out, problem = kernel.plan, kernel.seen
    if ".local" in ptx:
        yield "local memory in the PTX"
    short = {"bfloat16": "bf16", "float16": "f16"}[problem.a_dtype]
    wanted = f"m64n{worked_out.warpgroup_n}k16.f32.{short}.{short}"
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx))
    if found != {wanted}:
        yield f"WGMMA {sorted(found)}, planned {wanted}"
    config = kernel.config
    shared = {"A": config.cluster_n > 1, "B": config.cluster_m > 1}
    if "realigned" in kernel.loads:
        if "multicast" in ptx:
            yield "multicast of an operand whose lines are put in place by each CTA"
    elif multicast_of_loads(ptx) != shared:
        yield f"multicast {multicast_of_loads(ptx)}, the cluster shares {shared}"
    if ("barrier.cluster" in ptx) != (worked_out.cluster_ctas > 1):
        yield f"cluster barrier present: {'barrier.cluster' in ptx}, cluster of {worked_out.cluster_ctas}"
    before_wait, _, _ = ptx.partition("\tgriddepcontrol.wait")
    if ptx.count("griddepcontrol.wait") != 1 or re.search(r"\b(ld|st|atom)\.global|bulk", before_wait):
        yield "not every thread waits for the kernel before, ahead of all it does to global memory"
    if ("ld.shared::cluster" in ptx) != (worked_out.splits > 1):
        yield f"reads of other CTAs' sums: {'ld.shared::cluster' in ptx}, K split {worked_out.splits} ways"


def multicast_of_loads(ptx: str) -> dict[str, bool | None]:
    """Whether the TMA loads of A and of B are multicast; None where some are and some are not.

    A load is told by the kernel parameter its descriptor lies in; A's comes first.
    """
    parameter = dict(re.findall(r"mov\.b64\s+(%rd\d+), \w+_param_(\d+);", ptx))
    for register, source in re.findall(r"cvta\.param\.u64\s+(%rd\d+), (%rd\d+);", ptx):
        parameter[register] = parameter.get(source)
    loads: dict[int, set[bool]] = {}
    pattern = r"cp\.async\.bulk\.tensor\.\dd\.shared::(\S+) \[[^\]]*\], \[(%rd\d+),"
    for qualifiers, register in re.findall(pattern, ptx):
        loads.setdefault(int(parameter[register]), set()).add("multicast::cluster" in qualifiers)
    if len(loads) != 2:
        raise ValueError(f"expected loads through two descriptors, found {sorted(loads)}")
    return {
        name: (loads[index].pop() if len(loads[index]) == 1 else None)
        for name, index in zip("AB", sorted(loads), strict=True)
    }


def _sass_violations(sass: str, histogram: dict[str, int], worked_out: HopperPlan) -> Iterator[str]:
    if histogram["local memory"]:
        yield f"{histogram['local memory']} local memory instructions"
    wanted = f"HGMMA.64x{worked_out.warpgroup_n}x16.F32"
    found = set(re.findall(r"HGMMA\.64x\d+x16\.F32", sass))
    if found != {wanted}:
        yield f"SASS has {sorted(found)}, planned {wanted}"
    if not histogram["TMA load"]:
        yield "no TMA load"
    if bool(histogram["TMA store"]) != (worked_out.paths.store == "tma"):
        yield f"{histogram['TMA store']} TMA stores, planned a {worked_out.paths.store} store"


def _serialisations(ptx: str, sass: str) -> Iterator[str]:
    """An assembler short of registers runs WGMMAs one by one: more waits than the kernel asks for."""
    for asked, found in (
        (r"wgmma\.wait_group", r"WARPGROUP\.DEPBAR"),
        (r"wgmma\.fence", r"WARPGROUP\.ARRIVE"),
    ):
        counts = len(re.findall(asked, ptx)), len(re.findall(found, sass))
        if counts[0] != counts[1]:
            yield f"WGMMAs serialised: {counts[0]} of {asked} became {counts[1]} of {found}"


# --- worker processes --------------------------------------------------------------------------------------


class Examined(Protocol):
    """What a worker can be given."""

    def to_json(self) -> str:
        """One line that tells the worker which it is, and is its name among the findings."""


AnyExamined = TypeVar("AnyExamined", bound=Examined)


class Worker:
    """A process that examines kernels one after the other; replaced when it dies or hangs.

    seconds: after which a kernel counts as hung; None: KERNEL_SECONDS
    """

    def __init__(
        self,
        environment: dict[str, str],
        command: tuple[str, ...] = (sys.executable, __file__),
        seconds: float | None = None,
    ) -> None:
        self._environment = environment
        self._command = command
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._done = 0

    def examine(self, kernel: Examined) -> list[str]:
        """The violations of a kernel; what befell the compiler is one of them."""
        seconds = self._seconds or KERNEL_SECONDS
        if self._process is None or self._done >= KERNELS_PER_WORKER:
            self.close()
            self._process = self._start()
        process = self._process
        self._done += 1
        try:
            print(kernel.to_json(), file=process.stdin, flush=True)
        except BrokenPipeError:
            ready = True
        else:
            ready = bool(select.select([process.stdout], [], [], seconds)[0])
        line = process.stdout.readline() if ready and process.stdout else ""
        if line.endswith("\n"):
            answer: list[str] = json.loads(line)
            return answer
        if not ready:
            process.kill()
        code = process.wait()
        self.close()
        return [f"the compiler died with exit code {code}" if ready else f"no answer in {seconds} s"]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        self._done = 0
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            cwd=Path(__file__).resolve().parent.parent,
        )


def worker_environment(cache: Path | str) -> dict[str, str]:
    """The environment of a compile worker: this package, a cache of its own."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "CUTEGEMM_CACHE_DIR": str(cache), "PYTHONPATH": path}


class Findings:
    """Results of a long run, one JSON line a kernel, so that a run cut short goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, list[str]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                    self.known[entry["kernel"]] = entry["violations"]
                except (ValueError, KeyError):
                    continue  # the line a killed run was writing

    def add(self, kernel: Examined, found: list[str]) -> None:
        """Keeps the result of one kernel."""
        self.known[kernel.to_json()] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"kernel": kernel.to_json(), "violations": found}) + "\n")


def examine_all(
    kernels: list[AnyExamined], worker: Worker, findings: Findings, seconds: float
) -> Iterator[tuple[AnyExamined, list[str]]]:
    """(kernel, violations) of each kernel, those known already first; stops after ``seconds``.

    The worker is closed at the end.
    """
    end = time.monotonic() + seconds
    try:
        for kernel in sorted(kernels, key=lambda one: one.to_json() not in findings.known):
            line = kernel.to_json()
            if line not in findings.known:
                if time.monotonic() > end:
                    return
                findings.add(kernel, worker.examine(kernel))
            yield kernel, findings.known[line]
    finally:
        worker.close()


def report_all(
    kernels: list[AnyExamined], worker: Worker, findings: Findings, seconds: float
) -> tuple[int, list[str]]:
    """examine_all under a progress bar, what is wrong above it: (kernels examined, what is wrong)."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    bad, done = [], 0
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("kernels", total=len(kernels))
        for kernel, found in examine_all(kernels, worker, findings, seconds):
            done += 1
            progress.advance(task)
            if found:
                bad.append(f"{kernel}: {'; '.join(found)}")
                progress.console.print(bad[-1])
    return done, bad


def serve(violations: Callable[[str], list[str]]) -> None:
    """A worker's part: answers lines of ``to_json`` with what ``violations`` finds, as JSON."""
    from cutegemm.cache import default_cache

    # Whatever the compiler prints must not be mistaken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for number, line in enumerate(sys.stdin, 1):
        try:
            found = violations(line)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            found = [f"{type(error).__name__}: {error}"]
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        if number % 50 == 0:
            default_cache().clear()  # nobody asks for these kernels again


if __name__ == "__main__":
    serve(lambda line: violations(Kernel.from_json(line)))
