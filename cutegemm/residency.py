"""How many clusters of a kernel a GPU holds at once: what a persistent launch is sized by."""

import functools
import threading

from cutegemm.artifact import Artifact
from cutegemm.errors import DeviceError

_lock = threading.Lock()


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
        torch.cuda.current_stream()  # makes sure the context exists
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
