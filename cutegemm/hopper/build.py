"""The sm_90a kernel, compiled for a plan."""

from functools import partial

from cutegemm.hopper.kernel import HopperGemm
from cutegemm.parts.build import build_kernel

# Neutral symbols: the assembler has been seen to choose differently by name.
HopperGemm.kernel.set_name_prefix("gemm_sm90a", remove_cutlass_symbol=True, keep_mangled_name=False)
HopperGemm.__call__.set_name_prefix("gemm_sm90a_host", remove_cutlass_symbol=True, keep_mangled_name=False)

build = partial(build_kernel, HopperGemm)
