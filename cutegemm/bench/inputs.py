"""Operands of a benchmark: as many sets as the rotation asks for, and poison for the outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cutegemm.bench.workload import Case
from cutegemm.epilogue.spec import Epilogue, scaled_size


@dataclass(frozen=True)
class Operands:
    """One set: a (M, K), b (K, N) and out (M, N), in the majors of the problem; L in front if batched.

    beside   an epilogue's operands by name; out then has the columns it gives
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    beside: Mapping[str, Any] = field(default_factory=dict)


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

    columns = case.n if p.epilogue is None else scaled_size(case.n, p.epilogue.width)
    operands = [
        Operands(
            a=normal(case.m, case.k, p.a_torch, transposed=p.a_major == "m"),
            b=normal(case.k, case.n, p.b_torch, transposed=p.b_major == "k"),
            out=matrix(case.m, columns, p.out_torch, transposed=p.out_major == "m"),
            beside={} if p.epilogue is None else _epilogue_operands(case, p.epilogue, normal),
        )
        for _ in range(sets)
    ]
    poison(operands)
    return operands


def _epilogue_operands(case: Case, epilogue: Epilogue, normal: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Positive values around 1, of which logarithms and roots can be taken; 1 for numbers.

    normal: makes a matrix of rows, columns, dtype, in an order of memory
    """
    found: dict[str, Any] = {}
    for operand in epilogue.operands:
        if operand.is_scalar:
            found[operand.name] = 1 if operand.type == "int" else 1.0
            continue
        columns = scaled_size(case.n, operand.width)
        rows, columns = (case.m if "m" in operand.modes else 1, columns if "n" in operand.modes else 1)
        dtype: torch.dtype = getattr(torch, str(operand.dtype))
        transposed = operand.modes == "mn" and case.problem.out_major == "m"
        values = normal(rows, columns, dtype, transposed=transposed).abs_().add_(0.25)
        if operand.modes != "mn":
            # One line for every product of a batch.
            values = values.flatten(0, 1) if values.dim() == 2 else values[0].flatten()
        found[operand.name] = values
    return found


def poison(operands: list[Operands]) -> None:
    """Fills every output with NaN, so that an element nobody writes shows."""
    for one in operands:
        one.out.fill_(float("nan"))
