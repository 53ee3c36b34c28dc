"""What launches need beside their tensors, worked out without a GPU."""

import ctypes

import pytest

import cutegemm
from cutegemm import GemmConfig, GemmProblem
from cutegemm.callrecord import CallRecord
from cutegemm.errors import ProblemError
from cutegemm.hopper.plan import HopperPlan, plan
from cutegemm.scheduler import Dynamic, Persistent, SplitK, Static, StreamK, TileScheduler
from cutegemm.scheduler.stream import make_stream
from cutegemm.workspace import Needs, needs, with_addresses


def worked_out(config: GemmConfig) -> HopperPlan:
    return plan(config, GemmProblem(None, None, None))


@pytest.mark.parametrize("assignment", [Persistent(), Static(), SplitK(4), Persistent(3)])
def test_most_need_nothing(assignment: object) -> None:
    found = needs(TileScheduler(assignment=assignment), worked_out(GemmConfig(128, 128)), 132, 4096)
    assert not found
    assert found == Needs(0, 0)


def test_a_queue_needs_two_counters() -> None:
    assert needs(TileScheduler(assignment=Dynamic()), worked_out(GemmConfig(128, 128)), 132, 4096) == Needs(
        2, 0
    )


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(128, 256, cluster_m=2),
        GemmConfig(128, 128, schedule="pingpong"),
        GemmConfig(64, 64, consumers=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [None, 7])
def test_a_stream_has_room_for_all_its_parts(config: GemmConfig, limit: int | None) -> None:
    """The farthest counters and parts that a kernel reaches lie inside; see parts/sharing.py."""
    resident, ctas = 66, config.cluster_size
    used = worked_out(config)
    scheduler = TileScheduler(assignment=StreamK(limit))
    needed = needs(scheduler, used, resident, 4096)
    workers = limit or resident
    shared = max(tasks - make_stream(tasks, workers, 64).whole for tasks in range(1, 3 * workers))
    shares = used.warpgroups_per_tile
    last_counter = 2 * (((shared - 1) * ctas + ctas - 1) * shares + shares - 1) + 1
    assert last_counter < needed.counters
    last_part = (((workers - 1) * 2 + 1) * ctas + ctas - 1) * shares + shares - 1
    assert (last_part + 1) * 128 * used.accumulator_registers * 4 <= needed.partial_bytes


def test_a_k_whose_stages_cannot_be_numbered() -> None:
    used, scheduler = worked_out(GemmConfig(128, 128)), TileScheduler(assignment=StreamK())
    longest = (2**31 - 1) // (2 * 132) * 64
    assert needs(scheduler, used, 132, longest)
    with pytest.raises(ProblemError, match=f"up to {longest} is allowed: use SplitK or Persistent"):
        needs(scheduler, used, 132, longest + 1)


def test_a_record_with_a_workspace_is_a_copy() -> None:
    record = CallRecord(1, 2, 3, 4, 5, 1)
    copy = with_addresses(ctypes.addressof(record), 2**40, 2**41)
    assert (copy.l, copy.m, copy.n, copy.k, copy.resident, copy.disjoint) == (1, 2, 3, 4, 5, 1)
    assert (copy.counters, copy.partials) == (2**40, 2**41)
    assert (record.counters, record.partials) == (0, 0)


def test_the_emulator_takes_the_same_workspace() -> None:
    """A product that shares tiles among all workers, with the parts poisoned first."""
    import torch

    gemm = cutegemm.compile(
        (64, 128, 2048), "bfloat16", config=GemmConfig(64, 64, consumers=1), target="sm_90a",
        scheduler=TileScheduler(assignment=StreamK()),
    )  # fmt: skip
    a, w = torch.randn(64, 2048).bfloat16(), torch.randn(128, 2048).bfloat16()
    stream = make_stream(2, 5, 32)
    assert stream.whole == 0
    results = [gemm.emulate(a, w.t(), resident=5, seed=seed).out for seed in (None, 1, 2, 3)]
    truth = a.float() @ w.t().float()
    assert (results[0].float() - truth).norm() <= 2.1e-3 * truth.norm()
    for other in results[1:]:
        assert torch.equal(results[0], other), "whoever comes last"
