"""sm_100a kernels under every schedule, and that a tile's epilogue runs under the next tile's MMAs."""

from collections import Counter

import pytest
import torch
from emulation import gemm_of, judged, replaced, with_ptx
from gpu_checks import Case, Operands

from cutegemm import GemmConfig
from cutegemm.emulator import Emulation, EmulationError
from cutegemm.emulator.product import Circumstances
from cutegemm.emulator.timeline import division_of, lanes
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

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

TARGET = "sm_100a"
ONE_CTA = GemmConfig(128, 64, consumers=1)
PAIR = GemmConfig(256, 64, cluster_m=2, mma_ctas=2)
CLUSTER = GemmConfig(64, 32, cluster_m=4, cluster_n=2)
PAIRS = GemmConfig(128, 64, cluster_m=4, cluster_n=2, mma_ctas=2, consumers=1)
CONFIGS = {"one CTA": ONE_CTA, "pair": PAIR, "cluster 4x2": CLUSTER, "pairs 4x2": PAIRS}
ORDERS = (RowMajor(), ColumnMajor(), GroupedM(2), GroupedN(3), Blocked(2, 2), Morton(), Hilbert())


def run(
    config: GemmConfig, case: Case, scheduler: TileScheduler | None = None, **circumstances: object
) -> Emulation:
    """Emulates a case with every check on; fails unless the result is right."""
    return judged(gemm_of(case, config, scheduler, TARGET), case, check=True, **circumstances)


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("name", ["one CTA", "pairs 4x2"])
def test_every_order(order: object, name: str) -> None:
    case = Case(500, 200, 72)
    if name == "one CTA":
        run(ONE_CTA, case, TileScheduler(order), resident=2)  # type: ignore[arg-type]
    else:
        run(PAIRS, case, TileScheduler(order, Dynamic()), resident=1, seed=5)  # type: ignore[arg-type]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "assignment", [Persistent(), Persistent(1), Static(), Dynamic(), Dynamic(2)], ids=repr
)
def test_every_assignment(name: str, assignment: object) -> None:
    """Dynamic with a limit of workers counts tasks in memory, without one the hardware hands them out."""
    scheduler = TileScheduler(assignment=assignment)  # type: ignore[arg-type]
    run(CONFIGS[name], Case(500, 200, 136, l=2), scheduler, resident=2, seed=3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_when_the_hardware_says_no(seed: int) -> None:
    """With a seed, one answer in ten is no although there is work; 33 tasks, each done once."""
    for config in (ONE_CTA, PAIR):
        case = Case(11 * config.tile_m - 8, 3 * config.tile_n, 64)
        run(config, case, TileScheduler(assignment=Dynamic()), resident=2, seed=seed)


def test_tasks_come_from_the_hardware_unless_workers_are_limited() -> None:
    case = Case(256, 256, 64)
    handed = gemm_of(case, ONE_CTA, TileScheduler(assignment=Dynamic()), TARGET).ptx
    counted = gemm_of(case, ONE_CTA, TileScheduler(assignment=Dynamic(3)), TARGET).ptx
    assert handed.count("clusterlaunchcontrol.try_cancel") == 1
    assert "atom." not in handed
    assert "clusterlaunchcontrol" not in counted
    assert "atom." in counted


def test_few_workers_take_over_what_the_hardware_has_not_launched() -> None:
    """On two SMs two CTAs do all of 48 tiles, so that their events are all there are."""
    result = run(ONE_CTA, Case(1024, 384, 64), TileScheduler(assignment=Dynamic()), resident=1)
    assert {event.cta for event in result.trace.events if event.kind == "mma"} == {0}
    stored = [event for event in result.trace.events if event.kind == "store"]
    assert len(stored) == 48


@pytest.mark.sample(2)
@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("config", [ONE_CTA, GemmConfig(64, 144)], ids=str)
def test_ctas_of_a_cluster_share_a_tiles_k(splits: int, config: GemmConfig) -> None:
    """Fewer stages of K than CTAs, and more; several tiles for each worker."""
    scheduler = TileScheduler(assignment=SplitK(splits))
    for k in (64, 64 * splits + 200):
        run(config, Case(136, 152, k, out_dtype=torch.float32), scheduler, resident=1, seed=k)


def two_cluster_tiles(config: GemmConfig, k: int) -> Case:
    """One below the other, the lower one with few rows."""
    rows = config.tile_m * config.cluster_m // config.mma_ctas
    return Case(rows + 8, config.tile_n * config.cluster_n - 8, k, out_dtype=torch.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ordered", [True, False])
def test_workers_share_tiles_through_global_memory(name: str, ordered: bool) -> None:
    """Of 40 stages each two tiles are cut among 7 workers: four have a part of each, one a part of both."""
    config, workers, stages = CONFIGS[name], 7, 40
    scheduler = TileScheduler(assignment=StreamK(ordered=ordered))
    case = two_cluster_tiles(config, 64 * stages - 8)
    result = run(config, case, scheduler, resident=workers, seed=7)
    ctas = config.cluster_size
    done = Counter(event.cta // ctas for event in result.trace.events if event.kind == "mma")
    leaders = ctas // config.mma_ctas
    assert sorted(done.values()) == [11 * leaders] * 4 + [12 * leaders] * 3


def test_whole_tiles_come_first_and_then_shared_ones() -> None:
    scheduler = TileScheduler(assignment=StreamK())
    for config in (ONE_CTA, PAIR.with_(tile_n=32)):
        case = Case(5 * config.tile_m, config.tile_n, 32 * 64, l=2)
        run(config, case, scheduler, resident=3, seed=2)


@pytest.mark.parametrize("name", ["one CTA", "pairs 4x2"])
def test_shared_tiles_have_the_same_bits_whoever_is_last(name: str) -> None:
    config = CONFIGS[name]
    case = two_cluster_tiles(config, 40 * 64)
    gemm = gemm_of(case, config, TileScheduler(assignment=StreamK()), TARGET)
    results = []
    for seed in (None, 1, 2):
        operands = Operands.make(case, "cpu", seed=1)
        tensors = (operands.a.tensor, operands.b.tensor)
        gemm.emulate(*tensors, out=operands.out.tensor, seed=seed, resident=7)
        results.append(operands.out.tensor.clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("pattern", "new", "said"),
    [
        (r"(atom\.global\.add\.u32 \s*\S+ \S+) 1;", r"\1 0;", "counters"),
        (r"st\.global\.v2\.b32 \s*\[\S+\], \{0, 0\};", "", "counters"),
    ],
    ids=["everybody believes to be the first", "counters are not cleared"],
)
def test_a_planted_fault_among_workers_that_share_is_found(pattern: str, new: str, said: str) -> None:
    case = two_cluster_tiles(ONE_CTA, 40 * 64)
    gemm = gemm_of(case, ONE_CTA, TileScheduler(assignment=StreamK()), TARGET)
    ptx = replaced(gemm.ptx, pattern, new)
    with pytest.raises(EmulationError, match=said):
        with_ptx(gemm, case, ptx, Circumstances(check=True, seed=2, resident=7))


def test_streams_get_a_configuration_whose_registers_hold_the_parts() -> None:
    scheduler = TileScheduler(assignment=StreamK())
    gemm = gemm_of(Case(64, 64, 64), None, scheduler, TARGET)  # type: ignore[arg-type]
    assert gemm.resources.spills == 0


def test_a_scheduler_that_splits_k_gets_a_configuration_that_can() -> None:
    scheduler = TileScheduler(assignment=SplitK(4))
    gemm = gemm_of(Case(64, 64, 64), None, scheduler, TARGET)  # type: ignore[arg-type]
    assert (gemm.config.cluster_size, gemm.config.mma_ctas) == (1, 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_any_order_gives_the_same_bits(name: str) -> None:
    case = Case(264, 136, 264, out_dtype=torch.float32)
    gemm = gemm_of(case, CONFIGS[name], None, TARGET)
    results = []
    for seed in (None, *range(3)):
        operands = Operands.make(case, "cpu", seed=1)
        tensors = (operands.a.tensor, operands.b.tensor)
        gemm.emulate(*tensors, out=operands.out.tensor, seed=seed, check=seed is not None, resident=2)
        results.append(operands.out.tensor.clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("config", "rows"), [(GemmConfig(128, 256, consumers=1), 128), (PAIR.with_(tile_n=256), 256)]
)
def test_a_tile_is_stored_under_the_mmas_of_the_next(config: GemmConfig, rows: int) -> None:
    """Each tile but the last is read, and stored, while the tensor core works on the next."""
    case, tiles = Case(rows, 1024, 512), 4
    gemm = gemm_of(case, config, None, TARGET)
    result = judged(gemm, case, resident=1)
    events = [event for event in result.trace.events if event.cta == 0]
    mmas = [event for event in events if event.kind == "mma"]
    reads = [event for event in events if event.kind == "read" and event.warp == 0]
    stores = [event for event in events if event.kind == "store"]
    assert ({event.role for event in mmas}, {event.role for event in reads}) == ({"MMA"}, {"epilogue"})
    steps, each = len(mmas) // tiles, len(reads) // tiles
    assert steps == case.k // config.tile_k
    for tile in range(tiles - 1):
        following = mmas[(tile + 1) * steps : (tile + 2) * steps]
        read = reads[tile * each : (tile + 1) * each]
        # Issued before the last read, done after it: the epilogue is hidden.
        assert following[0].begin < read[-1].end
        assert following[-1].end > read[-1].end
        done = stores[(tile + 1) * len(stores) // tiles - 1].end
        assert done < following[-1].end
    found = {lane.name.split("\n")[0] for lane in lanes(result.trace, division_of(gemm, case.k), 0)}
    assert {"TMA load", "MMA warp", "tensor core", "results", "TMA store"} <= found


def test_the_two_accumulators_take_turns() -> None:
    """Tiles with fewer steps than stages: each begins by overwriting, in the accumulator before last."""
    case = Case(128, 640, 64)
    config = GemmConfig(128, 64, stages=6)
    result = run(config, case, resident=1, seed=None)
    columns = [event.detail for event in result.trace.events if event.kind == "mma"]
    assert all("put" in detail for detail in columns)
    assert [int(detail.split("column ")[1]) for detail in columns] == [0, 64] * 5
