"""WGMMA instructions of every type, in a kernel of four warps that does one or two steps along K."""

import struct
from typing import Any

import numpy as np
import pytest
import torch

from cutegemm.emulator.faults import RaceError, UnknownInstructionError
from cutegemm.emulator.machine import LaunchRecord, Machine
from cutegemm.emulator.memory import GlobalMemory, tensor_region
from cutegemm.emulator.run import program_of

N, ROWS, STEP = 16, 64, 32
TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
FORMS = [
    ("f32", "bf16", "bf16"),
    ("f32", "f16", "f16"),
    ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e4m3"),
    ("f32", "e4m3", "e5m2"),
    ("f32", "e5m2", "e4m3"),
    ("f16", "f16", "f16"),
    ("f16", "e5m2", "e5m2"),
    ("s32", "s8", "s8"),
    ("s32", "u8", "s8"),
    ("s32", "u8", "u8"),
]


def matrix(name: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    if name in ("s8", "u8"):
        low = -128 if name == "s8" else 0
        return torch.randint(low, low + 256, (rows, columns), generator=generator).to(TORCH[name])
    numbers = torch.randn(rows, columns, generator=generator)
    if name == "tf32":
        return (numbers.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return numbers.to(TORCH[name])


def in_core_matrices(operand: torch.Tensor) -> bytes:
    """Rows of 32 bytes in blocks of 8 x 16 bytes, unswizzled: SBO 128, LBO after the last row."""
    rows = operand.contiguous().view(torch.uint8).numpy().reshape(len(operand) // 8, 8, 2, 16)
    return rows.transpose(2, 0, 1, 3).tobytes()


def in_registers(operand: torch.Tensor) -> bytes:
    """Words of A for each thread: register i of lane t is row t/4 + 8 (i%2), byte 16 (i/2) + 4 (t%4)."""
    raw = operand.contiguous().view(torch.uint8).numpy().reshape(ROWS, STEP)
    words = []
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(4):
            row, byte = 16 * warp + lane // 4 + 8 * (i % 2), 16 * (i // 2) + 4 * (lane % 4)
            words.append(raw[row, byte : byte + 4].tobytes())
    return b"".join(words)


def descriptor(start: int, rows: int) -> str:
    """Without swizzle; ``start`` is added at run time."""
    return str((rows // 8 * 128) >> 4 << 16 | 128 >> 4 << 32 | start >> 4)


def kernel(opcode: str, registers: int, tail: str, steps: int, from_registers: bool) -> str:
    """Copies A and B to shared memory, multiplies, writes every thread's accumulators one after another."""
    block = (ROWS + N) * STEP  # bytes of a step
    accumulators = ", ".join(f"%a{i}" for i in range(registers))
    copies = "\n".join(
        f"ld.global.b32 %r4, [%rd1+{at}]; st.shared.b32 [%r3+{at}], %r4;"
        for at in range(0, steps * block, 512)
    )
    multiplications = []
    for step in range(steps):
        a, b = descriptor(step * block, ROWS), descriptor(step * block + ROWS * STEP, N)
        left = f"{{%x{4 * step}, %x{4 * step + 1}, %x{4 * step + 2}, %x{4 * step + 3}}}"
        multiplications.append(
            f"add.s64 %rd5, %rd4, {a}; add.s64 %rd6, %rd4, {b}; setp.ne.b32 %p0, {step}, 0;"
            f"{opcode} {{{accumulators}}}, {left if from_registers else '%rd5'}, %rd6, %p0{tail};"
        )
    stores = "\n".join(f"st.global.b32 [%rd2+{4 * i}], %a{i};" for i in range(registers))
    loads = "\n".join(
        f"ld.global.v4.b32 {{%x{4 * s}, %x{4 * s + 1}, %x{4 * s + 2}, %x{4 * s + 3}}}, [%rd7+{2048 * s}];"
        for s in range(steps if from_registers else 0)
    )
    return f"""
    .version 8.8
    .target sm_90a
    .address_size 64
    .extern .shared .align 1024 .b8 dynamic[];
    .visible .entry k(.param .u64 source, .param .u64 out, .param .u64 fragments)
    {{
        .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b32 %a<99>; .reg .b32 %x<9>; .reg .b64 %rd<9>;
        ld.param.b64 %rd0, [source]; ld.param.b64 %rd2, [out]; ld.param.b64 %rd7, [fragments];
        mov.u32 %r0, %tid.x; mul.wide.u32 %rd3, %r0, 4; add.s64 %rd1, %rd0, %rd3;
        mul.wide.u32 %rd3, %r0, {4 * registers}; add.s64 %rd2, %rd2, %rd3;
        mul.wide.u32 %rd3, %r0, 16; add.s64 %rd7, %rd7, %rd3;
        mov.b32 %r2, dynamic; shl.b32 %r3, %r0, 2; add.s32 %r3, %r2, %r3;
        {copies}
        {loads}
        fence.proxy.async.shared::cta; bar.sync 0;
        shr.u32 %r5, %r2, 4; and.b32 %r5, %r5, 16383; cvt.u64.u32 %rd4, %r5;
        wgmma.fence.sync.aligned;
        {"".join(multiplications)}
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        {stores}
        ret;
    }}"""


def run(ptx: str, source: bytes, fragments: bytes, words: int) -> Any:
    """The words of all threads."""
    given = [
        torch.frombuffer(bytearray(data or bytes(16)), dtype=torch.uint8) for data in (source, fragments)
    ]
    out = torch.zeros(128 * words, dtype=torch.int32)
    memory = GlobalMemory()
    for name, tensor in (("source", given[0]), ("fragments", given[1]), ("out", out)):
        memory.add(tensor_region(name, tensor))
    params = struct.pack("<QQQ", given[0].data_ptr(), out.data_ptr(), given[1].data_ptr())
    launch = LaunchRecord((1, 1, 1), (128, 1, 1), (1, 1, 1), 16384, params)
    Machine(program_of(ptx), launch, memory, None, check=True).run()
    return out.numpy().view(np.uint32).reshape(4, 32, words)


def matrix_of(found: Any, d: str) -> Any:
    """(64, N) out of the accumulators, by the position of each element."""
    result = np.zeros((ROWS, N), dtype=np.float64)
    for row in range(ROWS):
        for column in range(N):
            lane, high = row % 8 * 4 + column % 8 // 2, row % 16 // 8
            words = found[row // 16, lane]
            if d == "f16":
                pair = words[2 * (column // 8) + high : 2 * (column // 8) + high + 1].view(np.float16)
                result[row, column] = pair[column % 2]
            else:
                word = words[4 * (column // 8) + 2 * high + column % 2 :][:1]
                result[row, column] = word.view(np.float32 if d == "f32" else np.int32)[0]
    return result


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize(
    ("form", "sign"),
    [(form, 1) for form in FORMS] + [(form, -1) for form in FORMS if form[0] != "s32"],
    ids=str,
)
def test_a_product_of_every_type(form: tuple[str, str, str], sign: int, from_registers: bool) -> None:
    d, a, b = form
    steps, k = 2, STEP // TORCH[a].itemsize
    generator = torch.Generator().manual_seed(k)
    left = [matrix(a, ROWS, k, generator) for _ in range(steps)]
    right = [matrix(b, N, k, generator) for _ in range(steps)]
    wide = a in ("bf16", "f16")
    signs = "" if d == "s32" else f", {sign}, 1"
    tail = signs + ((", 0" if from_registers else ", 0, 0") if wide else "")
    registers = N // 4 if d == "f16" else N // 2
    opcode = f"wgmma.mma_async.sync.aligned.m64n{N}k{k}.{d}.{a}.{b}"
    ptx = kernel(opcode, registers, tail, steps, from_registers)
    source = b"".join(in_core_matrices(x) + in_core_matrices(y) for x, y in zip(left, right, strict=True))
    found = matrix_of(run(ptx, source, b"".join(map(in_registers, left)), registers), d)
    expected = np.zeros((ROWS, N))
    for x, y in zip(left, right, strict=True):
        expected = expected + sign * (x.double() @ y.double().T).numpy()
        if d == "f16":
            expected = expected.astype(np.float16).astype(np.float64)
    if d == "s32":
        assert np.array_equal(found, expected)
    else:
        # A sum in float32, rounded once more for a float16 accumulator.
        bound = 2.0**-10 * np.abs(expected) + 2.0**-12 if d == "f16" else 1e-5 * STEP
        assert (np.abs(found - expected) <= bound).all()


def test_integer_sums_saturate_only_if_told_to() -> None:
    largest = torch.full((ROWS, 32), 127, dtype=torch.int8)
    other = torch.full((N, 32), 127, dtype=torch.int8)
    product = 32 * 127 * 127
    for suffix, expected in (("", (2**31 - 1 + product) - 2**32), (".satfinite", 2**31 - 1)):
        opcode = f"wgmma.mma_async.sync.aligned.m64n{N}k32{suffix}.s32.s8.s8"
        ptx = kernel(opcode, N // 2, "", 1, False).replace("setp.ne.b32 %p0, 0, 0;", "setp.eq.b32 %p0, 0, 0;")
        start = "".join(f"mov.b32 %a{i}, 2147483647;" for i in range(N // 2))
        ptx = ptx.replace("wgmma.fence.sync.aligned;", start + "wgmma.fence.sync.aligned;")
        found = run(ptx, in_core_matrices(largest) + in_core_matrices(other), b"", N // 2)
        assert (found.view(np.int32) == expected).all()


def test_accumulators_cannot_be_used_before_the_wait() -> None:
    zeros = bytes((ROWS + N) * STEP)
    ptx = kernel(f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16", N // 2, ", 1, 1, 0, 0", 1, False)
    with pytest.raises(RaceError, match=r"st\.global\.b32 .* reads an accumulator of wgmma\.mma_async"):
        run(ptx.replace("wgmma.wait_group.sync.aligned 0;", ""), zeros, b"", N // 2)


def test_registers_are_written_before_the_fence() -> None:
    zeros = bytes((ROWS + N) * STEP)
    opcode = f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16"
    ptx = kernel(opcode, N // 2, ", 1, 1, 0, 0", 1, False).replace("setp.ne.b32 %p0, 0", "setp.eq.b32 %p0, 0")
    start = "mov.u32 %r6, %laneid; cvt.rn.f32.u32 %r6, %r6;"
    start += "".join(f"add.f32 %a{i}, %r6, %r6;" for i in range(N // 2))
    fence = "wgmma.fence.sync.aligned;"
    found = run(ptx.replace(fence, start + fence), zeros, b"", N // 2)
    assert (found.view(np.float32) == 2 * np.arange(32)[None, :, None]).all()
    with pytest.raises(
        RaceError, match=r"wgmma\.mma_async.* adds to registers written after the last wgmma\.fence"
    ):
        run(ptx.replace(fence, fence + start), zeros, b"", N // 2)
    with pytest.raises(RaceError, match=r"comes before any wgmma\.fence"):
        run(ptx.replace(fence, start), zeros, b"", N // 2)


@pytest.mark.parametrize(
    ("form", "tail"),
    [
        ("m64n16k16.f32.bf16.f16", ", 1, 1, 0, 0"),
        ("m64n16k32.f32.bf16.bf16", ", 1, 1, 0, 0"),
        ("m64n16k32.f32.e4m3.e4m3", ", 1, 1, 0, 0"),
        ("m64n16k256.s32.b1.b1.and.popc", ""),
        ("m64n16k16.f32.bf16.bf16", ", 2, 1, 0, 0"),
    ],
)
def test_forms_that_do_not_exist_or_are_not_known(form: str, tail: str) -> None:
    with pytest.raises(UnknownInstructionError, match=r"wgmma\.mma_async.*PTX line \d+"):
        program_of(kernel(f"wgmma.mma_async.sync.aligned.{form}", N // 2, tail, 1, False))
