"""StreamK: the last tiles' K laid end to end and cut into equal pieces, one for each worker.

The same arithmetic runs on the host (analysis, tests) and in the kernel.
"""

from dataclasses import dataclass

from cutegemm.errors import ConfigError
from cutegemm.scheduler.arithmetic import Index, divmod_, maximum, minimum, select
from cutegemm.scheduler.assignment import Strided

LEAST_STEPS = 4  # stages of a piece: a shorter one costs more to add than it saves
LEAST_SAVING = 12  # stages that sharing takes off the longest worker, about what adding the parts takes


@dataclass(frozen=True)
class StreamK(Strided):
    """Persistent, with the tiles that do not fill a round of workers shared along K by all of them.

    Of T tiles and W workers T mod W, and one whole round if there is one, are laid end to end along K and cut
    into W equal pieces; a piece may end one tile and begin the next. The other tiles are done whole, and all
    of them are where sharing would spare less than it costs. Whoever finishes its part of a shared tile last
    adds the parts, which lie in global memory, in float32; nobody waits for a worker that has not begun.
    ``first`` and ``next`` describe whole tiles.

    max_workers  limits W, see Persistent
    ordered      True: parts are added in the order of K, so that the same input gives the same bits on every
                 run. False: the last to finish adds the others to its own, which spares it a store and a load
                 where three or more share a tile; the rounding then depends on who was last.
    """

    max_workers: int | None = None
    ordered: bool = True

    def __post_init__(self) -> None:
        self._check_limit()
        if not isinstance(self.ordered, bool):
            raise ConfigError(f"StreamK(ordered={self.ordered!r}): use True or False")

    def workers(self, tasks: Index, resident: Index) -> Index:
        """See Assignment.workers: all that fit, even for fewer tiles."""
        return resident if self.max_workers is None else minimum(resident, self.max_workers)


@dataclass(frozen=True)
class Span:
    """Part of a task: stages k_first .. k_first + k_count - 1 of its tile. Beyond the last task: no more."""

    task: Index
    k_first: Index
    k_count: Index


@dataclass(frozen=True)
class Stream:
    """One launch's division of tasks of ``k_tiles`` stages each among workers.

    whole           the first so many tasks are done whole, in rounds; the others are laid end to end. Whole
                    ones come first because their workers go along K together and find each other's bands in
                    L2; the pieces begin anywhere.
    each, longer    a worker's piece has ``each`` stages, the first ``longer`` workers' one more
    """

    tasks: Index
    workers: Index
    k_tiles: Index
    whole: Index
    each: Index
    longer: Index

    @property
    def steps(self) -> Index:
        """Stages of the tasks that are laid end to end."""
        return (self.tasks - self.whole) * self.k_tiles

    def begin(self, worker: Index) -> Index:
        """The stage where a worker's piece begins; where the one before it ends."""
        return minimum(worker * self.each + minimum(worker, self.longer), self.steps)

    def worker_at(self, at: Index) -> Index:
        """Whose piece a stage lies in."""
        long = self.longer * (self.each + 1)
        among_longer, _ = divmod_(at, self.each + 1)
        among_others, _ = divmod_(maximum(at - long, 0), maximum(self.each, 1))
        return select(at < long, among_longer, self.longer + among_others)

    def first(self, worker: Index) -> Span:
        """Where a worker begins."""
        return self._whole_or_piece(worker, self.begin(worker), worker)

    def next(self, span: Span, worker: Index) -> Span:
        """What a worker does after ``span``."""
        after = (span.task - self.whole) * self.k_tiles + span.k_first + span.k_count
        at = select(span.task < self.whole, self.begin(worker), after)
        return self._whole_or_piece(span.task + self.workers, at, worker)

    def _whole_or_piece(self, task: Index, at: Index, worker: Index) -> Span:
        """A whole task if it is one of those, else what there is at stage ``at`` of the worker's piece."""
        end = self.begin(worker + 1)
        shared, k_first = divmod_(at, self.k_tiles)
        part = select(at < end, self.whole + shared, self.tasks)
        whole = task < self.whole
        k_count = minimum(self.k_tiles - k_first, end - at)
        return Span(
            select(whole, task, part), select(whole, 0, k_first), select(whole, self.k_tiles, k_count)
        )


def make_stream(tasks: Index, workers: Index, k_tiles: Index) -> Stream:
    """Divides a launch's work; all at least 1, and 2 * workers * k_tiles below 2^31."""
    rounds, left = divmod_(tasks, workers)
    # The longest worker has (rounds + 1) * k_tiles stages with whole tiles, and its even share otherwise.
    spared = divmod_((workers - left) * k_tiles, workers)[0]
    shared = select((left == 0) | (spared < LEAST_SAVING), 0, left + select(rounds > 0, workers, 0))
    steps = shared * k_tiles
    sharers = minimum(workers, maximum(divmod_(steps, LEAST_STEPS)[0], 1))
    each, longer = divmod_(steps, sharers)
    return Stream(tasks, workers, k_tiles, tasks - shared, each, longer)
