"""tcgen05.mma: descriptors, operands in every layout, every kind of numbers, where results lie."""

import numpy as np
import pytest
import torch
from ptx_kernels import ALLOCATE, FILL, FREE, launch, names, stores, vector

from cutegemm.emulator import tcgen05
from cutegemm.emulator.faults import MisuseError, RaceError, UnknownInstructionError

TYPES = {
    # kind: (codes of A, B, D), bytes of an element
    "f16": ((0, 1, 1), 2),
    "tf32": ((2, 2, 1), 4),
    "f8f6f4": ((0, 1, 1), 1),
    "i8": ((0, 1, 2), 1),
}
COLUMNS = 32


def random_operand(name: str, rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw bytes (rows, 32) and their numbers (rows, K)."""
    values = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    if name == "tf32":  # the last bits are not read
        values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return values.view(torch.uint8), values.double()
    dtype = {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "u8": torch.uint8,
        "s8": torch.int8,
    }[name]
    if not dtype.is_floating_point:
        values = values * 40 + (100 if name == "u8" else 0)
    typed = values.to(dtype)
    return typed.contiguous().view(torch.uint8).reshape(rows, 32), typed.double()


def place_operand(raw: torch.Tensor, start: int, element: int, swizzle: int, along_rows: bool) -> np.ndarray:
    """Shared memory that holds an operand, element for element as the layout's definition says."""
    memory = np.zeros(65536, dtype=np.uint8)
    rows = raw.shape[0]
    span = {0: 16, 6: 32, 4: 64, 2: 128, 1: 128}[swizzle]
    mask, least = {0: (0, 4), 6: (1, 4), 4: (3, 4), 2: (7, 4), 1: (3, 5)}[swizzle]
    period = 4 if swizzle == 1 else 8  # steps of K
    for r in range(rows):
        for byte in range(32):
            k, inside = divmod(byte, element)
            if along_rows and not swizzle:
                t = 16 // element
                at = r % t * element + r // t * SBO + k % 8 * 16 + k // 8 * LBO + inside
            elif along_rows:
                t = span // element
                at = r % t * element + r // t * LBO + k % period * span + k // period * SBO + inside
            elif swizzle:
                at = r % 8 * span + r // 8 * SBO + byte
            else:
                at = r % 8 * 16 + r // 8 * SBO + byte // 16 * LBO + byte % 16
            at += start
            memory[at ^ (at >> 7 & mask) << least] = raw[r, byte]
    return memory


LBO, SBO = 8192, 1024


class OneCta:
    """Shared memory as the MMA sees it."""

    number = 0

    def __init__(self, memory: np.ndarray) -> None:
        self.shared = type("Shared", (), {"chunks": memory.view(np.complex128)})()


@pytest.mark.parametrize("swizzle", [0, 2, 4, 6])
@pytest.mark.parametrize(
    ("name", "element", "along_rows"),
    [("bf16", 2, False), ("bf16", 2, True), ("tf32", 4, False), ("e5m2", 1, False), ("e4m3", 1, True)],
)
def test_operands_are_gathered_from_every_layout(
    name: str, element: int, along_rows: bool, swizzle: int
) -> None:
    check_gather(name, element, along_rows, swizzle)


def test_pieces_of_32_bytes_change_places() -> None:
    check_gather("tf32", 4, True, 1)


def check_gather(name: str, element: int, along_rows: bool, swizzle: int) -> None:
    """Fails unless an operand is found as its layout says."""
    raw, numbers = random_operand(name, 64, 32 // element, 3)
    start = 3 * 1024
    memory = place_operand(raw, start, element, swizzle, along_rows)
    descriptor = start >> 4 | LBO >> 4 << 16 | SBO >> 4 << 32 | 1 << 46 | swizzle << 61
    operand = tcgen05.Operand(descriptor, 64, element, along_rows)
    found = tcgen05.gather(OneCta(memory), [operand], name, "here")
    assert np.array_equal(found, numbers.numpy())


def mma_kernel(kind: str, descriptor: int, extra: str = "", d: str = "%r6") -> str:
    """A and B from the output tensor to shared memory, an MMA, and its result back.

    A lies from byte 65536 of the output on, B from 65536 + 8192; both without swizzle, along K.
    """
    copy = """
        mul.lo.s32 %r20, %r0, 128; cvt.u64.u32 %rd5, %r20; add.s64 %rd6, %rd0, %rd5; add.s32 %r21, %r3, %r20;
    """
    for i in range(0, 128, 8):
        copy += f"ld.global.b64 %rd7, [%rd6+{65536 + i}]; st.shared.b64 [%r21+{1024 + i}], %rd7;"
    low = f"add.s32 %r22, %r3, 1024; shr.u32 %r22, %r22, 4; or.b32 %r23, %r22, {128 >> 4 << 16};"
    return f"""{copy}
        setp.ne.b32 %p1, %r0, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r3+512], 1; READY:
        fence.proxy.async.shared::cta; bar.sync 0;
        {low} add.s32 %r24, %r23, {8192 >> 4};
        mov.b32 %r25, {256 >> 4 | 1 << 14}; mov.b64 %rd8, {{%r23, %r25}}; mov.b64 %rd9, {{%r24, %r25}};
        mov.b32 %r26, {descriptor};
        setp.ne.b32 %p2, %r0, 0; @%p2 bra ISSUED; {extra}
        tcgen05.mma.cta_group::1.kind::{kind} [{d}], %rd8, %rd9, %r26, 0;
        tcgen05.mma.cta_group::1.kind::{kind} [{d}], %rd8, %rd9, %r26, 1;
        add.s32 %r27, %r3, 512;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r27];
        ISSUED: WAITING: mbarrier.try_wait.parity.shared.b64 %p3, [%r3+512], 0; @!%p3 bra WAITING;
        tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {vector(names(100, COLUMNS))}, [%r7];
        tcgen05.wait::ld.sync.aligned; {stores(names(100, COLUMNS))}"""


def instruction(kind: str, m: int, n: int = COLUMNS, **bits: int) -> int:
    (a, b, d), _ = TYPES[kind]
    word = d << 4 | a << 7 | b << 10 | n // 8 << 17 | m // 16 << 24
    for bit, value in bits.items():
        word |= value << int(bit[1:])
    return word


def run_mma(kind: str, body: str, m: int, fill: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """(cells of D: (columns, lanes), the exact product) of twice A B^T."""
    (a_code, b_code, _), element = TYPES[kind]
    k = 32 // element
    a_raw, a = random_operand(tcgen05.OPERANDS[kind][a_code][0], m, k, 1)
    b_raw, b = random_operand(tcgen05.OPERANDS[kind][b_code][0], COLUMNS, k, 2)
    out = torch.zeros(65536 + 16384, dtype=torch.uint8)
    for raw, start in ((a_raw, 65536), (b_raw, 65536 + 8192)):
        # Without swizzle: rows of 16 bytes, 8 of them together, the other half of K 128 bytes on.
        rows = raw.shape[0]
        out[start : start + rows * 32] = raw.reshape(rows // 8, 8, 2, 16).permute(0, 2, 1, 3).reshape(-1)
    text = ALLOCATE.format(columns=128) + fill + body + FREE.format(columns=128)
    launch(text, out, threads=128, check=True)
    cells = out[: 64 * 512].view(torch.int32).reshape(64, 128)[:COLUMNS]
    return cells, 2 * b @ a.T


@pytest.mark.parametrize("kind", TYPES)
def test_an_mma_multiplies_its_kind_of_numbers(kind: str) -> None:
    cells, exact = run_mma(kind, mma_kernel(kind, instruction(kind, 128)), 128)
    got = cells.double() if kind == "i8" else cells.view(torch.float32).double()
    assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_what_lanes_wrote_is_fenced_before_an_mma_reads_it() -> None:
    body = mma_kernel("f16", instruction("f16", 128)).replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(RaceError, match=r"tcgen05\.mma\S* .* no fence\.proxy\.async"):
        run_mma("f16", body, 128)


def test_operands_may_be_negated() -> None:
    cells, exact = run_mma("f16", mma_kernel("f16", instruction("f16", 128, b13=1)), 128)
    assert (cells.view(torch.float32).double() + exact).abs().max() < 1e-4


@pytest.mark.parametrize("lane", [0, 16])
def test_64_rows_lie_in_half_of_every_quarter(lane: int) -> None:
    fill = FILL + "bar.sync 0;"
    extra = f"add.s32 %r28, %r6, {lane << 16};"
    body = mma_kernel("f16", instruction("f16", 64), extra, d="%r28")
    cells, exact = run_mma("f16", body, 64, fill)
    rows = torch.arange(64)
    lanes = rows // 16 * 32 + rows % 16 + lane
    assert (cells.view(torch.float32)[:, lanes].double() - exact).abs().max() < 1e-4
    others = [i for i in range(128) if i not in set(lanes.tolist())]
    assert all(cells[c, i] == 1000 * i + c for i in others for c in range(32))


def test_lanes_of_the_result_can_be_left_alone() -> None:
    body = mma_kernel("f16", instruction("f16", 128)).replace(
        "%rd9, %r26, ", "%rd9, %r26, {0xFF, 0, 0, 0x80000000}, "
    )
    cells, exact = run_mma("f16", body, 128, FILL + "bar.sync 0;")
    kept = [*range(8), 127]
    assert all(cells[c, i] == 1000 * i + c for i in kept for c in range(32))
    assert (cells.view(torch.float32)[:, 8:127].double() - exact[:, 8:127]).abs().max() < 1e-4


def test_half_precision_sums_are_rounded_at_every_step() -> None:
    cells, _ = run_mma("f16", mma_kernel("f16", instruction("f16", 128) & ~0x10), 128)
    _, a = random_operand("f16", 128, 16, 1)
    _, b = random_operand("bf16", COLUMNS, 16, 2)
    step = (b.float() @ a.float().T).half()
    expected = (b.float() @ a.float().T + step.float()).half()
    assert torch.equal(cells.to(torch.int16).view(torch.float16), expected)


def test_an_operand_may_come_from_tensor_memory() -> None:
    """A as the cells of columns 64..71: 16 elements of each row."""
    load_a = """
        shl.b32 %r40, %r0, 5; cvt.u64.u32 %rd12, %r40; add.s64 %rd13, %rd0, %rd12;
        ld.global.v4.b32 {%r41, %r42, %r43, %r44}, [%rd13];
        ld.global.v4.b32 {%r45, %r46, %r47, %r48}, [%rd13+16];
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7+64], {%r41, %r42, %r43, %r44, %r45, %r46, %r47, %r48};
        tcgen05.wait::st.sync.aligned;"""
    body = mma_kernel("f16", instruction("f16", 128)).replace("%rd8, %rd9, %r26", "[%r6+64], %rd9, %r26")
    a_raw, a = random_operand("f16", 128, 16, 1)
    _, b = random_operand("bf16", COLUMNS, 16, 2)
    out = torch.zeros(65536 + 16384, dtype=torch.uint8)
    out[:4096] = a_raw.reshape(-1)
    b_raw, _ = random_operand("bf16", COLUMNS, 16, 2)
    out[65536 + 8192 : 65536 + 8192 + 1024] = b_raw.reshape(4, 8, 2, 16).permute(0, 2, 1, 3).reshape(-1)
    launch(
        ALLOCATE.format(columns=128) + load_a + body + FREE.format(columns=128), out, threads=128, check=True
    )
    cells = out[: 32 * 512].view(torch.float32).reshape(32, 128)
    assert (cells.double() - 2 * b @ a.T).abs().max() < 1e-4


def test_what_an_mma_cannot_be_asked_is_refused() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    for kind, word, words in (
        ("f16", instruction("f16", 32), r"M = 32 \(allowed are 64 and 128\)"),
        ("f16", instruction("f16", 128, 264), "N = 264"),
        ("tf32", instruction("f16", 128), "types A 0, B 1"),
        ("f16", instruction("f16", 128, b2=1), "sparsity"),
    ):
        with pytest.raises(MisuseError, match=rf"tcgen05\.mma\S* \(PTX line \d+.*{words}"):
            run_mma(kind, mma_kernel(kind, word), 128)
    for statement, words in (
        ("tcgen05.shift.cta_group::1.down [%r6];", r"tcgen05\.shift\S* \(PTX line \d+"),
        ("tcgen05.cp.cta_group::1.128x256b [%r6], %rd1;", r"tcgen05\.cp\S* \(PTX line \d+"),
        (
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r6], %rd1, %rd2, %r7, [%r8], [%r9], 1;",
            "the kind 'mxf8f6f4'",
        ),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r6], %rd1, %rd2, %r7, 1;", r"qualifiers \['ws'\]"),
    ):
        with pytest.raises(UnknownInstructionError, match=words):
            launch(statement, out)
