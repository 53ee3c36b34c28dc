"""The measuring machine behind an interface: what the bench needs of a GPU, and nothing else.

``CudaGpu`` (cuda.py) is the real one; tests put a clock of their own in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cutegemm.errors import DeviceError

Launch = Callable[[], object]


class DeviceLostError(DeviceError):
    """The GPU cannot be used by this process any more: a kernel hangs, or wrote where it must not.

    ``implementation`` names what ran last.
    """

    implementation: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """What the results say about the machine. ``power_limit_w`` is None where the driver does not tell."""

    name: str
    driver: str
    sms: int
    l2_bytes: int
    memory_bytes: int
    power_limit_w: float | None


class Recording(Protocol):
    """Captured launches that can be run again."""

    def replay(self) -> None:
        """Runs the launches without timing them; returns before they end."""

    def replay_us(self) -> float:
        """GPU microseconds of all launches together, the GPU warmed up by an untimed replay just before."""


class Gpu(Protocol):
    """A GPU that can record launches and time them."""

    @property
    def device(self) -> torch.device:
        """Where operands live."""

    def facts(self) -> GpuFacts:
        """What it is."""

    def free_bytes(self) -> int:
        """Device memory that can be allocated now."""

    def record(self, launches: Sequence[Launch]) -> Recording:
        """Captures the launches in order, after a few warm-up calls outside the capture."""

    def wait(self) -> None:
        """Until all work submitted has ended; DeviceLostError if it does not, or failed for good."""

    def pause(self, milliseconds: float) -> None:
        """Lets the GPU idle."""

    def release(self) -> None:
        """Gives unused memory back between shapes."""


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
