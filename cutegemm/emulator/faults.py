"""What an emulated kernel can be guilty of, each as an exception that says where and why."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cutegemm.errors import CutegemmError


class EmulationError(CutegemmError, RuntimeError):
    """Base of everything the emulator reports about a kernel or about its own limits."""

    def located(self, source_of: Callable[[int], str]) -> "EmulationError":
        """The same error, its text naming the source line of each instruction next to its line of the PTX.

        source_of: "file:line" for a line of the PTX, "" where it is not known
        """

        def place(found: re.Match[str]) -> str:
            source = source_of(int(found[1]))
            return f"{found[0]}, {source}" if source else found[0]

        return type(self)(re.sub(r"\bPTX line (\d+)(?!, )", place, str(self)))


class UnknownInstructionError(EmulationError):
    """PTX the emulator does not execute; names the opcode and its line."""


class HostCodeError(EmulationError):
    """Host code the emulator cannot follow, or arguments that do not fit it."""


MAX_WARPS_LISTED = 48  # of a deadlock


@dataclass(frozen=True)
class Stuck:
    """Warps that cannot go on.

    blocked   those that wait for a barrier or the like
    others    those that do not
    polling   whether these read memory in a loop
    lines     a line for each warp, or for the first MAX_WARPS_LISTED of them
    """

    blocked: int
    others: int
    polling: bool
    lines: tuple[str, ...]

    @classmethod
    def together(cls, parts: "Sequence[Stuck]") -> "Stuck":
        """Those of several parts of a grid."""
        return cls(
            sum(part.blocked for part in parts),
            sum(part.others for part in parts),
            any(part.polling for part in parts),
            tuple(line for part in parts for line in part.lines),
        )

    def __str__(self) -> str:
        lines = [
            f"{self.blocked} warp(s) wait for what nobody left can supply"
            + (f", {self.others} poll memory that nobody writes" if self.polling else ""),
            *self.lines[:MAX_WARPS_LISTED],
        ]
        if self.blocked + self.others > MAX_WARPS_LISTED:
            lines.append(f"  and {self.blocked + self.others - MAX_WARPS_LISTED} more")
        return "\n".join(lines)


class DeadlockError(EmulationError):
    """No warp can ever go on; lists every waiting warp and what it waits for.

    stuck   what the text was made of, if it was made here
    """

    stuck: Stuck | None = None

    @classmethod
    def of(cls, stuck: Stuck) -> "DeadlockError":
        """The error about these warps."""
        error = cls(str(stuck))
        error.stuck = stuck
        return error


class RaceError(EmulationError):
    """Two accesses to the same memory with nothing that orders them."""


class UninitializedReadError(EmulationError):
    """Shared memory was read that nobody has written."""


class OutOfBoundsError(EmulationError):
    """An address outside of what the kernel was given, or misaligned for its access."""


class BarrierCountError(EmulationError):
    """A barrier received more arrivals than it expects, or was used before it was initialised."""


class ConvergenceError(EmulationError):
    """An instruction that all lanes of a warp must execute together was executed by some of them."""


class MisuseError(EmulationError):
    """An instruction used against its rules: tensor memory left allocated, an MMA issued by a whole warp."""
