"""A kernel that does no product: its workers write down what they are given to do, on a GPU or emulated."""

import tempfile
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutegemm import GemmConfig, GemmProblem, emulator
from cutegemm.hopper.kernel import FETCHING_WARP, HopperGemm, Place, TaskGrid
from cutegemm.hopper.plan import plan
from cutegemm.parts.feed import divided, make_feed
from cutegemm.scheduler import TileScheduler

WARPS_OF_WARPGROUP = 4
COLUMNS = 8


@dataclass(frozen=True)
class Line:
    """One thing a CTA did: which worker and CTA of its cluster, which task and tile, which stages of it."""

    worker: int
    rank: int
    task: int
    m: int
    n: int
    batch: int
    k_first: int
    k_count: int


@dataclass(frozen=True)
class Load:
    """Cluster tiles along M and N, products, clusters that run at once, stages of a tile."""

    clusters_m: int
    clusters_n: int
    batch: int
    resident: int
    k_tiles: int

    @property
    def tasks(self) -> int:
        return self.clusters_m * self.clusters_n * self.batch


class Recorder(HopperGemm):
    """The set-up and the warps of a GEMM kernel that read its feed."""

    @cute.jit
    def record(
        self, lines: cute.Tensor, used: cute.Tensor, counters: cute.Tensor, clusters_m: Int32,
        clusters_n: Int32, batch: Int32, resident: Int32, k_tiles: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """Launches ``recording``. lines (COLUMNS * room), used (1): int32; counters: two zeros."""
        tasks = clusters_m * clusters_n * batch
        workers = self.scheduler.assignment.workers(tasks, resident)
        division = divided(self.scheduler, tasks, workers, k_tiles)
        addresses = counters.iterator.toint(), Int64(0)
        grid = TaskGrid(clusters_m, clusters_n, batch, workers, k_tiles, *addresses, division)
        self.recording(lines, used, grid).launch(
            grid=(workers * self.plan.cluster_ctas, 1, 1), block=(self.plan.threads, 1, 1),
            cluster=(self.plan.cluster_ctas, 1, 1), stream=stream,
        )  # fmt: skip

    @cute.kernel
    def recording(self, lines: cute.Tensor, used: cute.Tensor, grid: TaskGrid) -> None:
        """The producer's warp writes down its positions; consumer warps only follow."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = self._place(grid)
        feed = make_feed(self.scheduler, self.plan, cutlass.memory.SmemAllocator(), grid, place)
        if warp == 0:
            with cute.arch.elect_one():
                feed.init()
                cute.arch.mbarrier_init_fence()
        self._sync_cluster()
        if (warp == 0) | (warp >= WARPS_OF_WARPGROUP):
            position = feed.first()
            while position.task < grid.tasks():
                if warp == 0:
                    feed.begin()
                if (warp == 0) & (cute.arch.lane_idx() == 0):
                    self._write(lines, used, feed.span(position), grid, place)
                position = feed.next(position)
        if cutlass.const_expr(self.scheduler.queued):  # noqa: SIM102 - at trace time, and at run time
            if (warp == FETCHING_WARP) & (place.cta_m + place.cta_n == 0):
                feed.fetch()
        self._sync_cluster()

    @cute.jit
    def _write(self, lines: cute.Tensor, used: cute.Tensor, span: Any, grid: TaskGrid, place: Place) -> None:
        m, n, batch = self._tile(span.task, grid, place)
        index = cute.arch.atomic_add(used.iterator, Int32(1), sem="relaxed", scope="gpu") * COLUMNS
        block, _, _ = cute.arch.block_idx()
        rank = block - place.worker * self.plan.cluster_ctas
        values = (place.worker, rank, span.task, m, n, batch, span.k_first, span.k_count)
        for i in cutlass.range_constexpr(COLUMNS):
            lines[index + i] = values[i]


def recorder(scheduler: TileScheduler, config: GemmConfig) -> Any:
    """The compiled recording kernel of a scheduler; batches are looked at."""
    problem = GemmProblem(None, None, None, None, batched=True)
    made = Recorder(plan(config, problem, splits=scheduler.splits), problem, scheduler)
    vector = [make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16) for _ in range(3)]
    return cute.compile(
        made.record, *vector, *(Int32(0) for _ in range(5)), make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --dump-dir {tempfile.mkdtemp()}",
    )  # fmt: skip


def recorded(compiled: Any, load: Load, device: str, seed: int | None = None) -> list[Line]:
    """What the workers wrote down; on "cpu" emulated, in adverse order if there is a seed.

    Fails if the counters are not left at 0.
    """
    room = 64 * load.tasks + 1024
    lines = torch.full((COLUMNS * room,), -1, dtype=torch.int32, device=device)
    used, counters = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 2))
    numbers = (load.clusters_m, load.clusters_n, load.batch, load.resident, load.k_tiles)
    if device == "cpu":
        emulator.run(compiled, lines, used, counters, *numbers, None, seed=seed, check=seed is not None)
    else:
        compiled(lines, used, counters, *numbers)
    assert counters.tolist() == [0, 0]
    rows = lines.view(-1, COLUMNS)[: int(used)].tolist()
    return [Line(*row) for row in rows]
