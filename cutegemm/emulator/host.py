"""Runs compiled host code without a driver, up to the launch it would make.

Host memory (call records, stack) is private bytes under addresses no tensor has; device pointers are the
tensors' own addresses and never followed here.
"""

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cutegemm.emulator.arguments import is_runtime_tensor, runtime_bytes
from cutegemm.emulator.faults import HostCodeError
from cutegemm.emulator.machine import LaunchRecord
from cutegemm.emulator.mlir import Function, Operation, Type, launching_function, parse_type, split_list
from cutegemm.emulator.ptx import Module
from cutegemm.emulator.tensormap import encode_map

HOST_SPACE = 1 << 60
CLUSTER_ATTRIBUTE = 4
MAX_STEPS = 1_000_000  # operations after which host code counts as endless


class HostMemory:
    """Bytes the host code may touch."""

    def __init__(self) -> None:
        self.data = bytearray()

    def allocate(self, size: int, alignment: int = 16) -> int:
        """Zeroed bytes; returns their address."""
        self.data.extend(bytes(-len(self.data) % max(alignment, 16)))
        address = HOST_SPACE + len(self.data)
        self.data.extend(bytes(max(size, 1)))
        return address

    def bytes_at(self, address: int, size: int) -> slice:
        """Where they lie in ``data``. Raises HostCodeError outside of it."""
        start = address - HOST_SPACE
        if start < 0 or start + size > len(self.data):
            raise HostCodeError(f"the host code touches 0x{address:x}, which is none of its memory")
        return slice(start, start + size)

    def load(self, address: int, kind: Type) -> Any:
        """A value of a type."""
        if kind.kind in ("struct", "array"):
            return [
                self.load(address + offset, member)
                for offset, member in zip(kind.offsets, kind.members, strict=True)
            ]
        value = int.from_bytes(self.data[self.bytes_at(address, kind.size)], "little")
        return value & ((1 << kind.bits) - 1)

    def store(self, address: int, kind: Type, value: Any) -> None:
        """Writes a value of a type."""
        if kind.kind in ("struct", "array"):
            for offset, member, part in zip(kind.offsets, kind.members, value, strict=True):
                self.store(address + offset, member, part)
        else:
            self.data[self.bytes_at(address, kind.size)] = int(value).to_bytes(kind.size, "little")


@dataclass(frozen=True)
class TensorArgument:
    """A tensor and the mode whose unit stride the compiled code takes for granted; None: any of stride 1."""

    tensor: torch.Tensor
    unit_mode: int | None = None

    def leaves(self, kind: Type) -> list[int]:
        """Pointer, sizes and strides as the struct has them. Raises HostCodeError."""
        slots = _leaves(kind)
        sizes, strides = list(self.tensor.shape), list(self.tensor.stride())
        mode = self.unit_mode
        if mode is None:
            mode = next((i for i in reversed(range(len(strides))) if strides[i] == 1), len(strides) - 1)
        pitches = [stride for i, stride in enumerate(strides) if i != mode % len(strides)]
        numbers = [slot.bits for slot in slots[1:]]
        if numbers == []:
            values = []
        elif numbers == [32] * len(sizes) + [64] * len(pitches):
            values = [*sizes, *pitches]
        elif numbers == [32] * len(sizes) + [64] * len(strides):
            values = [*sizes, *strides]
        elif numbers == [32] * len(sizes):
            values = sizes
        else:
            raise HostCodeError(
                f"the host code takes a tensor as {numbers} bit numbers, which is not understood for "
                f"{len(sizes)} modes"
            )
        return [
            self.tensor.data_ptr(),
            *(v & ((1 << bits) - 1) for v, bits in zip(values, numbers, strict=True)),
        ]


def _leaves(kind: Type) -> list[Type]:
    if kind.kind in ("struct", "array"):
        return [leaf for member in kind.members for leaf in _leaves(member)]
    return [kind]


def _build(kind: Type, leaves: list[int]) -> Any:
    if kind.kind in ("struct", "array"):
        return [_build(member, leaves) for member in kind.members]
    return leaves.pop(0)


def launch_of(host_mlir: str, module: Module, arguments: Sequence[Any]) -> LaunchRecord | None:
    """What the host code launches for these arguments; None if it decides not to.

    arguments: torch tensors, TensorArguments or the DSL runtime's tensors, numbers, ctypes structures or
    simple values (they are copied to host memory, passed by address and copied back), None for a stream.
    Raises HostCodeError.
    """
    function = launching_function(host_mlir)
    if len(arguments) != len(function.arguments):
        raise HostCodeError(
            f"{function.name} takes {len(function.arguments)} arguments, {len(arguments)} were given"
        )
    memory = HostMemory()
    values: dict[str, Any] = {}
    copied: list[tuple[Any, int]] = []
    for (name, kind), argument in zip(function.arguments, arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            argument = TensorArgument(argument)
        if isinstance(argument, TensorArgument):
            values[name] = _build(kind, argument.leaves(kind))
        elif isinstance(argument, ctypes.Structure | ctypes._SimpleCData):
            address = memory.allocate(ctypes.sizeof(argument))
            memory.data[memory.bytes_at(address, ctypes.sizeof(argument))] = bytes(argument)
            copied.append((argument, address))
            values[name] = address
        elif is_runtime_tensor(argument):
            address = memory.allocate(kind.size)
            memory.data[memory.bytes_at(address, kind.size)] = runtime_bytes(argument, kind.size)
            values[name] = memory.load(address, kind)
        elif kind.kind == "float":
            values[name] = _float_bits(float(argument), kind.bits)
        elif kind.kind == "int" and isinstance(argument, int):
            values[name] = argument & ((1 << kind.bits) - 1)
        else:
            values[name] = int(argument or 0) & ((1 << 64) - 1)
    interpreter = _Interpreter(function, memory, values, module)
    record = interpreter.run()
    for argument, address in copied:
        size = ctypes.sizeof(argument)
        ctypes.memmove(ctypes.addressof(argument), bytes(memory.data[memory.bytes_at(address, size)]), size)
    return record


def _float_bits(number: float, bits: int) -> int:
    code = {32: "f", 64: "d"}.get(bits)
    if code is None:
        raise HostCodeError(f"numbers of {bits} bits are not understood as arguments of the host code")
    return int.from_bytes(struct.pack(f"<{code}", number), "little")


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul": lambda a, b, n: a * b,
    "and": lambda a, b, n: a & b,
    "or": lambda a, b, n: a | b,
    "xor": lambda a, b, n: a ^ b,
    "shl": lambda a, b, n: a << b if b < n else 0,
    "lshr": lambda a, b, n: a >> b,
    "ashr": lambda a, b, n: _signed(a, n) >> b,
    "udiv": lambda a, b, n: a // b,
    "urem": lambda a, b, n: a % b,
    "sdiv": lambda a, b, n: _truncated(_signed(a, n), _signed(b, n)),
    "srem": lambda a, b, n: _signed(a, n) - _truncated(_signed(a, n), _signed(b, n)) * _signed(b, n),
}
_COUNTS: dict[str, Callable[[int, int], int]] = {
    "intr.ctlz": lambda a, n: n - a.bit_length(),
    "intr.cttz": lambda a, n: (a & -a).bit_length() - 1 if a else n,
    "intr.ctpop": lambda a, n: a.bit_count(),
}
_MINMAX: dict[str, Callable[[int, int, int], int]] = {
    "intr.smin": lambda a, b, n: min(_signed(a, n), _signed(b, n)),
    "intr.smax": lambda a, b, n: max(_signed(a, n), _signed(b, n)),
    "intr.umin": lambda a, b, n: min(a, b),
    "intr.umax": lambda a, b, n: max(a, b),
}
_ICMP: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


class _Interpreter:
    """Walks a function's blocks."""

    def __init__(
        self, function: Function, memory: HostMemory, values: dict[str, Any], module: Module
    ) -> None:
        self.function = function
        self.memory = memory
        self.values = values
        self.module = module
        self.globals: dict[str, int] = {}
        self.launch: LaunchRecord | None = None

    def run(self) -> LaunchRecord | None:
        block = self.function.blocks["entry"]
        steps = 0
        while True:
            for operation in block.operations:
                steps += 1
                if steps > MAX_STEPS:
                    raise HostCodeError(f"{self.function.name} does not end")
                if operation.name in ("br", "cond_br"):
                    block = self._branch(operation)
                    break
                if operation.name == "return":
                    return self.launch
                self._step(operation)
            else:
                raise HostCodeError(f"a block of {self.function.name} has no end")

    # --- operations ------------------------------------------------------------------------------------

    def _step(self, operation: Operation) -> None:
        name, rest = operation.name, operation.rest
        if name in _BINARY:
            value = self._binary(_BINARY[name], rest)
        elif name in _MINMAX:
            found = re.match(r"\((%\w+), (%\w+)\) : \((\w+)", rest)
            if found is None:
                raise self._unknown(operation)
            bits = parse_type(found[3]).bits
            value = _MINMAX[name](self.values[found[1]], self.values[found[2]], bits) & ((1 << bits) - 1)
        elif name in _COUNTS:
            found = re.match(r"\((%\w+)\) : \((\w+)\)", rest)
            if found is None:
                raise self._unknown(operation)
            value = _COUNTS[name](self.values[found[1]], parse_type(found[2]).bits)
        elif method := getattr(self, "_op_" + name.replace(".", "_"), None):
            value = method(rest)
        else:
            raise self._unknown(operation)
        if operation.result:
            self.values[operation.result] = value

    def _unknown(self, operation: Operation) -> HostCodeError:
        return HostCodeError(
            f"the host operation llvm.{operation.name} {operation.rest[:80]} is not executed"
        )

    def _binary(self, function: Callable[[int, int, int], int], rest: str) -> int:
        operands, _, kind = rest.rpartition(":")
        a, b = re.findall(r"%\w+", operands)[:2]
        bits = parse_type(kind).bits
        return function(self.values[a], self.values[b], bits) & ((1 << bits) - 1)

    def _branch(self, operation: Operation) -> Any:
        rest = operation.rest
        if operation.name == "cond_br":
            condition, *targets = split_list(re.sub(r"weights\([^)]*\)", "", rest))
            rest = targets[0 if self.values[condition.split()[0]] else 1]
        found = re.match(r"\^(\w+)(?:\((.*?) : .*\))?", rest)
        if found is None:
            raise self._unknown(operation)
        block = self.function.blocks[found[1]]
        if found[2]:
            given = [self.values[name.strip()] for name in found[2].split(",")]
            self.values.update(zip(block.arguments, given, strict=True))
        return block

    def _op_mlir_constant(self, rest: str) -> Any:
        found = re.match(r"\((true|false|-?\d+)(?: : \w+)?\) : (\S+)", rest)
        if dense := re.match(r"\(dense<(-?\d+)> : .*\) : (vector<.*)", rest):
            return [int(dense[1]) & ((1 << member.bits) - 1) for member in parse_type(dense[2]).members]
        if found is None:
            return 0  # a string; only error messages use them
        number = {"true": 1, "false": 0}.get(found[1])
        value = int(found[1]) if number is None else number
        return value & ((1 << parse_type(found[2]).bits) - 1)

    def _op_mlir_poison(self, rest: str) -> Any:
        return parse_type(rest.removeprefix(":")).zero()

    _op_mlir_undef = _op_mlir_zero = _op_mlir_poison

    def _op_mlir_addressof(self, rest: str) -> int:
        name = rest.split(" : ")[0]
        if name not in self.globals:
            self.globals[name] = self.memory.allocate(256)
        return self.globals[name]

    def _op_intr_assume(self, rest: str) -> None:
        """A promise to the optimiser."""

    def _op_extractvalue(self, rest: str) -> Any:
        found = re.match(r"(%\w+)\[([\d, ]+)\]", rest)
        if found is None:
            raise HostCodeError(f"llvm.extractvalue {rest[:60]} is not understood")
        value = self.values[found[1]]
        for index in found[2].split(","):
            value = value[int(index)]
        return value

    def _op_insertvalue(self, rest: str) -> Any:
        found = re.match(r"(%\w+), (%\w+)\[([\d, ]+)\]", rest)
        if found is None:
            raise HostCodeError(f"llvm.insertvalue {rest[:60]} is not understood")
        path = [int(index) for index in found[3].split(",")]
        return _inserted(self.values[found[2]], path, self.values[found[1]])

    def _op_inttoptr(self, rest: str) -> int:
        return int(self.values[rest.split()[0]])

    _op_ptrtoint = _op_addrspacecast = _op_bitcast = _op_inttoptr

    def _op_sext(self, rest: str) -> int:
        found = re.match(r"(%\w+) : (\w+) to (\w+)", rest)
        if found is None:
            raise HostCodeError(f"llvm.sext {rest[:60]} is not understood")
        bits = parse_type(found[3]).bits
        return _signed(self.values[found[1]], parse_type(found[2]).bits) & ((1 << bits) - 1)

    def _op_zext(self, rest: str) -> int:
        return int(self.values[rest.split()[0]])

    def _op_trunc(self, rest: str) -> int:
        return int(self.values[rest.split()[0]]) & ((1 << parse_type(rest.rpartition(" to ")[2]).bits) - 1)

    def _op_icmp(self, rest: str) -> int:
        found = re.match(r'"(\w+)" (%\w+), (%\w+) : (\S+)', rest)
        if found is None:
            raise HostCodeError(f"llvm.icmp {rest[:60]} is not understood")
        a, b = self.values[found[2]], self.values[found[3]]
        relation = found[1]
        if relation[0] == "s":
            bits = parse_type(found[4]).bits
            a, b = _signed(a, bits), _signed(b, bits)
        return int(_ICMP[relation if relation in _ICMP else relation[1:]](a, b))

    def _op_select(self, rest: str) -> Any:
        condition, yes, no = re.findall(r"%\w+", rest)[:3]
        return self.values[yes] if self.values[condition] else self.values[no]

    def _op_alloca(self, rest: str) -> int:
        found = re.match(r"(?:inalloca )?(%\w+) x (.*?)(?: \{alignment = (\d+).*?\})? : \(i\d+\) -> ", rest)
        if found is None:
            raise HostCodeError(f"llvm.alloca {rest[:60]} is not understood")
        kind = parse_type(found[2])
        return self.memory.allocate(self.values[found[1]] * kind.size, int(found[3] or kind.alignment))

    def _op_getelementptr(self, rest: str) -> int:
        found = re.match(r"(?:inbounds.*? )?(%\w+)\[([^\]]*)\] : \(.*?\) -> \S+, (.*)", rest)
        if found is None:
            raise HostCodeError(f"llvm.getelementptr {rest[:60]} is not understood")
        kind = parse_type(found[3])
        indices = [
            _signed(self.values[text], 32) if text.startswith("%") else int(text)
            for text in (part.strip() for part in found[2].split(","))
        ]
        address = self.values[found[1]] + indices[0] * kind.size
        for index in indices[1:]:
            address += kind.offsets[index] if kind.offsets else 0
            kind = kind.members[index]
        return int(address)

    def _op_load(self, rest: str) -> Any:
        return self.memory.load(self.values[rest.split()[0]], parse_type(rest.rpartition(" -> ")[2]))

    def _op_store(self, rest: str) -> None:
        names, _, kinds = re.sub(r"\{[^}]*\}", "", rest, count=1).partition(" : ")
        value, address = re.findall(r"%\w+", names)[:2]
        self.memory.store(self.values[address], parse_type(split_list(kinds)[0]), self.values[value])

    def _op_intr_trap(self, rest: str) -> None:
        raise HostCodeError(f"{self.function.name} stopped itself")

    _op_unreachable = _op_intr_trap

    def _op_call(self, rest: str) -> int:
        found = re.match(r"@(\w+)\(([^)]*)\)", rest)
        if found is None:
            raise HostCodeError(f"llvm.call {rest[:60]} is not understood")
        if found[1] in ("printf", "cuda_dialect_assert_success"):
            return 0
        if found[1] == "_cuTensorMapEncodeTiled":
            self._encode_map([self.values[name.strip()] for name in found[2].split(",")])
            return 0
        if found[1] != "_cudaLaunchKernelEx":
            raise HostCodeError(f"the host code calls {found[1]}, which this emulator has no stand-in for")
        config, _, arguments = (self.values[name.strip()] for name in found[2].split(","))
        self.launch = self._launch(config, arguments)
        return 0

    def _encode_map(self, arguments: list[int]) -> None:
        """Map, element type, rank, address, sizes, strides, box, element strides, interleave, swizzle, ..."""
        target, element, rank, address, *places = arguments
        i32, i64 = parse_type("i32"), parse_type("i64")

        def numbers(start: int, kind: Type, count: int) -> list[int]:
            return [int(self.memory.load(start + i * kind.size, kind)) for i in range(count)]

        if places[4] or any(step != 1 for step in numbers(places[3], i32, rank)):
            raise HostCodeError("a tensor map with interleaving or steps between elements is not known here")
        data = encode_map(
            element,
            address,
            numbers(places[0], i64, rank),
            numbers(places[1], i64, rank - 1),
            numbers(places[2], i32, rank),
            places[5],
        )
        self.memory.data[self.memory.bytes_at(target, len(data))] = data

    def _launch(self, config: int, arguments: int) -> LaunchRecord:
        """Reads the launch configuration and the kernel's parameters."""
        memory = self.memory
        words = [memory.load(config + 4 * i, parse_type("i32")) for i in range(6)]
        shared, _, attributes = (memory.load(config + 24 + 8 * i, parse_type("i64")) for i in range(3))
        count = memory.load(config + 48, parse_type("i32"))
        cluster = (1, 1, 1)
        for i in range(count):
            kind, x, y, z = (
                memory.load(attributes + 72 * i + at, parse_type("i32")) for at in (0, 8, 12, 16)
            )
            if kind == CLUSTER_ATTRIBUTE:
                cluster = (x, y, z)
        params = bytearray()
        for i, param in enumerate(self.module.params):
            params.extend(bytes(-len(params) % param.alignment))
            address = memory.load(arguments + 8 * i, parse_type("i64"))
            params.extend(memory.data[memory.bytes_at(address, param.size)])
        grid, block = (words[0], words[1], words[2]), (words[3], words[4], words[5])
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise HostCodeError(f"a grid of {grid} CTAs does not divide into clusters of {cluster}")
        return LaunchRecord(grid, block, cluster, int(shared), bytes(params))


def _inserted(value: Any, path: list[int], new: Any) -> Any:
    """A copy of nested lists with one member replaced."""
    if not path:
        return new
    copy = list(value)
    copy[path[0]] = _inserted(value[path[0]], path[1:], new)
    return copy
