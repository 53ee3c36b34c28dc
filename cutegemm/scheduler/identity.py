"""The text a scheduler is known by in a cache key."""

import hashlib
import inspect
import sys
from collections.abc import Callable

from cutegemm.errors import OperandTypeError
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.trial import assignment_digest, order_digest


def scheduler_identity(scheduler: TileScheduler) -> str:
    """Class and fields of both parts; of those from outside the package also the source and what they do.

    Raises OperandTypeError for a part whose ``repr`` does not show its fields or whose methods fail on
    integers of the host, ConfigError for one that loses tiles or repeats them.
    """
    order, assignment = scheduler.order, scheduler.assignment
    return "; ".join(
        (
            _identity(order, lambda: order_digest(order)),
            _identity(assignment, lambda: assignment_digest(assignment)),
        )
    )


def _identity(part: object, digest: Callable[[], str]) -> str:
    kind = type(part)
    text = repr(part)
    if kind.__repr__ is object.__repr__:
        if getattr(part, "__dict__", None):
            raise OperandTypeError(
                f"{kind.__qualname__} has fields but no __repr__ that shows them; make it a frozen dataclass"
            )
        text = f"{kind.__qualname__}()"
    if kind.__module__.startswith("cutegemm."):
        return f"{kind.__module__}.{text}"
    try:
        # Base classes too: the method that runs may be an inherited one.
        source = "".join(inspect.getsource(base) for base in kind.__mro__ if _is_outside(base))
    except (OSError, TypeError) as error:
        raise OperandTypeError(
            f"the source of {kind.__qualname__} cannot be read, so its kernel cannot be told from another's; "
            f"define the class in a file"
        ) from error
    return f"{kind.__module__}.{text} {hashlib.sha256(source.encode()).hexdigest()} {digest()}"


def _is_outside(kind: type) -> bool:
    """Whether a class is neither this package's, whose sources every key covers, nor Python's own."""
    return kind.__module__.partition(".")[0] not in ("cutegemm", *sys.stdlib_module_names)
