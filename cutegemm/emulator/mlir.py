"""The LLVM dialect of MLIR as far as compiled host code uses it: types with their layout, functions."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from cutegemm.emulator.faults import HostCodeError


@dataclass(frozen=True)
class Type:
    """An LLVM type with natural layout.

    kind      "int", "float", "ptr", "struct" or "array"; a float's value is its bits
    size      bytes; an empty struct has none
    offsets   of a struct's or array's members
    """

    kind: str
    bits: int
    size: int
    alignment: int
    members: tuple["Type", ...] = ()
    offsets: tuple[int, ...] = ()

    def zero(self) -> object:
        """A value of zeros: an int, or a list of members."""
        return [member.zero() for member in self.members] if self.kind in ("struct", "array") else 0


@lru_cache(maxsize=1024)
def parse_type(text: str) -> Type:
    """Reads a type. Raises HostCodeError."""
    kind, rest = _type(text.strip())
    if rest.strip():
        raise HostCodeError(f"the host code has a type {text!r} that is not understood")
    return kind


def _type(text: str) -> tuple[Type, str]:
    text = text.strip().removeprefix("!llvm.")
    if found := re.match(r"i(\d+)", text):
        bits = int(found[1])
        size = max(1, bits // 8)
        return Type("int", bits, size, size), text[found.end() :]
    if found := re.match(r"(f|bf)(16|32|64)", text):
        bits = int(found[2])
        return Type("float", bits, bits // 8, bits // 8), text[found.end() :]
    if found := re.match(r"ptr(<\d+>)?", text):
        return Type("ptr", 64, 8, 8), text[found.end() :]
    if text.startswith("struct<("):
        members = []
        rest = text[len("struct<(") :]
        while not rest.lstrip().startswith(")"):
            member, rest = _type(rest)
            members.append(member)
            rest = rest.lstrip().removeprefix(",")
        return _struct(tuple(members)), rest.lstrip()[1:].lstrip().removeprefix(">")
    if found := re.match(r"array<(\d+) x ", text):
        member, rest = _type(text[found.end() :])
        count = int(found[1])
        offsets = tuple(i * member.size for i in range(count))
        array = Type("array", 0, count * member.size, member.alignment, (member,) * count, offsets)
        return array, rest.lstrip().removeprefix(">")
    if found := re.match(r"vector<(\d+)x", text):
        member, rest = _type(text[found.end() :])
        count = int(found[1])
        offsets = tuple(i * member.size for i in range(count))
        size = 1 << (count * member.size - 1).bit_length()  # a vector is aligned to itself
        return Type("array", 0, size, size, (member,) * count, offsets), rest.lstrip().removeprefix(">")
    raise HostCodeError(f"the host code has a type {text[:60]!r} that is not understood")


def _struct(members: tuple[Type, ...]) -> Type:
    position, alignment, offsets = 0, 1, []
    for member in members:
        position = -(-position // member.alignment) * member.alignment
        offsets.append(position)
        position += member.size
        alignment = max(alignment, member.alignment)
    size = -(-position // alignment) * alignment
    return Type("struct", 0, size, alignment, members, tuple(offsets))


@dataclass(frozen=True)
class Operation:
    """One line: ``result = name rest``."""

    result: str
    name: str
    rest: str


@dataclass
class Block:
    """A basic block with the names of its arguments."""

    arguments: tuple[str, ...]
    operations: list[Operation] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A function with a body.

    arguments   (name, type) pairs
    """

    name: str
    arguments: tuple[tuple[str, Type], ...]
    blocks: dict[str, Block]


# An operation with no syntax of its own: = "llvm.name"(operands) <{properties}> : (types) -> type
_PLAIN = re.compile(r'\s*(?:(%[\w]+) = )?"llvm\.([\w.]+)"(\([^)]*\)) (?:<\{.*\}> )?(: .*)')
_OPERATION = re.compile(r"\s*(?:(%[\w]+) = )?llvm\.([\w.]+)(.*)")
_BLOCK = re.compile(r"\s*\^(\w+)(?:\(([^)]*)\))?:")
_HEADER = re.compile(r"\s*llvm\.func (?:internal )?@(\S+?)\((.*)\)(?: -> \S+)? ?(?:attributes .*)?\{\s*$")


@lru_cache(maxsize=32)
def launching_function(text: str) -> Function:
    """The function of a host module that launches the kernel. Raises HostCodeError."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  llvm.func "):
            lines = [line]
        elif lines:
            lines.append(line)
            if line.startswith("  }"):
                if any("llvm.call @_cudaLaunchKernelEx(" in entry for entry in lines):
                    return _function(lines)
                lines = []
    raise HostCodeError("no function of the host code launches a kernel")


def _function(lines: list[str]) -> Function:
    header = _HEADER.match(lines[0])
    if header is None:
        raise HostCodeError(f"the host function {lines[0][:80]!r} is not understood")
    arguments = []
    for part in split_list(header[2]):
        name, _, kind = part.partition(":")
        arguments.append((name.strip(), parse_type(re.sub(r"\{[^{}]*\}\s*$", "", kind))))
    block = Block(())
    blocks = {"entry": block}
    for line in lines[1:-1]:
        if label := _BLOCK.match(line):
            names = tuple(part.partition(":")[0].strip() for part in split_list(label[2] or ""))
            block = blocks[label[1]] = Block(names)
        elif plain := _PLAIN.match(line):
            block.operations.append(Operation(plain[1] or "", plain[2], f"{plain[3]} {plain[4]}"))
        elif found := _OPERATION.match(line):
            block.operations.append(Operation(found[1] or "", found[2], found[3].strip()))
        elif line.strip():
            raise HostCodeError(f"the host code line {line.strip()[:80]!r} is not understood")
    return Function(header[1], tuple(arguments), blocks)


def split_list(text: str) -> list[str]:
    """Splits at commas outside of brackets of any kind."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "(<[{":
            depth += 1
        elif character in ")]}" or (character == ">" and text[i - 1] != "-"):
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts
