"""cutegemm: GEMM kernels for Hopper GPUs, written in CuTe DSL and compiled at first call.

gemm = cutegemm.compile((4096, 4096, 7168), torch.bfloat16)
d = gemm(a, b)                      # a (M, K), b (K, N); d = a @ b
"""

from cutegemm.dependencies import missing_dependency
from cutegemm.errors import CutegemmError, MissingDependencyError

try:
    from cutegemm import epilogue, scheduler
    from cutegemm.compile import compile, matmul
    from cutegemm.config import GemmConfig
    from cutegemm.gemm import Gemm
    from cutegemm.problem import GemmProblem
except ModuleNotFoundError as error:
    _missing = str(missing_dependency(error))

    # The command line is part of the package and has to come up all the same: doctor says what is not there.
    def __getattr__(name: str) -> object:
        if name in __all__:
            raise MissingDependencyError(_missing)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = ["CutegemmError", "Gemm", "GemmConfig", "GemmProblem", "compile", "epilogue", "matmul", "scheduler"]
