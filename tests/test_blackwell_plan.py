"""What is legal on sm_100a: each rule with its sentence, and plans that fit shared and tensor memory."""

import random

import pytest
from blackwell_space import drawn_kind, pair

from cutegemm import GemmConfig, GemmProblem
from cutegemm.blackwell.plan import DRIVER_BYTES, SM_SMEM_BYTES, TMEM_COLUMNS, output_chunks, plan
from cutegemm.errors import ConfigError
from cutegemm.parts.limits import MAX_STAGES, MIN_STAGES, SMEM_BYTES

BF16 = GemmProblem(None, None, None)
N_MAJOR_B = GemmProblem(None, None, None, b_major="n")
FLOAT32_OUT = GemmProblem(None, None, None, out_dtype="float32")


@pytest.mark.parametrize(
    ("config", "problem", "said"),
    [
        (GemmConfig(192, 128), BF16, r"tile_m=192: tcgen05 with mma_ctas=1 allows 64, 128; the nearest"),
        (pair(64, 128), BF16, r"tile_m=64: tcgen05 with mma_ctas=2 allows 128, 256; the nearest is 128"),
        (GemmConfig(128, 128, 32), BF16, r"tile_k=32: .* allows 64, 128; the nearest is 64"),
        (GemmConfig(128, 128, mma_ctas=3), BF16, r"mma_ctas=3: tcgen05, .* allows 1, 2; the nearest is 2"),
        (GemmConfig(128, 128, mma_ctas=2), BF16, r"mma_ctas=2 with cluster_m=1: .* use cluster_m=2 or 4"),
        (GemmConfig(128, 128, cluster_m=3), BF16, r"cluster_m=3: this kernel allows 1, 2, 4"),
        (GemmConfig(128, 128, cluster_n=4), BF16, r"cluster_n=4: this kernel allows 1, 2"),
        (GemmConfig(128, 128, consumers=3), BF16, r"consumers=3: the epilogue allows 1, 2"),
        (GemmConfig(128, 128, schedule="pingpong"), BF16, r'schedule="pingpong": .* use "cooperative"'),
        (GemmConfig(64, 12), BF16, r"tile_n=12: .*k-major allows 8, 16, ..., 256; the nearest is 8"),
        (GemmConfig(128, 24), BF16, r"tile_n=24: .* allows 16, 32, ..., 256; the nearest is 16"),
        (pair(256, 48), BF16, r"tile_n=48: .* allows 32, 64, 96, 128, 160, 192, 224, 256; the nearest is 32"),
        (GemmConfig(64, 264), BF16, r"tile_n=264: .*; the nearest is 256"),
        (GemmConfig(64, 16, cluster_m=4), BF16, r"tile_n=16: .* with cluster_m=4 allows 32, 64"),
        (GemmConfig(64, 8), N_MAJOR_B, r"tile_n=8: .* and B n-major allows 16, 32"),
        (GemmConfig(128, 256, stages=9), BF16, r"needs .* a CTA has 232448; the nearest legal stages is"),
        (GemmConfig(64, 64, stages=17), BF16, r"stages=17: .* at most 16; the nearest legal stages is"),
        (GemmConfig(64, 64, stages=1), BF16, r"stages=1: .* at least 2"),
        (GemmConfig(128, 256, 128, store_stages=4), FLOAT32_OUT, r"the nearest legal store_stages"),
    ],
)  # fmt: skip
def test_illegal_configurations_are_refused_with_the_nearest_legal_value(
    config: GemmConfig, problem: GemmProblem, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(config, problem)


@pytest.mark.parametrize(
    ("config", "splits", "said"),
    [
        (GemmConfig(128, 64), 3, "splits=3: .* allows 1, 2, 4, 8; the nearest is 2"),
        (GemmConfig(128, 64, cluster_n=2), 2, "cluster 1x2 with K split 2 ways: .* use a cluster of 1x1"),
        (pair(128, 64), 4, "cluster 2x1 with K split 4 ways: .* and mma_ctas=1"),
        (GemmConfig(128, 256, 128), 2, "even 2 stages do not fit: use a smaller tile"),
    ],
)
def test_what_cannot_share_a_tiles_k(config: GemmConfig, splits: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(config, BF16, splits=splits)


def test_a_split_tile_has_room_for_its_sums_and_no_output_buffers() -> None:
    found = plan(GemmConfig(128, 128), BF16, splits=4)
    assert (found.paths.store, found.splits, found.cluster_ctas) == ("direct", 4, 4)
    assert (found.squares(0), found.squares(1)) == (16, 16)
    assert found.smem_bytes == 1024 + 4 * 128 * 128 + found.stages * found.stage_bytes + found.padding_bytes
    uneven = plan(GemmConfig(64, 72), BF16, splits=2)
    assert (uneven.squares(0), uneven.squares(1)) == (8, 1)


def test_plans_fit_shared_and_tensor_memory() -> None:
    """400 of the legal space; however many CTAs an SM has room for, it has tensor memory for them."""
    for number in range(400):
        kind = drawn_kind(random.Random(number))
        found = kind.plan
        assert MIN_STAGES <= found.stages <= MAX_STAGES
        assert found.smem_bytes <= SMEM_BYTES
        assert found.tmem_columns <= TMEM_COLUMNS
        assert found.tmem_columns & (found.tmem_columns - 1) == 0
        needed = found.accumulator_columns * (1 if kind.config.tile_m == 64 else 2)
        assert needed <= found.tmem_columns < 2 * max(needed, 32)
        assert found.smem_bytes + DRIVER_BYTES >= SM_SMEM_BYTES * found.tmem_columns // TMEM_COLUMNS
        assert found.config.with_(stages=None, store_stages=None) == kind.config
        assert sum(width for _, width in found.chunks) == found.accumulator_columns
        assert found.halves * found.accumulator_columns == kind.config.tile_n


@pytest.mark.parametrize(
    ("config", "columns", "allocated", "stages"),
    [
        (GemmConfig(128, 256, consumers=1), 256, 512, 4),
        (GemmConfig(64, 256), 256, 256, 5),
        (pair(256, 256), 256, 512, 6),
        (pair(128, 256), 128, 256, 8),
        (GemmConfig(64, 8), 8, 32, 16),
    ],
)
def test_what_a_plan_works_out(config: GemmConfig, columns: int, allocated: int, stages: int) -> None:
    found = plan(config, BF16)
    assert (found.accumulator_columns, found.tmem_columns, found.stages) == (columns, allocated, stages)


def test_a_buffer_is_filled_again_only_when_its_store_has_been_read() -> None:
    """Replays the groups of three tiles: who used a step's buffer last is never among the pending."""
    for number in range(200):
        found = drawn_kind(random.Random(number)).plan
        buffers, steps = found.store_stages, found.store_steps
        used: list[int] = []  # buffer of each group so far
        for _ in range(3):
            for step in range(steps):
                pending = found.pending_stores(step)
                done = used[: len(used) - pending]
                buffer = step % buffers
                assert buffer not in used[len(done) :]
                used.append(buffer)


def test_chunks_are_one_swizzle_span_and_the_last_takes_the_rest() -> None:
    assert output_chunks(144, BF16) == ((0, 64), (64, 64), (128, 16))
    assert output_chunks(40, FLOAT32_OUT) == ((0, 32), (32, 8))
