"""What can be measured: cutegemm itself and the libraries next to it, as plug-in objects.

An implementation has a name, says why it cannot run here, and prepares a function (a, b, out) for a problem.
Another peer is another such object, given to ``run_suite(peers=[...])``.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cutegemm.bench.accuracy import torch_product
from cutegemm.bench.inputs import Operands
from cutegemm.bench.workload import Case
from cutegemm.config import GemmConfig
from cutegemm.errors import ProblemError
from cutegemm.scheduler import TileScheduler

Product = Callable[..., object]  # of a, b, out; of an epilogue's operands by name


@dataclass(frozen=True)
class Prepared:
    """A function (a, b, out) for one problem, and the configuration it uses where there is one to tell."""

    product: Product
    config: str = ""


@dataclass(frozen=True)
class Variant:
    """What of a kernel is fixed; the heuristic chooses what is None."""

    config: GemmConfig | None = None
    scheduler: TileScheduler | None = None

    def __str__(self) -> str:
        words = "heuristic" if self.config is None else str(self.config)
        return words if self.scheduler is None else f"{words}, tiles by {self.scheduler}"


class Implementation(Protocol):
    """Something that multiplies matrices on the GPU."""

    @property
    def name(self) -> str:
        """As it stands in tables and JSON."""

    @property
    def ours(self) -> bool:
        """Whether a failure is cutegemm's own."""

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""

    def prepare(self, case: Case) -> Prepared:
        """What is called for this problem; raises for a problem it does not take."""


@dataclass(frozen=True)
class Ours:
    """cutegemm with a GemmConfig, a Variant, or with what the heuristic chooses (``config=None``)."""

    name: str = "cutegemm"
    config: Any = None
    ours: bool = True

    def available(self) -> str | None:
        """Always."""
        return None

    def prepare(self, case: Case) -> Prepared:
        """Compiles the kernel."""
        gemm = compile_case(case, self.config)

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **beside: Any) -> object:
            return gemm(a, b, out=out, **beside)

        return Prepared(product, str(gemm.config))


def compile_case(case: Case, config: Any = None, target: str | None = None) -> Any:
    """``cutegemm.compile`` for a case; ``config`` is a GemmConfig, a Variant or None."""
    import cutegemm
    from cutegemm.epilogue.interpreted import Interpreted

    p = case.problem
    fixed = config if isinstance(config, Variant) else Variant(config)
    return cutegemm.compile(
        (case.batches, case.m, case.n, case.k) if p.batched else (case.m, case.n, case.k),
        (p.a_dtype, p.b_dtype),
        out_dtype=p.out_dtype,
        a_major=p.a_major,
        b_major=p.b_major,
        out_major=p.out_major,
        epilogue=None if p.epilogue is None else Interpreted(p.epilogue),
        scheduler=fixed.scheduler,
        config=fixed.config,
        target=target,
    )


def _check_plain(name: str, case: Case) -> None:
    """Raises ProblemError for what only cutegemm and torch take."""
    if case.problem.batched or case.problem.out_major != "n":
        raise ProblemError(f"{name} is measured on single products into a row-major D, not {case.problem}")


@dataclass(frozen=True)
class Cublas:
    """torch.mm."""

    name: str = "cublas"
    ours: bool = False

    def available(self) -> str | None:
        """Always."""
        return None

    def prepare(self, case: Case) -> Prepared:
        """Nothing to prepare."""
        return Prepared(lambda a, b, out: torch_product(Operands(a, b, out)))


@dataclass(frozen=True)
class DeepGemm:
    """DeepGEMM's bf16 kernels; they are generated and compiled at the first call of a shape."""

    name: str = "deepgemm"
    ours: bool = False

    def available(self) -> str | None:
        """Needs the package deep_gemm."""
        return _missing("deep_gemm")

    def prepare(self, case: Case) -> Prepared:
        """Takes bfloat16 only, any majors."""
        import deep_gemm

        _check_plain("DeepGEMM", case)
        if case.problem.a_dtype != "bfloat16" or case.problem.out_dtype not in ("bfloat16", "float32"):
            raise ProblemError(
                f"DeepGEMM takes bfloat16 operands and writes bfloat16 or float32, not {case.problem}"
            )
        return Prepared(lambda a, b, out: deep_gemm.bf16_gemm_nt(a, b.t(), out))


@dataclass(frozen=True)
class Quack:
    """QuACK's gemm: with its default configuration, or tuned at the first call (slow)."""

    tuned: bool = False
    ours: bool = False

    @property
    def name(self) -> str:
        """As it stands in tables and JSON."""
        return "quack-tuned" if self.tuned else "quack"

    def available(self) -> str | None:
        """Needs the package quack-kernels."""
        return _missing("quack")

    def prepare(self, case: Case) -> Prepared:
        """Takes what torch.mm takes."""
        from quack.gemm_interface import gemm

        _check_plain("QuACK", case)
        return Prepared(lambda a, b, out: gemm(a, b, out=out, out_dtype=out.dtype, tuned=self.tuned))


@dataclass(frozen=True)
class Triton:
    """A persistent TMA kernel in Triton, the best of a few tiles per shape (triton_peer.py)."""

    name: str = "triton"
    ours: bool = False

    def available(self) -> str | None:
        """Needs the package triton."""
        return _missing("triton")

    def prepare(self, case: Case) -> Prepared:
        """TMA needs rows of a multiple of 16 bytes."""
        from cutegemm.bench import triton_peer

        _check_plain("the Triton kernel", case)
        triton_peer.check(case)
        return Prepared(triton_peer.matmul)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"the package {module} is not installed"


PEERS: Mapping[str, Implementation] = {
    peer.name: peer for peer in (Cublas(), DeepGemm(), Quack(), Quack(tuned=True), Triton())
}
DEFAULT_PEERS = ("cublas", "deepgemm", "quack", "triton")


def choose_peers(names: Sequence[str | Implementation]) -> tuple[list[Implementation], list[str]]:
    """The implementations of these names that can run here, cuBLAS first and always, and a sentence for
    each that cannot.

    Raises ProblemError for an unknown name.
    """
    chosen: dict[str, Implementation] = {"cublas": PEERS["cublas"]}
    notes = []
    for name in names:
        if isinstance(name, str):
            if name not in PEERS:
                raise ProblemError(f"peer {name!r} is unknown; choose from {', '.join(PEERS)}")
            peer = PEERS[name]
        else:
            peer = name
        reason = peer.available()
        if reason is None:
            chosen[peer.name] = peer
        else:
            notes.append(f"{peer.name} was not measured: {reason}")
    return list(chosen.values()), notes


def our_variants(variants: Mapping[str, Any] | None) -> list[Implementation]:
    """One implementation per named GemmConfig or Variant (None: the heuristic's); that alone if none is."""
    if not variants:
        return [Ours()]
    return [Ours(name, config) for name, config in variants.items()]
