"""One case, tried: the worker process's part."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cutegemm.bench.gpu import DeviceLostError
from cutegemm.complaint import first_complaint
from cutegemm.emulator.faults import EmulationError
from cutegemm.errors import ConfigError, CutegemmError
from cutegemm.fuzz.case import Case
from cutegemm.fuzz.judge import complaints
from cutegemm.fuzz.memory import MARGIN, Placed, leave_poison, placed_input, placed_output
from cutegemm.fuzz.product import NOT_LAUNCHED, Product, Ways, is_lost

#: Kinds of failure; a run shrinks a failure to the smallest case of the same kind.
RIGHT, REFUSED = "right", "refused"
FAILURES = (
    "wrong numbers", "special values", "wrote outside", "wrote an input", "other bits", "wrong result",
    "fault", "error", "hang", "crash",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    kind      "right", "refused" where a clear error is right, or one of FAILURES
    message   what is wrong, in a sentence
    ways      how the operands travelled
    """

    kind: str
    message: str = ""
    ways: Ways = NOT_LAUNCHED

    @property
    def failed(self) -> bool:
        """Whether it is a failure."""
        return self.kind not in (RIGHT, REFUSED)


@dataclass(frozen=True)
class Start:
    """A worker's first job: to have everything ready, so that the time of a case is its own."""

    product: Product

    def run(self, send: Callable[[dict[str, Any]], None]) -> None:
        """See bench.worker.Job."""
        torch.zeros(1, device=self.product.device)
        send({"event": "ready"})


@dataclass(frozen=True)
class Trial:
    """A case to try in a worker; its answer is one event with the verdict.

    refusals   whether any CutegemmError counts as refused rather than as a failure
    margin     elements of memory around each operand
    """

    case: Case
    product: Product
    refusals: bool = False
    margin: int = MARGIN

    def run(self, send: Callable[[dict[str, Any]], None]) -> None:
        """See bench.worker.Job. Raises DeviceLostError where the process can go on no more."""
        send({"event": "verdict", "verdict": self.verdict()})

    def verdict(self) -> Verdict:
        """Tries it here and now."""
        with torch.no_grad(), warnings.catch_warnings():
            # A division by zero or a cast of NaN in the library's own arithmetic is worth knowing of.
            warnings.simplefilter("error", RuntimeWarning)
            operands = _Operands.of(self.case, torch.device(self.product.device), self.margin)
            ways = NOT_LAUNCHED
            try:
                ways = self.product.ways(self.case, *operands.tensors)
                kind, message = next(operands.run(self.product), (RIGHT, ""))
            except DeviceLostError:
                raise
            except EmulationError as error:
                kind, message = "fault", f"{type(error).__name__}: {error}"
            except CutegemmError as error:
                kind = REFUSED if self.refusals or _is_right(error, ways) else "error"
                message = f"{type(error).__name__}: {error}"
            except Exception as error:
                if is_lost(error):
                    raise DeviceLostError(str(error).splitlines()[0]) from error
                kind, message = "error", first_complaint(error)
        return Verdict(kind, message, ways)


def _is_right(error: CutegemmError, ways: Ways) -> bool:
    """Whether an error is the right answer: a configuration may have no kernel for the way operands lie."""
    return isinstance(error, ConfigError) and not ways.exist


@dataclass
class _Operands:
    """a, b and out of a case in memory."""

    case: Case
    device: torch.device
    a: Placed
    b: Placed
    out: Placed | None

    @classmethod
    def of(cls, case: Case, device: torch.device, margin: int) -> "_Operands":
        out = None if case.out is None else placed_output(case, device, margin)
        a, b = (placed_input(case, name, device, margin) for name in ("a", "b"))
        return cls(case, device, a, b, out)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.a.tensor, self.b.tensor, None if self.out is None else self.out.tensor

    def run(self, product: Product) -> Iterator[tuple[str, str]]:
        """(kind, sentence) for each thing that is wrong; runs the product once or twice."""
        a, b, out = self.tensors
        first = self._compute(product, 0)
        yield from self._form(first)
        yield from self._surroundings()
        yield from complaints(first, a, b)
        if not self._twice:
            return
        kept = first.clone()
        if out is not None:
            out.fill_(float("inf"))
        second = self._compute(product, 1)
        yield from self._surroundings()
        if self.case.is_repeatable:
            differing = int((_bits(kept) != _bits(second)).sum())
            if differing:
                yield "other bits", f"{differing} of {kept.numel()} elements differ when it is computed again"
        else:
            yield from complaints(second, a, b)

    @property
    def _twice(self) -> bool:
        """Always on a GPU; in the emulator, where it takes long, for every other case."""
        return self.device.type == "cuda" or self.case.seed % 2 == 1

    def _compute(self, product: Product, turn: int) -> torch.Tensor:
        if self.out is None:
            leave_poison(self.case, self.device)
        return product.run(self.case, *self.tensors, turn)

    def _form(self, result: torch.Tensor) -> Iterator[tuple[str, str]]:
        if self.out is not None and result is not self.out.tensor:
            yield "wrong result", "what is returned is not the out that was given"
        wanted = (self.case.shape("out"), getattr(torch, self.case.out_dtype), self.device.type)
        found = (tuple(result.shape), result.dtype, result.device.type)
        if found != wanted:
            yield "wrong result", f"shape, dtype and device are {found} instead of {wanted}"

    def _surroundings(self) -> Iterator[tuple[str, str]]:
        for name, operand in (("a", self.a), ("b", self.b)):
            if changed := operand.changed():
                yield "wrote an input", f"{changed} elements of {name} or around it were changed"
        if self.out is not None and (changed := self.out.changed_outside()):
            yield "wrote outside", f"{changed} elements around out were changed"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
