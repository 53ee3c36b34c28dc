"""Every epilogue of the library against its own reference, and gradients against torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from epilogue_checks import check, operands_for

import cutegemm
from cutegemm import GemmConfig, GemmProblem
from cutegemm.epilogue import library
from cutegemm.epilogue.operands import default_epilogue
from cutegemm.errors import ProblemError
from cutegemm.heuristic import candidates
from cutegemm.hopper.plan import SPLITS
from cutegemm.parts.paths import ALIGNED

# Each compiles a kernel or runs one: make test takes every second of a test's parameters.
pytestmark = pytest.mark.sample(2)

EVERY = library.every()


def test_the_library_is_found() -> None:
    assert len(EVERY) >= 20
    for name, fused in EVERY.items():
        assert fused.__name__ == name
        assert fused.__doc__


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EVERY)
def test_each_against_its_reference(name: str) -> None:
    fused = EVERY[name]
    check(fused, (136, 144, 128), operands_for(fused, 136, 144))


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("name", ["bias_gelu", "alpha_beta", "swiglu_keeping", "swiglu_backward"])
def test_some_in_ping_pong_and_ragged(name: str) -> None:
    fused = EVERY[name]
    config = GemmConfig(64, 64, schedule="pingpong")
    check(fused, (200, 200, 128), operands_for(fused, 200, 200), config=config)
    check(fused, (77, 54, 64), operands_for(fused, 77, 54), config=config)


@pytest.mark.parametrize(
    ("forward", "gate"),
    [("swiglu", torch.nn.functional.silu), ("geglu", torch.nn.functional.gelu), ("reglu", torch.relu)],
)
def test_gradients_are_those_of_torch(forward: str, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(16, 24, dtype=torch.float32, requires_grad=True)
    y = gate(x[:, 0::2]) * x[:, 1::2]
    assert torch.allclose(EVERY[forward].function(x.detach()), y, atol=1e-6)
    gradient = torch.randn(16, 12)
    y.backward(gradient)
    mine = EVERY[f"{forward}_backward"].function(gradient, x.detach())
    assert x.grad is not None
    assert torch.allclose(mine, x.grad, atol=1e-5)


def test_interleaved_weights() -> None:
    gate, up = torch.randn(8, 6), torch.randn(8, 6)
    weight = library.interleaved(gate, up)
    assert torch.equal(weight[:, 0::2], gate)
    assert torch.equal(weight[:, 1::2], up)
    assert torch.equal(library.interleaved(gate.t(), up.t(), dim=0), weight.t())
    with pytest.raises(ProblemError, match="both need one shape"):
        library.interleaved(gate, up[:, :5])


def test_dropout_drops_what_it_says() -> None:
    acc, bias, zero = torch.ones(256, 256), torch.zeros(256), torch.zeros(256, 256)
    dropped: Any = library.bias_dropout_residual(acc, bias, zero, 3, 0.25)
    share = float((dropped == 0).float().mean())
    assert abs(share - 0.25) < 0.01
    assert torch.allclose(dropped[dropped != 0], torch.tensor(1 / 0.75))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EVERY)
def test_each_has_a_heuristic_choice(name: str) -> None:
    """Without a configuration, some kernel without spills is chosen for a large product."""
    gemm = cutegemm.compile((4096, 4096, 4096), "bfloat16", epilogue=EVERY[name], target="sm_90a")
    assert gemm.config.stages is not None
    assert not gemm.config.swap_ab or not EVERY[name].epilogue.pairs


@pytest.mark.parametrize("name", ["residual_rms", "with_row_amax", "swiglu", "swiglu_backward"])
def test_what_an_epilogue_rules_out_is_no_candidate(name: str) -> None:
    """Reductions with K split, and pairs of columns that a swap would part, are not even estimated."""
    epilogue = default_epilogue(EVERY[name].epilogue, "bfloat16")
    plans = candidates(GemmProblem(64, 512, 16384, epilogue=epilogue).kind(), ALIGNED, SPLITS).plans
    assert plans
    assert not epilogue.reductions or {plan.splits for plan in plans} == {1}
    assert not epilogue.pairs or not any(plan.config.swap_ab for plan in plans)
    assert epilogue.reductions or {plan.splits for plan in plans} == set(SPLITS)
    assert epilogue.pairs or any(plan.config.swap_ab for plan in plans)
