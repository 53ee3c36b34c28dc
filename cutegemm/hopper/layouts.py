"""Shared-memory layouts and MMA atoms of the sm_90a kernel, worked out from a HopperPlan."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutegemm.hopper.plan import MMA_M, HopperPlan
from cutegemm.parts.tensors import CUTE_DTYPES
from cutegemm.problem import GemmProblem, dtype_bytes

_MAJOR_MODE = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN, "n": OperandMajorMode.MN}


@dataclass(frozen=True)
class Layouts:
    """Everything static the kernel needs to know about where data sits.

    a_stage, b_stage      (tile_m, tile_k) and (tile_n, tile_k) of one stage, swizzled
    a_staged, b_staged    the same with a trailing stage mode
    tiled_mma             the WGMMA of all warpgroups that share a tile
    """

    a_stage: Any
    b_stage: Any
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
    a_k_major = problem.a_major == "k"
    b_k_major = problem.b_major == "k"
    a_atom = _operand_atom(
        dtype, a_k_major, config.tile_k if a_k_major else config.tile_m // config.cluster_n
    )
    b_atom = _operand_atom(dtype, b_k_major, config.tile_k if b_k_major else _common_span(plan))
    a_tile, b_tile = (config.tile_m, config.tile_k), (config.tile_n, config.tile_k)
    return Layouts(
        a_stage=_filled(a_atom, a_tile, a_k_major),
        b_stage=_filled(b_atom, b_tile, b_k_major),
        a_staged=_filled(a_atom, (*a_tile, plan.stages), a_k_major),
        b_staged=_filled(b_atom, (*b_tile, plan.stages), b_k_major),
        tiled_mma=tiled_mma,
    )


def chunk_piece(problem: GemmProblem, width: int) -> Any:
    """(64, width): one output piece in shared memory, swizzled along D's contiguous mode."""
    layout = LayoutEnum.ROW_MAJOR if problem.out_major == "n" else LayoutEnum.COL_MAJOR
    dtype = CUTE_DTYPES[problem.out_dtype]
    span = width if problem.out_major == "n" else MMA_M
    atom = warpgroup.make_smem_layout_atom(hopper_helpers.get_smem_layout_atom(layout, dtype, span), dtype)
    return _filled(atom, (MMA_M, width), problem.out_major == "n")


def chunk_layout(plan: HopperPlan, problem: GemmProblem, width: int) -> Any:
    """(64, width, buffer): the output buffers of one warpgroup, seen as pieces ``width`` columns wide."""
    piece = chunk_piece(problem, width)
    buffer_elements = plan.store_buffer_bytes // dtype_bytes(problem.out_dtype)
    outer = cute.append(piece.outer, cute.make_layout(plan.store_stages, stride=buffer_elements))
    return cute.make_composed_layout(piece.inner, 0, outer)


def chunk_copy(problem: GemmProblem, width: int) -> Any:
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


def chunk_load(problem: GemmProblem, width: int) -> Any:
    """The shared-to-register copy of one (64, width) piece of an operand that lies as an output of its dtype.

    16-bit operands come through ldmatrix, transposed when D is M-major; float32 through plain loads.
    """
    dtype = CUTE_DTYPES[problem.out_dtype]
    m_major = problem.out_major == "m"
    if dtype.width == 16:
        matrices = 4 if width % 16 == 0 else 2
        atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(m_major, matrices), dtype)
    else:
        bits = 32 if m_major else 64
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=bits)
    return cute.make_tiled_copy_C(atom, chunk_mma(problem, width))


def chunk_mma(problem: GemmProblem, width: int) -> Any:
    """An MMA that names who holds what of a (64, width) piece; never executed."""
    dtype = CUTE_DTYPES[problem.a_dtype]
    return hopper_helpers.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.K,
        cutlass.Float32,
        (1, 1, 1),
        tiler_mn=(MMA_M, width),
    )


def _common_span(plan: HopperPlan) -> int:
    """Contiguous elements of N that no multicast slice and no warpgroup's share cuts through."""
    config = plan.config
    span = 64
    while config.tile_n % (span * plan.warpgroups_n) or config.tile_n % (span * config.cluster_m):
        span //= 2
    return span


def _operand_atom(dtype: Any, k_major: bool, span: int) -> Any:
    """The widest swizzle atom that divides ``span`` contiguous elements."""
    layout = LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR
    return warpgroup.make_smem_layout_atom(hopper_helpers.get_smem_layout_atom(layout, dtype, span), dtype)


def _filled(atom: Any, shape: tuple[int, ...], second_contiguous: bool) -> Any:
    """A shape (rows, columns[, stage]) filled with atoms, the contiguous mode's neighbours last.

    The unstaged form is built as such rather than sliced from the staged one: the compiler aborts on
    slices whose row count is 8 mod 16.
    """
    order = (0, 1, 2) if second_contiguous else (1, 0, 2)
    return cute.tile_to_shape(atom, shape, order=order[: len(shape)])
