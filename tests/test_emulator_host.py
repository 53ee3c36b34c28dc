"""Host code of other kernels than this package's, up to the launch it makes."""

import struct
from pathlib import Path

import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from tiny_kernels import THREADS, scale

from cutegemm import emulator
from cutegemm.emulator.faults import OutOfBoundsError
from cutegemm.emulator.host import launch_of
from cutegemm.emulator.ptx import parse

HOST = """
  llvm.func @cutlass_f(%arg0: i32, %arg1: f32, %arg2: !llvm.ptr {llvm.align = 4 : i64}) -> i32 {
    %0 = llvm.mlir.constant(1 : i32) : i32
    %1 = llvm.alloca %0 x !llvm.CONFIG : (i32) -> !llvm.ptr
    %2 = llvm.alloca %0 x !llvm.array<1 x ptr> : (i32) -> !llvm.ptr
    %3 = llvm.alloca %0 x f32 : (i32) -> !llvm.ptr
    %4 = "llvm.intr.ctlz"(%arg0) <{is_zero_poison = false}> : (i32) -> i32
    %5 = "llvm.intr.cttz"(%arg0) <{is_zero_poison = false}> : (i32) -> i32
    %6 = "llvm.intr.ctpop"(%arg0) : (i32) -> i32
    llvm.store %arg1, %3 : f32, !llvm.ptr
    llvm.store %3, %2 : !llvm.ptr, !llvm.ptr
    llvm.store %4, %1 : i32, !llvm.ptr
    %7 = llvm.getelementptr inbounds %1[0, 0, 1] : (!llvm.ptr) -> !llvm.ptr, !llvm.CONFIG
    llvm.store %5, %7 : i32, !llvm.ptr
    %8 = llvm.getelementptr inbounds %1[0, 0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.CONFIG
    llvm.store %6, %8 : i32, !llvm.ptr
    %9 = llvm.call @_cudaLaunchKernelEx(%1, %arg2, %2) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    llvm.return %9 : i32
  }
""".replace("CONFIG", "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")


def test_host_code_counts_bits_and_passes_numbers() -> None:
    kernel = parse(".visible .entry k(.param .f32 k_param_0) { ret; }")
    launch_record = launch_of(HOST, kernel, (0x50, 2.5, None))
    assert launch_record is not None
    assert launch_record.grid == (25, 4, 2)
    assert launch_record.params == struct.pack("<f", 2.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_of_the_runtime_are_taken_with_what_is_dynamic_in_them(dynamic: bool, tmp_path: Path) -> None:
    x, y = torch.arange(float(THREADS)), torch.zeros(THREADS)

    def wrapped(tensor: torch.Tensor) -> object:
        made = from_dlpack(tensor, assumed_align=16)
        return made.mark_compact_shape_dynamic(mode=0) if dynamic else made

    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}"
    compiled = cute.compile(scale, wrapped(x), wrapped(y), make_fake_stream(), options=options)
    emulator.run(compiled, wrapped(x), wrapped(y), None)
    assert torch.equal(y, 2 * x)
    with pytest.raises(OutOfBoundsError, match="argument 1"):
        emulator.run(compiled, wrapped(x), wrapped(y[: THREADS // 2]), None)
