"""Assignments: which tasks a worker takes, independent of what tile a task is.

A worker is a cluster of CTAs (often one CTA). An assignment says where a worker starts and how it
steps, on the host and on the device alike; a kernel asks it nothing else.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cutegemm.errors import ConfigError
from cutegemm.scheduler.arithmetic import Index, minimum


@runtime_checkable
class Assignment(Protocol):
    """What the kernel and its launch need of an assignment."""

    def workers(self, tasks: Index, resident: Index) -> Index:
        """Clusters to launch for ``tasks`` tasks when ``resident`` clusters fit on the GPU at once."""
        ...

    def first(self, worker: Index) -> Index:
        """The first task of a worker; at or beyond the number of tasks means it has none."""
        ...

    def next(self, task: Index, workers: Index) -> Index:
        """The task a worker takes after ``task``; at or beyond the number of tasks ends its work."""
        ...


class Strided:
    """Worker w of W takes w, w + W, w + 2W, ...; as many workers as fit, or fewer if limited."""

    max_workers: int | None

    def _check_limit(self) -> None:
        limit = self.max_workers
        if limit is not None and (
            not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < 2**31
        ):
            raise ConfigError(
                f"{type(self).__name__}(max_workers={limit!r}): the number of workers must be an integer of "
                "at least 1 (and below 2**31), or None for as many as fit"
            )

    def workers(self, tasks: Index, resident: Index) -> Index:
        """See Assignment.workers."""
        limit = resident if self.max_workers is None else minimum(resident, self.max_workers)
        return minimum(tasks, limit)

    def first(self, worker: Index) -> Index:
        """See Assignment.first."""
        return worker

    def next(self, task: Index, workers: Index) -> Index:
        """See Assignment.next."""
        return task + workers


@dataclass(frozen=True)
class Persistent(Strided):
    """As many workers as fit on the GPU; worker w takes w, w + W, w + 2W, ...

    ``max_workers`` limits W, for instance to leave SMs to another kernel; a worker is a cluster, so this is
    the SMs left over divided by the CTAs of a cluster.
    """

    max_workers: int | None = None

    def __post_init__(self) -> None:
        self._check_limit()


@dataclass(frozen=True)
class Dynamic(Strided):
    """As many workers as fit; each takes the next task when it is ready for one, from a common counter.

    For tiles of unequal cost, or SMs shared with other kernels. Worker w begins with task w; a warp of its
    own fetches the others, each when the loads of the one before begin. The last worker to end resets the
    counter: no extra launch.
    ``first`` and ``next`` describe workers of equal speed.
    """

    max_workers: int | None = None

    def __post_init__(self) -> None:
        self._check_limit()


@dataclass(frozen=True)
class SplitK(Strided):
    """Persistent, with each tile's K shared by ``splits`` CTAs: 2, 4 or 8, which form a worker's cluster.

    For problems of few tiles and long K. The CTAs' partial sums are added in float32 and in a fixed order,
    in the cluster's shared memory: the same input gives the same bits on every run. A K of fewer stages
    than ``splits`` is allowed; the CTAs without a share add zeros.
    """

    splits: int
    max_workers: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.splits, int) or self.splits not in (2, 4, 8):
            raise ConfigError(
                f"SplitK({self.splits!r}): the CTAs that share a tile's K form a cluster; use 2, 4 or 8"
            )
        self._check_limit()


@dataclass(frozen=True)
class Static:
    """One worker per task, in launch order: worker w takes task w and ends."""

    def workers(self, tasks: Index, resident: Index) -> Index:
        """See Assignment.workers."""
        return tasks

    def first(self, worker: Index) -> Index:
        """See Assignment.first."""
        return worker

    def next(self, task: Index, workers: Index) -> Index:
        """See Assignment.next."""
        return task + workers
