"""Orders and assignments from outside the package, tried out before a kernel is made of them.

What they are called and how they are written does not show all of what they do: they may call functions of
other files, or hold other orders. So they are run on the host for some grids. What they do wrong there is an
error instead of a wrong product or a kernel that never ends; what they do is part of the kernel's cache key.
"""

import hashlib
from collections.abc import Callable

from cutegemm.errors import CutegemmError, OperandTypeError
from cutegemm.scheduler.analysis import tasks_by_wave
from cutegemm.scheduler.assignment import Assignment
from cutegemm.scheduler.checker import check_bijection, tiles_of
from cutegemm.scheduler.order import TileOrder

# Lines, less and more than a power of two, more tiles than a GPU has SMs.
GRIDS = ((1, 1), (1, 7), (7, 1), (5, 3), (16, 16), (33, 17), (70, 66), (3, 700))
# Tasks, and workers that fit at once: fewer tasks than workers, as many, some waves and a part.
LOADS = ((1, 132), (3, 132), (132, 132), (133, 132), (1000, 132), (7, 1), (37, 5))
# Where an order is only asked for tasks here and there.
LARGE_GRIDS = ((1000, 700), (5, 100_000), (100_000, 5))
SAMPLES = 50


def order_digest(order: TileOrder) -> str:
    """SHA-256 of what an order does.

    Raises ConfigError if it is no bijection, OperandTypeError if it fails.
    """

    def tiles() -> bytes:
        done = hashlib.sha256()
        for grid in GRIDS:
            check_bijection(order, *grid)
            for index in tiles_of(order, *grid):
                done.update(index.tobytes())
        for rows, columns in LARGE_GRIDS:
            tasks = range(0, rows * columns, rows * columns // SAMPLES)
            done.update(repr([tuple(map(int, order.tile(i, rows, columns))) for i in tasks]).encode())
        return done.digest()

    return _tried(order, "tile(i, tiles_m, tiles_n)", tiles)


def assignment_digest(assignment: Assignment) -> str:
    """SHA-256 of what an assignment does.

    Raises ConfigError if a task is lost or done twice, OperandTypeError if it fails.
    """
    return _tried(
        assignment,
        "workers(tasks, resident), first(worker) or next(task, workers)",
        lambda: repr(
            [(assignment.workers(*load), tasks_by_wave(assignment, *load)) for load in LOADS]
        ).encode(),
    )


def _tried(part: object, methods: str, run: Callable[[], bytes]) -> str:
    try:
        return hashlib.sha256(run()).hexdigest()
    except CutegemmError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise OperandTypeError(
            f"{part!r}: {methods} failed on Python integers with {type(error).__name__}: {error}; the same "
            "lines must run on integers of the host and of the device (see cutegemm.scheduler.arithmetic)"
        ) from error
