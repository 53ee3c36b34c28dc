"""Operands of a benchmark: as many sets as the rotation asks for, and poison for the outputs."""

from dataclasses import dataclass

import torch

from cutegemm.bench.workload import Case


@dataclass(frozen=True)
class Operands:
    """One set: a (M, K), b (K, N) and out (M, N), in the majors of the problem; L in front if batched."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


def random_operands(case: Case, sets: int, device: torch.device, seed: int) -> list[Operands]:
    """``sets`` sets of normally distributed A and B with poisoned outputs, each its own allocation."""
    generator = torch.Generator(device).manual_seed(seed)
    p = case.problem

    def empty(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (case.batches, rows, columns) if p.batched else (rows, columns)
        return torch.empty(shape, dtype=dtype, device=device)

    def matrix(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
        return empty(columns, rows, dtype).transpose(-1, -2) if transposed else empty(rows, columns, dtype)

    def normal(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
        values = matrix(rows, columns, dtype, transposed=transposed)
        # Filled in the order of memory: random numbers into a transposed view would be copied.
        (values.transpose(-1, -2) if transposed else values).normal_(generator=generator)
        return values

    operands = [
        Operands(
            a=normal(case.m, case.k, p.a_torch, transposed=p.a_major == "m"),
            b=normal(case.k, case.n, p.b_torch, transposed=p.b_major == "k"),
            out=matrix(case.m, case.n, p.out_torch, transposed=p.out_major == "m"),
        )
        for _ in range(sets)
    ]
    poison(operands)
    return operands


def poison(operands: list[Operands]) -> None:
    """Fills every output with NaN, so that an element nobody writes shows."""
    for one in operands:
        one.out.fill_(float("nan"))
