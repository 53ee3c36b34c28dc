"""Integer instructions on values that are the same in every lane, as Python expressions.

The same semantics as ops_integer.py gives them, for those that loops and address arithmetic are made of.
Registers hold unsigned numbers of their width, predicates bool.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cutegemm.emulator.ptx import Statement
from cutegemm.emulator.values import mask_of

_TYPE = re.compile(r"([subf])(8|16|32|64)$")
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_EXTENDED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


@dataclass(frozen=True)
class Formula:
    """One instruction.

    reads, writes   (slot, "int" or "bool") pairs
    texts           an expression for each result, with {0}, {1} ... for what is read
    operands        slots or literals that stand for these
    """

    writes: tuple[tuple[int, str], ...]
    operands: tuple[tuple[str, Any], ...]
    texts: tuple[str, ...]

    @property
    def reads(self) -> list[tuple[int, str]]:
        """Registers it reads."""
        return [(value, kind) for kind, value in self.operands if kind != "literal"]

    def expressions(self, names: Mapping[int, str]) -> list[str]:
        """Its results, in names of Python variables for registers."""
        given = [f"({value})" if kind == "literal" else names[value] for kind, value in self.operands]
        return [text.format(*given) for text in self.texts]


def formula(statement: Statement, decoder: Any) -> Formula | None:
    """Of a statement without guard; None for all that is not as simple."""
    parts = statement.opcode.split(".")
    build = _BUILDERS.get(parts[0])
    if build is None or statement.guard is not None:
        return None
    kind = _TYPE.match(parts[-1])
    if kind is None and parts[-1] != "pred":
        return None
    bits = int(kind[2]) if kind else 1
    found = build(statement, parts, kind[1] if kind else "p", bits)
    if found is None:
        return None
    results, operands, texts = found
    writes = tuple(
        (decoder.result(text, statement), "bool" if is_flag else "int") for text, is_flag in results
    )
    if any(slot == 0 for slot, _ in writes) or len({slot for slot, _ in writes}) < len(writes):
        return None
    return Formula(writes, tuple(_operand(decoder, statement, *each) for each in operands), texts)


# What a builder finds: results with whether they are predicates, operands with their bits, an expression for
# each result.
Found = tuple[list[tuple[str, bool]], list[tuple[str, int]], tuple[str, ...]] | None


def _operand(decoder: Any, statement: Statement, text: str, bits: int) -> tuple[str, Any]:
    slot = decoder.source(text, statement, bits)
    if decoder.is_literal(slot):
        return "literal", decoder.program.template[slot]
    return "bool" if bits == 1 else "int", slot


def _flipped(bits: int) -> str:
    """Turns the order of signed numbers into that of unsigned ones."""
    return f" ^ {1 << bits - 1}"


def _sign_extended(place: int, bits: int) -> str:
    top = 1 << bits - 1
    return f"(({{{place}}} ^ {top}) - {top})"


def _arithmetic(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x, y, *rest = statement.operands
    name = parts[0]
    if rest or kind == "f" or (name == "mul" and parts[1] not in ("lo", "wide")):
        return None
    if kind == "p":
        return [(d, True)], [(x, 1), (y, 1)], (f"{{0}} {_SIGNS[name]} {{1}}",)
    if name == "mul" and parts[1] == "wide":
        a, b = (_sign_extended(i, bits) if kind == "s" else f"{{{i}}}" for i in (0, 1))
        return [(d, False)], [(x, bits), (y, bits)], (f"{a} * {b} & {mask_of(2 * bits)}",)
    text = f"({{0}} {_SIGNS[name]} {{1}})"
    if name not in ("and", "or", "xor"):
        text += f" & {mask_of(bits)}"
    return [(d, False)], [(x, bits), (y, bits)], (text,)


def _multiply_add(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    if parts[1] != "lo" or kind == "f":
        return None
    d, *operands = statement.operands
    return [(d, False)], [(x, bits) for x in operands], (f"({{0}} * {{1}} + {{2}}) & {mask_of(bits)}",)


def _shift(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x, by = statement.operands
    if not by.isdecimal() or int(by) >= bits or (parts[0] == "shr" and kind == "s"):
        return None
    text = f"{{0}} << {by} & {mask_of(bits)}" if parts[0] == "shl" else f"{{0}} >> {by}"
    return [(d, False)], [(x, bits)], (text,)


def _compare(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x, y, *rest = statement.operands
    relation = {**_RELATIONS, **_EXTENDED}.get(parts[1])
    if len(parts) != 3 or rest or "|" in d or kind in "fp" or relation is None:
        return None
    flip = _flipped(bits) if kind == "s" and relation not in ("==", "!=") else ""
    return [(d, True)], [(x, bits), (y, bits)], (f"({{0}}{flip}) {relation} ({{1}}{flip})",)


def _select(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x, y, p = statement.operands
    return [(d, False)], [(x, bits), (y, bits), (p, 1)], ("{0} if {2} else {1}",)


def _extreme(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    if kind not in ("s", "u") or len(parts) != 2:
        return None
    d, x, y = statement.operands
    flip = _flipped(bits) if kind == "s" else ""
    relation = "<" if parts[0] == "min" else ">"
    text = f"{{0}} if ({{0}}{flip}) {relation} ({{1}}{flip}) else {{1}}"
    return [(d, False)], [(x, bits), (y, bits)], (text,)


def _invert(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x = statement.operands
    if kind == "p":
        return [(d, True)], [(x, 1)], ("not {0}",)
    return [(d, False)], [(x, bits)], (f"{{0}} ^ {mask_of(bits)}",)


def _negate(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x = statement.operands
    return None if kind == "f" else ([(d, False)], [(x, bits)], (f"-{{0}} & {mask_of(bits)}",))


def _move(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    target, origin = statement.operands
    if kind == "p":
        return None
    if origin.startswith("{"):
        low, _, high = origin[1:-1].partition(",")
        each = bits // 2
        if "," in high or target.startswith("{"):
            return None
        return [(target, False)], [(low.strip(), each), (high.strip(), each)], (f"{{0}} | {{1}} << {each}",)
    if target.startswith("{"):
        names = [name.strip() for name in target[1:-1].split(",")]
        each = bits // len(names)
        texts = tuple(f"{{0}} >> {i * each} & {mask_of(each)}" for i in range(len(names)))
        return [(name, False) for name in names], [(origin, bits)], texts
    return [(target, False)], [(origin, bits)], ("{0}",)


def _convert(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    to = _TYPE.match(parts[1])
    if len(parts) != 3 or to is None or "f" in (kind, to[1]):
        return None
    d, x = statement.operands
    text = _sign_extended(0, bits) if kind == "s" else "{0}"
    return [(d, False)], [(x, bits)], (f"{text} & {mask_of(int(to[2]))}",)


def _address(statement: Statement, parts: list[str], kind: str, bits: int) -> Found:
    d, x = statement.operands
    return [(d, False)], [(x, 64)], ("{0}",)


_BUILDERS: dict[str, Callable[[Statement, list[str], str, int], Found]] = {
    **dict.fromkeys(_SIGNS, _arithmetic),
    "mad": _multiply_add,
    "shl": _shift,
    "shr": _shift,
    "setp": _compare,
    "selp": _select,
    "min": _extreme,
    "max": _extreme,
    "not": _invert,
    "neg": _negate,
    "mov": _move,
    "cvt": _convert,
    "cvta": _address,
}
