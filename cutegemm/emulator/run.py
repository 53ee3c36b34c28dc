"""One emulated launch, from compiled code and CPU tensors to the result."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cutegemm.emulator import (
    ops_async,
    ops_atomic,
    ops_control,
    ops_copy,
    ops_float,
    ops_integer,
    ops_launch,
    ops_mbarrier,
    ops_memory,
    ops_packed,
    ops_tcgen05,
    ops_tensormap,
    ops_tma,
    ops_wgmma,
)
from cutegemm.emulator.arguments import Addresses, is_runtime_tensor, runtime_region
from cutegemm.emulator.decode import Decoder, Program
from cutegemm.emulator.faults import HostCodeError
from cutegemm.emulator.host import TensorArgument, launch_of
from cutegemm.emulator.independence import processes_for
from cutegemm.emulator.machine import LaunchRecord, Machine, Progress
from cutegemm.emulator.memory import SHARED_BASE, GlobalMemory, tensor_region
from cutegemm.emulator.processes import divide, run_divided
from cutegemm.emulator.ptx import parse
from cutegemm.emulator.trace import Trace

FAMILIES = (
    ops_async,
    ops_atomic,
    ops_copy,
    ops_control,
    ops_float,
    ops_integer,
    ops_launch,
    ops_mbarrier,
    ops_memory,
    ops_packed,
    ops_tcgen05,
    ops_tensormap,
    ops_tma,
    ops_wgmma,
)


@dataclass(frozen=True)
class Emulation:
    """What came of a launch.

    out            the result, a CPU tensor; None for a bare ``run`` of arbitrary code
    outputs        an epilogue's further results, by name
    trace          what ran when
    launch         grid, block, cluster and parameters; None if the host code launched nothing
    instructions   warp instructions executed
    processes      among which the clusters were divided; 1 if they depend on each other
    """

    out: torch.Tensor | None
    outputs: Mapping[str, torch.Tensor]
    trace: Trace
    launch: LaunchRecord | None
    instructions: int = 0
    processes: int = 1


@lru_cache(maxsize=16)
def program_of(ptx: str) -> Program:
    """The decoded kernel of a PTX text; kept, because decoding takes a while."""
    return Decoder(parse(ptx), SHARED_BASE).decode()


def run(
    compiled: Any,
    *arguments: Any,
    seed: int | None = None,
    check: bool = False,
    ptx: str | None = None,
    barrier_labels: Mapping[int, str] | None = None,
    sms: int | None = None,
    processes: int | None = 1,
    progress: Callable[[Progress], None] | None = None,
    exact_sums: bool = False,
) -> Emulation:
    """Runs a compiled kernel on CPU tensors, which are written in place.

    compiled    a cutegemm Artifact, or what ``cute.compile`` returned with ``--keep-ptx``
    arguments   those of the host function: tensors (torch's, or those of from_dlpack), numbers, None for a
                stream, ctypes values for addresses of host memory; Addresses for one that holds pointers
    seed        None: a fixed order, everything as early as possible; a number: random order of warps, late
                asynchronous work, try_waits that fail for no reason
    check       whether races and uninitialised reads of shared memory are looked for
    ptx         device code to run instead of the compiled one's
    barrier_labels   what to call the mbarriers in reports, by their offset in shared memory
    progress    is called a few times a second
    processes   among which clusters that do not depend on each other are divided; None or 0: as many as there
                are CPUs. With a seed the order differs with their number
    sms         SMs of the emulated GPU; None: as many as an H200 or a B200 has
    exact_sums  whether WGMMAs of 16-bit operands give the bits an H200 gives; several times slower

    Raises EmulationError and its subclasses for faults of the kernel.
    """
    text = ptx if ptx is not None else _ptx_of(compiled)
    program = program_of(text)
    memory = GlobalMemory()
    arguments = tuple(_unfolded(arguments, memory))
    for number, argument in enumerate(arguments):
        tensor = argument.tensor if isinstance(argument, TensorArgument) else argument
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type != "cpu":
                raise HostCodeError(
                    f"argument {number} lies on {tensor.device}; the emulator takes CPU tensors"
                )
            memory.add(tensor_region(f"argument {number}", tensor))
        elif is_runtime_tensor(tensor):
            memory.add(runtime_region(f"argument {number}", tensor))
    launch = launch_of(_host_of(compiled), program.module, arguments)
    if launch is None:
        return Emulation(None, {}, Trace(), None)

    def build(number: int = 0) -> Machine:
        """The machine, or that of one of several processes, each with chances of its own."""
        own = seed if seed is None else seed + (number << 32)
        machine = Machine(program, launch, memory, own, check, sms)
        machine.barrier_labels = dict(barrier_labels or {})
        machine.exact_sums = exact_sums
        return machine

    machine = build()
    count = processes_for(processes, program, launch, machine.processors)
    # NaN and Inf are numbers like others to a GPU.
    with _older_objects_set_aside(), np.errstate(invalid="ignore", over="ignore"):
        if count > 1:
            parts = divide(math.prod(launch.grid) // math.prod(launch.cluster), count)
            divided = run_divided(build, parts, progress)
            if divided is not None:
                return Emulation(None, {}, divided[0], launch, divided[1], count)
            # A race between two processes: one that sees both accesses can say what they are.
        machine.watch = progress
        try:
            machine.run()
        finally:
            machine.take_apart()
    return Emulation(None, {}, machine.trace, launch, machine.instructions)


def _unfolded(arguments: tuple[Any, ...], memory: GlobalMemory) -> Iterator[Any]:
    """The arguments themselves; what their Addresses lead to is given to the kernel too."""
    for number, argument in enumerate(arguments):
        if not isinstance(argument, Addresses):
            yield argument
            continue
        for name, target in argument.named(number).items():
            memory.add(tensor_region(name, target))
        yield argument.argument


@contextmanager
def _older_objects_set_aside() -> Iterator[None]:
    """Garbage collection looks at the emulator's own objects only, not at all of torch's every time."""
    if gc.get_freeze_count():
        yield  # somebody else has done so, and would not want to have them thawed
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _ptx_of(compiled: Any) -> str:
    text = getattr(compiled, "ptx", None) or getattr(compiled, "__ptx__", None)
    if not isinstance(text, str):
        raise HostCodeError(
            f"{type(compiled).__name__} carries no PTX; compile it with the option --keep-ptx"
        )
    return text


def _host_of(compiled: Any) -> str:
    text = getattr(compiled, "host_mlir", None)
    if text is None and getattr(compiled, "ir_module", None) is not None:
        text = str(compiled.ir_module)
    if not isinstance(text, str):
        raise HostCodeError(f"{type(compiled).__name__} carries no host code to take the launch from")
    return text
