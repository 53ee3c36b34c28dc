"""The MMA and the shared-memory layouts of the sm_100a kernel, worked out from a BlackwellPlan."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.parts.tensors import CUTE_DTYPES
from cutegemm.problem import GemmProblem, dtype_bytes

MMA_K = 16  # of 16-bit elements, one MMA

_MAJOR_MODE = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN, "n": OperandMajorMode.MN}

# Swizzle atoms by the contiguous bytes they span, widest first.
_K_ATOMS = {
    128: tcgen05.SmemLayoutAtomKind.K_SW128,
    64: tcgen05.SmemLayoutAtomKind.K_SW64,
    32: tcgen05.SmemLayoutAtomKind.K_SW32,
    16: tcgen05.SmemLayoutAtomKind.K_INTER,
}
_MN_ATOMS = {
    128: tcgen05.SmemLayoutAtomKind.MN_SW128,
    64: tcgen05.SmemLayoutAtomKind.MN_SW64,
    32: tcgen05.SmemLayoutAtomKind.MN_SW32,
    16: tcgen05.SmemLayoutAtomKind.MN_INTER,
}


@dataclass(frozen=True)
class Layouts:
    """Everything static the kernel needs to know about where data sits.

    tiled_mma             the MMA of a CTA or a pair, (tile_m, tile_n, 16)
    a_staged, b_staged    one CTA's part of a tile, (mma, mma_m, mma_k, stage), swizzled
    """

    tiled_mma: Any
    a_staged: Any
    b_staged: Any


def make_layouts(plan: BlackwellPlan, problem: GemmProblem) -> Layouts:
    """The MMA and the operand layouts of a plan; called while a kernel is traced."""
    config = plan.config
    dtype = CUTE_DTYPES[problem.a_dtype]
    op = tcgen05.MmaF16BF16Op(
        dtype,
        cutlass.Float32,
        (config.tile_m, config.tile_n, MMA_K),
        cta_group(plan),
        tcgen05.OperandSource.SMEM,
        _MAJOR_MODE[problem.a_major],
        _MAJOR_MODE[problem.b_major],
    )
    tiled_mma = cute.make_tiled_mma(op)
    # What one CTA loads of a multicast is a whole number of atoms.
    a_span = config.tile_k if problem.a_major == "k" else plan.cta_m // config.cluster_n
    b_span = config.tile_k if problem.b_major == "k" else plan.cta_n // plan.teams_m
    a_shape = tiled_mma.partition_shape_A((config.tile_m, config.tile_k))
    b_shape = tiled_mma.partition_shape_B((config.tile_n, config.tile_k))
    return Layouts(
        tiled_mma,
        _staged(_atom(dtype, problem.a_major == "k", a_span), a_shape, plan.stages, problem.a_major == "k"),
        _staged(_atom(dtype, problem.b_major == "k", b_span), b_shape, plan.stages, problem.b_major == "k"),
    )


def cta_group(plan: BlackwellPlan) -> tcgen05.CtaGroup:
    """Whether one CTA or a pair computes a tile."""
    return tcgen05.CtaGroup.TWO if plan.config.mma_ctas == 2 else tcgen05.CtaGroup.ONE


def box_layout(plan: BlackwellPlan, problem: GemmProblem, width: int) -> Any:
    """(cta_m, width): what one TMA store writes, in shared memory, swizzled along D's contiguous mode."""
    n_major = problem.out_major == "n"
    dtype = CUTE_DTYPES[problem.out_dtype]
    atom = _atom(dtype, n_major, width if n_major else plan.cta_m)
    return cute.tile_to_shape(atom, (plan.cta_m, width), order=(0, 1) if n_major else (1, 0))


def box_ring(plan: BlackwellPlan, problem: GemmProblem, width: int) -> Any:
    """(cta_m, width, half, buffer): a warpgroup's output buffers, seen as boxes ``width`` columns wide."""
    box = box_layout(plan, problem, width)
    buffer_elements = plan.store_buffer_bytes // dtype_bytes(problem.out_dtype)
    halves = cute.make_layout(plan.halves, stride=plan.cta_m * width)
    buffers = cute.make_layout(plan.store_stages, stride=buffer_elements)
    outer = cute.append(cute.append(box.outer, halves), buffers)
    return cute.make_composed_layout(box.inner, 0, outer)


def _atom(dtype: Any, k_major: bool, span: int) -> Any:
    """The widest swizzle atom that divides ``span`` contiguous elements."""
    bytes_ = span * dtype.width // 8
    kinds = _K_ATOMS if k_major else _MN_ATOMS
    kind = next(kind for wide, kind in kinds.items() if bytes_ % wide == 0)
    return tcgen05.make_smem_layout_atom(kind, dtype)


def _staged(atom: Any, mma_shape: Any, stages: int, k_major: bool) -> Any:
    """Stages filled with atoms, the contiguous mode's neighbours last."""
    order = (1, 2, 3) if k_major else (2, 1, 3)
    return tcgen05.tile_to_mma_shape(atom, cute.append(mma_shape, stages), order=order)
