"""Copies by lanes, matrices from shared memory, reductions of vectors."""

import pytest
import torch
from test_emulator_instructions import launch

from cutegemm.emulator.faults import UninitializedReadError, UnknownInstructionError


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_read_as_they_were_stored(count: int, trans: str) -> None:
    """Row r of matrix j is at the address of lane 8j + r; lane t gets 2(t%4), 2(t%4)+1 of row t/4."""
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    stores = "".join(f"st.global.b32 [%rd1+{128 * i}], %r{10 + i};" for i in range(count))
    body = f"""
        mov.b32 %r1, dynamic;
        shl.b32 %r2, %r0, 4; add.s32 %r2, %r2, %r1;
        shl.b32 %r3, %r0, 3; add.s32 %r4, %r3, 1; prmt.b32 %r5, %r3, %r4, 0x5410;
        add.s32 %r4, %r3, 2; add.s32 %r6, %r3, 3; prmt.b32 %r6, %r4, %r6, 0x5410;
        add.s32 %r4, %r3, 4; add.s32 %r7, %r3, 5; prmt.b32 %r7, %r4, %r7, 0x5410;
        add.s32 %r4, %r3, 6; add.s32 %r8, %r3, 7; prmt.b32 %r8, %r4, %r8, 0x5410;
        st.shared.v4.b32 [%r2], {{%r5, %r6, %r7, %r8}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r2];
        {stores}"""
    out = torch.zeros(32 * count, dtype=torch.int32)
    launch(body, out, check=True)
    found = out.view(torch.int16).reshape(count, 8, 8)  # matrix, lane / 4, two for each of four lanes
    # Element c of row r of matrix j was made 8 (8j + r) + c.
    stored = torch.arange(count * 64, dtype=torch.int16).reshape(count, 8, 8)
    assert torch.equal(found, stored.mT if trans else stored)


COPY = """
    mov.b32 %r1, dynamic; shl.b32 %r2, %r0, 4; add.s32 %r2, %r2, %r1;
    mul.wide.u32 %rd2, %r0, 16; add.s64 %rd2, %rd0, %rd2;
    and.b32 %r3, %r0, 15; add.s32 %r3, %r3, 1;
    cp.async.cg.shared.global [%r2], [%rd2], 16, %r3;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];
    st.global.v4.b32 [%rd2+512], {%r4, %r5, %r6, %r7};"""


def copied(body: str, seed: int | None, check: bool = True) -> torch.Tensor:
    out = torch.zeros(1024, dtype=torch.uint8)
    out[:512] = torch.arange(512) % 251 + 1
    launch(body, out.view(torch.int32), seed=seed, check=check)
    return out


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_copy_by_lanes_fills_up_with_zeros(seed: int | None) -> None:
    out = copied(COPY, seed)
    source = out[:512].reshape(32, 16)
    valid = torch.arange(16)[None, :] < torch.arange(32)[:, None] % 16 + 1
    assert torch.equal(out[512:].reshape(32, 16), torch.where(valid, source, 0))


@pytest.mark.parametrize(
    ("wait", "enough"), [("", False), ("cp.async.wait_group 1;", False), ("cp.async.wait_all;", True)]
)
def test_a_copy_that_is_not_waited_for_may_come_late(wait: str, enough: bool) -> None:
    body = COPY.replace("cp.async.wait_group 0;", wait)
    late = 0
    for seed in range(12):
        try:
            late += not torch.equal(copied(body, seed)[512:], copied(COPY, seed)[512:])
        except UninitializedReadError:
            late += 1
    assert (late == 0) == enough


def test_a_reduction_of_vectors_adds_every_member() -> None:
    body = """
        cvt.rn.f32.u32 %f0, %r0; mov.b32 %f1, 0f3F800000; and.b32 %r1, %r0, 1;
        mul.wide.u32 %rd2, %r1, 16; add.s64 %rd2, %rd0, %rd2;
        red.relaxed.gpu.global.add.v4.f32 [%rd2], {%f0, %f1, %f0, %f1};"""
    out = torch.zeros(8)
    launch(body, out, grid=2, check=True)
    assert out.tolist() == [480.0, 32.0] * 2 + [512.0, 32.0] * 2


def test_forms_of_copies_that_are_not_known() -> None:
    for body in (
        "mov.b32 %r1, dynamic; cp.async.ca.shared.global [%r1], [%rd0], 32;",
        "mov.b32 %r1, dynamic; ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2}, [%r1];",
        "atom.global.add.v2.f32 {%f0, %f1}, [%rd0], {%f0, %f1};",
    ):
        with pytest.raises(UnknownInstructionError):
            launch(body, torch.zeros(8))
