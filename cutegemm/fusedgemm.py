"""FusedGemm: a Gemm whose product passes through an epilogue before it is stored."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cutegemm.alignment import Alignment, paths_of
from cutegemm.allocation import gpu_count
from cutegemm.callrecord import Outcome
from cutegemm.config import GemmConfig
from cutegemm.epilogue.call import Call, Parts, ReadyCall, emulated_argument
from cutegemm.epilogue.fuse import Fused
from cutegemm.epilogue.operands import (
    Sizes,
    bound_operands,
    check_outputs_apart,
    default_epilogue,
    further_output,
    unstorable,
)
from cutegemm.epilogue.spec import Epilogue, scaled_size
from cutegemm.errors import CutegemmError, DeviceError, OperandTypeError, ProblemError
from cutegemm.gemm import MAX_KNOWN_LAUNCHES, REFUSALS, Gemm, on_stream
from cutegemm.kernels import Fastest, Kernels
from cutegemm.operands import OperandRule, check_grad, check_out, operand_rules, read_sizes
from cutegemm.parts.limits import TMA_ALIGNMENT
from cutegemm.problem import GemmProblem
from cutegemm.residency import loading_allowed
from cutegemm.scheduler import TileScheduler


class FusedGemm(Gemm):
    """D = epilogue(A @ B) for one problem, callable on CUDA tensors. Made by ``cutegemm.compile``.

    Kernels depend on the dtypes of the operands, which are known at the first call: ``build``, ``ptx`` and
    the like show the one for dense operands of A's dtype where the epilogue names none.
    """

    def __init__(
        self,
        problem: GemmProblem,
        config: GemmConfig | Fastest | None,
        scheduler: TileScheduler | None,
        target: str,
        fused: Fused,
    ) -> None:
        self.fused = fused
        self._given = config, scheduler
        bound = default_epilogue(fused.epilogue, problem.a_dtype)
        super().__init__(replace(problem, epilogue=bound), config, scheduler, target)
        self._kinds: dict[Epilogue, Kernels] = {bound: self._kernels}
        self._ready: dict[Any, ReadyCall] = {}
        self._latest: ReadyCall | None = None  # where only operands can differ: tried before any look-up
        self._tensor_names = tuple(operand.name for operand in bound.operands if not operand.is_scalar)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        outputs: Mapping[str, torch.Tensor] | None = None,
        stream: torch.cuda.Stream | None = None,
        **operands: Any,
    ) -> Any:
        """out = epilogue(a @ b, operands) on the GPU the tensors lie on.

        a, b, out, stream   as for Gemm; out has the columns the epilogue gives it, and may be a Tile operand
                            itself
        outputs             tensors for further outputs, by name; those left out are allocated
        operands            the epilogue's, by name: see its kinds. Strides are free
        Returns out, or (out, {"name": further}). Raises what Gemm raises.
        """
        if stream is not None:
            with on_stream(stream, a):
                return self(a, b, out=out, outputs=outputs, **operands)
        error: Exception | None = None
        latest = self._latest
        if outputs is None:
            try:
                ready = latest or self._ready.get(self._call_key(a, b, out, operands))
                result = None if ready is None else ready.run(a, b, out, operands)
                if result is not None:
                    return result
            except CutegemmError:
                raise
            except REFUSALS as caught:
                error = caught
            if latest is not None:
                result = self._called_otherwise(latest, a, b, out, operands)
                if result is not None:
                    return result
        return self._first_call(a, b, (out, outputs or {}), operands, error)

    def emulate(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        outputs: Mapping[str, torch.Tensor] | None = None,
        **operands: Any,
    ) -> Any:
        """A call on CPU tensors, by running the PTX a GPU call would launch. Needs no GPU.

        Beside the operands take check, seed, resident, exact_sums, processes and progress, as Gemm.emulate
        does; an operand of the epilogue with one of these names comes first.
        Returns an Emulation with .out, .outputs (further outputs by name) and .trace.
        """
        from cutegemm.emulator.product import Circumstances

        of_emulator = set(Circumstances.__dataclass_fields__) - set(self.fused.kinds)
        chosen = {name: operands.pop(name) for name in of_emulator & set(operands)}
        call = self._checked(a, b, (out, outputs or {}), operands, "cpu")
        return self._emulated(call, Circumstances(**chosen))

    def _emulated(self, call: Call, circumstances: Any) -> Any:
        from cutegemm.emulator.product import Product, emulate_choice
        from cutegemm.emulator.run import Emulation
        from cutegemm.emulator.trace import Trace

        out = call.tensors[2]
        if 0 in call.sizes[:3]:
            return Emulation(out, call.further, Trace(), None)
        kernels = self._kernels_for(call.epilogue)
        gpu = self._gpu()
        choice, _ = kernels.built(kernels.problem.with_sizes(*call.sizes), gpu, call.paths)
        extras: list[Any] = []
        for operand in call.epilogue.operands:
            extras += emulated_argument(operand, call.operands[operand.name], self.problem.out_major)
        parts = Parts.of(call.epilogue, call.further, choice.plan(kernels.problem), call.sizes)
        extras += parts.tensors
        emulation = emulate_choice(
            kernels, gpu, Product(choice, call.sizes, call.tensors, tuple(extras)), circumstances
        )
        parts.finish()
        return replace(emulation, outputs=call.further)

    # --- calling on a GPU ------------------------------------------------------------------------------

    def _called_otherwise(self, tried: ReadyCall, a: Any, b: Any, out: Any, operands: dict[str, Any]) -> Any:
        """Tries the kind of call these operands make, if it is known and another one than was tried."""
        try:
            ready = self._ready.get(self._call_key(a, b, out, operands))
            if ready is None or ready is tried:
                return None
            result = ready.run(a, b, out, operands)
        except REFUSALS:
            return None  # the thorough checks come next, and say why
        if result is not None:
            self._latest = ready
        return result

    def _try_ready(self, key: Any, ready: ReadyCall) -> None:
        """The next call of this kind is tried with this; any call, where sizes and GPU are fixed."""
        self._ready[key] = ready
        if self._static and gpu_count() == 1:
            self._latest = ready

    def _first_call(
        self,
        a: Any,
        b: Any,
        results: tuple[Any, Mapping[str, Any]],
        operands: dict[str, Any],
        error: Exception | None,
    ) -> Any:
        """A new kind of call, or one the host code refused: every check, then the launch."""
        call = self._checked(a, b, results, operands, "cuda")
        if 0 in call.sizes[:3]:
            return call.result
        with loading_allowed():
            ready = self._prepared_call(call)
            launched = ready.launch_checked(call)
        if launched != Outcome.LAUNCHED:
            raise error or DeviceError(f"the launch was refused: {Outcome(launched).name}")
        if a.shape[-1]:
            self._try_ready(self._call_key(a, b, results[0], operands), ready)
        return call.result

    def _prepared_call(self, call: Call) -> ReadyCall:
        if len(self._ready) >= MAX_KNOWN_LAUNCHES:
            self._ready.clear()
            self._prepared.clear()
            self._latest = None
        a = call.tensors[0]
        kernels = self._kernels_for(call.epilogue)
        key = (a.get_device(), call.epilogue, call.sizes), call.paths
        launch = self._prepared.get(key)
        if launch is None:
            launch = self._launch_among(kernels, call.sizes, a.get_device(), call.paths)
            self._prepared[key] = launch
        return ReadyCall(self, call, launch)

    # --- checking and preparing ------------------------------------------------------------------------

    def _call_key(self, a: Any, b: Any, out: Any, operands: dict[str, Any]) -> Any:
        """What decides on the kernel of a call, addresses excepted: the host code asks for those."""
        key = [a.get_device(), a.shape, b.shape, tuple(operands)]
        if out is not None:
            key += (out.shape, out.stride())
        for name in self._tensor_names:
            tensor = operands[name]
            key += (tensor.shape, tensor.stride(), tensor.dtype)
        return tuple(key)

    def _kernels_for(self, epilogue: Epilogue) -> Kernels:
        kernels = self._kinds.get(epilogue)
        if kernels is None:
            problem = replace(self.problem, epilogue=epilogue)
            kernels = self._kinds.setdefault(epilogue, Kernels(problem, *self._given, self.target))
        return kernels

    def _checked(
        self, a: Any, b: Any, results: tuple[Any, Mapping[str, Any]], operands: dict[str, Any], device: str
    ) -> Call:
        """Every check of a call; allocates what is not given."""
        out, given = results
        l, m, n, k = read_sizes(self.problem, a, b, device)  # noqa: E741
        sizes = Sizes(l if self.problem.batched else None, m, n)
        operands = {**self.fused.defaults, **operands}
        epilogue = self.fused.epilogue
        bound = bound_operands(self.fused, operands, sizes, a, self.problem)
        columns = self._result_columns(n)
        if out is None:
            out = self._allocate(a, b)
        check_out(self.problem, out, a, b, columns)
        check_grad(a, b, out)
        further = {
            str(output.name): further_output(
                output, given.get(str(output.name)), epilogue, sizes, self.problem, a
            )
            for output in epilogue.further
        }
        unknown = set(given) - set(further)
        if unknown:
            raise OperandTypeError(
                f"outputs has {', '.join(sorted(unknown))}; the epilogue {self.fused.__name__} gives "
                f"{', '.join(further) or 'nothing but its main output'}"
            )
        matrices = {str(o.name): further[str(o.name)] for o in epilogue.further if o.reduction is None}
        epilogue = epilogue.bound(bound, unstorable(matrices, self.problem))
        widths = [epilogue.width, *(epilogue.graph.width(output) for output in epilogue.further)]
        named = [("out", out), *further.items()]
        check_outputs_apart(
            [(name, tensor, width) for (name, tensor), width in zip(named, widths, strict=True)],
            (("a", a), ("b", b)),
            [(operand, operands[operand.name]) for operand in epilogue.operands],
        )
        a_rule, b_rule, out_rule = operand_rules(self.problem, device)
        if 0 not in (l, m, n):
            out_rule.check_major(out)
            if k == 0:
                a, b = self._no_products(a, b)
            for rule, tensor in ((a_rule, a), (b_rule, b)):
                rule.check_major(tensor)
            if not out_rule.is_contiguous(out):
                raise ProblemError(
                    f"out has strides {out.stride()}: neither of its last two modes is contiguous; allocate "
                    "it densely or leave it out"
                )
            a, b = (_loadable(rule, tensor) for rule, tensor in ((a_rule, a), (b_rule, b)))
        paths = paths_of(self.problem, (l, m, columns, k), a, b, out)
        return Call(epilogue, (l, m, n, a.shape[-1]), paths, (a, b, out), further, operands)

    def _no_products(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros in place of operands without a K: their product is the sum of no products too."""
        depth = TMA_ALIGNMENT // a.element_size()
        units = [-(-size // depth) * depth for size in (a.shape[-2], b.shape[-1])]
        zeros = []
        for tensor, major, rows, columns in (
            (a, self.problem.a_major == "k", units[0], depth),
            (b, self.problem.b_major == "n", depth, units[1]),
        ):
            shape = (rows, columns) if major else (columns, rows)
            dense = tensor.new_zeros((*tensor.shape[:-2], *shape))
            zeros.append(dense if major else dense.transpose(-1, -2))
        return zeros[0][..., : a.shape[-2], :], zeros[1][..., : b.shape[-1]]

    def _result_columns(self, n: int) -> int:
        """Columns of the main output of a product of n."""
        return scaled_size(n, self.fused.epilogue.width)

    def __reduce__(self) -> tuple[Any, ...]:
        """How copy makes an equal FusedGemm; pickle asks that the epilogue's function can be imported."""
        return FusedGemm, (replace(self.problem, epilogue=None), *self._given, self.target, self.fused)

    def __hash__(self) -> int:
        return hash((self.problem, self._kernels.config, self.target))


def _loadable(rule: OperandRule, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy: with a contiguous mode, and matrices a multiple of 16 bytes apart."""
    tensor = rule.dense(tensor)
    return tensor if Alignment.of(rule, tensor).matrices else rule.copied(tensor)
