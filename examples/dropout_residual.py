"""y = dropout(x W + bias) + residual in one kernel, the epilogue written out.

The dropout's random numbers follow from seed, row and column alone: the same function on torch tensors drops
the same elements, so that the reference is exact, and a backward pass can make the mask again.

On a GPU the kernel runs there; without one, on the emulator. Exits with 1 if the result is wrong.
"""

import sys
from typing import Any

import torch

import cutegemm
from cutegemm import epilogue as epi

M, N, K = (8192, 4096, 4096) if torch.cuda.is_available() else (136, 200, 128)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@epi.fuse
def dropped(acc: Any, bias: epi.Row, residual: epi.Tile, seed: epi.Integer, p: epi.Scalar) -> Any:
    """dropout(acc + bias) + residual."""
    kept = epi.random(acc, seed) >= p
    return epi.where(kept, (acc + bias) / (1 - p), 0.0) + residual


def main() -> int:
    """Runs it with two seeds, which share a kernel, and compares with torch."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    x, weight, bias, residual = rand(M, K), rand(N, K) * K**-0.5, rand(N), rand(M, N)
    target = None if torch.cuda.is_available() else "sm_90a"
    gemm: Any = cutegemm.compile((M, N, K), torch.bfloat16, epilogue=dropped, target=target)
    worst = 0.0
    for seed in (1, 2):
        operands = {"bias": bias, "residual": residual, "seed": seed, "p": 0.1}
        if x.is_cuda:
            y = gemm(x, weight.t(), **operands)
        else:
            y = gemm.emulate(x, weight.t(), **operands).out
        truth = dropped.reference(x, weight.t(), **operands)
        # A dropped element that should be there, or the other way round, would be off by about 1.
        worst = max(worst, float((y.float() - truth).abs().max() / truth.abs().max()))
        print(f"seed {seed}: largest error {worst:.1e} of the largest value")
    return 0 if worst < 2e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
