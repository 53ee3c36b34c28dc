"""Dense results: allocated at every call that brings none, so as cheaply as torch allows."""

import functools
from collections.abc import Callable, Sequence

import torch

# What the code that torch's own compiler generates calls: a fraction of the host time of torch.empty, on the
# current GPU only. Not public, so it may be missing.
_empty_on_current_gpu: Callable[..., torch.Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)
_current_gpu: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


@functools.cache
def gpu_count() -> int:
    """GPUs this process sees. With one, nothing needs to be asked about which a tensor is on."""
    return torch.cuda.device_count()


def dense_strides(shape: Sequence[int], major: str) -> tuple[int, ...]:
    """Strides of a dense (M, N) or (L, M, N) tensor; major "n": row-major, "m": column-major."""
    *batch, m, n = (max(size, 1) for size in shape)
    return (*(m * n for _ in batch), *((n, 1) if major == "n" else (1, m)))


def dense_beside(other: torch.Tensor, shape: Sequence[int], major: str, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised dense tensor on the device of another."""
    return other.new_empty_strided(shape, dense_strides(shape, major), dtype=dtype)


def dense_maker(
    shape: Sequence[int], major: str, dtype: torch.dtype, device: int
) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialised dense tensors on a GPU, for its current stream."""
    strides = dense_strides(shape, major)
    name = f"cuda:{device}"

    def make() -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=name)

    if _empty_on_current_gpu is None or _current_gpu is None:
        return make
    empty, current = _empty_on_current_gpu, _current_gpu
    if gpu_count() == 1:
        return functools.partial(empty, shape, strides, dtype)

    def make_faster() -> torch.Tensor:
        return empty(shape, strides, dtype) if current() == device else make()

    return make_faster
