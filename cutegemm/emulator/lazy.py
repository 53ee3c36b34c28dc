"""Attributes that are computed when they are first asked for."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):
    """functools.cached_property without the lock that it holds up to Python 3.11.

    A process forked while another thread holds that lock would wait for it for ever. Two threads may compute
    the same value here, and one of the results is kept.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self.compute.__name__] = self.compute(instance)
        return value
