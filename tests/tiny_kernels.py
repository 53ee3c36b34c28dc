"""The smallest kernels that exercise the compiler: what the tests of cache and artifacts compile."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cutegemm.errors import ConfigError

THREADS = 64
MIRROR_BYTES = 49380
FACTS = {"smem_bytes": 0, "stages": 1, "threads": THREADS}


def vector_args():
    """A float32 vector of any length, and the stream of the caller."""
    vector = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,))
    return vector, make_fake_stream(use_tvm_ffi_env_stream=True)


def scale_args():
    """Two float32 vectors and the stream of the caller."""
    x, stream = vector_args()
    return x, vector_args()[0], stream


@cute.kernel
def fill_kernel(x: cute.Tensor, value: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = cutlass.Float32(value)


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread] * cutlass.Float32(2.0)


@cute.kernel
def local_memory_kernel(x: cute.Tensor):
    """Indexes registers by a run-time number, which only local memory can do."""
    thread, _, _ = cute.arch.thread_idx()
    table = cute.make_rmem_tensor((200,), cutlass.Float32)
    for i in cutlass.range_constexpr(200):
        table[i] = x[i] * cutlass.Float32(2.0)
    x[thread] = table[thread % 200]


@cute.kernel
def mirror_kernel(x: cute.Tensor, length: cutlass.Constexpr):
    """Through `length` floats of dynamic shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    shared = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(length), 16)
    shared[thread] = x[thread]
    cute.arch.sync_threads()
    x[thread] = shared[THREADS - 1 - thread]


@cute.kernel
def odd_barrier_kernel(x: cute.Tensor):
    cute.arch.barrier(barrier_id=1, number_of_threads=100)
    x[0] = cutlass.Float32(1.0)


@cute.kernel
def early_exit_kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread > 3:
        return
    x[thread] = cutlass.Float32(1.0)


@cute.kernel
def refused_kernel(x: cute.Tensor):
    raise ConfigError("tile_n must be a multiple of 8, not 12")


@cute.kernel
def value_error_kernel(x: cute.Tensor):
    raise ValueError("three stages do not fit")


@cute.jit
def fill(x: cute.Tensor, stream):
    fill_kernel(x, 1.0).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, stream):
    scale_kernel(x, y).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def local_memory(x: cute.Tensor, stream):
    local_memory_kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def mirror(x: cute.Tensor, stream):
    mirror_kernel(x, MIRROR_BYTES // 4).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def odd_barrier(x: cute.Tensor, stream):
    odd_barrier_kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def early_exit(x: cute.Tensor, stream):
    early_exit_kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def refused(x: cute.Tensor, stream):
    refused_kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def value_error(x: cute.Tensor, stream):
    value_error_kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def two_kernels(x: cute.Tensor, stream):
    fill_kernel(x, 1.0).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)
    local_memory_kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def no_kernel(x: cute.Tensor, stream):
    pass


class Filler:
    """A host function per value, so that compiling many of them is not answered from anywhere."""

    def __init__(self, value: float):
        self.value = value

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        fill_kernel(x, self.value).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)
