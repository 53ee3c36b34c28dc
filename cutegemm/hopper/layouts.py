"""Shared-memory layouts and MMA atoms of the sm_90a kernel, worked out from a HopperPlan."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.problem import GemmProblem

CUTE_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}

_MAJOR_MODE = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN, "n": OperandMajorMode.MN}


@dataclass(frozen=True)
class Layouts:
    """Everything static the kernel needs to know about where data sits.

    a_staged, b_staged    (tile_m, tile_k, stage) and (tile_n, tile_k, stage), swizzled
    tiled_mma             the WGMMA of all warpgroups that share a tile
    """

    a_staged: Any
    b_staged: Any
    tiled_mma: Any


def make_layouts(plan: HopperPlan, problem: GemmProblem) -> Layouts:
    """The operand layouts and the MMA of a plan; called while a kernel is traced."""
    config = plan.config
    dtype = CUTE_DTYPES[problem.a_dtype]
    tiled_mma = hopper_helpers.make_trivial_tiled_mma(
        dtype,
        dtype,
        _MAJOR_MODE[problem.a_major],
        _MAJOR_MODE[problem.b_major],
        cutlass.Float32,
        (plan.warpgroups_m, plan.warpgroups_n, 1),
        tiler_mn=(MMA_M, plan.warpgroup_n),
    )
    a_span = config.tile_k if problem.a_major == "k" else config.tile_m // config.cluster_n
    b_span = config.tile_k if problem.b_major == "k" else _common_span(plan)
    return Layouts(
        a_staged=_operand(dtype, (config.tile_m, config.tile_k), problem.a_major == "k", a_span, plan.stages),
        b_staged=_operand(dtype, (config.tile_n, config.tile_k), problem.b_major == "k", b_span, plan.stages),
        tiled_mma=tiled_mma,
    )


def chunk_layout(plan: HopperPlan, problem: GemmProblem, width: int):
    """(64, width, buffer): the output buffers of one warpgroup, seen as pieces ``width`` columns wide."""
    dtype = CUTE_DTYPES[problem.out_dtype]
    layout = LayoutEnum.ROW_MAJOR if problem.out_major == "n" else LayoutEnum.COL_MAJOR
    piece = hopper_helpers.make_smem_layout_epi(dtype, layout, (MMA_M, width), 1)
    buffer_elements = plan.store_buffer_bytes * 8 // dtype.width
    outer = cute.append(
        cute.select(piece.outer, mode=[0, 1]), cute.make_layout(plan.store_stages, stride=buffer_elements)
    )
    return cute.make_composed_layout(piece.inner, 0, outer)


def chunk_copy(problem: GemmProblem, width: int):
    """The register-to-shared copy of one (64, width) output piece by one warpgroup.

    16-bit outputs go through stmatrix, transposed when D is M-major; float32 through plain stores.
    """
    dtype = CUTE_DTYPES[problem.out_dtype]
    m_major = problem.out_major == "m"
    if dtype.width == 16:
        matrices = 4 if width % 16 == 0 else 2
        atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(m_major, matrices), dtype)
    else:
        bits = 32 if m_major else 64
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=bits)
    return cute.make_tiled_copy_C(atom, chunk_mma(problem, width))


def chunk_mma(problem: GemmProblem, width: int):
    """An MMA that names who holds what of a (64, width) piece; never executed."""
    dtype = CUTE_DTYPES[problem.a_dtype]
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, cutlass.Float32, (1, 1, 1), tiler_mn=(MMA_M, width)
    )


def _common_span(plan: HopperPlan) -> int:
    """Contiguous elements of N that no multicast slice and no warpgroup's share cuts through."""
    config = plan.config
    span = 64
    while config.tile_n % (span * plan.warpgroups_n) or config.tile_n % (span * config.cluster_m):
        span //= 2
    return span


def _operand(dtype: Any, tile: tuple[int, int], k_major: bool, span: int, stages: int):
    """(rows, k, stage) in the widest swizzle that divides the contiguous span."""
    layout = LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR
    kind = hopper_helpers.get_smem_layout_atom(layout, dtype, span)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2) if k_major else (1, 0, 2))
