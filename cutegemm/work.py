"""What the cost models of all architectures are asked, and what they answer."""

from dataclasses import dataclass

import numpy as np

from cutegemm.epilogue.cost import bytes_per_element, cycles_per_element
from cutegemm.problem import GemmProblem, dtype_bytes

UNKNOWN_SIZE = 4096  # stands for a size known only at the call


@dataclass(frozen=True)
class Work:
    """A problem in numbers; sizes may be arrays, one for each row of a table."""

    m: int | np.ndarray
    n: int | np.ndarray
    k: int | np.ndarray
    batch: int = 1
    in_bytes: int = 2  # of an element of A and B
    out_bytes: float = 2  # of D, for each element of the product
    a_is_k: bool = True  # contiguous along K
    b_is_k: bool = True
    fused_cycles: float = 0.0  # of an SM, for what an epilogue does with an element
    fused_bytes: float = 0.0  # of matrices an epilogue reads and writes beside D, for each element

    @classmethod
    def of(cls, problem: GemmProblem) -> "Work":
        """Unknown M, N, K count as 4096, an unknown L as 1."""
        epilogue = problem.epilogue
        m, n, k = (UNKNOWN_SIZE if size is None else size for size in (problem.m, problem.n, problem.k))
        return cls(
            m,
            n,
            k,
            1 if problem.l is None else problem.l,
            dtype_bytes(problem.a_dtype),
            dtype_bytes(problem.out_dtype) * (2.0**epilogue.width if epilogue else 1),
            problem.a_major == "k",
            problem.b_major == "k",
            cycles_per_element(epilogue),
            bytes_per_element(epilogue, problem.out_dtype),
        )

    @property
    def bytes(self) -> np.ndarray | float:
        """What device memory moves at least."""
        inputs = (self.m * 1.0 * self.k + self.k * 1.0 * self.n) * self.in_bytes
        return self.batch * (inputs + self.m * 1.0 * self.n * (self.out_bytes + self.fused_bytes))


@dataclass(frozen=True)
class Cost:
    """The account of every row of a table, in SM cycles; see heuristic.Estimate for what each is."""

    tiles: np.ndarray
    waves: np.ndarray
    mma: np.ndarray
    fill: np.ndarray
    store: np.ndarray
    dram: np.ndarray
    reduce: np.ndarray
    total: np.ndarray
