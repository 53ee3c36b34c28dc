"""Orders are bijections on every grid; assignments give every task to exactly one worker."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutegemm
from cutegemm import scheduler
from cutegemm.errors import ConfigError, OperandTypeError
from cutegemm.scheduler import (
    ColumnMajor,
    Dynamic,
    GroupedM,
    GroupedN,
    Persistent,
    RowMajor,
    SplitK,
    Static,
    StreamK,
    TileScheduler,
)
from cutegemm.scheduler.arithmetic import ceil_div, divmod_, minimum
from cutegemm.scheduler.identity import scheduler_identity

GROUPS = st.integers(1, 250)
ORDERS = st.one_of(
    st.just(RowMajor()), st.just(ColumnMajor()), st.builds(GroupedM, GROUPS), st.builds(GroupedN, GROUPS)
)
SIDES = st.integers(1, 200)
ASSIGNMENTS = st.one_of(
    st.just(Static()), st.just(Persistent()), st.builds(Persistent, max_workers=st.integers(1, 300)),
    st.just(Dynamic()), st.builds(Dynamic, max_workers=st.integers(1, 300)),
)  # fmt: skip


def tiles_of(order: Any, tiles_m: int, tiles_n: int) -> list[tuple[int, int]]:
    """The grid in the order's order."""
    return [order.tile(i, tiles_m, tiles_n) for i in range(tiles_m * tiles_n)]


def grid(tiles_m: int, tiles_n: int) -> list[tuple[int, int]]:
    """The grid, row by row."""
    return [(m, n) for m in range(tiles_m) for n in range(tiles_n)]


@given(ORDERS, SIDES, SIDES)
@settings(max_examples=60, deadline=None)
def test_orders_are_bijections(order: Any, tiles_m: int, tiles_n: int) -> None:
    assert sorted(tiles_of(order, tiles_m, tiles_n)) == grid(tiles_m, tiles_n)


@pytest.mark.parametrize("order_class", [GroupedM, GroupedN])
def test_grouped_orders_are_bijections_on_every_small_grid(order_class: type[Any]) -> None:
    """Every combination of side, other side and strip width, so every kind of ragged strip."""
    for tiles_m in range(1, 14):
        for tiles_n in range(1, 14):
            for group in range(1, 16):
                found = tiles_of(order_class(group), tiles_m, tiles_n)
                assert sorted(found) == grid(tiles_m, tiles_n), (tiles_m, tiles_n, group)


def test_plain_orders_on_a_small_grid() -> None:
    assert tiles_of(RowMajor(), 2, 3) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert tiles_of(ColumnMajor(), 2, 3) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_grouped_orders_with_a_ragged_last_strip() -> None:
    assert tiles_of(GroupedM(2), 3, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert tiles_of(GroupedN(2), 2, 3) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


@given(SIDES, SIDES, GROUPS)
@settings(max_examples=30, deadline=None)
def test_strips_along_n_mirror_strips_along_m(tiles_m: int, tiles_n: int, group: int) -> None:
    mirrored = [(m, n) for n, m in tiles_of(GroupedM(group), tiles_n, tiles_m)]
    assert tiles_of(GroupedN(group), tiles_m, tiles_n) == mirrored


@given(SIDES, SIDES)
@settings(max_examples=30, deadline=None)
def test_strips_of_one_and_of_all_are_the_plain_orders(tiles_m: int, tiles_n: int) -> None:
    assert tiles_of(GroupedM(1), tiles_m, tiles_n) == tiles_of(RowMajor(), tiles_m, tiles_n)
    assert tiles_of(GroupedM(tiles_m), tiles_m, tiles_n) == tiles_of(ColumnMajor(), tiles_m, tiles_n)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_a_wave_of_a_strip_touches_few_bands(tiles_m: int, tiles_n: int, group: int) -> None:
    """What grouping is for: group x c consecutive tasks of a full strip touch group bands of A, c of B."""
    strip = GroupedM(group)
    if tiles_m < group:
        return
    columns = min(tiles_n, 5)
    wave = [strip.tile(i, tiles_m, tiles_n) for i in range(group * columns)]
    assert len({m for m, _ in wave}) == group
    assert len({n for _, n in wave}) == columns


@given(ASSIGNMENTS, st.integers(1, 3000), st.integers(1, 300))
@settings(deadline=None)
def test_every_task_is_taken_exactly_once(assignment: Any, tasks: int, resident: int) -> None:
    workers = assignment.workers(tasks, resident)
    assert 1 <= workers <= tasks
    taken = []
    for worker in range(workers):
        task = assignment.first(worker)
        while task < tasks:
            taken.append(task)
            task = assignment.next(task, workers)
    assert sorted(taken) == list(range(tasks))


@given(ASSIGNMENTS, st.integers(1, 3000), st.integers(1, 300))
@settings(deadline=None)
def test_alternating_teams_take_every_task_exactly_once(assignment: Any, tasks: int, resident: int) -> None:
    """Two teams of a worker: the second starts one task on, each steps by two: ping-pong."""
    workers = assignment.workers(tasks, resident)
    taken = []
    for worker in range(workers):
        for team in range(2):
            task = assignment.first(worker)
            if team == 1:
                task = assignment.next(task, workers)
            while task < tasks:
                taken.append(task)
                task = assignment.next(assignment.next(task, workers), workers)
    assert sorted(taken) == list(range(tasks))


@given(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300))
def test_persistent_launches_what_fits_and_no_more(tasks: int, resident: int, limit: int) -> None:
    assert Persistent().workers(tasks, resident) == min(tasks, resident)
    assert Persistent(limit).workers(tasks, resident) == min(tasks, resident, limit)
    assert Static().workers(tasks, resident) == tasks


@pytest.mark.parametrize("tiles", [131, 132, 133, 264, 265])
def test_busiest_worker_has_the_least_possible(tiles: int) -> None:
    persistent = Persistent()
    workers = persistent.workers(tiles, 132)
    loads = [len(range(persistent.first(w), tiles, workers)) for w in range(workers)]
    assert max(loads) == ceil_div(tiles, 132)
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("order_class", [GroupedM, GroupedN])
@pytest.mark.parametrize("group", [0, -8, 2.0, True, "8", None])
def test_strip_width_must_be_a_positive_integer(order_class: type[Any], group: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        order_class(group)
    assert str(caught.value).startswith(f"{order_class.__name__}({group!r})")
    assert "an integer of at least 1, such as 8" in str(caught.value)


@pytest.mark.parametrize("kind", [Persistent, Dynamic, StreamK])
@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "all"])
def test_limit_of_workers_must_be_a_positive_integer(limit: Any, kind: type[Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(limit)
    assert f"max_workers={limit!r}" in str(caught.value)
    assert "or None for as many as fit" in str(caught.value)


@dataclass(frozen=True)
class Diagonal:
    """An order from outside the package."""

    shift: int = 1

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        m, n = divmod_(i, tiles_n)
        return m, (n + m * self.shift) % tiles_n


class Unprintable:
    """An order whose fields nobody can see."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        return i // tiles_n, i % tiles_n


@given(SIDES, SIDES, st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_an_order_from_outside_is_an_order(tiles_m: int, tiles_n: int, shift: int) -> None:
    TileScheduler(Diagonal(shift))
    assert sorted(tiles_of(Diagonal(shift), tiles_m, tiles_n)) == grid(tiles_m, tiles_n)


def test_an_order_from_outside_compiles_without_registration() -> None:
    own = cutegemm.compile(
        (None, None, None), "bfloat16", target="sm_90a", scheduler=TileScheduler(Diagonal(3), Static()),
        config=cutegemm.GemmConfig(64, 8, consumers=1),
    )  # fmt: skip
    plain = cutegemm.compile(
        (None, None, None), "bfloat16", target="sm_90a", config=cutegemm.GemmConfig(64, 8, consumers=1)
    )
    assert own.resources.spills == 0
    assert own.cubin != plain.cubin


@pytest.mark.parametrize("order", [None, 8, "GroupedM", Static()])
def test_a_scheduler_without_an_order(order: Any) -> None:
    with pytest.raises(OperandTypeError) as caught:
        TileScheduler(order)
    assert f"order={order!r} has no method tile(i, tiles_m, tiles_n)" in str(caught.value)
    assert "GroupedM(8)" in str(caught.value)


@pytest.mark.parametrize("assignment", [None, 132, GroupedM()])
def test_a_scheduler_without_an_assignment(assignment: Any) -> None:
    with pytest.raises(OperandTypeError) as caught:
        TileScheduler(GroupedM(), assignment)
    assert f"assignment={assignment!r} has no method workers(tasks, resident)" in str(caught.value)
    assert "Persistent()" in str(caught.value)


@pytest.mark.parametrize("wrong", [GroupedM(8), "persistent", 3])
def test_compile_takes_a_tile_scheduler(wrong: Any) -> None:
    with pytest.raises(OperandTypeError) as caught:
        cutegemm.compile((8, 8, 8), "bfloat16", scheduler=wrong, target="sm_90a")
    assert f"scheduler={wrong!r}" in str(caught.value)
    assert "TileScheduler(order, assignment)" in str(caught.value)


def test_identities_differ_where_kernels_do() -> None:
    schedulers = [
        TileScheduler(order, assignment)
        for order in (RowMajor(), ColumnMajor(), GroupedM(4), GroupedM(8), GroupedN(4), Diagonal(2))
        for assignment in (Static(), Persistent(), Persistent(100))
    ]  # fmt: skip
    assert len({scheduler_identity(one) for one in schedulers}) == len(schedulers)
    assert scheduler_identity(TileScheduler(GroupedM(4))) == scheduler_identity(TileScheduler(GroupedM(4)))


def test_identity_shows_the_source_of_an_outside_class() -> None:
    assert "Diagonal(shift=2)" in scheduler_identity(TileScheduler(Diagonal(2)))
    namespace: dict[str, Any] = {"__name__": "no_file"}
    exec("class Typed:\n def tile(self, i, tiles_m, tiles_n):\n  return i // tiles_n, i % tiles_n", namespace)
    with pytest.raises(OperandTypeError, match="define the class in a file"):
        scheduler_identity(TileScheduler(namespace["Typed"]()))


def test_identity_covers_the_methods_a_class_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    base = "class Base:\n    def tile(self, i, tiles_m, tiles_n):\n        return {}\n"
    child = "from {0} import Base\nclass Own(Base):\n    def __repr__(self):\n        return 'Own()'\n"
    identities = []
    for number, result in enumerate(("(i // tiles_n, i % tiles_n)", "(i % tiles_m, i // tiles_m)")):
        (tmp_path / f"base_{number}.py").write_text(base.format(result))
        (tmp_path / f"child_{number}.py").write_text(child.format(f"base_{number}"))
        own = importlib.import_module(f"child_{number}").Own()
        identities.append(scheduler_identity(TileScheduler(own)).partition(" ")[2])
    assert identities[0] != identities[1]


@dataclass(frozen=True)
class Own:
    """An order or assignment made of functions of the test."""

    name: str = "own"
    tile: Any = lambda i, tiles_m, tiles_n: divmod(i, tiles_n)
    workers: Any = lambda tasks, resident: min(tasks, resident)
    first: Any = lambda worker: worker
    next: Any = lambda task, workers: task + workers

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Around:
    """An order that asks another one."""

    inner: Any

    def tile(self, i: Any, tiles_m: Any, tiles_n: Any) -> tuple[Any, Any]:
        """See TileOrder.tile."""
        return self.inner.tile(i, tiles_m, tiles_n)  # type: ignore[no-any-return]


def test_identity_covers_what_a_scheduler_does_and_not_only_how_it_is_written() -> None:
    one = Own()
    other = Own(tile=lambda i, tiles_m, tiles_n: (i % tiles_m, i // tiles_m))
    backwards = Own(first=lambda worker: worker, workers=lambda tasks, resident: tasks)
    for wrap in (lambda part: part, Around):
        assert scheduler_identity(TileScheduler(wrap(one))) != scheduler_identity(TileScheduler(wrap(other)))
        assert scheduler_identity(TileScheduler(wrap(one))) == scheduler_identity(TileScheduler(wrap(Own())))
    identities = [scheduler_identity(TileScheduler(RowMajor(), part)) for part in (one, backwards)]
    assert identities[0] != identities[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": lambda i, m, n: (0, 0)}, "does not visit each of"),
        ({"tile": lambda i, m, n: (i // n, i % n + 1)}, "outside the grid"),
        ({"tile": lambda i, m, n: 1 // 0}, "failed on Python integers with ZeroDivisionError"),
        ({"tile": lambda i, m, n: "ab"}, "a tile is a pair"),
        ({"tile": lambda i, m: (i, m)}, r"called as tile\(i, tiles_m, tiles_n\), which it does not take"),
        ({"tile": 3}, r"has no method tile\(i, tiles_m, tiles_n\)"),
        ({"workers": lambda tasks, resident: 0}, "leaves some of 1 tasks to none of 0 workers"),
        ({"first": lambda worker: 0}, "leaves some of 3 tasks"),
        ({"first": lambda worker: worker - 1}, "tasks count from 0"),
        ({"next": lambda task, workers: task}, "to more than one of"),
        ({"next": lambda task, workers: task + workers + 1}, "leaves some of"),
    ],
)
def test_a_scheduler_that_would_compute_wrong_things_is_refused(change: Any, message: str) -> None:
    own = Own(**change)
    order, assignment = (own, Persistent()) if "tile" in change else (RowMajor(), own)
    with pytest.raises((ConfigError, OperandTypeError), match=message):
        cutegemm.compile((8, 8, 8), "bfloat16", scheduler=TileScheduler(order, assignment), target="sm_90a")


@pytest.mark.parametrize("classes", [(GroupedM, Persistent()), (GroupedM(), Persistent)])
def test_a_class_is_no_scheduler(classes: Any) -> None:
    with pytest.raises(OperandTypeError, match=r"is a class; pass an object of it"):
        TileScheduler(*classes)


def test_more_workers_than_an_index_holds() -> None:
    with pytest.raises(ConfigError, match=r"below 2\*\*31"):
        Persistent(2**31)


def test_a_grid_too_large_to_list() -> None:
    with pytest.raises(ConfigError, match="too many to list one by one"):
        scheduler.check_bijection(GroupedM(), 10**6, 10**6)


def test_an_order_that_hides_its_fields_is_refused() -> None:
    with pytest.raises(OperandTypeError, match=r"Unprintable has fields but no __repr__.*frozen dataclass"):
        scheduler_identity(TileScheduler(Unprintable(1)))


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_arithmetic_on_the_host(a: int, b: int) -> None:
    assert divmod_(a, b) == divmod(a, b)
    assert ceil_div(a, b) == -(-a // b)
    assert minimum(a, b) == min(a, b)


def test_text_names_both_parts() -> None:
    text = str(TileScheduler(GroupedM(4), Persistent(64)))
    assert text == "GroupedM(group=4) x Persistent(max_workers=64)"
    assert scheduler.TileScheduler is TileScheduler


@pytest.mark.parametrize("ordered", [1, None, "no"])
def test_a_stream_is_ordered_or_not(ordered: Any) -> None:
    with pytest.raises(ConfigError, match="use True or False"):
        StreamK(ordered=ordered)


@pytest.mark.parametrize("splits", [0, 1, 3, 16, -2, 2.0, True, "2", None])
def test_splits_form_a_cluster(splits: Any) -> None:
    with pytest.raises(ConfigError, match="use 2, 4 or 8"):
        SplitK(splits)


@given(st.integers(1, 10_000), st.integers(1, 200), st.sampled_from([2, 4, 8]))
def test_split_tiles_are_taken_once_by_one_cluster(tasks: int, resident: int, splits: int) -> None:
    assignment = SplitK(splits)
    workers = assignment.workers(tasks, resident)
    taken = [task for w in range(workers) for task in range(assignment.first(w), tasks, workers)]
    assert sorted(taken) == list(range(tasks))
    assert TileScheduler(RowMajor(), assignment).splits == splits
    assert TileScheduler(RowMajor(), Persistent()).splits == 1
