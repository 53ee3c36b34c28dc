"""Epilogues that do not fit the registers: never handed out, and what is done instead."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from epilogue_checks import SMALL
from test_epilogue_emulated import arithmetic

import cutegemm
from cutegemm import GemmConfig
from cutegemm import epilogue as epi
from cutegemm.alignment import expected_paths
from cutegemm.artifact import Resources
from cutegemm.errors import ConfigError
from cutegemm.hardware import gpu_by_name
from cutegemm.kernels import Choice, Fastest, Kernels
from cutegemm.scheduler import TileScheduler

WIDE = GemmConfig(128, 192, cluster_m=2, schedule="pingpong")


class Builds:
    """Stands in for the compiler: kernels of which a warpgroup has more than ``fitting`` elements spill."""

    def __init__(self, fitting: int) -> None:
        self.fitting = fitting
        self.choices: list[Choice] = []

    def __call__(self, kernels: Kernels, choice: Choice, options: str = "") -> Any:
        """What Kernels._from_cache gives."""
        self.choices.append(choice)
        return SimpleNamespace(resources=Resources(168, 24 * (choice.share > self.fitting), 0, 4, 384))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a stand-in take the compiler's place."""

    def take_place(fitting: int) -> Builds:
        found = Builds(fitting)
        monkeypatch.setattr(Kernels, "_from_cache", lambda *arguments: found(*arguments))
        return found

    return take_place


def gemm_of(config: Any = None, epilogue: Any = epi.library.bias, **options: Any) -> Any:
    """A product of which nothing is compiled yet."""
    return cutegemm.compile(
        (8192, 8192, 2048), "bfloat16", epilogue=epilogue, config=config, target="sm_90a", **options
    )


def test_the_heuristic_goes_on_to_a_kernel_that_fits(builds: Any) -> None:
    gemm, fits = gemm_of(), 128 * 128
    chosen = gemm.config
    assert Choice(chosen, gemm.scheduler, gemm.paths, "sm_90a").share > fits
    found = builds(fits)
    assert gemm.artifact.resources.spills == 0
    assert gemm.config != chosen
    assert found.choices[0].config == chosen
    assert [one.share > fits for one in found.choices] == [True] * (len(found.choices) - 1) + [False]
    shares = [one.share for one in found.choices]
    assert shares == sorted(shares, reverse=True)
    count = len(found.choices)
    assert gemm.build().resources.spills == 0
    assert len(found.choices) == count  # what spilled is remembered


def test_a_given_configuration_is_refused_with_the_largest_that_fits(builds: Any) -> None:
    builds(128 * 144)
    gemm = gemm_of(WIDE)
    with pytest.raises(ConfigError) as refusal:
        gemm.build()
    text = str(refusal.value)
    assert "128x192x64" in text
    assert "with the epilogue bias spills 24 bytes a thread" in text
    assert "the largest tile that fits them is 128x144" in text
    assert gemm_of(WIDE.with_(tile_n=144)).artifact.resources.spills == 0
    with pytest.raises(ConfigError, match="the largest tile that fits them is 128x144"):
        gemm_of(WIDE.with_(tile_n=160)).build()


def test_where_nothing_fits_the_epilogue_is_to_blame(builds: Any) -> None:
    builds(0)
    with pytest.raises(ConfigError, match="no narrower one fits them"):
        gemm_of(WIDE).build()
    with pytest.raises(ConfigError, match="more than fits the registers even beside the smallest tile"):
        gemm_of().build()


def test_what_was_measured_is_given_up_too(builds: Any) -> None:
    found = builds(128 * 144)
    problem = gemm_of().problem
    paths = expected_paths(problem)
    kernels = Kernels(problem, Fastest(WIDE, TileScheduler(), paths), None, "sm_90a")
    choice, artifact = kernels.built(problem, gpu_by_name("H200"), paths)
    assert artifact.resources.spills == 0
    assert choice.share <= 128 * 144
    assert found.choices[0].config.tile_n == WIDE.tile_n


def test_plain_products_are_not_looked_at(builds: Any) -> None:
    """What is legal for them was found by compiling it; where it spills after all it is still right."""
    builds(0)
    assert gemm_of(WIDE, None).artifact.resources.spills == 24


@pytest.mark.skipif("CUTEGEMM_FULL_SPACE" not in os.environ, reason="compiles several; CUTEGEMM_FULL_SPACE=1")
def test_a_kernel_that_spills_in_earnest() -> None:
    """A dozen outputs hold more addresses than there are registers."""
    with pytest.raises(ConfigError, match=r"spills \d+ bytes a thread.* largest tile that fits them is 64x"):
        gemm_of(SMALL, arithmetic).build()
