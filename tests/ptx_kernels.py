"""Small sm_100a kernels written in PTX: a frame around a body, tensor memory allocated and freed."""

import struct

import torch

from cutegemm.emulator.machine import LaunchRecord, Machine
from cutegemm.emulator.memory import GlobalMemory, tensor_region
from cutegemm.emulator.run import program_of

HEADER = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 k_param_0)
{
    .reg .pred %p<19>; .reg .b16 %h<9>; .reg .b32 %r<400>; .reg .b64 %rd<40>; .reg .b128 %q<4>;
    ld.param.b64 %rd0, [k_param_0];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_ctarank;
    mov.b32 %r3, dynamic;
    shr.u32 %r4, %r0, 5; shl.b32 %r5, %r4, 21;  // the first lane of a warp's quarter, as an address
"""
ALLOCATE = """
    setp.ne.b32 %p0, %r4, 0; @%p0 bra HAVE;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], {columns};
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    HAVE: bar.sync 0; ld.shared.b32 %r6, [%r3]; add.s32 %r7, %r6, %r5;
"""
FREE = """
    bar.sync 0; setp.ne.b32 %p0, %r4, 0; @%p0 bra FREED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, {columns};
    FREED:
"""


def launch(
    body: str,
    out: torch.Tensor,
    grid: int = 1,
    threads: int = 32,
    cluster: int = 1,
    shared: int = 65536,
    **machine: object,
) -> Machine:
    """Runs a body with %rd0 = address of ``out``."""
    memory = GlobalMemory()
    memory.add(tensor_region("out", out))
    record = LaunchRecord(
        (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, struct.pack("<Q", out.data_ptr())
    )
    emulated = Machine(program_of(HEADER + body + "\nret;\n}\n"), record, memory, **machine)  # type: ignore[arg-type]
    emulated.run()
    return emulated


def stores(registers: list[str], first: int = 0) -> str:
    """PTX that stores registers as words first, first + 1, ... of the thread's column of the output."""
    lines = ["shl.b32 %r390, %r0, 2; cvt.u64.u32 %rd30, %r390; add.s64 %rd31, %rd0, %rd30;"]
    lines += [f"st.global.b32 [%rd31+{(first + i) * 512}], {r};" for i, r in enumerate(registers)]
    return " ".join(lines)


def names(first: int, count: int) -> list[str]:
    return [f"%r{i}" for i in range(first, first + count)]


def vector(registers: list[str]) -> str:
    return "{" + ", ".join(registers) + "}"


# Every cell gets 1000 * lane + column: each warp stores 32 columns of its 32 lanes.
FILL = (
    "mul.lo.s32 %r300, %r0, 1000;"
    + " ".join(f"add.s32 %r{301 + i}, %r300, {i};" for i in range(32))
    + f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r7], {vector(names(301, 32))};"
    + "tcgen05.wait::st.sync.aligned;"
)
