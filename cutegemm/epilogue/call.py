"""A call with an epilogue: what is passed to the compiled code, and what is put together afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from cutegemm.epilogue.graph import FULL, Output
from cutegemm.epilogue.operands import Sizes, as_argument, further_output
from cutegemm.epilogue.spec import Epilogue, Operand
from cutegemm.gemm import LAUNCHED, Launch, outcome_word
from cutegemm.parts.paths import ALIGNED, Paths
from cutegemm.parts.plan import KernelPlan

if TYPE_CHECKING:
    from cutegemm.fusedgemm import FusedGemm


@dataclass(frozen=True)
class Call:
    """One checked call.

    epilogue   with the dtypes of the operands
    sizes      (l, m, n, k)
    paths      how a and b are loaded and the result is written
    tensors    a, b and out; a and b are zeros of some depth where K is 0
    further    further outputs by name
    operands   by name, scalars' defaults included
    """

    epilogue: Epilogue
    sizes: tuple[int, int, int, int]
    paths: Paths
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    further: dict[str, torch.Tensor]
    operands: Mapping[str, Any]

    @property
    def result(self) -> Any:
        """What the caller gets: out, or (out, {"name": further})."""
        return (self.tensors[2], self.further) if self.further else self.tensors[2]


@dataclass(frozen=True)
class Parts:
    """The tensors a kernel writes beside its main output, and the reductions to be finished from them.

    A warp reduces what it holds of a row or a column in registers and writes it to a place of its own; the
    places of a row or column are put together here, in an order that does not depend on who came first.
    """

    tensors: tuple[torch.Tensor, ...]
    reductions: tuple[tuple[Output, torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(
        cls,
        epilogue: Epilogue,
        further: Mapping[str, torch.Tensor],
        plan: KernelPlan,
        sizes: tuple[int, int, int, int],
    ) -> "Parts":
        """For further outputs that are there already. sizes: (l, m, n, k)."""
        tensors, reductions = [], []
        for output in epilogue.further:
            final = further[str(output.name)]
            if output.reduction is None:
                tensors.append(final)
                continue
            parts = _room_for_parts(output, final, plan, sizes)
            tensors.append(parts)
            reductions.append((output, parts, final))
        return cls(tuple(tensors), tuple(reductions))

    def finish(self) -> None:
        """Puts the parts of every reduction together."""
        for output, parts, final in self.reductions:
            along = -1 if output.axis == "row" else -2
            if output.reduction in ("max", "amax"):
                torch.amax(parts, along, out=final)
            else:
                torch.sum(parts, along, out=final)


def _room_for_parts(
    output: Output, final: torch.Tensor, plan: KernelPlan, sizes: tuple[int, int, int, int]
) -> torch.Tensor:
    """(L, M, part) for sums along rows, (L, part, N) for sums along columns."""
    _, m, n, _ = sizes
    along_rows = output.axis == "row"
    reduced = n if along_rows else m
    # The kernel's columns are the user's unless it computes D^T.
    over_columns = along_rows != plan.config.swap_ab
    count = plan.parts_of_row(reduced) if over_columns else plan.parts_of_column(reduced)
    lead, kept = final.shape[:-1], final.shape[-1]
    return final.new_empty((*lead, kept, count) if along_rows else (*lead, count, kept))


def emulated_argument(operand: Operand, given: Any, out_major: str) -> tuple[Any, ...]:
    """What the emulator gets for an operand; tensors without dimensions count as lying on the GPU."""
    from cutegemm.emulator.arguments import Addresses
    from cutegemm.emulator.host import TensorArgument

    if not operand.is_scalar:
        unit = None if operand.access == "direct" else -1 if out_major == "n" else -2
        return (TensorArgument(given, unit),)
    if not isinstance(given, torch.Tensor):
        return given, 0
    value = given.detach().to(torch.float32 if operand.type == "float" else torch.int32)
    return 0, Addresses(value.data_ptr(), {operand.name: value})


class ReadyCall:
    """A kind of call that was checked once: the repeated one costs what passing its tensors costs."""

    def __init__(self, gemm: "FusedGemm", call: Call, launch: Launch) -> None:
        """call: the first of its kind."""
        self.problem, self.epilogue, self.sizes, self.launch = gemm.problem, call.epilogue, call.sizes, launch
        defaults = gemm.fused.defaults
        self._operands = tuple((one, one.name, defaults.get(one.name)) for one in call.epilogue.operands)
        # What the compiled host code takes as it comes: pitches of matrices, one of which may be the output's
        # own, and sizes of half or twice N.
        self._pitches = tuple(
            (one.name, call.operands[one.name].stride())
            for one in call.epilogue.operands
            if one.modes == "mn"
        )
        self._out_pitches = call.tensors[2].stride() if self._pitches else None
        self._shapes = tuple(
            (one.name, call.operands[one.name].shape)
            for one in call.epilogue.operands
            if not one.is_scalar and one.width != FULL
        )

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: dict[str, Any]
    ) -> Any:
        """The result; None if this is another kind of call, or the host code refused the launch."""
        arguments: list[Any] = []
        kept: list[torch.Tensor] = []
        given_names, tracked = 0, a.requires_grad or b.requires_grad
        for operand, name, default in self._operands:
            given: Any = operands.get(name)
            if given is None:
                given = default
            else:
                given_names += 1
            if operand.modes:
                arguments.append(given)
                tracked = tracked or given.requires_grad
            elif type(given) is float or type(given) is int:
                arguments += (given, 0)
            else:
                arguments += as_argument(operand, given, kept)
        if given_names != len(operands):
            return None
        for name, stride in self._pitches:
            if operands[name].stride() != stride:
                return None
        if self._out_pitches is not None and out is not None and out.stride() != self._out_pitches:
            return None
        for name, shape in self._shapes:
            if operands[name].shape != shape:
                return None
        result = self.launch.new_result() if out is None else out
        if (tracked or result.requires_grad) and torch.is_grad_enabled():
            return None  # the thorough checks say whose gradient there would have to be
        if self.epilogue.further:
            further = self._allocated(a)
            call = Call(self.epilogue, self.sizes, ALIGNED, (a, b, result), further, operands)
            launched = self._launched(call, self.launch.record_address, arguments)
            return (result, further) if launched == LAUNCHED else None
        outcome, address = outcome_word.both
        self.launch.function(a, b, result, self.launch.record_address, address, *arguments)
        return result if outcome.value == LAUNCHED else None

    def launch_checked(self, call: Call) -> int:
        """Launches a call that passed every check, the exact ones for overlap too; an Outcome."""
        arguments: list[Any] = []
        kept: list[torch.Tensor] = []
        for operand, name, _ in self._operands:
            given = call.operands[name]
            arguments += as_argument(operand, given, kept) if operand.is_scalar else (given,)
        return self._launched(call, self.launch.disjoint_record_address, arguments)

    def _launched(self, call: Call, record: int, arguments: list[Any]) -> int:
        """An Outcome; reductions are finished."""
        parts = Parts.of(self.epilogue, call.further, cast(KernelPlan, self.launch.plan), call.sizes)
        outcome, address = outcome_word.both
        self.launch.function(*call.tensors, record, address, *arguments, *parts.tensors)
        launched = int(outcome.value)
        if launched == LAUNCHED:
            parts.finish()
        return launched

    def _allocated(self, a: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, m, n, _ = self.sizes
        sizes = Sizes(batch if self.problem.batched else None, m, n)
        return {
            str(output.name): further_output(output, None, self.epilogue, sizes, self.problem, a)
            for output in self.epilogue.further
        }
