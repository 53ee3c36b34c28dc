"""What a fused product is held against: its epilogue's graph, evaluated by torch on the float32 product."""

from dataclasses import dataclass

import torch

from cutegemm.bench import accuracy
from cutegemm.bench.accuracy import MARGIN, TRUTH_ERROR, Errors, WrongResultError
from cutegemm.bench.inputs import Operands
from cutegemm.epilogue.interpreted import Interpreted
from cutegemm.epilogue.spec import Epilogue
from cutegemm.problem import GemmProblem


@dataclass(frozen=True)
class Judge:
    """Says what is right of plain products; see accuracy.py."""

    def truth(self, operands: Operands) -> torch.Tensor:
        """The result in float32."""
        return accuracy.truth_of(operands)

    def allowed(self, operands: Operands, truth: torch.Tensor) -> Errors:
        """The bound for these inputs."""
        return accuracy.allowed_errors(operands, truth)

    def check(self, out: torch.Tensor, truth: torch.Tensor, allowed: Errors) -> Errors:
        """The errors of a result. Raises WrongResultError."""
        return accuracy.check(out, truth, allowed)

    def check_written(self, out: torch.Tensor, truth: torch.Tensor) -> None:
        """WrongResultError if poison is left; truth: of other inputs."""
        accuracy.check_finite(out)


@dataclass(frozen=True)
class FusedJudge(Judge):
    """The same of a fused product's main output.

    An epilogue may give infinities and NaN, as masks do: a result must have the same in the same places. The
    bound is twice the error of what torch makes: a product rounded to A's dtype, and the epilogue of that.
    """

    epilogue: Epilogue

    def truth(self, operands: Operands) -> torch.Tensor:
        """See Judge."""
        return self._applied(accuracy.truth_of(operands), operands)

    def allowed(self, operands: Operands, truth: torch.Tensor) -> Errors:
        """See Judge."""
        finite = truth.isfinite()
        rounded = self._applied(torch.matmul(operands.a, operands.b).float(), operands)
        worst = Errors(0.0, 0.0)
        for value in (truth, rounded):
            settled = value.to(operands.out.dtype).float()
            both = finite & settled.isfinite()
            worst = worst.worst(accuracy.errors_of(_where(both, settled), _where(both, truth)))
        return Errors(MARGIN * worst.relative + TRUTH_ERROR, MARGIN * worst.largest + TRUTH_ERROR)

    def check(self, out: torch.Tensor, truth: torch.Tensor, allowed: Errors) -> Errors:
        """See Judge."""
        finite, result = truth.isfinite(), out.float()
        same = (result == truth) | (result.isnan() & truth.isnan())
        if not bool((finite | same).all()):
            raise WrongResultError("infinities or NaN in other places than the epilogue has them")
        return accuracy.check(_where(finite, result), _where(finite, truth), allowed)

    def check_written(self, out: torch.Tensor, truth: torch.Tensor) -> None:
        """See Judge; where the epilogue gives NaN itself, poison cannot be told."""
        if not bool(truth.isnan().any()) and bool(out.isnan().any()):
            raise WrongResultError(f"{int(out.isnan().sum())} of {out.numel()} elements are NaN: not written")

    def _applied(self, product: torch.Tensor, operands: Operands) -> torch.Tensor:
        result = Interpreted(self.epilogue).applied(product, **operands.beside)
        main: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return main


def _where(chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values chosen, 0 elsewhere; NaN and infinities elsewhere do not matter."""
    return values.masked_fill(~chosen, 0.0)


def judge_of(problem: GemmProblem) -> Judge:
    """The one for a problem."""
    return Judge() if problem.epilogue is None else FusedJudge(problem.epilogue)
