"""A small sm_100a kernel in every circumstance: one CTA and pairs, any order, and what its trace shows."""

import pytest
import torch
from blackwell_kernels import BARRIER_LABELS, STAGES, TILE_K, compiled, operands
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import emulator
from cutegemm.emulator import Emulation
from cutegemm.emulator.timeline import Division, lanes


def product(
    size: tuple[int, int, int],
    pair: bool = False,
    tile_n: int = 64,
    teams: int = 1,
    clusters: int = 1,
    **options: object,
) -> tuple[Emulation, torch.Tensor]:
    """Runs the kernel; fails unless each element is right within float32 summation."""
    a, b, d = operands(*size)
    kernel = compiled(*size, pair=pair, tile_n=tile_n, teams=teams, clusters=clusters)
    result = emulator.run(kernel, a, b, d, barrier_labels=BARRIER_LABELS, **options)  # type: ignore[arg-type]
    exact = a.double() @ b.double().T
    scale = a.double().abs() @ b.double().abs().T
    assert ((d.double() - exact).abs() <= 1e-6 * scale).all()
    return result, d


@pytest.mark.parametrize("pair", [False, True], ids=["one CTA", "pair"])
@pytest.mark.parametrize("tile_n", [32, 96, 256])
def test_products_are_right_for_every_width(pair: bool, tile_n: int) -> None:
    product((256, 2 * tile_n, 320), pair, tile_n, check=True, seed=1)


@pytest.mark.parametrize("pair", [False, True], ids=["one CTA", "pair"])
def test_any_order_gives_the_same_bits(pair: bool) -> None:
    size = (512, 192, 320)
    _, plain = product(size, pair, clusters=2)
    for seed in range(6):
        _, adverse = product(size, pair, clusters=2, seed=seed, check=seed % 2 == 0)
        assert torch.equal(plain, adverse)


@pytest.mark.parametrize("pair", [False, True], ids=["CTAs", "pairs"])
@pytest.mark.parametrize("teams", [2, 4])
def test_a_cluster_shares_its_loads(pair: bool, teams: int) -> None:
    """B goes to all CTAs or pairs of a cluster at once; a stage is free when all have used it."""
    size = (128 * (2 if pair else 1) * teams * 2, 128, 320)
    for seed in (None, 0, 1):
        product(size, pair, teams=teams, check=True, seed=seed)


@settings(max_examples=8, deadline=None)
@given(
    pair=st.booleans(),
    teams=st.sampled_from([1, 2]),
    tile_n=st.sampled_from(range(32, 257, 32)),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(1, 7),
    clusters=st.integers(1, 3),
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_random_kernels_are_right(
    pair: bool,
    teams: int,
    tile_n: int,
    tiles: tuple[int, int],
    steps: int,
    clusters: int,
    seed: int | None,
) -> None:
    rows = 128 * (2 if pair else 1) * teams * tiles[0]
    size = (rows, tile_n * tiles[1], steps * TILE_K)
    product(size, pair, tile_n, teams, clusters, check=True, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ctas_share_the_tensor_memory_of_an_sm(seed: int) -> None:
    """Three CTAs fit on the one SM: their accumulators begin at columns 0, 128 and 256."""
    result, _ = product((512, 192, 192), clusters=6, sms=1, check=True, seed=seed)
    columns = {event.detail.split("column ")[1] for event in result.trace.events if event.kind == "mma"}
    assert {int(column) // 128 for column in columns} == {0, 1, 2}


def test_the_next_tile_is_computed_while_one_is_read() -> None:
    """A wide pair needs as long for its MMAs as for its loads, so that MMAs follow each other."""
    size = (256, 1024, 512)
    steps = size[2] // TILE_K
    result, _ = product(size, pair=True, tile_n=256)
    cta = [event for event in result.trace.events if event.cta == 0]
    mmas = [event for event in cta if event.kind == "mma"]
    reads = [event for event in cta if event.kind == "read" and event.warp == 0]
    assert len(mmas) == 4 * steps
    assert len(reads) == 4 * 8
    assert ({event.role for event in mmas}, {event.role for event in reads}) == ({"MMA"}, {"epilogue"})
    assert [" put " in event.detail for event in mmas] == ([True] + [False] * (steps - 1)) * 4
    for tile in range(3):
        after = mmas[(tile + 1) * steps]
        assert any(
            read.begin < after.end and after.begin < read.end for read in reads[8 * tile : 8 * tile + 8]
        )
    division = Division(STAGES, steps, 2 * 128 * TILE_K * 2)
    found = {lane.name.split("\n")[0]: lane for lane in lanes(result.trace, division, 0)}
    assert {"TMA load", "tensor core", "results"} <= set(found)
    assert [bar.text for bar in found["tensor core"].bars[:4]] == ["0", "1", "2", "0"]
    tiles = [bar.text for bar in found["results"].bars if bar.kind == "tile"]
    assert tiles == [f"tile {i}" for i in range(4)]


def test_a_pair_needs_two_sms() -> None:
    with pytest.raises(emulator.MisuseError, match="emulated GPU has one"):
        product((256, 64, 64), pair=True, sms=1)
    product((256, 64, 64), pair=True, sms=2)
