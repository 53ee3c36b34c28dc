"""Which worker does what: kernels that write it down, emulated and on a GPU, against the same on the host."""

from collections import Counter
from typing import Any

import pytest
from feed_kernels import Line, Load, recorded, recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import GemmConfig
from cutegemm.scheduler import (
    Blocked,
    ColumnMajor,
    Dynamic,
    GroupedM,
    GroupedN,
    Hilbert,
    Morton,
    Persistent,
    RowMajor,
    SplitK,
    Static,
    StreamK,
    TileScheduler,
)
from cutegemm.scheduler.stream import LEAST_SAVING, LEAST_STEPS, Span, make_stream

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

ORDERS = [RowMajor(), ColumnMajor(), GroupedM(3), GroupedN(5), Blocked(3, 5), Morton(), Hilbert()]
ASSIGNMENTS = [
    Static(), Persistent(), Persistent(5), Dynamic(), Dynamic(5), SplitK(2), SplitK(8), StreamK(), StreamK(5),
]  # fmt: skip
ALONE = GemmConfig(64, 64, consumers=1)
CLUSTERED = GemmConfig(64, 64, cluster_m=2, cluster_n=2, schedule="pingpong")
# Ragged, fewer tasks than workers, one task, a batch, K of fewer stages than sharers, a line of tiles.
LOADS = [
    Load(7, 9, 1, 8, 25), Load(3, 2, 1, 8, 51), Load(1, 1, 1, 4, 40), Load(5, 3, 4, 7, 1),
    Load(1, 37, 1, 6, 23),
]  # fmt: skip
GPU_LOADS = [*LOADS, Load(64, 33, 1, 120, 59), Load(1, 4000, 2, 66, 42), Load(300, 7, 1, 132, 1)]


def expected(scheduler: TileScheduler, config: GemmConfig, load: Load) -> list[Line]:
    """What the host says that all CTAs do."""
    ctas = config.cluster_size * scheduler.splits
    lines = []
    for worker, span in spans(scheduler, load):
        batch, task = divmod(span.task, load.clusters_m * load.clusters_n)
        m, n = scheduler.order.tile(task, load.clusters_m, load.clusters_n)
        for rank in range(ctas):
            first, count = span.k_first, span.k_count
            if scheduler.splits > 1:
                each, left = divmod(load.k_tiles, scheduler.splits)
                first, count = rank * each + min(rank, left), max(each + (rank < left), 1)
                row, column = m, n
            else:
                row = m * config.cluster_m + rank % config.cluster_m
                column = n * config.cluster_n + rank // config.cluster_m
            lines.append(Line(worker, rank, span.task, row, column, batch, first, count))
    return sorted(lines, key=str)


def spans(scheduler: TileScheduler, load: Load) -> list[tuple[int, Span]]:
    """(worker, what it does) by the assignment's own methods; a queue's as if all workers were as fast."""
    assignment = scheduler.assignment
    workers = assignment.workers(load.tasks, load.resident)
    found = []
    for worker in range(workers):
        if isinstance(assignment, StreamK):
            stream = make_stream(load.tasks, workers, load.k_tiles)
            span = stream.first(worker)
            while span.task < load.tasks:
                found.append((worker, span))
                span = stream.next(span, worker)
            continue
        task = assignment.first(worker)
        while task < load.tasks:
            found.append((worker, Span(task, 0, load.k_tiles)))
            task = assignment.next(task, workers)
    return found


def compare(scheduler: TileScheduler, config: GemmConfig, load: Load, lines: list[Line]) -> None:
    """The host's list, line by line; for a queue any worker may have done a task, and its first is given."""
    wanted = expected(scheduler, config, load)
    if not scheduler.queued:
        assert sorted(lines, key=str) == wanted, (scheduler, load)
        return
    assert Counter(map(without_worker, lines)) == Counter(map(without_worker, wanted)), (scheduler, load)
    done = {(line.task, line.rank): line.worker for line in lines}
    for task in range(load.tasks):
        ranks = {done[task, rank] for rank in range(config.cluster_size)}
        assert len(ranks) == 1, "the CTAs of a cluster do the same tasks"
    for worker in range(scheduler.assignment.workers(load.tasks, load.resident)):
        assert done[worker, 0] == worker


def without_worker(line: Line) -> tuple[int, ...]:
    return line.rank, line.task, line.m, line.n, line.batch, line.k_first, line.k_count


def config_for(assignment: Any, clustered: bool) -> GemmConfig:
    return CLUSTERED if clustered and not isinstance(assignment, SplitK) else ALONE


@pytest.mark.parametrize("clustered", [False, True], ids=["alone", "clusters"])
@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
def test_workers_do_what_the_host_says_in_the_emulator(assignment: Any, clustered: bool) -> None:
    config = config_for(assignment, clustered)
    scheduler = TileScheduler(GroupedM(3), assignment)
    kernel = recorder(scheduler, config)
    for seed, load in enumerate(LOADS):
        compare(scheduler, config, load, recorded(kernel, load, "cpu", seed or None))


@pytest.mark.gpu
@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_workers_do_what_the_host_says_on_a_gpu(order: Any, assignment: Any) -> None:
    config = config_for(assignment, ORDERS.index(order) % 2 == 1)
    scheduler = TileScheduler(order, assignment)
    kernel = recorder(scheduler, config)
    for load in GPU_LOADS:
        compare(scheduler, config, load, recorded(kernel, load, "cuda"))


# --- StreamK's arithmetic ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 500), st.integers(1, 150), st.integers(1, 70))
def test_a_stream_covers_every_stage_once(tasks: int, workers: int, k_tiles: int) -> None:
    stream = make_stream(tasks, workers, k_tiles)
    owner: dict[tuple[int, int], int] = {}
    for worker in range(workers):
        span, parts = stream.first(worker), []
        while span.task < tasks:
            assert span.k_count >= 1
            assert 0 <= span.k_first <= k_tiles - span.k_count
            for stage in range(span.k_first, span.k_first + span.k_count):
                assert (span.task, stage) not in owner
                owner[span.task, stage] = worker
            if span.k_count < k_tiles:
                parts.append(span.k_first == 0)
            span = stream.next(span, worker)
        assert len(parts) == len(set(parts)), "one part of either kind at most: each has its place in memory"
    assert len(owner) == tasks * k_tiles
    for (task, stage), worker in owner.items():
        if task >= stream.whole:
            assert stream.worker_at((task - stream.whole) * k_tiles + stage) == worker


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 500), st.integers(1, 150), st.integers(1, 70))
def test_a_stream_loads_workers_evenly(tasks: int, workers: int, k_tiles: int) -> None:
    """All whole tiles where they fill rounds, nearly or quite; otherwise no worker has a stage more than
    another, unless the pieces would be too short to be worth it."""
    stream = make_stream(tasks, workers, k_tiles)
    longest, share = -(-tasks // workers) * k_tiles, tasks * k_tiles / workers
    assert (stream.steps > 0) == (longest - share >= LEAST_SAVING)
    assert stream.steps == 0 or stream.whole % workers == 0
    pieces = [stream.begin(worker + 1) - stream.begin(worker) for worker in range(workers)]
    assert sum(pieces) == stream.steps == (tasks - stream.whole) * k_tiles
    sharing = [piece for piece in pieces if piece]
    if sharing:
        assert max(sharing) - min(sharing) <= 1
        assert len(sharing) == workers or min(sharing) >= min(LEAST_STEPS, stream.steps)
