"""The sm_100a kernels on a GPU that runs them: the listed ones on a few sizes; bits that do not change."""

from dataclasses import replace

import pytest
import torch
from blackwell_space import TARGET, units
from gpu_checks import check
from test_blackwell import KINDS, gemm

from cutegemm.errors import CutegemmError
from cutegemm.hardware import current_target


def runs_here() -> bool:
    """Whether the current GPU runs this target."""
    try:
        return current_target() == TARGET
    except CutegemmError:
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(), reason=f"needs a GPU that runs {TARGET}, such as a B200"),
]

SIZES = [(1, 1, 1), (37, 50, 100), (300, 700, 72), (1000, 1500, 4096)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(name: str, sizes: tuple[int, int, int]) -> None:
    case = KINDS[name].case
    m, n = (size * unit for size, unit in zip(sizes, units(case), strict=False))
    batch = None if case.l is None else 3
    check(replace(case, m=m, n=n, k=sizes[2], l=batch), gemm(name), "cuda", name)


@pytest.mark.parametrize("name", ["pair 256x256", "pairs 4x2", "pairs, dynamic", "split 8, ragged chunks"])
def test_a_thousand_runs_give_the_same_bits(name: str) -> None:
    case = replace(KINDS[name].case, m=1024, n=1024, k=1024, l=None if KINDS[name].case.l is None else 2)
    operands = check(case, gemm(name), "cuda", name)
    first = operands.out.tensor.clone()
    for _ in range(1000):
        gemm(name)(operands.a.tensor, operands.b.tensor, out=operands.out.tensor)
        assert torch.equal(operands.out.tensor, first)
