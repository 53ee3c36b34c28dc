"""Which kernels are worth measuring for a problem: the heuristic's choice first, then its runners-up."""

from dataclasses import dataclass, replace

from cutegemm import heuristic
from cutegemm.alignment import expected_paths
from cutegemm.config import GemmConfig
from cutegemm.hardware import Gpu
from cutegemm.heuristic import Estimate
from cutegemm.kernels import Choice, default_scheduler
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import GroupedM, GroupedN, TileScheduler

DEFAULT_TOP = 16  # of the ranking; the splits and orders below come on top
PER_SPLIT = 3  # best kernels of each number of CTAs that share a tile's K, if the model thinks them possible
POSSIBLE = 1.5  # times the best prediction: beyond it the model would have to be very wrong
DEFAULT_ORDER = TileScheduler().order
OTHER_ORDERS = 2  # of the best kernels, tried with strips of columns as well


@dataclass(frozen=True)
class Candidate:
    """A kernel to measure, and what the cost model predicts for it, in microseconds."""

    config: GemmConfig
    scheduler: TileScheduler
    predicted_us: float

    @property
    def name(self) -> str:
        """As it stands in tables; no two candidates of a problem have the same."""
        words = [str(self.config)]
        if self.scheduler.splits > 1:
            words.append(f"K split {self.scheduler.splits} ways")
        if self.scheduler.order != DEFAULT_ORDER:
            words.append(f"{self.scheduler.order!r}")
        return ", ".join(words)


def candidates(
    problem: GemmProblem, gpu: Gpu, scheduler: TileScheduler | None, top: int = DEFAULT_TOP
) -> list[Candidate]:
    """Candidates for a problem of known sizes, the heuristic's choice first; all are legal.

    scheduler  the one all of them have; None: each has the one that suits it, K split or not, and a few are
               tried in another order
    """
    paths = expected_paths(problem)
    splits = heuristic.SPLITS if scheduler is None else (scheduler.splits,)
    estimates = list(heuristic.ranked(problem, gpu, top, paths, splits))
    limit = POSSIBLE * estimates[0].total
    for ways in splits:
        more = heuristic.ranked(problem, gpu, PER_SPLIT, paths, (ways,))
        estimates += [estimate for estimate in more if estimate.total <= limit and estimate not in estimates]
    found = [_candidate(estimate, problem, gpu, scheduler) for estimate in estimates]
    found = [one for one in found if Choice(one.config, one.scheduler, paths, gpu.target).is_legal(problem)]
    if scheduler is None:
        found += _reordered(found)
    return found


def _candidate(
    estimate: Estimate, problem: GemmProblem, gpu: Gpu, scheduler: TileScheduler | None
) -> Candidate:
    scheduler = scheduler or default_scheduler(estimate.config, estimate.splits, problem, gpu)
    return Candidate(estimate.config, scheduler, estimate.total / gpu.sm_clock_hz * 1e6)


def _reordered(found: list[Candidate]) -> list[Candidate]:
    """The best kernels with the strips of tiles turned; the model knows no difference."""
    best = [candidate for candidate in found if candidate.scheduler.splits == 1][:OTHER_ORDERS]
    return [replace(candidate, scheduler=_turned(candidate.scheduler)) for candidate in best]


def _turned(scheduler: TileScheduler) -> TileScheduler:
    """Strips of rows for strips of columns, and the other way round."""
    order = scheduler.order
    if isinstance(order, GroupedN):
        return replace(scheduler, order=GroupedM(order.group))
    return replace(
        scheduler, order=GroupedN(order.group if isinstance(order, GroupedM) else GroupedN().group)
    )
