"""Reading cubins that are not what a compiler wrote: kernels with numbers, or a BuildError, never more."""

import contextlib

import pytest
import tiny_kernels as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import cubin
from cutegemm.artifact import compile_to_files
from cutegemm.errors import BuildError


@pytest.fixture(scope="module")
def whole() -> bytes:
    """The cubin of a kernel without shared memory and without spills."""
    files = compile_to_files(tiny.fill, tiny.vector_args(), target="sm_90a", facts=tiny.FACTS)
    return files["kernel.cubin"]


def test_a_whole_cubin(whole: bytes) -> None:
    (kernel,) = cubin.cubin_kernels(whole)
    assert kernel.registers > 0


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_broken_cubin_is_a_build_error_and_nothing_else(whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(content[: data.draw(st.integers(0, len(content)))])
    kernels: list[cubin.CubinKernel] = []
    with contextlib.suppress(BuildError):
        kernels = cubin.cubin_kernels(broken)
    assert all(isinstance(kernel.registers, int) for kernel in kernels)


def test_a_cubin_whose_sections_lie_beyond_every_file(whole: bytes) -> None:
    content = bytearray(whole)
    content[0x28:0x30] = b"\xff" * 8
    with pytest.raises(BuildError, match="the cubin cannot be read"):
        cubin.cubin_kernels(bytes(content))
