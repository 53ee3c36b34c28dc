"""Operands and further outputs of one call, checked and bound: each complaint says what to pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cutegemm.alignment import Alignment
from cutegemm.allocation import dense_beside
from cutegemm.epilogue.fuse import Fused
from cutegemm.epilogue.graph import FULL, WIDTHS, Output
from cutegemm.epilogue.kinds import OPERAND_DTYPES, Kind
from cutegemm.epilogue.spec import Access, Epilogue, Operand, scaled_size
from cutegemm.errors import DeviceError, OperandTypeError, ProblemError
from cutegemm.operands import (
    OperandRule,
    check_overlap,
    check_written_out,
    overlaps_itself,
    strided_tensor,
)
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.problem import GemmProblem

INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True)
class Sizes:
    """Of one call: l is None where there is no batch."""

    l: int | None  # noqa: E741 - the field's own name for the batch mode
    m: int
    n: int

    def shape(self, modes: str, width: int = FULL) -> tuple[int, ...]:
        """Of an operand or output of these modes, without the batch."""
        sizes = {"m": self.m, "n": scaled_size(self.n, width)}
        return tuple(sizes[mode] for mode in modes)

    @property
    def lead(self) -> tuple[int, ...]:
        """(L,), or () without a batch."""
        return () if self.l is None else (self.l,)


def check_names(fused: Fused, given: Mapping[str, Any]) -> None:
    """Refuses missing and unknown operands. Raises OperandTypeError."""
    missing = [name for name in fused.kinds if name not in given and name not in fused.defaults]
    if missing:
        listed = ", ".join(
            f"{name}={fused.kinds[name]!r} of {fused.kinds[name].shape_words()}" for name in missing
        )
        raise OperandTypeError(f"the epilogue {fused.__name__} is called without {listed}; pass it by name")
    unknown = [name for name in given if name not in fused.kinds]
    if unknown:
        has = ", ".join(fused.kinds) or "none"
        raise OperandTypeError(
            f"the epilogue {fused.__name__} has no operand {', '.join(unknown)}; its operands are: {has}"
        )


def bound_operand(
    operand: Operand, kind: Kind, given: Any, sizes: Sizes, a: torch.Tensor, out_major: str
) -> Operand:
    """The operand with what is to be known of its tensor, which is checked. Scalars are checked only.

    Raises OperandTypeError, ProblemError, DeviceError.
    """
    name = operand.name
    if operand.is_scalar:
        _check_scalar(name, operand, given, a)
        return operand
    tensor = strided_tensor(given, name)
    check_written_out(tensor, name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    allowed = OPERAND_DTYPES if kind.dtype is None else (kind.dtype,)
    if dtype not in allowed:
        raise OperandTypeError(f"{name} has dtype {tensor.dtype}; {kind!r} takes {', '.join(allowed)}")
    if tensor.device != a.device:
        raise DeviceError(f"{name} lies on {tensor.device}, a and b on {a.device}; move it there")
    shape = sizes.shape(operand.modes, operand.width)
    batched = tensor.shape == (*sizes.lead, *shape) and sizes.l is not None
    if not batched and tensor.shape != shape:
        lead = "" if sizes.l is None else f", or {(*sizes.lead, *shape)} with a value for each product"
        hint = ""
        if tensor.shape == shape[::-1] and len(shape) == 2:
            hint = "; pass its transpose"
        raise ProblemError(
            f"{name} has shape {tuple(tensor.shape)}; {kind!r} is {kind.shape_words()}, here {shape}{lead}"
            + hint
        )
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ProblemError(
            f"{name} requires grad and this gemm has no backward; call it under torch.no_grad(), "
            f"or pass {name}.detach()"
        )
    access: Access = "direct"
    if operand.modes == "mn" and operand.width == FULL and _tma_can_load(tensor, out_major):
        access = "staged"
    return replace(operand, dtype=dtype, batched=batched, access=access)


def _tma_can_load(tensor: torch.Tensor, out_major: str) -> bool:
    """Whether its lines lie along the result's own, and start on 16-byte units."""
    contiguous = -1 if out_major == "n" else -2
    if tensor.stride(contiguous) != 1 or 0 in tensor.stride():
        return False
    rule = OperandRule("operand", ("M", "N"), tensor.dtype, out_major, "out_major")
    alignment = Alignment.of(rule, tensor)
    return alignment.start and alignment.lines and alignment.matrices


def _check_scalar(name: str, operand: Operand, given: Any, a: torch.Tensor) -> None:
    whole = operand.type == "int"
    words = "a whole number" if whole else "a number"
    if isinstance(given, torch.Tensor):
        if (
            given.dim() != 0
            or (whole and given.dtype not in (torch.int32, torch.int64))
            or given.is_complex()
        ):
            raise OperandTypeError(
                f"{name} is a tensor of shape {tuple(given.shape)} and {given.dtype}; pass {words}, or one "
                "without dimensions" + (" of int32 or int64" if whole else "")
            )
        if given.device.type != "cpu" and given.device != a.device:
            raise DeviceError(f"{name} lies on {given.device}, a and b on {a.device}; move it there")
        return
    if isinstance(given, bool) or not isinstance(given, int if whole else int | float):
        raise OperandTypeError(f"{name} is {given!r}; pass {words}, or a tensor without dimensions")
    if whole and given not in INT32:
        raise ProblemError(f"{name} is {given}; an epi.Integer has 32 bits, from {INT32[0]} to {INT32[-1]}")


def bound_operands(
    fused: Fused, given: Mapping[str, Any], sizes: Sizes, a: torch.Tensor, problem: GemmProblem
) -> tuple[Operand, ...]:
    """The epilogue's operands with the dtypes of a call's, every one of which is checked."""
    check_names(fused, given)
    if fused.epilogue.pairs and sizes.n % 2:
        raise ProblemError(
            f"N is {sizes.n}; the epilogue {fused.__name__} takes columns in pairs: N must be even"
        )
    return tuple(
        bound_operand(operand, fused.kinds[operand.name], given[operand.name], sizes, a, problem.out_major)
        for operand in fused.epilogue.operands
    )


def unstorable(further: Mapping[str, torch.Tensor], problem: GemmProblem) -> tuple[str, ...]:
    """Names of further outputs, matrices among them, that TMA cannot store in lines as the main one has."""
    contiguous = -1 if problem.out_major == "n" else -2
    return tuple(
        name
        for name, tensor in further.items()
        if tensor.dim() >= 2
        and (
            not _tma_can_load(tensor, problem.out_major)
            or tensor.shape[contiguous] * tensor.element_size() % TMA_ALIGNMENT
        )
    )


def default_epilogue(epilogue: Epilogue, dtype: str) -> Epilogue:
    """The epilogue for operands that are not there yet: dense, without a batch, of a dtype if of none yet."""
    return epilogue.bound(
        tuple(
            operand
            if operand.is_scalar
            else replace(
                operand,
                dtype=operand.dtype or dtype,
                access="staged" if operand.modes == "mn" and operand.width == FULL else "direct",
            )
            for operand in epilogue.operands
        )
    )


def further_output(
    output: Output,
    given: torch.Tensor | None,
    epilogue: Epilogue,
    sizes: Sizes,
    problem: GemmProblem,
    a: torch.Tensor,
) -> torch.Tensor:
    """The tensor of a further output: the one given, checked, or a new one."""
    dtype: torch.dtype = getattr(torch, output.dtype or problem.out_dtype)
    width = epilogue.graph.width(output)
    modes = {None: "mn", "row": "m", "col": "n"}[output.axis]
    shape = (*sizes.lead, *sizes.shape(modes, width))
    if given is None:
        return (
            dense_beside(a, shape, problem.out_major, dtype)
            if modes == "mn"
            else a.new_empty(shape, dtype=dtype)
        )
    tensor = strided_tensor(given, str(output.name))
    if tensor.dtype != dtype:
        raise OperandTypeError(f"{output.name} has dtype {tensor.dtype}, the epilogue gives {dtype}")
    if tuple(tensor.shape) != shape:
        raise ProblemError(f"{output.name} has shape {tuple(tensor.shape)}, the epilogue gives {shape}")
    if tensor.device != a.device:
        raise DeviceError(f"{output.name} lies on {tensor.device}, a and b on {a.device}; allocate it there")
    if overlaps_itself(tensor):
        raise ProblemError(
            f"{output.name} has strides {tensor.stride()}: its elements overlap; allocate it densely"
        )
    return tensor


def check_outputs_apart(
    outputs: Sequence[tuple[str, torch.Tensor, int]],
    inputs: Sequence[tuple[str, torch.Tensor]],
    operands: Sequence[tuple[Operand, Any]],
) -> None:
    """Refuses outputs that share memory with what is read, or with each other.

    outputs are (name, tensor, width). An operand may be an output itself: each element is read before it is
    written. Raises ProblemError.
    """
    for i, (name, tensor, width) in enumerate(outputs):
        for other, operand in inputs:
            _check_apart(name, tensor, other, operand)
        for other, second, _ in outputs[:i]:
            _check_apart(name, tensor, other, second)
        for declared, given in operands:
            if declared.is_scalar and not isinstance(given, torch.Tensor):
                continue
            same = (
                declared.modes == "mn"
                and declared.width == width
                and given.data_ptr() == tensor.data_ptr()
                and (given.shape, given.stride(), given.dtype)
                == (tensor.shape, tensor.stride(), tensor.dtype)
            )
            if not same:
                _check_apart(name, tensor, declared.name, given)


def _check_apart(name: str, tensor: torch.Tensor, other: str, operand: torch.Tensor) -> None:
    try:
        check_overlap(tensor, other, operand)
    except ProblemError as error:
        if name == "out":
            raise
        raise ProblemError(
            str(error).replace("out shares", f"{name} shares").replace("another out", "another")
        ) from None


def columns_words(width: int) -> str:
    """Columns of a matrix of a width, in letters."""
    return WIDTHS[width]


def as_argument(operand: Operand, given: Any, kept: list[Any]) -> tuple[Any, ...]:
    """What the compiled code gets for an operand; ``kept`` must outlive the call."""
    if not operand.is_scalar:
        return (given,)
    if not isinstance(given, torch.Tensor):
        return given, 0
    if given.device.type == "cpu":
        return given.item(), 0
    value = given.detach().to(torch.float32 if operand.type == "float" else torch.int32)
    kept.append(value)
    return 0, value.data_ptr()
