"""Tensors as the compiler's runtime wraps them (``from_dlpack``): they know what is dynamic in them."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cutegemm.emulator.faults import HostCodeError
from cutegemm.emulator.memory import Region


@dataclass(frozen=True)
class Addresses:
    """An argument that holds addresses, as that of a grouped product, and the tensors they lead to.

    targets   CPU tensors, or such tensors by the names they have in reports
    """

    argument: Any
    targets: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]

    def named(self, number: int) -> dict[str, torch.Tensor]:
        """The targets by name, this being the argument of a number."""
        if isinstance(self.targets, Mapping):
            return dict(self.targets)
        return {f"tensor {i} behind argument {number}": target for i, target in enumerate(self.targets)}


def is_runtime_tensor(argument: Any) -> bool:
    """Whether it is such a tensor."""
    return all(hasattr(argument, name) for name in ("__c_pointers__", "data_ptr", "shape", "stride"))


def runtime_bytes(argument: Any, size: int) -> bytes:
    """The struct that is passed for it: pointer, and those sizes and strides that are dynamic."""
    return ctypes.string_at(argument.__c_pointers__()[0], size)


def runtime_region(name: str, argument: Any) -> Region:
    """The memory it lies in. Raises HostCodeError if that is a GPU's."""
    if "generic" not in str(argument.memspace):
        raise HostCodeError(f"{name} lies in {argument.memspace}; the emulator takes tensors of CPU memory")
    first = int(argument.data_ptr)
    unit = max(1, argument.element_type.width // 8)
    span = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride, strict=True))
    size = (span + 1) * unit
    data = np.frombuffer((ctypes.c_uint8 * size).from_address(first), dtype=np.uint8)
    return Region(name, first, data, first, first + size, unit)
