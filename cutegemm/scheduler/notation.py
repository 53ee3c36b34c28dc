"""Schedulers as text: ``GroupedM(8)``, ``Blocked(rows=8, cols=16)``, ``Persistent``, for the command line.

Only the package's own classes with whole numbers, or named True and False, as arguments are understood;
nothing is evaluated.
"""

import ast
from collections.abc import Mapping
from typing import Any

from cutegemm import scheduler
from cutegemm.errors import ConfigError
from cutegemm.scheduler.assignment import Assignment
from cutegemm.scheduler.order import TileOrder


def parse_order(text: str) -> TileOrder:
    """The order a text names. Raises ConfigError for a text that names none, or what its class refuses."""
    order: TileOrder = _parse(text, "order", _classes_with("tile"))
    return order


def parse_assignment(text: str) -> Assignment:
    """The assignment a text names. Raises as parse_order does."""
    assignment: Assignment = _parse(text, "assignment", _classes_with("workers"))
    return assignment


def _classes_with(method: str) -> dict[str, type]:
    """The classes the scheduler package exports that have a method, without the protocols."""
    exported = {name: getattr(scheduler, name) for name in scheduler.__all__}
    return {
        name: kind
        for name, kind in exported.items()
        if isinstance(kind, type) and hasattr(kind, method) and not getattr(kind, "_is_protocol", False)
    }


def _parse(text: str, what: str, known: Mapping[str, type]) -> Any:
    unknown = ConfigError(
        f"{what} {text!r} is not understood; write one of {', '.join(sorted(known))}, "
        "with whole numbers in parentheses where it takes some, such as GroupedM(8)"
    )
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise unknown from error
    if isinstance(expression, ast.Name):
        expression = ast.Call(expression, [], [])
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        raise unknown
    kind = known.get(expression.func.id)
    if kind is None:
        raise unknown
    numbers = [_integer(node, unknown) for node in expression.args]
    named = {keyword.arg or "**": _literal(keyword.value, unknown) for keyword in expression.keywords}
    try:
        return kind(*numbers, **named)
    except TypeError as error:  # too many arguments, or a name it does not have
        raise ConfigError(f"{what} {text!r}: {error}") from error


def _integer(node: ast.expr, refusal: ConfigError) -> int:
    """The whole number written, negative ones too: their class has the better message."""
    value = _literal(node, refusal)
    if isinstance(value, bool):
        raise refusal
    return value


def _literal(node: ast.expr, refusal: ConfigError) -> int:
    """The whole number, or True or False, written after a name."""
    try:
        value = ast.literal_eval(node)
    except ValueError as error:
        raise refusal from error
    if not isinstance(value, int):
        raise refusal
    return value
