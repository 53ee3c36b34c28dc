"""Random epilogues in the emulator: whatever is drawn gives what its own reference says."""

import os

import pytest
from epilogue_checks import SMALL, check, operands_for
from epilogue_random import PLANS, Plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutegemm import GemmConfig
from cutegemm.scheduler import StreamK, TileScheduler

EXAMPLES = int(os.environ.get("CUTEGEMM_RANDOM_EPILOGUES", "7"))  # a kernel is compiled for nearly each

CONFIGS = [
    SMALL,
    SMALL.with_(swap_ab=True),
    GemmConfig(64, 96, schedule="pingpong"),
    GemmConfig(128, 80),
    GemmConfig(128, 80, swap_ab=True),
]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    plan=PLANS,
    config=st.sampled_from(CONFIGS),
    sizes=st.sampled_from([(136, 144, 64), (77, 54, 64), (200, 40, 128)]),
    streamed=st.booleans(),
    out_dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_random_epilogues(
    plan: Plan, config: GemmConfig, sizes: tuple[int, int, int], streamed: bool, out_dtype: str
) -> None:
    fused = plan.fused()
    if fused.epilogue.pairs and config.swap_ab:
        config = config.with_(swap_ab=False)
    scheduler = TileScheduler(assignment=StreamK()) if streamed else None
    check(
        fused,
        sizes,
        operands_for(fused, *sizes[:2]),
        config=config,
        scheduler=scheduler,
        circumstances={"resident": 3},
        out_dtype=out_dtype,
    )


def test_what_is_drawn_reaches_every_operation() -> None:
    """A run of draws has every operation, kind of operand and output in it: none is out of reach."""
    seen: set[str] = set()

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(PLANS)
    def draw(plan: Plan) -> None:
        fused = plan.fused()
        seen.update(node.op for node in fused.graph.nodes)
        seen.update(output.reduction or "" for output in fused.graph.outputs)

    draw()
    for name in (
        "exp",
        "erf",
        "tanh",
        "random",
        "even",
        "row_index",
        "column_index",
        "batch_index",
        "mod",
        "div",
    ):
        assert name in seen
    assert {"sum", "max", "amax", "sum_of_squares"} <= seen


@pytest.mark.parametrize("wrong", ["operand", "step"])
def test_a_wrong_kernel_would_be_noticed(wrong: str) -> None:
    from epilogue_random import Step

    plan = Plan(("row",), (Step("gelu", 0, 0), Step("product", 1, 2)), (), False, False)
    other = Plan(("row",), (Step("silu", 0, 0), Step("product", 1, 2)), (), False, False)
    fused = plan.fused()
    operands = operands_for(fused, 72, 40)
    if wrong == "step":
        fused.function = other.fused().function
    else:
        fused.function = lambda acc, x0: plan.compute(acc, x0.flip(-1))
    with pytest.raises(AssertionError, match="wrong, by up to"):
        check(fused, (72, 40, 64), operands)
