"""Products with a planted fault, for the tests of the fuzzer. Workers import them from here."""

import os
import time
from dataclasses import dataclass

import torch

from cutegemm.errors import ProblemError
from cutegemm.fuzz.case import Case
from cutegemm.fuzz.product import Ways

Tensor = torch.Tensor


@dataclass(frozen=True)
class TorchProduct:
    """torch's product with a float32 sum: right. The others below spoil what it does."""

    device: str = "cpu"
    target: str = "sm_90a"

    def __str__(self) -> str:
        return type(self).__name__

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        result = torch.matmul(a.float(), b.float()).to(getattr(torch, case.out_dtype))
        if out is None:
            return result
        return out.copy_(result)

    def ways(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None) -> Ways:
        return Ways("tma", "tma", "direct")


class WrongElement(TorchProduct):
    """One product is missing from one element of larger results."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        result = super().run(case, a, b, out, turn)
        if case.m >= 3 and case.n >= 5 and case.k >= 2:
            result[..., 2, 4] -= (a[..., 2, -1].float() * b[..., -1, 4].float()).to(result.dtype)
        return result


class WritesBeside(TorchProduct):
    """An element after a row's last is written where rows are not multiples of 8."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        result = super().run(case, a, b, out, turn)
        if out is not None and out.numel() and case.n % 8:
            last = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True))
            out.as_strided((1,), (1,), out.storage_offset() + last + 1).fill_(0.0)
        return result


class Leaks(TorchProduct):
    """K is rounded up to a multiple of 8 by what follows in memory, times 0."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        result = super().run(case, a, b, out, turn)
        if case.k % 8 and a.numel() and case.a is not None and case.a.strides[-1] == 1:
            beyond = a.as_strided((1,), (1,), a.storage_offset() + (case.m - 1) * a.stride(-2) + case.k)
            result[..., -1:, :] += (beyond * 0).to(result.dtype)
        return result


class WritesInput(TorchProduct):
    """B is scaled in place."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        result = super().run(case, a, b, out, turn)
        if case.n > 1 and b.numel():
            b[..., :1, :1] *= 2
        return result


class OtherBits(TorchProduct):
    """The second time one bit differs."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        result = super().run(case, a, b, out, turn)
        if turn and case.l is not None and result.numel():
            one = result[..., -1:, -1:]
            one.copy_(one * (1 + torch.finfo(result.dtype).eps))
        return result


class LeavesOut(TorchProduct):
    """The last column of D is not written."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        if out is not None and case.n >= 9:
            super().run(case, a, b[..., :-1], out[..., :-1], turn)
            return out
        return super().run(case, a, b, out, turn)


class ReturnsAnother(TorchProduct):
    """``out`` is left alone."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        return super().run(case, a, b, None, turn)


class Refuses(TorchProduct):
    """A start off 16 bytes is refused."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        if a.data_ptr() % 16:
            raise ProblemError(f"a starts {a.data_ptr() % 16} bytes past a multiple of 16")
        return super().run(case, a, b, out, turn)


class Stumbles(TorchProduct):
    """An error that is none of the library's."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        if case.out_dtype == "float32" and case.m > 6:
            raise KeyError("float32")
        return super().run(case, a, b, out, turn)


class Hangs(TorchProduct):
    """A long K never ends."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        if case.k > 5:
            time.sleep(1000)
        return super().run(case, a, b, out, turn)


class Dies(TorchProduct):
    """The process is gone."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        if case.n > 3:
            os._exit(3)
        return super().run(case, a, b, out, turn)


_calls: list[Case] = []


class Tires(TorchProduct):
    """Only a process that has done much fails."""

    def run(self, case: Case, a: Tensor, b: Tensor, out: Tensor | None, turn: int) -> Tensor:
        _calls.append(case)
        result = super().run(case, a, b, out, turn)
        if len(_calls) > 8:
            result += 1
        return result
