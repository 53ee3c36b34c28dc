"""A product, and the largest absolute value of each of its rows: the scales of the next quantisation.

Without the second output, the scales would take another pass over the whole result.

On a GPU the kernel runs there; without one, on the emulator. Exits with 1 if a result is wrong.
"""

import sys
from typing import Any

import torch

import cutegemm
from cutegemm import epilogue as epi

M, N, K = (8192, 8192, 2048) if torch.cuda.is_available() else (136, 200, 128)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3_MAX = 448.0


@epi.fuse
def gelu_with_amax(acc: Any, bias: epi.Row) -> Any:
    """gelu(acc + bias), and of each row the largest absolute value."""
    y = epi.gelu_tanh(acc + bias)
    return y, {"amax": epi.row_amax(y)}


def main() -> int:
    """Runs it, quantises its result by the scales that came with it, and compares with torch."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(M, K, generator=generator, device=DEVICE).bfloat16()
    weight = (torch.randn(N, K, generator=generator, device=DEVICE) * K**-0.5).bfloat16()
    bias = torch.randn(N, generator=generator, device=DEVICE)
    target = None if torch.cuda.is_available() else "sm_90a"
    gemm: Any = cutegemm.compile((M, N, K), torch.bfloat16, epilogue=gelu_with_amax, target=target)
    if x.is_cuda:
        y, further = gemm(x, weight.t(), bias=bias)
    else:
        emulation = gemm.emulate(x, weight.t(), bias=bias)
        y, further = emulation.out, emulation.outputs
    truth, expected = gelu_with_amax.reference(x, weight.t(), bias=bias)
    scales = further["amax"] / E4M3_MAX
    quantised = (y.float() / scales[:, None]).to(torch.float8_e4m3fn)
    restored = quantised.float() * scales[:, None]

    amax_error = float(((further["amax"] - expected["amax"]) / expected["amax"]).abs().max())
    error = float((restored - truth).norm() / truth.norm())
    print(f"row maxima: relative error {amax_error:.1e}; quantised result: relative error {error:.1e}")
    return 0 if amax_error < 1e-4 and error < 5e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
