"""Tensor maps that a kernel changes, and arguments that hold addresses of tensors."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emulator_instructions import launch, map_words

from cutegemm import emulator
from cutegemm.emulator.faults import OutOfBoundsError, UnknownInstructionError
from cutegemm.emulator.ops_tensormap import replaced
from cutegemm.emulator.tma import TensorMap, decode_map

SIZES = st.integers(1, 1 << 32)


def changed(before: bytes, *changes: tuple[str, int, int]) -> TensorMap:
    bits = int.from_bytes(before, "little")
    for change in changes:
        bits = replaced(bits, *change)
    return decode_map(bits.to_bytes(128, "little"))


@settings(max_examples=100, deadline=None)
@given(
    address=st.integers(0, (1 << 53) - 1).map(lambda n: n * 16),
    rank=st.integers(1, 5),
    sizes=st.lists(SIZES, min_size=5, max_size=5),
    strides=st.lists(st.integers(0, (1 << 36) - 1).map(lambda n: n * 16), min_size=4, max_size=4),
    box=st.lists(st.integers(1, 256), min_size=5, max_size=5),
)
def test_every_field_can_be_replaced(
    address: int, rank: int, sizes: list[int], strides: list[int], box: list[int]
) -> None:
    before = decode_map(map_words(0x1230))
    after = changed(
        map_words(0x1230),
        ("rank", 0, rank - 1),
        ("global_address", 0, address),
        *(("global_dim", i, size) for i, size in enumerate(sizes)),
        *(("global_stride", i, stride) for i, stride in enumerate(strides)),
        *(("box_dim", i, size) for i, size in enumerate(box)),
    )
    assert after.address == address
    assert after.sizes == tuple(sizes[:rank])
    assert after.strides == tuple(strides[: rank - 1])
    assert after.box == tuple(box[:rank])
    assert (after.element, after.swizzle) == (before.element, before.swizzle)


REPLACE = """
    setp.ne.b32 %p0, %r0, 0; @%p0 bra DONE;
    mov.b64 %rd3, 4096; mov.b32 %r5, 33; mov.b64 %rd4, 512;
    tensormap.replace.tile.global_address.SPACE.b1024.b64 [PLACE], %rd3;
    tensormap.replace.tile.global_dim.SPACE.b1024.b32 [PLACE], 1, %r5;
    tensormap.replace.tile.global_stride.SPACE.b1024.b64 [PLACE], 0, %rd4;
    DONE: bar.warp.sync -1;"""
EXPECTED = changed(
    map_words(0x1230), ("global_address", 0, 4096), ("global_dim", 1, 33), ("global_stride", 0, 512)
)


def test_a_map_in_global_memory_is_changed() -> None:
    out = torch.tensor(struct.unpack("<16q", map_words(0x1230)))
    launch(REPLACE.replace("SPACE", "global").replace("PLACE", "%rd0"), out, check=True)
    assert decode_map(out.numpy().tobytes()) == EXPECTED


def test_a_map_in_shared_memory_is_changed_and_published() -> None:
    out = torch.tensor([*struct.unpack("<16q", map_words(0x1230)), *[0] * 16])
    body = (
        "mov.b32 %r1, dynamic; add.s32 %r1, %r1, 128; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1;"
        "ld.global.b32 %r3, [%rd1]; st.shared.b32 [%r2], %r3; bar.warp.sync -1;"
        + REPLACE.replace("SPACE", "shared::cta").replace("PLACE", "%r1")
        + "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%rd0+128], [%r1], 128; fence.proxy.tensormap::generic.acquire.gpu [%rd0+128], 128;"
    )
    launch(body, out, check=True)
    assert decode_map(out[16:].numpy().tobytes()) == EXPECTED
    assert decode_map(out[:16].numpy().tobytes()) == decode_map(map_words(0x1230))


def test_fields_that_are_not_known_are_refused() -> None:
    for body in (
        "tensormap.replace.tile.elemtype.global.b1024.b32 [%rd0], 3;",
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%rd0], %r0;",
    ):
        with pytest.raises(UnknownInstructionError, match=r"tensormap\.replace"):
            launch(body, torch.zeros(16, dtype=torch.int64))


class PointerKernel:
    """What a compiled kernel shows of itself: it doubles the numbers its argument leads to."""

    ptx = """
        .version 8.8
        .target sm_90a
        .visible .entry k(.param .u64 k_param_0)
        {
            .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .b32 %f<4>;
            ld.param.b64 %rd0, [k_param_0]; ld.global.b64 %rd1, [%rd0];
            mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 4; add.s64 %rd1, %rd1, %rd2;
            ld.global.f32 %f0, [%rd1]; add.f32 %f0, %f0, %f0; st.global.f32 [%rd1], %f0; ret;
        }"""
    host_mlir = """
  llvm.func @cutlass_f(%arg0: !llvm.ptr, %arg1: !llvm.ptr) -> i32 {
    %0 = llvm.mlir.constant(1 : i32) : i32
    %9 = llvm.mlir.constant(32 : i32) : i32
    %1 = llvm.alloca %0 x !llvm.CONFIG : (i32) -> !llvm.ptr
    %2 = llvm.alloca %0 x !llvm.array<1 x ptr> : (i32) -> !llvm.ptr
    %3 = llvm.alloca %0 x !llvm.ptr : (i32) -> !llvm.ptr
    llvm.store %arg0, %3 : !llvm.ptr, !llvm.ptr
    llvm.store %3, %2 : !llvm.ptr, !llvm.ptr
    %4 = llvm.mlir.poison : !llvm.array<3 x i32>
    %5 = llvm.insertvalue %0, %4[0] : !llvm.array<3 x i32>
    %6 = llvm.insertvalue %0, %5[1] : !llvm.array<3 x i32>
    %7 = llvm.insertvalue %0, %6[2] : !llvm.array<3 x i32>
    llvm.store %7, %1 : !llvm.array<3 x i32>, !llvm.ptr
    %8 = llvm.getelementptr inbounds %1[0, 1] : (!llvm.ptr) -> !llvm.ptr, !llvm.CONFIG
    %10 = llvm.insertvalue %9, %7[0] : !llvm.array<3 x i32>
    llvm.store %10, %8 : !llvm.array<3 x i32>, !llvm.ptr
    %11 = llvm.call @_cudaLaunchKernelEx(%1, %arg1, %2) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    llvm.return %11 : i32
  }
""".replace("CONFIG", "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")


def test_tensors_behind_addresses_are_the_kernels_too() -> None:
    data = torch.arange(32.0)
    pointers = torch.tensor([data.data_ptr()])
    emulator.run(PointerKernel(), emulator.Addresses(pointers, [data]), None)
    assert torch.equal(data, 2 * torch.arange(32.0))
    with pytest.raises(OutOfBoundsError, match="outside of every operand"):
        emulator.run(PointerKernel(), pointers, None)
