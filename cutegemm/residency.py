"""What a first launch asks of the driver: how many clusters fit on the GPU, and leave to load a kernel."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cutegemm.artifact import Artifact
from cutegemm.errors import DeviceError

_lock = threading.Lock()


@contextmanager
def loading_allowed() -> Iterator[None]:
    """Lets this thread load a kernel while a CUDA graph is being captured.

    Loading is among the calls a capture forbids by default, because it may synchronise; it does not
    touch the captured stream, so the thread's capture mode is relaxed for its duration.
    """
    import torch

    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    error, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the driver refused to relax the stream capture mode: {error.name}")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def resident_clusters(artifact: Artifact, cluster_size: int, device: int) -> int:
    """Clusters of ``artifact``'s kernel that fit on GPU ``device`` at once, asked of the driver.

    GPCs differ in their number of SMs, so that it can be fewer than SMs / cluster size.
    Raises DeviceError when not one fits or the driver refuses.
    """
    resources = artifact.resources
    with _lock:
        return _query(
            artifact.cubin,
            artifact.kernel_name,
            resources.threads,
            resources.smem_bytes,
            cluster_size,
            device,
        )


@functools.lru_cache(maxsize=4096)
def _query(
    cubin: bytes, kernel_name: str, threads: int, smem_bytes: int, cluster_size: int, device: int
) -> int:
    import torch
    from cuda.bindings import driver

    def call(name: str, *args: object) -> object:
        error, *values = getattr(driver, name)(*args)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"the driver refused {name} for {kernel_name} on GPU {device}: {error.name}")
        return values[0] if values else None

    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # makes the GPU's context exist and be this thread's
        library = call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        try:
            function = call("cuKernelGetFunction", call("cuLibraryGetKernel", library, kernel_name.encode()))
            attributes = driver.CUfunction_attribute
            call(
                "cuFuncSetAttribute",
                function,
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                smem_bytes,
            )
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster_size, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = smem_bytes
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = (
                cluster_size,
                1,
                1,
            )
            config.attrs = [cluster]
            config.numAttrs = 1
            count = call("cuOccupancyMaxActiveClusters", function, config)
        finally:
            call("cuLibraryUnload", library)
    if not isinstance(count, int) or count < 1:
        raise DeviceError(
            f"not one cluster of {cluster_size} CTAs of {kernel_name} fits on GPU {device}; "
            "use a smaller cluster"
        )
    return count
