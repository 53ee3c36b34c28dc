"""How numbers are taken: the knobs of a run, in one printable object."""

from dataclasses import dataclass

from cutegemm.errors import ProblemError


@dataclass(frozen=True)
class Method:
    """One run's method, written into its results.

    rounds         times every implementation is measured; the median counts
    replay_ms      GPU milliseconds of one timed graph replay
    pause_ms       idle milliseconds before each measurement, so that every implementation starts equally cool
    rotate_bytes   input bytes the calls rotate through; at least twice the L2 is taken in any case
    seed           of the inputs and of the order of implementations within each round
    memory_share   of the free GPU memory, what the input sets may take; the checks need room as well
    """

    rounds: int = 9
    replay_ms: float = 10.0
    pause_ms: float = 10.0
    rotate_bytes: int = 150_000_001
    seed: int = 0
    memory_share: float = 0.5

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.replay_ms <= 0 or self.pause_ms < 0 or self.rotate_bytes < 0:
            raise ProblemError(
                f"{self}: rounds must be at least 1, replay_ms above 0, the others not negative"
            )
        if not 0 < self.memory_share <= 1:
            raise ProblemError(f"memory_share={self.memory_share}: it must be above 0 and at most 1")

    def __str__(self) -> str:
        return (
            f"CUDA graphs of about {self.replay_ms:g} ms, input sets rotated over more than "
            f"{self.rotate_bytes // 1_000_000} MB and twice the L2, implementations in random order in each "
            f"of {self.rounds} rounds, one untimed replay before each timed one, median of the rounds; "
            f"normally distributed inputs, outputs poisoned with NaN before they are checked"
        )


#: For numbers to publish.
FULL = Method()
#: For comparing configurations: enough to rank them, not to publish.
QUICK = Method(rounds=3, replay_ms=4.0, pause_ms=2.0)
