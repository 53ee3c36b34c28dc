"""Small products, one for each kind of kernel, meant to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/sanitizer_cases.py
    compute-sanitizer --tool synccheck python tests/sanitizer_cases.py

Prints a line for each case and exits with 1 if a result is wrong; the tool reports the rest.
"""

import sys
from typing import Any

import torch

import cutegemm
from cutegemm import GemmConfig
from cutegemm.scheduler import Dynamic, SplitK, StreamK, TileScheduler

CASES = (
    ((200, 264, 136), {}, GemmConfig(128, 256)),
    ((264, 200, 72), {}, GemmConfig(128, 128, cluster_m=2, schedule="pingpong")),
    ((136, 520, 192), {}, GemmConfig(64, 256, cluster_n=2, schedule="pingpong")),
    ((8, 320, 264), {}, GemmConfig(64, 16, 128, consumers=1, swap_ab=True)),
    ((192, 136, 200), {"a_major": "m", "b_major": "n", "out_dtype": "float32"}, GemmConfig(192, 96)),
    ((136, 248, 320), {"out_major": "m"}, GemmConfig(128, 72, consumers=1)),
    ((72, 136, 1000), {"scheduler": TileScheduler(assignment=SplitK(4))}, GemmConfig(64, 72, consumers=1)),
    ((520, 264, 72), {"scheduler": TileScheduler(assignment=Dynamic(5))}, GemmConfig(64, 64, consumers=1)),
    (
        (400, 264, 136),
        {"scheduler": TileScheduler(assignment=Dynamic(3))},
        GemmConfig(64, 64, cluster_m=2, schedule="pingpong"),
    ),
    ((200, 136, 2056), {"scheduler": TileScheduler(assignment=StreamK(7))}, GemmConfig(64, 72, consumers=1)),
    ((300, 392, 1032), {"scheduler": TileScheduler(assignment=StreamK(5))}, GemmConfig(128, 128)),
)


def run(shape: tuple[int, int, int], options: dict[str, Any], config: GemmConfig) -> float:
    """Relative error of one product against float32, the output poisoned beforehand."""
    m, n, k = shape
    a = _matrix(m, k, options.get("a_major") == "m")
    b = _matrix(k, n, options.get("b_major") != "n")
    gemm = cutegemm.compile(shape, "bfloat16", config=config, **options)
    out = gemm(a, b)
    out.fill_(float("nan"))
    gemm(a, b, out=out)
    reference = a.float() @ b.float()
    return float((out.float() - reference).norm() / reference.norm())


def _matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
    if transposed:
        return torch.randn(columns, rows, device="cuda", dtype=torch.bfloat16).t()
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def main() -> int:
    """Runs every case."""
    torch.manual_seed(0)
    wrong = 0
    for shape, options, config in CASES:
        error = run(shape, options, config)
        good = error <= 4e-3
        wrong += not good
        print(f"{'ok' if good else 'WRONG'} {shape} {config}: relative error {error:.2e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
