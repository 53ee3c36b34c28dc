"""Is an order one? Every tile of the grid exactly once, and nothing outside it.

For the package's own orders and for anybody's: ``check_bijection(MyOrder(), 77, 53)``.
"""

import numpy as np

from cutegemm.errors import ConfigError, OperandTypeError
from cutegemm.scheduler.order import TileOrder

MAX_TILES = 2**26  # listed one by one; some GB
_SAMPLES = 64  # tasks whose tile is asked for one by one, to see whether an order takes arrays


def check_bijection(order: TileOrder, tiles_m: int, tiles_n: int) -> None:
    """Returns if ``order`` visits each of the tiles_m x tiles_n tiles exactly once.

    Raises ConfigError naming the first task whose tile is outside the grid or was visited before, and the
    first tile never visited; OperandTypeError for an order without ``tile`` or a tile that is no pair of
    integers. An order that takes numpy arrays is checked on arrays: about 0.1 s for a million tiles.
    """
    m, n = tiles_of(order, tiles_m, tiles_n)
    outside = (m < 0) | (m >= tiles_m) | (n < 0) | (n >= tiles_n)
    index = np.where(outside, -1, m * tiles_n + n)
    # Stable: of the tasks with one tile the earliest comes first.
    by_tile = np.argsort(index, kind="stable")
    repeats = by_tile[1:][index[by_tile[1:]] == index[by_tile[:-1]]]
    wrong = np.union1d(repeats, np.flatnonzero(outside))
    if not len(wrong):
        return
    task = int(wrong[0])
    tile = (int(m[task]), int(n[task]))
    if outside[task]:
        what = f"task {task} is tile {tile}, outside the grid"
    else:
        what = f"task {task} is tile {tile}, as task {int(np.flatnonzero(index == index[task])[0])} was"
    missing = np.setdiff1d(np.arange(tiles_m * tiles_n), index)
    first_missing = tuple(map(int, divmod(missing[0], tiles_n)))
    raise ConfigError(
        f"{order!r} does not visit each of {tiles_m} x {tiles_n} tiles once: {what}; "
        f"{len(missing)} of {tiles_m * tiles_n} are never visited, the first of them {first_missing}"
    )


def tiles_of(order: TileOrder, tiles_m: int, tiles_n: int) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of all tasks, in order: arrays m and n of tiles_m * tiles_n integers.

    Raises OperandTypeError for an order without ``tile`` or a tile that is no pair of integers, ConfigError
    for a grid without tiles.
    """
    if not isinstance(order, TileOrder):
        raise OperandTypeError(f"order={order!r} has no method tile(i, tiles_m, tiles_n)")
    for name, tiles in (("tiles_m", tiles_m), ("tiles_n", tiles_n)):
        if not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1:
            raise ConfigError(f"{name}={tiles!r}: the tiles of a grid are an integer of at least 1")
    if tiles_m * tiles_n > MAX_TILES:
        raise ConfigError(
            f"{tiles_m} x {tiles_n} tiles are too many to list one by one; a grid of up to {MAX_TILES} can be"
        )
    tasks = np.arange(tiles_m * tiles_n)
    arrays = _on_arrays(order, tasks, tiles_m, tiles_n)
    if arrays is not None:
        return arrays
    pairs = [_one_tile(order, i, tiles_m, tiles_n) for i in range(len(tasks))]
    m, n = np.array(pairs, dtype=np.int64).T
    return m, n


def _on_arrays(
    order: TileOrder, tasks: np.ndarray, tiles_m: int, tiles_n: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """All tiles at once, or None if the order is not written for arrays or answers otherwise on them."""
    try:
        m, n = (np.broadcast_to(x, tasks.shape) for x in order.tile(tasks, tiles_m, tiles_n))
    except (TypeError, ValueError, AttributeError):
        return None
    if not all(np.issubdtype(x.dtype, np.integer) for x in (m, n)):
        return None
    samples = np.linspace(0, len(tasks) - 1, min(len(tasks), _SAMPLES)).astype(np.int64)
    agrees = all(_one_tile(order, i, tiles_m, tiles_n) == (int(m[i]), int(n[i])) for i in map(int, samples))
    return (m.astype(np.int64), n.astype(np.int64)) if agrees else None


def _one_tile(order: TileOrder, i: int, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    tile = order.tile(i, tiles_m, tiles_n)
    is_pair = isinstance(tile, tuple | list) and len(tile) == 2
    if not is_pair or not all(isinstance(x, int | np.integer) for x in tile):
        raise OperandTypeError(
            f"{order!r}.tile({i}, {tiles_m}, {tiles_n}) gave {tile!r}; a tile is a pair (m, n) of integers"
        )
    return int(tile[0]), int(tile[1])
