"""The work of a launch, and where a CTA stands in it."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64

from cutegemm.scheduler.stream import Stream


@dataclass(frozen=True)
class TaskGrid:
    """The output in cluster tiles, as the scheduler sees it, and the depth of each; run-time numbers."""

    clusters_m: Int32
    clusters_n: Int32
    batch: Int32
    workers: Int32
    k_tiles: Int32
    # Device addresses, 0 where the scheduler needs none: counters, and room for parts of sums.
    counters: Int64
    partials: Int64
    # Worked out on the host, so that it takes no registers: all 0 where nothing is shared along K.
    stream: Stream

    def tasks(self) -> Int32:
        """Cluster tiles of the whole problem."""
        return self.clusters_m * self.clusters_n * self.batch


@dataclass(frozen=True)
class Place:
    """Where a CTA stands: its cluster's worker number, its coordinates in the cluster, and its share of K."""

    worker: Int32
    cta_m: Int32
    cta_n: Int32
    k_first: Int32
    k_count: Int32


def k_share(k_tiles: Int32, splits: int, rank: Int32) -> tuple[Int32, Int32]:
    """(first stage, stages) of the CTA of a rank, where ``splits`` CTAs share a tile's K.

    The first CTAs take one stage more. One that would have none loads a stage beyond K: zeros.
    """
    each = k_tiles // splits
    left = k_tiles - each * splits
    first = rank * each + cutlass.min(rank, left)
    return first, cutlass.max(each + (rank < left).to(Int32), Int32(1))
