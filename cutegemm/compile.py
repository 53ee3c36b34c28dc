"""compile() and matmul(): from a shape or two tensors to a Gemm."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from cutegemm.config import GemmConfig
from cutegemm.epilogue.fuse import Fused
from cutegemm.epilogue.operands import default_epilogue
from cutegemm.errors import OperandTypeError, ProblemError, TargetError
from cutegemm.fingerprint import dsl_version
from cutegemm.fusedgemm import FusedGemm
from cutegemm.gemm import Gemm
from cutegemm.hardware import BUILT_TARGETS, current_target, normalise_target
from cutegemm.kernels import Fastest
from cutegemm.operands import check_kind, contiguous_mode, strided_tensor
from cutegemm.problem import DtypeLike, GemmProblem
from cutegemm.scheduler import TileScheduler


def compile(
    shape: Sequence[int | None],
    dtype: DtypeLike | Sequence[DtypeLike],
    *,
    out_dtype: DtypeLike | None = None,
    a_major: str = "k",
    b_major: str = "k",
    out_major: str = "n",
    epilogue: Fused | None = None,
    scheduler: TileScheduler | None = None,
    config: GemmConfig | Literal["autotune"] | None = None,
    target: str | None = None,
) -> Gemm:
    """A callable D = A @ B for one problem.

    shape       (M, N, K), or (L, M, N, K) for L independent products; None in a place = known at the call
    dtype       bfloat16 or float16 (a torch dtype, its name, or a short one: "bf16", "fp16", "half"), or a
                pair of the same; accumulation is float32
    out_dtype   bfloat16, float16 or float32; the inputs' dtype if None
    a_major     "k" or "m": the contiguous mode of A (M, K)
    b_major     "k" or "n": the contiguous mode of B (K, N); a row-major weight w (N, K) as w.t() is "k"
    out_major   "n" or "m": the contiguous mode of D (M, N)
    epilogue    a function made by ``cutegemm.epilogue.fuse``: what is done to the product before it is stored
    scheduler   order of tiles and assignment to workers; None: chosen with the configuration
    config      a GemmConfig; None: chosen by the heuristic; "autotune": measured on the current GPU, which
                takes some seconds the first time, and remembered on disk. All sizes must be known for it.
                Operands that are loaded in another way than dense ones get the heuristic's choice. With an
                epilogue the fused call is measured, with dense operands of A's dtype
    target      "sm_90a" (Hopper), "sm_100a" (Blackwell: B200, GB200), or None: the current GPU.
                Cross-compiling needs no GPU.

    Nothing is compiled before the first call, ``build()`` or a look at an artifact; the compiler is imported
    here when the cache does not hold the kernel.
    Raises ProblemError, OperandTypeError, ConfigError, TargetError, DeviceError, MissingDependencyError.
    """
    problem = GemmProblem.from_user(
        shape, dtype, out_dtype=out_dtype, a_major=a_major, b_major=b_major, out_major=out_major
    )
    if config is not None and config != "autotune" and not isinstance(config, GemmConfig):
        raise OperandTypeError(
            f"config={config!r}: pass a cutegemm.GemmConfig, None to have one chosen, "
            'or "autotune" to have the fastest measured'
        )
    if scheduler is not None and not isinstance(scheduler, TileScheduler):
        raise OperandTypeError(
            f"scheduler={scheduler!r}: pass a cutegemm.scheduler.TileScheduler(order, assignment)"
        )
    if epilogue is not None and not isinstance(epilogue, Fused):
        raise OperandTypeError(
            f"epilogue={epilogue!r}: pass a function decorated with @cutegemm.epilogue.fuse"
        )
    name = current_target() if target is None else normalise_target(target)
    if name not in BUILT_TARGETS:
        raise TargetError(f"there is no kernel for {name} yet; use one of: {', '.join(BUILT_TARGETS)}")
    dsl_version()
    chosen: GemmConfig | Fastest | None
    if config == "autotune":
        from cutegemm.tuning.tuner import autotuned  # brings in the bench

        bound = None if epilogue is None else default_epilogue(epilogue.epilogue, problem.a_dtype)
        chosen = autotuned(replace(problem, epilogue=bound), scheduler, name)
    else:
        chosen = config
    if epilogue is not None:
        return FusedGemm(problem, chosen, scheduler, name, epilogue).prepare()
    return Gemm(problem, chosen, scheduler, name).prepare()


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    epilogue: Fused | None = None,
    **operands: Any,
) -> Any:
    """a @ b with everything read off the tensors; the Gemm is kept for the next call of its kind.

    a (M, K) or (L, M, K), b (K, N) or (L, K, N): bfloat16 or float16 CUDA tensors with one contiguous mode
    among the last two. out: as for Gemm; a row-major tensor of the inputs' dtype is allocated if None.
    epilogue, operands: what is done to the product, and its operands by name, as for FusedGemm; further
    outputs come back beside the main one.
    Sizes are run-time values: a loop over shapes builds one kernel for each configuration the heuristic
    picks. Raises as compile and Gemm do.
    """
    if epilogue is None and operands:
        raise OperandTypeError(
            f"matmul has no argument {', '.join(operands)}; operands belong to an epilogue"
        )
    given = {"a": a, "b": b} if out is None else {"a": a, "b": b, "out": out}
    for name, tensor in given.items():
        if strided_tensor(tensor, name).dim() not in (2, 3):
            raise ProblemError(
                f"{name} has {tensor.dim()} dimensions; matmul takes 2, or 3 with a leading batch mode"
            )
    out_major = "n" if out is None else contiguous_mode(out, ("m", "n"))
    kind = (
        a.dim() == 3,
        (a.dtype, b.dtype),
        a.dtype if out is None else out.dtype,
        (contiguous_mode(a, ("m", "k")), contiguous_mode(b, ("k", "n")), out_major),
        a.get_device(),
        epilogue,
    )
    gemm = _gemms.get(kind)
    if gemm is None:
        for name, tensor in given.items():
            check_kind(tensor, name)
        gemm = _gemms.setdefault(kind, _gemm_for(*kind))
    return gemm(a, b, out=out) if epilogue is None else gemm(a, b, out=out, **operands)


_gemms: dict[tuple[Any, ...], Gemm] = {}  # those of matmul, by the kind of call


def _gemm_for(
    batched: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    majors: tuple[str, str, str],
    device: int,
    epilogue: Fused | None,
) -> Gemm:
    shape = (None,) * (4 if batched else 3)
    a_major, b_major, out_major = majors
    target = current_target(device if device >= 0 else None)
    return compile(
        shape,
        dtypes,
        out_dtype=out_dtype,
        a_major=a_major,
        b_major=b_major,
        out_major=out_major,
        epilogue=epilogue,
        target=target,
    )
