"""What a scheduler makes of a grid: which tiles run together, and how much of A and B they need.

A wave is what all workers do at one time if every tile takes equally long: a worker's k-th task belongs
to wave k. Tiles of a wave that share a row of the grid read the same band of A (tile_m rows, all of K),
those that share a column the same band of B. The working set of a wave is each of these bands once. It
says what should be in L2 together; it is not a measurement of L2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cutegemm.errors import ConfigError
from cutegemm.problem import dtype_bytes, dtype_name
from cutegemm.scheduler.arithmetic import ceil_div
from cutegemm.scheduler.assignment import Assignment
from cutegemm.scheduler.checker import tiles_of
from cutegemm.scheduler.order import TileOrder


class Tile(NamedTuple):
    """An output tile: its row and column in the grid, and which product of the batch."""

    m: int
    n: int
    batch: int = 0


@dataclass(frozen=True)
class Wave:
    """The tiles that run at one time, and what they read.

    tiles               in the order of the workers; those a cluster has beyond the grid's edge are left out
    a_bands, b_bands    different bands of A and of B among them
    a_bytes, b_bytes    of those bands, each once
    """

    tiles: tuple[Tile, ...]
    a_bands: int
    b_bands: int
    a_bytes: int
    b_bytes: int

    @property
    def working_set_bytes(self) -> int:
        """A and B together."""
        return self.a_bytes + self.b_bytes


@dataclass(frozen=True)
class Summary:
    """All waves of a launch.

    efficiency          share of the CTA slots of all waves that have a tile: 1 if the last wave is full
    mean_bytes          working set, mean over the waves
    max_bytes           largest working set of a wave
    """

    waves: int
    tiles: int
    efficiency: float
    mean_bytes: float
    max_bytes: int


@dataclass(frozen=True)
class Grid:
    """The grid as its tiles see it.

    tiles_m, tiles_n    output tiles
    tile_m, tile_n, k   elements: rows and columns of a tile, depth of the product
    dtype               of A and B, a name such as "bfloat16" or a torch dtype
    cluster             CTAs of a cluster along M and N, one tile each; the order walks clusters
    batch               products one after another
    """

    tiles_m: int
    tiles_n: int
    tile_m: int
    tile_n: int
    k: int
    dtype: object
    cluster: tuple[int, int] = (1, 1)
    batch: int = 1

    def __post_init__(self) -> None:
        numbers = {
            name: getattr(self, name) for name in ("tiles_m", "tiles_n", "tile_m", "tile_n", "k", "batch")
        }
        numbers |= {f"cluster[{axis}]": self.cluster[axis] for axis in (0, 1)}
        for name, value in numbers.items():
            _check_positive(name, value)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def clusters(self) -> tuple[int, int]:
        """Clusters along M and N; the last ones may reach beyond the grid."""
        return ceil_div(self.tiles_m, self.cluster[0]), ceil_div(self.tiles_n, self.cluster[1])

    @property
    def band_bytes(self) -> tuple[int, int]:
        """Bytes of a whole band of A and of B."""
        element = dtype_bytes(dtype_name(self.dtype, "dtype"))
        return self.tile_m * self.k * element, self.tile_n * self.k * element

    def tiles_of_cluster(self, m: int, n: int, batch: int) -> list[Tile]:
        """The output tiles of a cluster, CTA by CTA, M first; none beyond the grid."""
        rows, columns = self.cluster
        return [
            Tile(row, column, batch)
            for column in range(n * columns, min((n + 1) * columns, self.tiles_n))
            for row in range(m * rows, min((m + 1) * rows, self.tiles_m))
        ]


def waves(order: TileOrder, assignment: Assignment, grid: Grid, resident: int) -> list[Wave]:
    """The waves in which ``resident`` workers (clusters the GPU holds at once) do a grid.

    Workers beyond those that fit start when the ones before them have ended, which is how a GPU runs
    Static(). Raises ConfigError for sizes that are none, for tasks that are taken twice or by nobody, and
    what ``tiles_of`` raises.
    """
    _check_positive("workers", resident)
    clusters_m, clusters_n = grid.clusters
    rows, columns = (x.tolist() for x in tiles_of(order, clusters_m, clusters_n))
    per_batch = clusters_m * clusters_n
    result = []
    for tasks in tasks_by_wave(assignment, per_batch * grid.batch, resident):
        tiles: list[Tile] = []
        for task in tasks:
            batch, i = divmod(task, per_batch)
            tiles += grid.tiles_of_cluster(rows[i], columns[i], batch)
        result.append(_wave(tuple(tiles), grid))
    return result


def summarise(found: Sequence[Wave], slots: int) -> Summary:
    """The whole of some waves; ``slots`` CTAs run at one time (workers times CTAs of a cluster)."""
    _check_positive("slots", slots)
    tiles = sum(len(wave.tiles) for wave in found)
    sizes = [wave.working_set_bytes for wave in found]
    return Summary(len(found), tiles, tiles / (len(found) * slots), sum(sizes) / len(sizes), max(sizes))


def _wave(tiles: tuple[Tile, ...], grid: Grid) -> Wave:
    a_bands = len({(tile.batch, tile.m) for tile in tiles})
    b_bands = len({(tile.batch, tile.n) for tile in tiles})
    a_bytes, b_bytes = grid.band_bytes
    return Wave(tiles, a_bands, b_bands, a_bands * a_bytes, b_bands * b_bytes)


def tasks_by_wave(assignment: Assignment, tasks: int, resident: int) -> list[list[int]]:
    """The tasks of each wave, by worker. Raises ConfigError for a task that is lost or taken twice."""
    workers = assignment.workers(tasks, resident)
    by_wave: list[list[int]] = []
    begin = 0
    taken = 0
    for worker in range(workers):
        if worker % resident == 0:
            begin = len(by_wave)
        task = assignment.first(worker)
        step = begin
        while task < tasks:
            if task < 0:
                raise ConfigError(f"{assignment!r} gives worker {worker} task {task}; tasks count from 0")
            if step == len(by_wave):
                by_wave.append([])
            by_wave[step].append(task)
            taken += 1
            if taken > tasks:
                raise ConfigError(
                    f"{assignment!r} gives some of {tasks} tasks to more than one of {workers} workers"
                )
            task, step = assignment.next(task, workers), step + 1
    if len({task for wave in by_wave for task in wave}) != tasks:
        raise ConfigError(f"{assignment!r} leaves some of {tasks} tasks to none of {workers} workers")
    return by_wave


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
