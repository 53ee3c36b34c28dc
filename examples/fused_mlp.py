"""A SwiGLU MLP layer in two kernels forward, and the one of its backward that is more than a product.

    h = silu(x Wg) * (x Wu)      one product with both weights interleaved, gated before it is stored
    y = h Wd                     a product
    d(x Wg, x Wu)                dy Wd^T, and the gradient of the gate before it is stored

On a GPU the kernels run there; without one, on the emulator, smaller. Exits with 1 if a result is wrong.
"""

import sys
from typing import Any

import torch

import cutegemm
from cutegemm.epilogue import library

TOKENS, WIDTH, HIDDEN = (4096, 4096, 14336) if torch.cuda.is_available() else (136, 128, 192)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-2  # relative, of a chain of two products in bfloat16


def gemm_for(m: int, n: int, k: int, b_major: str = "k", epilogue: Any = None) -> Any:
    """A Gemm for this machine's GPU, or for Hopper where there is none."""
    target = None if torch.cuda.is_available() else "sm_90a"
    return cutegemm.compile((m, n, k), torch.bfloat16, b_major=b_major, epilogue=epilogue, target=target)


def run(gemm: Any, a: torch.Tensor, b: torch.Tensor, **operands: Any) -> Any:
    """(out, further outputs), on the GPU or emulated."""
    if a.is_cuda:
        result = gemm(a, b, **operands)
        return result if isinstance(result, tuple) else (result, {})
    emulation = gemm.emulate(a, b, **operands)
    return emulation.out, emulation.outputs


class Mlp:
    """The layer: weights in the layout of torch.nn.Linear, (features out, features in)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate_up = library.interleaved(gate, up, dim=0)
        self.down = down

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, preact): the result, and what went into the gate, for the backward."""
        tokens, width = x.shape
        hidden = self.down.shape[1]
        first = gemm_for(tokens, 2 * hidden, width, epilogue=library.swiglu_keeping)
        h, kept = run(first, x, self.gate_up.t())
        y, _ = run(gemm_for(tokens, self.down.shape[0], hidden), h, self.down.t())
        return y, kept["preact"]

    def backward_to_gate(self, dy: torch.Tensor, preact: torch.Tensor) -> torch.Tensor:
        """The gradient of what went into the gate, interleaved as that is."""
        third = gemm_for(dy.shape[0], self.down.shape[1], dy.shape[1], "n", library.swiglu_backward)
        return run(third, dy, self.down, preact=preact)[0]


def relative(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return float((mine.float() - truth.float()).norm() / truth.float().norm())


def main() -> int:
    """Runs the layer forward and back to the gate; compares with torch in float32."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def rand(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=DEVICE)
        return (values * columns**-0.5).bfloat16()

    x, dy = rand(TOKENS, WIDTH) * WIDTH**0.5, rand(TOKENS, WIDTH)
    gate, up, down = rand(HIDDEN, WIDTH), rand(HIDDEN, WIDTH), rand(WIDTH, HIDDEN)
    mlp = Mlp(gate, up, down)
    y, preact = mlp.forward(x)
    d_preact = mlp.backward_to_gate(dy, preact)

    into_gate, into_up = (x.float() @ weight.float().t() for weight in (gate, up))
    into_gate.requires_grad_(True)
    into_up.requires_grad_(True)
    truth = (torch.nn.functional.silu(into_gate) * into_up) @ down.float().t()
    truth.backward(dy.float())
    errors = {
        "y": relative(y, truth.detach()),
        "d gate": relative(d_preact[:, 0::2], into_gate.grad),
        "d up": relative(d_preact[:, 1::2], into_up.grad),
    }
    for name, error in errors.items():
        print(f"{name:7} relative error {error:.1e}")
    return 0 if max(errors.values()) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
