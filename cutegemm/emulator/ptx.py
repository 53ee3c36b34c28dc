"""PTX text to statements: parameters, shared symbols, instructions with their operands.

Blocks in braces (inline assembly) have registers and labels of their own under repeated names, so both are
looked up through scopes. Nothing here knows what an instruction does.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cutegemm.emulator.faults import UnknownInstructionError


@dataclass(frozen=True)
class Param:
    """One kernel parameter: its name and bytes."""

    name: str
    size: int
    alignment: int


@dataclass(frozen=True)
class SharedSymbol:
    """A module-level shared array; size 0 for dynamic shared memory."""

    name: str
    size: int
    alignment: int


@dataclass
class Scope:
    """Registers and labels declared between one pair of braces."""

    parent: "Scope | None"
    registers: dict[str, tuple[int, str]] = field(default_factory=dict)
    ranges: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def label(self, name: str) -> int | None:
        """Index of the instruction after a label visible from here, None if there is none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None

    def spelled_out(self, operand: str) -> str:
        """The name of a vector of registers as ``{v.x, v.y}``; any other operand as it is."""
        scope: Scope | None = self
        while scope is not None:
            if operand in scope.vectors:
                return "{" + ", ".join(f"{operand}.{part}" for part in "xyzw"[: scope.vectors[operand]]) + "}"
            scope = scope.parent
        return operand


@dataclass(frozen=True)
class Statement:
    """One instruction as written.

    opcode     with all its qualifiers
    operands   texts, split at the outer commas
    guard      (predicate register, whether it is negated) or None
    line       of the PTX text
    source     "file:line" of the kernel's source, "" if the PTX does not say
    """

    opcode: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    scope: Scope
    line: int
    source: str

    @property
    def place(self) -> str:
        """Line of the PTX, and of the source if that is known."""
        return f"PTX line {self.line}{', ' + self.source if self.source else ''}"

    @property
    def where(self) -> str:
        """Opcode and place, for messages."""
        return f"{self.opcode} ({self.place})"


@dataclass(frozen=True)
class Module:
    """One kernel's PTX.

    threads   of a CTA as the kernel requires them, None if it does not say
    """

    name: str
    target: str
    params: tuple[Param, ...]
    shared: tuple[SharedSymbol, ...]
    threads: int | None
    statements: tuple[Statement, ...]


_BITS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?"
)
_SHARED = re.compile(
    r"^\s*(?:\.extern\s+|\.visible\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+([\w$]+)"
    r"(?:\[(\d*)\])?\s*;",
    re.MULTILINE,
)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_INLINE = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)
_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+")


def parse(text: str) -> Module:
    """The module of a PTX text with exactly one kernel. Raises UnknownInstructionError."""
    # Each line of inline assembly has a source line of its own there: all are of the statement before it.
    located = _INLINE.sub(lambda block: re.sub(r"\.loc[^\n]*", "", block[0]), text)
    plain = re.sub(r"//[^\n]*", "", located)
    entry = _ENTRY.search(plain)
    if entry is None:
        raise UnknownInstructionError("the PTX holds no .entry: there is no kernel to run")
    target = re.search(r"\.target\s+(\w+)", plain)
    start = plain.index("{", entry.end())
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", plain[entry.end() : start])
    return Module(
        name=entry[1],
        target=target[1] if target else "",
        params=tuple(_params(entry[2])),
        shared=tuple(_shared(plain)),
        threads=_product(threads.groups()) if threads else None,
        statements=tuple(_Body(plain, start, dict(_FILE.findall(plain))).statements()),
    )


def _params(text: str) -> Iterator[Param]:
    for align, bits, name, count in _PARAM.findall(text):
        size = _BITS[bits] * int(count or 1)
        yield Param(name, size, int(align or _BITS[bits]))


def _shared(text: str) -> Iterator[SharedSymbol]:
    for align, bits, name, count in _SHARED.findall(text):
        yield SharedSymbol(name, _BITS[bits] * int(count or 0), int(align or _BITS[bits]))


def _product(numbers: tuple[str | None, ...]) -> int:
    product = 1
    for number in numbers:
        product *= int(number or 1)
    return product


class _Body:
    """Walks a function body, keeping scopes and source lines."""

    def __init__(self, text: str, start: int, files: dict[str, str]) -> None:
        self.text = text
        self.position = start
        self.files = files
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.source = ""
        self.count = 0

    def statements(self) -> Iterator[Statement]:
        text = self.text
        scope: Scope | None = None
        while True:
            while self.position < len(text) and text[self.position].isspace():
                self.position += 1
            if self.position >= len(text):
                raise UnknownInstructionError("the PTX ends inside the kernel: a closing brace is missing")
            character = text[self.position]
            if character == "{":
                scope = Scope(scope)
                self.position += 1
            elif scope is None:
                raise UnknownInstructionError("the kernel's body does not begin with a brace")
            elif character == "}":
                self.position += 1
                scope = scope.parent
                if scope is None:
                    return
            elif label := _LABEL.match(text, self.position):
                scope.labels[label[1]] = self.count
                self.position = label.end()
            elif location := _LOC.match(text, self.position):
                self.source = self._source(location[1], location[2])
                self.position = location.end()
            else:
                yield from self._statement(scope)

    def _source(self, file: str, line: str) -> str:
        """ "file:line" as one can open it from here; "" for code the compiler made up."""
        if line == "0" or file not in self.files:
            return ""
        path = Path(self.files[file])
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"

    def _statement(self, scope: Scope) -> Iterator[Statement]:
        start = self.position
        end = self.text.find(";", start)
        if end < 0:
            raise UnknownInstructionError(f"PTX line {self._line(start)}: a semicolon is missing")
        self.position = end + 1
        statement = self.text[start:end].strip()
        if statement.startswith(".reg"):
            _declare(statement, scope)
        elif statement.startswith(".pragma") or not statement:
            return
        elif statement.startswith("."):
            raise UnknownInstructionError(
                f"PTX line {self._line(start)}: the directive {statement.split()[0]} is not supported here"
            )
        else:
            self.count += 1
            guard = None
            if found := _GUARD.match(statement):
                guard = (found[2], found[1] == "!")
                statement = statement[found.end() :]
            opcode, _, rest = statement.partition(" ") if " " in statement else statement.partition("\t")
            opcode, rest = (opcode.partition("\t")[0], opcode.partition("\t")[2] + " " + rest)
            operands = tuple(scope.spelled_out(operand) for operand in split_operands(rest))
            yield Statement(opcode, operands, guard, scope, self._line(start), self.source)

    def _line(self, position: int) -> int:
        return bisect_right(self.newlines, position) + 1


def _declare(statement: str, scope: Scope) -> None:
    _, kind, names = statement.split(None, 2)
    count = 0
    if kind in (".v2", ".v4"):
        count = int(kind[2:])
        kind, names = names.split(None, 1)
    for name in names.split(","):
        name = name.strip()
        if count:
            scope.vectors[name] = count
            scope.registers.update({f"{name}.{part}": (-1, kind.lstrip(".")) for part in "xyzw"[:count]})
            continue
        if ranged := re.fullmatch(r"([%\w$]+)<(\d+)>", name):
            scope.ranges[ranged[1]] = kind.lstrip(".")
        else:
            scope.registers[name] = (-1, kind.lstrip("."))


def split_operands(text: str) -> Iterator[str]:
    """Splits at commas outside of braces and brackets."""
    depth, start = 0, 0
    for i, character in enumerate(text):
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()
