"""The plan of sm_90a kernels: what is legal, how a tile is split, and the sentence for everything else."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmConfig, GemmProblem
from cutegemm.errors import ConfigError
from cutegemm.hopper.plan import (
    CONSUMER_REGISTERS,
    MAX_STAGES,
    PRODUCER_REGISTERS,
    REGISTER_RESERVE,
    SMEM_BYTES,
    HopperPlan,
    output_chunks,
    plan,
)
from cutegemm.parts.paths import Paths
from cutegemm.problem import dtype_bytes

PLAIN = GemmProblem(None, None, None)
SCHEDULES = ((1, "cooperative"), (2, "cooperative"), (2, "pingpong"))


def configs(tile_n: st.SearchStrategy[int]) -> st.SearchStrategy[GemmConfig]:
    """Configurations around the legal ones."""
    return st.builds(
        lambda tile_m, tile_n, tile_k, cluster, schedule: GemmConfig(
            tile_m, tile_n, tile_k, *cluster, consumers=schedule[0], schedule=schedule[1]
        ),
        st.sampled_from([64, 128, 192, 256]),
        tile_n,
        st.sampled_from([64, 128]),
        st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        st.sampled_from(SCHEDULES),
    )


problems = st.builds(
    lambda majors, dtype: GemmProblem(None, None, None, 1, "bfloat16", "bfloat16", dtype, *majors),
    st.tuples(st.sampled_from("km"), st.sampled_from("kn"), st.sampled_from("nm")),
    st.sampled_from(["bfloat16", "float16", "float32"]),
)  # fmt: skip
EIGHTS = st.sampled_from(range(8, 257, 8))


def legal(config: GemmConfig, problem: GemmProblem = PLAIN) -> HopperPlan | None:
    """The plan, or None if it is refused."""
    try:
        return plan(config, problem)
    except ConfigError:
        return None


def refusal(config: GemmConfig, problem: GemmProblem = PLAIN) -> str:
    """The message with which the plan, and compile at once, refuse a configuration."""
    with pytest.raises(ConfigError) as caught:
        plan(config, problem)
    with pytest.raises(ConfigError) as from_compile:
        cutegemm.compile(
            (None, None, None), problem.a_dtype, out_dtype=problem.out_dtype, a_major=problem.a_major,
            b_major=problem.b_major, out_major=problem.out_major, config=config, target="sm_90a",
        )  # fmt: skip
    assert str(caught.value) == str(from_compile.value)
    return str(caught.value)


# --- what a legal plan guarantees --------------------------------------------------------------------------


@given(configs(EIGHTS), problems)
def test_warpgroups_cover_the_tile_once(config: GemmConfig, problem: GemmProblem) -> None:
    worked_out = legal(config, problem)
    assume(worked_out is not None)
    assert worked_out.warpgroup_m * worked_out.warpgroups_m == config.tile_m
    assert worked_out.warpgroup_n * worked_out.warpgroups_n == config.tile_n
    assert worked_out.warpgroup_m % 64 == 0
    assert worked_out.warpgroup_n % 8 == 0
    assert worked_out.warpgroups_m * worked_out.warpgroups_n * worked_out.teams == config.consumers
    assert worked_out.threads == 128 * (1 + config.consumers)
    assert worked_out.consumer_warps_per_tile * worked_out.teams == 4 * config.consumers


@given(configs(EIGHTS), problems)
def test_everything_fits_the_hardware(config: GemmConfig, problem: GemmProblem) -> None:
    worked_out = legal(config, problem)
    assume(worked_out is not None)
    assert worked_out.smem_bytes <= SMEM_BYTES == 227 * 1024
    assert 2 <= worked_out.stages <= MAX_STAGES
    assert 16 * worked_out.stages <= 1024  # both barriers of each stage in their corner
    assert worked_out.stage_bytes % 1024 == 0
    assert worked_out.store_buffer_bytes % 1024 == 0
    element = dtype_bytes(problem.out_dtype)
    assert worked_out.store_buffer_bytes >= 64 * element * max(width for _, width in worked_out.chunks)
    own = CONSUMER_REGISTERS[config.consumers]
    assert worked_out.accumulator_registers <= own - REGISTER_RESERVE
    assert 128 * (PRODUCER_REGISTERS + config.consumers * own) <= 65536
    assert own % 8 == PRODUCER_REGISTERS % 8 == 0  # what setmaxnreg takes


@given(configs(EIGHTS), problems)
def test_the_plan_of_a_plan_is_itself(config: GemmConfig, problem: GemmProblem) -> None:
    worked_out = legal(config, problem)
    assume(worked_out is not None)
    assert worked_out.config.stages == worked_out.stages
    assert worked_out.config.store_stages == worked_out.store_stages
    assert plan(worked_out.config, problem) == worked_out


@given(configs(EIGHTS), problems)
def test_shared_memory_is_used(config: GemmConfig, problem: GemmProblem) -> None:
    worked_out = legal(config, problem)
    assume(worked_out is not None)
    one_more = worked_out.config.with_(stages=worked_out.stages + 1)
    assert legal(one_more, problem) is None


@given(EIGHTS, problems)
def test_output_pieces_cover_the_columns(columns: int, problem: GemmProblem) -> None:
    chunks = output_chunks(columns, problem)
    assert [first for first, _ in chunks] == [0, *(first + width for first, width in chunks[:-1])]
    assert chunks[-1][0] + chunks[-1][1] == columns
    for _, width in chunks:
        assert width % 8 == 0
        assert width * dtype_bytes(problem.out_dtype) <= 128
    assert len({width for _, width in chunks}) <= 2  # two TMA descriptors serve any tile


@given(configs(EIGHTS), problems)
def test_multicast_slices_are_whole_swizzle_spans(config: GemmConfig, problem: GemmProblem) -> None:
    worked_out = legal(config, problem)
    assume(worked_out is not None)
    assert config.tile_n // config.cluster_m * config.cluster_m == config.tile_n
    assert config.tile_n // config.cluster_m % (16 if problem.b_major == "n" else 8) == 0
    assert config.tile_m // config.cluster_n % (16 if problem.a_major == "m" else 8) == 0
    if problem.b_major == "n":
        assert worked_out.warpgroup_n % 16 == 0


def test_every_width_has_a_kernel() -> None:
    for tile_n in range(8, 257, 8):
        assert any(
            legal(GemmConfig(tile_m, tile_n, consumers=c, schedule=s))  # type: ignore[arg-type]
            for tile_m in (64, 128, 192, 256)
            for c, s in SCHEDULES
        ), tile_n


def test_every_tile_height_and_schedule_has_a_kernel() -> None:
    for tile_m, (consumers, schedule), major in product((64, 128, 192, 256), SCHEDULES, "kn"):
        problem = GemmProblem(None, None, None, b_major=major)
        config = GemmConfig(tile_m, 64, consumers=consumers, schedule=schedule)  # type: ignore[arg-type]
        assert legal(config, problem), config


def test_known_plans() -> None:
    cooperative = plan(GemmConfig(128, 256), PLAIN)
    assert (cooperative.warpgroups_m, cooperative.warpgroups_n, cooperative.teams) == (2, 1, 1)
    assert (cooperative.stages, cooperative.stage_bytes) == (4, 48 * 1024)
    assert cooperative.accumulator_registers == 128
    tall = plan(GemmConfig(192, 128), PLAIN)
    assert (tall.warpgroups_m, tall.warpgroups_n, tall.warpgroup_n) == (1, 2, 64)
    pingpong = plan(GemmConfig(64, 256, schedule="pingpong"), PLAIN)
    assert (pingpong.warpgroups_m, pingpong.warpgroups_n, pingpong.teams) == (1, 1, 2)
    assert plan(GemmConfig(64, 72, consumers=1), PLAIN).chunks == ((0, 64), (64, 8))
    wide = GemmProblem(None, None, None, out_dtype="float32")
    assert plan(GemmConfig(64, 72, consumers=1), wide).chunks == ((0, 32), (32, 32), (64, 8))


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (GemmConfig(100, 128), ("tile_m=100", "64, 128, 192, 256", "the nearest is 128")),
        (GemmConfig(32, 128), ("tile_m=32", "the nearest is 64")),
        (GemmConfig(512, 128), ("tile_m=512", "the nearest is 256")),
        (GemmConfig(128, 36), ("tile_n=36", "WGMMA", "8, 16, ..., 256", "the nearest is 32")),
        (GemmConfig(128, 300), ("tile_n=300", "the nearest is 256")),
        (GemmConfig(128, 1), ("tile_n=1", "the nearest is 8")),
        (GemmConfig(128, 128, 32), ("tile_k=32", "64, 128", "the nearest is 64")),
        (GemmConfig(128, 128, 256), ("tile_k=256", "the nearest is 128")),
        (GemmConfig(128, 128, cluster_m=4), ("cluster_m=4", "1, 2", "the nearest is 2")),
        (GemmConfig(128, 128, cluster_n=3), ("cluster_n=3", "1, 2", "the nearest is 2")),
        (GemmConfig(128, 128, consumers=3), ("consumers=3", "1, 2", "the nearest is 2")),
        (GemmConfig(64, 128, consumers=1, schedule="pingpong"), ("consumers=1", "use consumers=2")),
        (GemmConfig(64, 24, cluster_m=2), ("tile_n=24 with cluster_m=2", "the nearest legal tile_n is 16")),
        (GemmConfig(64, 8, cluster_m=2, consumers=1), ("multiple of 8", "the nearest legal tile_n is 16")),
        (GemmConfig(64, 24), ("tile_n=24", "2 consumers along N", "the nearest is 16")),
        (GemmConfig(128, 128, stages=17), ("stages=17", "at most 16", "the nearest legal stages is 6")),
        (GemmConfig(64, 8, consumers=1, stages=17), ("stages=17", "at most 16", "legal stages is 16")),
        (GemmConfig(128, 256, stages=5), ("a CTA has 232448", "the nearest legal stages is 4")),
        (GemmConfig(128, 128, stages=1), ("stages=1:", "at least 2 stages", "the nearest legal stages is 2")),
        (GemmConfig(128, 128, store_stages=100), ("a CTA has 232448", "nearest legal store_stages is 10")),
        (GemmConfig(64, 8, consumers=1, store_stages=300), ("a CTA has 232448", "legal store_stages is 208")),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_value_limit_and_remedy(config: GemmConfig, parts: tuple[str, ...]) -> None:
    message = refusal(config)
    for part in parts:
        assert part in message, message
    assert "\n" not in message


def test_too_many_accumulators() -> None:
    message = refusal(GemmConfig(256, 256))
    assert "tile 256x256 with 2 cooperative consumer(s) needs 256 accumulator registers a thread" in message
    assert "192 fit without spilling" in message
    assert "the nearest legal tile_n is 192" in message
    assert legal(GemmConfig(256, 192))
    alone = refusal(GemmConfig(256, 128, consumers=1))
    assert "the nearest legal tile_n is 96, or use 2 cooperative consumers" in alone
    assert "2 cooperative consumers" not in refusal(GemmConfig(256, 256, consumers=1))  # 256 there too
    n_major = refusal(GemmConfig(128, 240, consumers=1), GemmProblem(None, None, None, b_major="n"))
    assert "the nearest legal tile_n is 192," in n_major  # 200 fits the registers, but not whole spans of N


def test_shared_memory_message_gives_both_byte_counts() -> None:
    wide = GemmProblem(None, None, None, out_dtype="float32")
    message = refusal(GemmConfig(192, 256, 128, stages=8), wide)
    asked = int(re.search(r"needs (\d+) bytes", message)[1])  # type: ignore[index]
    assert asked > SMEM_BYTES
    assert f"a CTA has {SMEM_BYTES}" in message


@pytest.mark.parametrize(
    ("config", "nearest_width", "cause"),
    [
        (GemmConfig(128, 24, consumers=1), 16, "B n-major allows"),
        (GemmConfig(64, 80), 64, "B n-major with 2 consumers along N allows"),
        (GemmConfig(64, 80, cluster_m=2), 64, "B n-major with 2 consumers along N allows"),
        (GemmConfig(128, 80, cluster_m=2), 64, "B n-major with cluster_m=2 allows"),
        (GemmConfig(128, 16, cluster_m=2), 32, "B n-major with cluster_m=2 allows"),
    ],
)  # fmt: skip
def test_n_major_b_has_wider_units(config: GemmConfig, nearest_width: int, cause: str) -> None:
    message = refusal(config, GemmProblem(None, None, None, b_major="n"))
    assert cause in message
    assert message.endswith(f"the nearest is {nearest_width}")
    assert legal(config.with_(tile_n=nearest_width), GemmProblem(None, None, None, b_major="n"))


@given(configs(st.integers(1, 300)), problems, st.none() | st.integers(1, 20), st.none() | st.integers(1, 40))
def test_the_nearest_legal_value_is_legal(
    config: GemmConfig, problem: GemmProblem, stages: int | None, store_stages: int | None
) -> None:
    """Taking the advice, at most once for each rule, ends in a legal configuration."""
    config = config.with_(stages=stages, store_stages=store_stages)
    for _ in range(9):
        try:
            plan(config, problem)
            return
        except ConfigError as error:
            message = str(error)
        fields: dict[str, Any] = {}
        advice = (
            r"^(\w+)=\d+.*; the nearest is (\d+)$",
            r"the nearest legal (\w+) is (\d+)",
            r"use (\w+)=(\d+)$",
        )
        found = next(filter(None, (re.search(pattern, message) for pattern in advice)), None)
        if found:
            fields = {found[1]: int(found[2])}
        elif "use a smaller tile" in message:
            fields = {"tile_k": 64}
        assert fields, message
        assert any(getattr(config, name) != value for name, value in fields.items()), message
        config = config.with_(**fields)
    pytest.fail(f"no legal configuration after nine steps, last: {config}")


def test_exchanged_operands_are_checked_as_the_kernel_sees_them() -> None:
    """A of the user is the kernel's B: its contiguous mode decides the legal widths."""
    config = GemmConfig(128, 24, consumers=1, swap_ab=True)
    with pytest.raises(ConfigError, match="B n-major"):
        cutegemm.compile((8, 8, 8), "bfloat16", a_major="m", config=config, target="sm_90a")
    gemm = cutegemm.compile((8, 8, 8), "bfloat16", b_major="n", config=config, target="sm_90a")
    assert gemm.config.swap_ab


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_a_store_buffer_is_free_when_it_is_filled_again(steps: int, buffers: int, tiles: int) -> None:
    """Plays the stores of several tiles: whoever used a buffer last must be among those waited for."""
    worked_out = plan(GemmConfig(64, 64, consumers=1), GemmProblem(None, None, None))
    # One 64-column piece an MMA: as many steps as MMAs along M.
    chunks = tuple((64 * i, 64) for i in range(steps))
    played = replace(worked_out, chunks=chunks, store_stages=buffers)
    assert played.store_steps == steps
    last_user: dict[int, int] = {}
    issued = 0
    for _ in range(tiles):
        for step in range(steps):
            buffer = step % buffers
            pending = played.pending_stores(step)
            assert pending >= 0
            if buffer in last_user:
                assert last_user[buffer] < issued - pending, "its last store may still be reading"
                # and no wait for a store that came later than the buffer's last one, unless forced
                assert last_user[buffer] == issued - pending - 1
            last_user[buffer] = issued
            issued += 1


def test_direct_stores_need_no_buffers() -> None:
    problem = GemmProblem(None, None, None)
    through_tma = plan(GemmConfig(128, 256), problem)
    direct = plan(GemmConfig(128, 256), problem, Paths(store="direct"))
    assert direct.smem_bytes == 1024 + direct.stages * direct.stage_bytes
    assert direct.stages >= through_tma.stages


def test_what_was_seen_to_spill_is_refused() -> None:
    n_major_b = GemmProblem(None, None, None, b_major="n")
    with pytest.raises(ConfigError, match="nearest legal tile_k is 64"):
        plan(GemmConfig(192, 96, 128), n_major_b)
    plan(GemmConfig(192, 96, 64), n_major_b)
    plan(GemmConfig(128, 96, 128), n_major_b)


COLUMN_D = GemmProblem(None, None, None, out_major="m")


@pytest.mark.parametrize(
    ("config", "nearest_width"),
    [
        (GemmConfig(128, 176, schedule="pingpong"), 168),
        (GemmConfig(128, 176, consumers=1), 168),
        (GemmConfig(192, 120, consumers=1), 112),
        (GemmConfig(256, 88, consumers=1), 80),
        (GemmConfig(256, 176), 168),  # shared by two along M
        (GemmConfig(192, 256, cluster_m=2, cluster_n=2), 224),  # and along N
    ],
)
def test_direct_stores_down_columns_leave_fewer_registers(config: GemmConfig, nearest_width: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config, COLUMN_D, Paths(store="direct"))
    assert "168 fit without spilling beside a direct store to an m-major D;" in str(caught.value)
    assert re.search(rf"the nearest legal tile_n is {nearest_width}\b", str(caught.value))
    plan(config.with_(tile_n=nearest_width), COLUMN_D, Paths(store="direct"))
    plan(config, COLUMN_D, Paths())
    plan(config, PLAIN, Paths(store="direct"))


@pytest.mark.parametrize("problem", [PLAIN, COLUMN_D], ids=str)
@pytest.mark.parametrize(
    ("config", "nearest_width"),
    [(GemmConfig(128, 176, consumers=1), 168), (GemmConfig(192, 120, consumers=1), 112)],
    ids=str,
)
def test_split_tiles_leave_fewer_registers(
    config: GemmConfig, nearest_width: int, problem: GemmProblem
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config, problem, splits=2)
    beside = f"168 fit without spilling beside a split store to an {problem.out_major}-major D;"
    assert beside in str(caught.value)
    assert f"the nearest legal tile_n is {nearest_width}," in str(caught.value)
    plan(config.with_(tile_n=nearest_width), problem, splits=2)
    plan(config, problem)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_a_split_tile_keeps_its_sums_in_shared_memory(splits: int) -> None:
    worked_out = plan(GemmConfig(64, 128, consumers=1), GemmProblem(None, None, None), splits=splits)
    assert worked_out.paths.store == "direct"
    assert worked_out.cluster_ctas == splits
    sums = 64 * 128 * 4
    assert worked_out.smem_bytes == 1024 + sums + worked_out.stages * worked_out.stage_bytes
    assert worked_out.smem_bytes <= SMEM_BYTES


def test_what_cannot_be_split() -> None:
    problem = GemmProblem(None, None, None)
    with pytest.raises(ConfigError, match="already share the tile's K; use a cluster of 1x1"):
        plan(GemmConfig(128, 128, cluster_m=2), problem, splits=2)
    with pytest.raises(ConfigError, match="use a cooperative schedule"):
        plan(GemmConfig(128, 128, schedule="pingpong"), problem, splits=2)
    with pytest.raises(ConfigError, match=r"splits=3: .* the nearest is 2"):
        plan(GemmConfig(128, 128), problem, splits=3)
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        plan(GemmConfig(256, 160), problem, splits=2)
