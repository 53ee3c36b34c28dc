"""GemmConfig: fields that cannot be wrong, text, and the nearest legal value."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutegemm
from cutegemm import GemmConfig
from cutegemm.config import check_one_of, nearest
from cutegemm.errors import ConfigError, OperandTypeError

INTEGER_FIELDS = (
    "tile_m",
    "tile_n",
    "tile_k",
    "cluster_m",
    "cluster_n",
    "consumers",
    "mma_ctas",
    "stages",
    "store_stages",
)


def with_field(name: str, value: Any) -> GemmConfig:
    """A plain configuration with one field of another value."""
    return GemmConfig(**{"tile_m": 128, "tile_n": 128, name: value})


@pytest.mark.parametrize("name", INTEGER_FIELDS)
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value} must be at least 1$"):
        with_field(name, value)


@pytest.mark.parametrize("name", INTEGER_FIELDS)
@pytest.mark.parametrize("value", [1.5, 128.0, "64", True, [64]])
def test_fields_that_are_no_integers(name: str, value: Any) -> None:
    with pytest.raises(OperandTypeError) as caught:
        with_field(name, value)
    assert str(caught.value) == f"{name}={value!r} must be an integer"


@pytest.mark.parametrize("name", INTEGER_FIELDS)
def test_integers_of_numpy_become_python_integers(name: str) -> None:
    config = with_field(name, np.int64(2))
    assert config == with_field(name, 2)
    assert repr(config) == repr(with_field(name, 2))


@pytest.mark.parametrize("name", [name for name in INTEGER_FIELDS if "stages" not in name])
def test_only_depths_may_be_left_open(name: str) -> None:
    with pytest.raises(OperandTypeError, match=f"{name}=None must be an integer"):
        with_field(name, None)


@pytest.mark.parametrize("schedule", ["ping-pong", "Cooperative", None, 1, ["pingpong"]])
def test_unknown_schedule(schedule: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        with_field("schedule", schedule)
    assert str(caught.value) == f'schedule={schedule!r} is unknown; use "cooperative" or "pingpong"'


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_swap_that_is_no_boolean(value: Any) -> None:
    with pytest.raises(OperandTypeError, match="must be True or False"):
        with_field("swap_ab", value)


def test_with_changes_and_checks() -> None:
    config = GemmConfig(128, 256)
    assert config.with_(cluster_m=2) == GemmConfig(128, 256, cluster_m=2)
    with pytest.raises(ConfigError, match="tile_n=0 must be at least 1"):
        config.with_(tile_n=0)
    with pytest.raises(AttributeError):
        config.tile_m = 64  # type: ignore[misc]


def test_text_is_short_and_complete() -> None:
    assert str(GemmConfig(128, 256)) == "128x256x64, cluster 1x1, 2 consumers cooperative"
    full = GemmConfig(64, 40, 128, 2, 1, 1, stages=4, store_stages=2, swap_ab=True)
    assert str(full) == (
        "64x40x128, cluster 2x1, 1 consumer cooperative, 4 stages, 2 store buffers, A and B swapped"
    )
    assert full.cluster_size == 2
    assert str(GemmConfig(64, 8, stages=1, store_stages=1)).endswith(", 1 stage, 1 store buffer")


def test_configurations_that_differ_read_differently() -> None:
    variants = [with_field(name, 2) for name in INTEGER_FIELDS if name != "consumers"]
    variants += [with_field("consumers", 1), with_field("swap_ab", True), with_field("schedule", "pingpong")]
    assert len({str(variant) for variant in variants}) == len(set(variants)) == 11


@given(st.integers(-500, 500), st.sets(st.integers(1, 300), min_size=1))
def test_nearest_is_nearest(value: int, allowed: set[int]) -> None:
    found = nearest(value, tuple(sorted(allowed)))
    assert found in allowed
    assert abs(found - value) == min(abs(candidate - value) for candidate in allowed)
    assert not any(abs(one - value) == abs(found - value) for one in allowed if one < found)


@given(st.integers(-500, 500), st.sets(st.integers(1, 300), min_size=1))
def test_check_names_the_nearest_value(value: int, allowed: set[int]) -> None:
    values = tuple(sorted(allowed))
    if value in allowed:
        check_one_of("tile", value, values, "hardware")
        return
    with pytest.raises(ConfigError) as caught:
        check_one_of("tile", value, values, "hardware")
    message = str(caught.value)
    assert message.startswith(f"tile={value}: hardware allows ")
    assert message.endswith(f"the nearest is {nearest(value, values)}")
    assert str(values[0]) in message
    assert str(values[-1]) in message


@pytest.mark.parametrize("config", ["fastest", (128, 256), {"tile_m": 128}])
def test_compile_takes_a_config_or_nothing(config: Any) -> None:
    with pytest.raises(OperandTypeError) as caught:
        cutegemm.compile((8, 8, 8), "bfloat16", config=config, target="sm_90a")
    assert f"config={config!r}" in str(caught.value)
    assert "pass a cutegemm.GemmConfig, None to have one chosen, or" in str(caught.value)
