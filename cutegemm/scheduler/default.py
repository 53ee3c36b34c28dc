"""The order a kernel gets when nobody asks for one: strips, and how wide, from what a wave reads.

The rule is DeepGEMM's: the width of a strip is the one of a few candidates for which a wave of workers
reads the fewest bytes of A and B, and the operand that clusters multicast gives the strips' direction.
There the direction is what makes neighbours in the order the CTAs that share an operand. Here an order
walks whole clusters, so that any direction would do; it decides whose bands stay in L2 from one wave to
the next, A's in strips of rows, B's in strips of columns.
"""

from dataclasses import dataclass

from cutegemm.scheduler.arithmetic import ceil_div
from cutegemm.scheduler.order import GroupedM, GroupedN

WIDTHS = (8, 16)  # tiles across a strip


@dataclass(frozen=True)
class _Axis:
    """One side of the grid: its tiles, the CTAs of a cluster along it, and the elements of a tile."""

    tiles: int
    cluster: int
    tile: int

    @property
    def clusters(self) -> int:
        return ceil_div(self.tiles, self.cluster)


def default_order(
    tiles_m: int, tiles_n: int, cluster_m: int, cluster_n: int, *, tile_m: int, tile_n: int, workers: int
) -> GroupedM | GroupedN:
    """The strips in which ``workers`` clusters read least at one time.

    tiles_m, tiles_n        output tiles, one for a CTA
    cluster_m, cluster_n    CTAs of a cluster along M and N; the order walks clusters
    tile_m, tile_n          elements of a tile
    workers                 clusters that run at one time

    Clusters along N share A by multicast: strips of columns. Clusters along M share B: strips of rows. With
    neither or both shared, the direction with the smaller working set, rows if they are equal. A strip may
    be wider than the grid, which is then one strip: fewer different orders, so fewer kernels.
    """
    m, n = _Axis(tiles_m, cluster_m, tile_m), _Axis(tiles_n, cluster_n, tile_n)
    rows, rows_read = _best_width(m, n, workers)
    columns, columns_read = _best_width(n, m, workers)
    if (cluster_n > 1) != (cluster_m > 1):
        strips_of_columns = cluster_n > 1
    else:
        strips_of_columns = columns_read < rows_read
    return GroupedN(columns) if strips_of_columns else GroupedM(rows)


def _best_width(across: _Axis, along: _Axis, workers: int) -> tuple[int, int]:
    """Clusters across the best strip, and the elements a wave then reads for each element of K."""
    widths = [ceil_div(width, across.cluster) for width in WIDTHS]
    return min(((width, _read(width, across, along, workers)) for width in widths), key=lambda pair: pair[1])


def _read(width: int, across: _Axis, along: _Axis, workers: int) -> int:
    """Elements of A and B, for each element of K, under a wave that begins where a strip does."""
    width = min(width, across.clusters)
    length = ceil_div(workers, width)
    if length > along.clusters:  # the wave goes on in the next strips
        strips = ceil_div(workers, width * along.clusters)
        width, length = min(strips * width, across.clusters), along.clusters
    return width * across.cluster * across.tile + length * along.cluster * along.tile
