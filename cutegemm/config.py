"""GemmConfig: the answer to a GemmProblem. How one kernel is built, and the rules every target shares.

What makes a configuration legal on one architecture (shared memory, registers, swizzle) is worked
out in that architecture's plan module; a config is checked there before anything is compiled.
"""

from dataclasses import dataclass, replace
from typing import Literal

from cutegemm.errors import ConfigError, OperandTypeError
from cutegemm.problem import as_integer

Schedule = Literal["cooperative", "pingpong"]
SCHEDULES: tuple[Schedule, ...] = ("cooperative", "pingpong")


@dataclass(frozen=True)
class GemmConfig:
    """How a kernel divides the problem and the SM.

    tile_m, tile_n, tile_k   output tile of one CTA (of a pair, with mma_ctas=2) and the depth of one pipeline
                             stage, in elements
    cluster_m, cluster_n     CTAs of a cluster along M and N; they share operands through multicast
    consumers                warpgroups that hold accumulators: on sm_90a they issue MMAs, on sm_100a they
                             read the results of one warp's MMAs from tensor memory
    schedule                 "cooperative": all consumers work on one tile; "pingpong": each has its
                             own tile, one's epilogue runs under the other's main loop
    stages                   depth of the operand pipeline; None: as many as shared memory holds
    store_stages             output buffers of one consumer warpgroup; None: chosen with the stages
    swap_ab                  compute D^T = B^T A^T, so that the problem's N takes the MMA's M
    mma_ctas                 CTAs that compute a tile together: 2 for a pair, neighbours along M, that share
                             B's shared memory (sm_100a)

    On sm_90a: tile_m 64, 128, 192 or 256; tile_n a multiple of 8 up to 256; tile_k 64 or 128; clusters of 1
    or 2 along each mode; 1 or 2 consumers; 2 to 16 stages.
    On sm_100a: tile_m 64 or 128, of a pair 128 or 256; tile_n up to 256, a multiple of 8 (tile_m 64), 16 or,
    of a pair, 32; clusters of 1, 2 or 4 along M and 1 or 2 along N; "cooperative" only, since the epilogue
    runs under the next tile's MMAs in any case.
    What of that fits together is checked by ``compile``, which names the nearest legal value.

    Raises ConfigError for values no kernel has, OperandTypeError for a field that is no integer.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    consumers: int = 2
    schedule: Schedule = "cooperative"
    stages: int | None = None
    store_stages: int | None = None
    swap_ab: bool = False
    mma_ctas: int = 1

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "consumers", "mma_ctas"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        for name in ("stages", "store_stages"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.schedule not in SCHEDULES:
            raise ConfigError(f'schedule={self.schedule!r} is unknown; use "cooperative" or "pingpong"')
        if not isinstance(self.swap_ab, bool):
            raise OperandTypeError(f"swap_ab={self.swap_ab!r} must be True or False")

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    def with_(self, **changes: object) -> "GemmConfig":
        """A copy with some fields changed; the checks run again."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}x{self.tile_k}", f"cluster {self.cluster_m}x{self.cluster_n}"]
        if self.mma_ctas > 1:
            parts.append(f"MMAs of {self.mma_ctas} CTAs")
        parts.append(f"{self.consumers} consumer{'s' if self.consumers > 1 else ''} {self.schedule}")
        if self.stages is not None:
            parts.append(f"{self.stages} stage{'s' if self.stages > 1 else ''}")
        if self.store_stages is not None:
            parts.append(f"{self.store_stages} store buffer{'s' if self.store_stages > 1 else ''}")
        if self.swap_ab:
            parts.append("A and B swapped")
        return ", ".join(parts)


def _positive(name: str, value: object) -> int:
    """``value`` as a Python int: NumPy's integers would read differently in a kernel's cache key."""
    number = as_integer(value)
    if number is None:
        raise OperandTypeError(f"{name}={value!r} must be an integer")
    if number < 1:
        raise ConfigError(f"{name}={number} must be at least 1")
    return number


def nearest(value: int, allowed: tuple[int, ...]) -> int:
    """The allowed value closest to ``value`` (the smaller of two equally close ones)."""
    return min(allowed, key=lambda candidate: (abs(candidate - value), candidate))


def check_one_of(name: str, value: int, allowed: tuple[int, ...], why: str) -> None:
    """Raises ConfigError naming the limit and the nearest legal value when ``value`` is not allowed."""
    if value not in allowed:
        listed = (
            ", ".join(map(str, allowed))
            if len(allowed) <= 8
            else f"{allowed[0]}, {allowed[1]}, ..., {allowed[-1]}"
        )
        raise ConfigError(f"{name}={value}: {why} allows {listed}; the nearest is {nearest(value, allowed)}")
