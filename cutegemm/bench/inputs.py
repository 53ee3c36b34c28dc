"""Operands of a benchmark: as many sets as the rotation asks for, and poison for the outputs."""

from dataclasses import dataclass

import torch

from cutegemm.bench.workload import Case


@dataclass(frozen=True)
class Operands:
    """One set: a (M, K), b (K, N) and out (M, N), in the majors of the problem."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


def random_operands(case: Case, sets: int, device: torch.device, seed: int) -> list[Operands]:
    """``sets`` sets of normally distributed A and B with poisoned outputs, each its own allocation."""
    generator = torch.Generator(device).manual_seed(seed)
    p = case.problem

    def normal(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        values = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        return values.t() if transposed else values

    operands = [
        Operands(
            a=normal(case.m, case.k, p.a_torch, transposed=p.a_major == "m"),
            b=normal(case.k, case.n, p.b_torch, transposed=p.b_major == "k"),
            out=torch.empty((case.m, case.n), dtype=p.out_torch, device=device),
        )
        for _ in range(sets)
    ]
    poison(operands)
    return operands


def poison(operands: list[Operands]) -> None:
    """Fills every output with NaN, so that an element nobody writes shows."""
    for one in operands:
        one.out.fill_(float("nan"))
