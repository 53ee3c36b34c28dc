"""The long run over drawn sm_100a kernels: each by its number, and what is wrong with its products.

Trials run in a worker process (see legal_space.Worker). As a script this file is that worker.
"""

import hashlib
import json
import random
import sys
from dataclasses import dataclass

from blackwell_space import TARGET, Kind, Trial, drawn_kind, drawn_trials
from emulation import gemm_of, judged
from legal_space import Worker, serve

TRIALS = 10  # of each kernel: compiling one takes as long as emulating a few small products
WORKER_SECONDS = 1800  # after which a kernel counts as hung, on a machine with other things to do too


@dataclass(frozen=True)
class DrawnKernel:
    """The kernel drawn with a seed, and its trials drawn after it."""

    number: int

    @property
    def kind(self) -> Kind:
        """What is compiled."""
        return drawn_kind(random.Random(self.number))

    def trials(self) -> list[Trial]:
        """What it is tried on."""
        chance = random.Random(self.number)
        return list(drawn_trials(drawn_kind(chance), chance, TRIALS))

    def __str__(self) -> str:
        kind = self.kind
        return f"{self.number}: {kind.config}, {kind.scheduler}, {kind.seen}"

    def to_json(self) -> str:
        """One line from which ``from_json`` makes an equal one; other trials have another name."""
        trials = hashlib.sha256(repr(self.trials()).encode()).hexdigest()[:16]
        return json.dumps({"number": self.number, "trials": trials, "kernel": str(self)})

    @classmethod
    def from_json(cls, line: str) -> "DrawnKernel":
        """Of a line made by ``to_json``."""
        return cls(json.loads(line)["number"])

    def complaints(self) -> list[str]:
        """Compiles the kernel and tries it, every check on; one line for each trial that goes wrong."""
        kind = self.kind
        gemm = gemm_of(kind.case, kind.config, kind.scheduler, TARGET)
        found = []
        for trial in self.trials():
            try:
                judged(gemm, trial.case, seed=trial.seed, resident=trial.resident, check=True)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                found.append(f"{trial}: {type(error).__name__}: {error}")
        return found


def trial_worker(environment: dict[str, str]) -> Worker:
    """A process that tries kernels."""
    return Worker(environment, (sys.executable, __file__), WORKER_SECONDS)


if __name__ == "__main__":
    serve(lambda line: DrawnKernel.from_json(line).complaints())
