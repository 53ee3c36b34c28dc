"""The one place that decides which way each operand of a call takes; its alignment alone decides.

TMA addresses units of 16 bytes: a tensor it moves begins on one, and so does every line and every matrix of
a batch. It loads from any element of such a tensor, and it reads nothing beyond the sizes it is told; but
it stores whole units, so that a stored line must end on one as well.
"""

from typing import NamedTuple

import torch

from cutegemm.epilogue.spec import scaled_size
from cutegemm.operands import OperandRule, operand_rules
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.parts.paths import LoadPath, Paths, StorePath
from cutegemm.problem import GemmProblem, dtype_bytes

Sizes = tuple[int | None, int | None, int | None, int | None]


class Alignment(NamedTuple):
    """Which of a tensor's addresses are multiples of 16 bytes: of the first element, of lines, of matrices.

    A stride along which there is one element only counts as a multiple.
    """

    start: bool
    lines: bool
    matrices: bool

    @classmethod
    def of(cls, rule: OperandRule, tensor: torch.Tensor) -> "Alignment":
        """That of a tensor that has passed the rule's checks."""
        element, shape, strides = tensor.element_size(), tensor.shape, tensor.stride()
        pitched = -1 if rule.rows_contiguous else -2
        start = tensor.data_ptr() % TMA_ALIGNMENT == 0
        lines = shape[pitched] <= 1 or strides[pitched] * element % TMA_ALIGNMENT == 0
        matrices = len(shape) == 2 or shape[0] <= 1 or strides[0] * element % TMA_ALIGNMENT == 0
        return cls(start, lines, matrices)


def load_path(alignment: Alignment) -> LoadPath:
    """How an operand is loaded; its matrices are aligned, or taken one at a time."""
    return "tma" if alignment.start and alignment.lines else "realigned"


def store_path(problem: GemmProblem, sizes: Sizes, alignment: Alignment | None) -> StorePath:
    """How a result of sizes (l, m, n, k) is written. Sizes not known, and None, count as aligned."""
    _, m, n, _ = sizes
    run = n if problem.out_major == "n" else m
    if run is not None and run * dtype_bytes(problem.out_dtype) % TMA_ALIGNMENT:
        return "direct"
    if alignment is not None and not (alignment.start and alignment.lines and alignment.matrices):
        return "direct"
    return "tma"


def expected_paths(problem: GemmProblem) -> Paths:
    """The paths of dense tensors of the problem's sizes; sizes not known count as aligned.

    The result has the columns that an epilogue gives it.
    """

    def dense(contiguous: int | None) -> LoadPath:
        if contiguous is None or contiguous * dtype_bytes(problem.a_dtype) % TMA_ALIGNMENT == 0:
            return "tma"
        return "realigned"

    a = dense(problem.k if problem.a_major == "k" else problem.m)
    b = dense(problem.k if problem.b_major == "k" else problem.n)
    n = problem.n
    if n is not None and problem.epilogue is not None:
        n = scaled_size(n, problem.epilogue.width)
    return Paths(a, b, store_path(problem, (problem.l, problem.m, n, problem.k), None))


def paths_of(
    problem: GemmProblem, sizes: Sizes, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> Paths:
    """The paths of a call's tensors, which have passed every check; out: None for one as allocated."""
    a_rule, b_rule, out_rule = operand_rules(problem)
    stored = None if out is None else Alignment.of(out_rule, out)
    return Paths(
        load_path(Alignment.of(a_rule, a)),
        load_path(Alignment.of(b_rule, b)),
        store_path(problem, sizes, stored),
    )


def one_at_a_time(problem: GemmProblem, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the products of a batch are launched one by one: their matrices begin off TMA's units."""
    a_rule, b_rule, _ = operand_rules(problem)
    return not (Alignment.of(a_rule, a).matrices and Alignment.of(b_rule, b).matrices)
