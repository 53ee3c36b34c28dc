"""How operands get into shared memory and results out of it. No compiler needed."""

from dataclasses import dataclass
from typing import Literal

# "tma"        as TMA loads it: address and pitches are multiples of 16 bytes
# "realigned"  TMA into a staging buffer, one line in eight at a time, and shifted into place from there
LoadPath = Literal["tma", "realigned"]

# "tma"     through shared memory
# "direct"  from registers, each element under its own bounds check, for what TMA cannot address
StorePath = Literal["tma", "direct"]


@dataclass(frozen=True)
class Paths:
    """The ways of one kernel's operands; a kernel is built for one combination.

    a, b    loads of A and B
    store   the store of D
    """

    a: LoadPath = "tma"
    b: LoadPath = "tma"
    store: StorePath = "tma"

    def swapped(self) -> "Paths":
        """Those of the transposed product."""
        return Paths(self.b, self.a, self.store)

    def __str__(self) -> str:
        return f"A {self.a}, B {self.b}, D {self.store}"


ALIGNED = Paths()
