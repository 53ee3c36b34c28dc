"""The sm_100a kernel, compiled for a plan."""

from functools import partial

from cutegemm.blackwell.kernel import BlackwellGemm
from cutegemm.parts.build import build_kernel

# Neutral symbols: the assembler has been seen to choose differently by name.
BlackwellGemm.kernel.set_name_prefix("gemm_sm100a", remove_cutlass_symbol=True, keep_mangled_name=False)
BlackwellGemm.__call__.set_name_prefix(
    "gemm_sm100a_host", remove_cutlass_symbol=True, keep_mangled_name=False
)

build = partial(build_kernel, BlackwellGemm)
