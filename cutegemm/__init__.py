"""cutegemm: GEMM kernels for Hopper and Blackwell, written in CuTe DSL and compiled at first call.

gemm = cutegemm.compile((4096, 4096, 7168), torch.bfloat16)
d = gemm(a, b)                      # a (M, K), b (K, N); d = a @ b
"""

from cutegemm import scheduler
from cutegemm.compile import compile, matmul
from cutegemm.config import GemmConfig
from cutegemm.errors import CutegemmError
from cutegemm.gemm import Gemm
from cutegemm.problem import GemmProblem

__version__ = "0.1.0"

__all__ = ["CutegemmError", "Gemm", "GemmConfig", "GemmProblem", "compile", "matmul", "scheduler"]
