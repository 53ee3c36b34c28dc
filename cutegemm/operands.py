"""Checks of the tensors of one call, each with a sentence that says what to do.

They run once for every new combination of shapes, strides and devices; the repeated call relies on
the outcome and on the checks the launch itself makes (dtype, alignment of the address).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from cutegemm.errors import DeviceError, OperandTypeError, ProblemError
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.problem import INPUT_DTYPES, MAX_SIZE, OUTPUT_DTYPES, GemmProblem


@dataclass(frozen=True)
class OperandRule:
    """How one operand must look: its modes' names, dtype, and which of the last two is contiguous."""

    name: str
    modes: tuple[str, str]
    dtype: torch.dtype
    major: str
    major_argument: str
    device: str = "cuda"

    def check(self, tensor: Any, batched: bool) -> None:
        """Everything that concerns this tensor alone. Raises OperandTypeError, ProblemError, DeviceError."""
        tensor = strided_tensor(tensor, self.name)
        if tensor.dtype != self.dtype:
            raise OperandTypeError(
                f"{self.name} has dtype {tensor.dtype}, this gemm was compiled for {self.dtype}; "
                f"convert the tensor or compile for its dtype"
            )
        wanted = ("L", *self.modes) if batched else self.modes
        if tensor.dim() != len(wanted):
            raise ProblemError(
                f"{self.name} has {tensor.dim()} dimensions {tuple(tensor.shape)}; this gemm takes "
                f"({', '.join(wanted)})"
            )
        if tensor.device.type != self.device:
            where = "move it to the GPU with .cuda()"
            if self.device == "cpu":
                where = "the emulator takes CPU tensors, move it with .cpu()"
            raise DeviceError(f"{self.name} lies on {tensor.device}; {where}")

    def check_major(self, tensor: torch.Tensor) -> None:
        """The contiguous mode. Raises ProblemError."""
        rows, columns = self.modes
        first, second = tensor.stride()[-2:]
        if self.is_contiguous(tensor) or 1 not in (first, second):
            return  # a tensor with no contiguous mode is copied
        found = rows if first == 1 else columns
        raise ProblemError(
            f"{self.name} has strides {tensor.stride()}, this gemm was compiled for {self.major}-major "
            f'({self.major.upper()} contiguous); pass {self.major_argument}="{found.lower()}" to compile'
        )

    def is_contiguous(self, tensor: torch.Tensor) -> bool:
        """Whether the elements along the major mode lie side by side."""
        mode = -2 if self.rows_contiguous else -1
        return tensor.stride(mode) == 1 or tensor.shape[mode] <= 1

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if its major mode is contiguous and memory holds its values, else a copy."""
        return tensor if self.is_contiguous(tensor) and not tensor.is_neg() else self.copied(tensor)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with a contiguous major mode, lines and matrices a multiple of 16 bytes apart."""
        lines = tensor.mT if self.rows_contiguous else tensor
        unit = TMA_ALIGNMENT // tensor.element_size()
        length = lines.shape[-1]
        padded = tensor.new_empty((*lines.shape[:-1], -(-length // unit) * unit))[..., :length]
        padded.copy_(lines)
        return padded.mT if self.rows_contiguous else padded

    @functools.cached_property
    def rows_contiguous(self) -> bool:
        """Whether the first of the two modes is the contiguous one."""
        return self.major == self.modes[0].lower()


@functools.cache
def operand_rules(problem: GemmProblem, device: str = "cuda") -> tuple[OperandRule, OperandRule, OperandRule]:
    """The rules of a, b and out, which lie on a kind of device."""
    return (
        OperandRule("a", ("M", "K"), problem.a_torch, problem.a_major, "a_major", device),
        OperandRule("b", ("K", "N"), problem.b_torch, problem.b_major, "b_major", device),
        OperandRule("out", ("M", "N"), problem.out_torch, problem.out_major, "out_major", device),
    )


def check_call(
    problem: GemmProblem, a: Any, b: Any, out: Any, device: str = "cuda"
) -> tuple[int, int, int, int]:
    """(L, M, N, K) of a call whose operands passed every check.

    device: the kind of device all three must lie on. Raises OperandTypeError, ProblemError, DeviceError.
    """
    sizes = read_sizes(problem, a, b, device)
    check_out(problem, out, a, b)
    check_grad(a, b, out)
    if 0 not in sizes:
        a_rule, b_rule, out_rule = operand_rules(problem, device)
        for rule, tensor in ((a_rule, a), (b_rule, b), (out_rule, out)):
            rule.check_major(tensor)
    check_overlap(out, "a", a)
    check_overlap(out, "b", b)
    return sizes


def strided_tensor(tensor: object, name: str) -> torch.Tensor:
    """``tensor`` if it is a torch.Tensor with plain strides. Raises OperandTypeError otherwise."""
    if not isinstance(tensor, torch.Tensor):
        raise OperandTypeError(f"{name} is {type(tensor).__name__}; pass a torch.Tensor")
    if tensor.is_nested:
        raise OperandTypeError(f"{name} is a nested tensor; pass its parts, or pad them into one tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise OperandTypeError(f"{name} is not a plain strided tensor ({tensor.layout}); densify it first")
    return tensor


def check_written_out(tensor: torch.Tensor, name: str) -> None:
    """Refuses a view whose elements are the negatives of what lies in memory, as torch makes of conj().imag.

    Raises OperandTypeError.
    """
    if tensor.is_neg():
        raise OperandTypeError(f"{name} is a view that torch negates as it reads; pass {name}.resolve_neg()")


def check_kind(tensor: object, name: str) -> None:
    """Refuses what no kernel takes as ``name``, whatever the problem: by its class, dtype, then device.

    name: "a", "b" or "out". Raises OperandTypeError, DeviceError.
    """
    plain = strided_tensor(tensor, name)
    allowed = OUTPUT_DTYPES if name == "out" else INPUT_DTYPES
    if str(plain.dtype).removeprefix("torch.") not in allowed:
        raise OperandTypeError(
            f"{name} has dtype {plain.dtype}, kernels take {', '.join(allowed)}; convert it, e.g. with "
            f".to(torch.{allowed[0]})"
        )
    if plain.device.type != "cuda":
        raise DeviceError(f"{name} lies on {plain.device}; move it to the GPU with .cuda()")


def contiguous_mode(tensor: torch.Tensor, modes: tuple[str, str]) -> str:
    """Which of the last two modes of a matrix is contiguous; the second where both could be.

    The second as well where neither is: such a matrix is copied.
    """
    first, second = tensor.stride()[-2:]
    if second == 1 or tensor.shape[-1] == 1:
        if first == 1 and tensor.shape[-1] == 1 and tensor.shape[-2] > 1:
            return modes[0]
        return modes[1]
    if first == 1 or tensor.shape[-2] == 1:
        return modes[0]
    return modes[1]


def read_sizes(problem: GemmProblem, a: Any, b: Any, device: str = "cuda") -> tuple[int, int, int, int]:
    """(L, M, N, K) of a call, after checking a and b alone and against each other and the problem.

    Raises OperandTypeError, ProblemError, DeviceError.
    """
    a_rule, b_rule, _ = operand_rules(problem, device)
    a_rule.check(a, problem.batched)
    b_rule.check(b, problem.batched)
    if a.device != b.device:
        raise DeviceError(f"a lies on {a.device} and b on {b.device}; move them to one device")
    m, k = a.shape[-2:]
    k_b, n = b.shape[-2:]
    if k != k_b:
        hint = "; b is given as (K, N): pass a weight of shape (N, K) as w.t()" if n == k else ""
        raise ProblemError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: K differs, {k} and {k_b}{hint}")
    l_a, l_b = (a.shape[0], b.shape[0]) if problem.batched else (1, 1)
    if l_a != l_b:
        raise ProblemError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: L differs, {l_a} and {l_b}")
    given = {"L": l_a, "M": m, "N": n, "K": k}
    compiled = {"L": problem.l, "M": problem.m, "N": problem.n, "K": problem.k}
    for name, size in given.items():
        if compiled[name] is not None and compiled[name] != size:
            raise ProblemError(
                f"{name} is {size} in this call, the gemm was compiled for {name}={compiled[name]}; "
                f"compile for this shape, or with None in {name}'s place"
            )
        if size > MAX_SIZE:
            raise ProblemError(
                f"{name} is {size} in this call; a kernel's sizes go up to {MAX_SIZE}: split the product"
            )
    return l_a, m, n, k


def check_out(
    problem: GemmProblem, out: Any, a: torch.Tensor, b: torch.Tensor, columns: int | None = None
) -> None:
    """out against the problem and the inputs, all but overlap. columns: of the result; None: as b has.

    Raises OperandTypeError, ProblemError, DeviceError.
    """
    # The device first: a's own was checked before.
    rule = operand_rules(problem, a.device.type)[2]
    rule.check(out, problem.batched)
    check_written_out(out, "out")
    wanted = (*a.shape[:-1], b.shape[-1] if columns is None else columns)
    if tuple(out.shape) != wanted:
        raise ProblemError(
            f"out has shape {tuple(out.shape)}, the result has {wanted}; allocate it so or leave it out"
        )
    if out.device != a.device:
        raise DeviceError(
            f"out lies on {out.device}, a and b on {a.device}; allocate it there or leave it out"
        )
    if overlaps_itself(out):
        raise ProblemError(
            f"out has strides {out.stride()} for shape {tuple(out.shape)}: its elements overlap; "
            f"allocate it densely"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may name one element: some stride is no longer than what lies inside it."""
    if tensor.numel() == 0:
        return False
    modes = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    span = 0
    for stride, size in modes:
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False


def byte_span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to one past its last; 0 when it is empty. Strides are >= 0."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_overlap(out: torch.Tensor, name: str, operand: torch.Tensor) -> None:
    """Raises ProblemError if ``out`` shares memory with an operand, or may.

    Exact for matrices with one common pitch (columns or rows of one buffer); otherwise two byte ranges
    that intersect count as overlapping.
    """
    first, other = out.data_ptr(), operand.data_ptr()
    if first >= other + byte_span(operand) or other >= first + byte_span(out):
        return
    if _side_by_side(out, operand):
        return
    raise ProblemError(f"out shares memory with {name}: the result would be read as input; pass another out")


def _side_by_side(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two matrices occupy disjoint parts of every line of one pitched buffer."""
    if one.dim() != 2:
        return False
    pitches = {max(tensor.stride()) * tensor.element_size() for tensor in (one, two)}
    if len(pitches) != 1 or any(min(tensor.stride()) != 1 for tensor in (one, two)):
        return False
    pitch = pitches.pop()
    base = min(one.data_ptr(), two.data_ptr())
    ranges = []
    for tensor in (one, two):
        start = (tensor.data_ptr() - base) % pitch
        run = tensor.shape[tensor.stride().index(1)] * tensor.element_size()
        if start + run > pitch:
            return False
        ranges.append((start, start + run))
    (a0, a1), (b0, b1) = ranges
    return a1 <= b0 or b1 <= a0


def check_grad(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> None:
    """Raises ProblemError where autograd would expect a backward."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if tensor is not None and tensor.requires_grad:
            raise ProblemError(
                f"{name} requires grad and this gemm has no backward; call it under torch.no_grad(), "
                f"or pass {name}.detach()"
            )
