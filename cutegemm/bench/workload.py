"""What is measured: one GEMM shape, its arithmetic, and how its inputs rotate so that the L2 stays cold."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cutegemm.errors import ProblemError
from cutegemm.problem import GemmProblem, dtype_bytes

#: Tiny problems would need tens of thousands of input sets; with this many instead, the L2 is not cold.
MAX_SETS = 4096
#: Most kernel nodes of one graph: enough for 10 ms of the shortest kernels there are.
MAX_CALLS = 8192


@dataclass(frozen=True)
class Case:
    """One line of a benchmark: a problem with every size known, and the name a suite gives it."""

    problem: GemmProblem
    label: str = ""

    def __post_init__(self) -> None:
        p = self.problem
        if not p.is_static or min(self.batches, self.m, self.n, self.k) < 1:
            raise ProblemError(f"cannot measure {p}: give every size, each at least 1")

    @property
    def batches(self) -> int:
        """Independent products; 1 without a batch mode."""
        return self.problem.l or 0

    @property
    def m(self) -> int:
        """Rows of D."""
        return self.problem.m or 0

    @property
    def n(self) -> int:
        """Columns of D."""
        return self.problem.n or 0

    @property
    def k(self) -> int:
        """Length of the products."""
        return self.problem.k or 0

    @property
    def shape(self) -> str:
        """M x N x K as text, L x in front where there is a batch mode."""
        return f"{self.batches}x" * self.problem.batched + f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * self.batches * self.m * self.n * self.k

    @property
    def input_bytes(self) -> int:
        """Bytes of A and B."""
        p = self.problem
        one = self.m * self.k * dtype_bytes(p.a_dtype) + self.k * self.n * dtype_bytes(p.b_dtype)
        return self.batches * one

    @property
    def bytes(self) -> int:
        """Fewest bytes device memory must move: A and B read once, D written once."""
        return self.input_bytes + self.batches * self.m * self.n * dtype_bytes(self.problem.out_dtype)


def as_cases(
    shapes: Iterable[Case | GemmProblem | Sequence[int]],
    dtype: str = "bfloat16",
    *,
    out_dtype: str | None = None,
    a_major: str = "k",
    b_major: str = "k",
) -> list[Case]:
    """Cases from (M, N, K) tuples, problems or cases; dtype and majors apply to the tuples only.

    Raises ProblemError or OperandTypeError for what no kernel takes.
    """
    cases = []
    for shape in shapes:
        if isinstance(shape, Case):
            cases.append(shape)
        elif isinstance(shape, GemmProblem):
            cases.append(Case(shape))
        else:
            problem = GemmProblem.from_user(
                shape, dtype, out_dtype=out_dtype, a_major=a_major, b_major=b_major
            )
            cases.append(Case(problem))
    return cases


@dataclass(frozen=True)
class Ceilings:
    """The two rates no kernel can pass: device-memory bytes and tensor-core operations per second."""

    copy_bytes_per_s: float
    flops_per_s: float
    source: str

    def floor_us(self, case: Case) -> float:
        """Microseconds below which no implementation of ``case`` can come."""
        return 1e6 * max(case.bytes / self.copy_bytes_per_s, case.flops / self.flops_per_s)


#: Rates reached on real machines (data-sheet rates are never reached, so they make no honest floor).
KNOWN_CEILINGS = {
    "NVIDIA H200": Ceilings(
        4.14e12, 830e12, "copy rate and best bf16 rate measured on an NVIDIA H200 (700 W)"
    ),
}


@dataclass(frozen=True)
class Rotation:
    """How many input sets a shape cycles through, and whether that keeps the L2 cold."""

    sets: int
    cold: bool


def rotation_of(
    case: Case, *, rotate_bytes: int, l2_bytes: int, free_bytes: int, share: float = 0.5
) -> Rotation:
    """Input sets so that A and B of all of them exceed both ``rotate_bytes`` and twice the L2.

    At least two sets, so that no call finds the end of its own last run in the L2. A ``share`` of the free
    memory and MAX_SETS bound the number; where they do, ``cold`` is False.

    Raises ProblemError if not even one set fits.
    """
    must_exceed = max(rotate_bytes, 2 * l2_bytes)
    wanted = max(2, must_exceed // case.input_bytes + 1)
    limit = min(MAX_SETS, int(share * free_bytes) // case.bytes)
    if limit < 1:
        raise ProblemError(
            f"{case.shape} takes {case.bytes / 2**30:.1f} GiB, more than {share:.0%} of the "
            f"{free_bytes / 2**30:.1f} GiB of free GPU memory; measure a smaller shape or free memory"
        )
    return Rotation(min(wanted, limit), cold=limit >= wanted)


def calls_per_replay(sets: int, call_us: float, replay_ms: float) -> int:
    """Calls captured in one graph: about ``replay_ms`` of work, in whole turns of the input sets."""
    calls = math.ceil(1e3 * replay_ms / max(call_us, 0.1))
    turns = max(1, math.ceil(min(calls, MAX_CALLS) / sets))
    return turns * sets
