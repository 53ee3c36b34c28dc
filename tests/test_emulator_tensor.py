"""Tensor memory in small kernels: loads, stores, waits, allocation, and who may do what."""

import pytest
import torch
from ptx_kernels import ALLOCATE, FILL, FREE, launch, names, stores, vector

from cutegemm.emulator.faults import (
    DeadlockError,
    MisuseError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)
from cutegemm.emulator.processors import Processors


def in_tensor_memory(body: str, columns: int = 128, check: bool = True, **sizes: int) -> torch.Tensor:
    """What a body with ``columns`` columns from %r6 (%r7: this warp's lanes) leaves in its 64 x 128 words.

    OUT(register, i) in the body stores a register as word i of the thread.
    """
    out = torch.zeros(64, 128, dtype=torch.int32)
    text = ALLOCATE.format(columns=columns) + body + FREE.format(columns=columns)
    launch(text, out, threads=128, check=check, **sizes)
    return out


# Bits of a thread's registers in a row-major window, as (sizes, strides) of thread and bit; the pitch is that
# of one row (lane). Written down from the published layouts of these instructions.
LAYOUTS = {
    "16x64b.x2": (128, ((2, 2, 8), (8 * 128, 32, 128)), ((32, 2), (1, 64)), 2),
    "16x64b.x8": (512, ((2, 2, 8), (8 * 512, 32, 512)), ((32, 8), (1, 64)), 8),
    "16x128b.x1": (128, ((4, 8), (32, 128)), ((32, 2), (1, 8 * 128)), 2),
    "16x128b.x4": (512, ((4, 8), (32, 512)), ((32, 2, 4), (1, 8 * 512, 128)), 8),
    "16x256b.x1": (256, ((4, 8), (64, 256)), ((64, 2), (1, 8 * 256)), 4),
    "16x256b.x4": (1024, ((4, 8), (64, 1024)), ((64, 2, 4), (1, 8 * 1024, 256)), 16),
    "32x32b.x8": (256, ((32,), (256,)), ((256,), (1,)), 8),
}


def offset(index: int, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """Where a layout puts an index, the first mode fastest."""
    place = 0
    for size, stride in zip(*layout, strict=True):
        place += index % size * stride
        index //= size
    return place


@pytest.mark.parametrize("shape", LAYOUTS)
def test_loads_distribute_cells_over_registers_as_published(shape: str) -> None:
    pitch, threads, bits, count = LAYOUTS[shape]
    got = in_tensor_memory(
        FILL
        + f"tcgen05.ld.sync.aligned.{shape}.b32 {vector(names(10, count))}, [%r7];"
        + "tcgen05.wait::ld.sync.aligned;"
        + stores(names(10, count))
    )
    for thread in range(128):
        for register in range(count):
            bit = offset(thread % 32, threads) + offset(32 * register, bits)
            lane, column = thread // 32 * 32 + bit // pitch, bit % pitch // 32
            assert got[register, thread] == 1000 * lane + column


def test_the_upper_half_of_a_quarter_is_reached_by_its_address() -> None:
    body = "add.s32 %r8, %r7, 0x100002; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r10}, [%r8];"
    got = in_tensor_memory(FILL + body + "tcgen05.wait::ld.sync.aligned;" + stores(["%r10"]))
    assert got[0, :4].tolist() == [16002, 24002, 16003, 24003]


def test_stores_put_cells_where_loads_find_them() -> None:
    """Registers 1000 * thread + i through 16x128b and back, and what 32x32b finds in between."""
    body = (
        "mul.lo.s32 %r20, %r0, 1000; add.s32 %r21, %r20, 1; add.s32 %r22, %r20, 2; add.s32 %r23, %r20, 3;"
        "tcgen05.st.sync.aligned.16x128b.x2.b32 [%r7], {%r20, %r21, %r22, %r23};"
        "tcgen05.wait::st.sync.aligned;"
        "tcgen05.ld.sync.aligned.16x128b.x2.b32 {%r30, %r31, %r32, %r33}, [%r7];"
        "tcgen05.wait::ld.sync.aligned;" + stores(names(30, 4))
    )
    got = in_tensor_memory(body)
    assert all(got[i, t] == 1000 * t + i for i in range(4) for t in range(128))
    whole = body.split("tcgen05.ld")[0] + "add.s32 %r8, %r7, 1;"
    partly = in_tensor_memory(
        whole
        + "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r40}, [%r8]; tcgen05.wait::ld.sync.aligned;"
        + stores(["%r40"])
    )
    # Thread 6 of 16x64b reads lane 1, column 1 + 1: what thread 4 * 1 + 2 stored first.
    assert partly[0, 6] == 6000


def test_packed_loads_join_two_columns() -> None:
    got = in_tensor_memory(
        FILL
        + "tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {%r10, %r11, %r12, %r13}, [%r7];"
        + "tcgen05.wait::ld.sync.aligned;"
        + stores(names(10, 4))
    )
    for i in range(4):
        low, high = (1000 * 7 + 2 * i) & 0xFFFF, (1000 * 7 + 2 * i + 1) & 0xFFFF
        assert got[i, 7] == low | high << 16


def test_a_warp_reaches_its_quarter_of_the_lanes_only() -> None:
    with pytest.raises(
        OutOfBoundsError, match=r"warp 3 of CTA 0: lane 0 of tensor memory; .* lanes 96\.\.127"
    ):
        in_tensor_memory("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r6];", check=False)
    with pytest.raises(OutOfBoundsError, match=r"columns 120\.\.135 .*it has columns 0\.\.127"):
        in_tensor_memory("tcgen05.ld.sync.aligned.32x32b.x16.b32 " + vector(names(10, 16)) + ", [%r7+120];")
    with pytest.raises(UninitializedReadError, match=r"column 3, lanes 96\.\.111, which nobody has written"):
        in_tensor_memory("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r7+3];")


def test_stores_are_there_when_they_were_waited_for() -> None:
    body = (
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r7], {%r0};"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r7]; tcgen05.wait::ld.sync.aligned;"
    )
    with pytest.raises(RaceError, match=r"read-after-write in tensor memory .*tcgen05\.wait::st"):
        in_tensor_memory(body)


def test_a_load_is_over_when_it_was_waited_for_or_its_results_are_used() -> None:
    """Warp 1 lets warp 0 free the columns it has loaded from: after a wait, after a use, or too early."""
    ready = "setp.ne.b32 %p2, %r0, 0; @%p2 bra R; mbarrier.init.shared.b64 [%r3+64], 32; R: bar.sync 0;"
    load = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r7]; mov.b64 %rd4, {%r10, %r11};"
    use = "mov.b64 {%r12, %r13}, %rd4; add.s32 %r14, %r12, %r13;"
    arrive = "mbarrier.arrive.shared.b64 _, [%r3+64];"
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p5, [%r3+64], 0; @!%p5 bra W;"
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 128; HELD:"
    for release, fine in (
        (load + "tcgen05.wait::ld.sync.aligned;" + arrive + use, True),
        (load + use + arrive, True),
        (load + arrive + use, False),
        (load + arrive + "tcgen05.wait::ld.sync.aligned;" + use, False),
        (load + use + load.replace("%r10, %r11", "%r15, %r16").replace("%rd4", "%rd5") + arrive, False),
    ):
        body = (
            ready + FILL + "bar.sync 0; setp.gt.u32 %p6, %r4, 1; @%p6 bra HELD;"
            "setp.ne.b32 %p7, %r4, 1; @%p7 bra ZERO;" + release + stores(["%r14"]) + "bra HELD;"
            "ZERO:" + wait + free
        )
        out = torch.zeros(64, 128, dtype=torch.int32)
        text = ALLOCATE.format(columns=128) + body
        if fine:
            launch(text, out, threads=128, check=True)
            assert out[0, 32] == 32000 + 32001
        else:
            with pytest.raises(RaceError, match=r"free-after-read .* load from tensor memory of .*warp 1"):
                launch(text, out, threads=128, check=True)


# --- allocation ----------------------------------------------------------------------------------------


def allocation(columns: int, between: str = "", relinquish: bool = True) -> str:
    """A warp allocates, does something, frees and writes that it did."""
    permit = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" if relinquish else ""
    return f"""
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], {columns}; {permit}
        {between}
        ld.shared.b32 %r6, [%r3]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, {columns};
        shl.b32 %r8, %r1, 2; cvt.u64.u32 %rd2, %r8; add.s64 %rd3, %rd0, %rd2; st.global.b32 [%rd3], 1;"""


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_ctas_of_an_sm_wait_for_each_others_columns(seed: int | None) -> None:
    out = torch.zeros(8, dtype=torch.int32)
    launch(allocation(512), out, grid=8, shared=1024, sms=2, seed=seed)
    assert out.tolist() == [1] * 8


MEET = "barrier.cluster.arrive; barrier.cluster.wait;"


def test_a_permit_that_is_kept_keeps_the_neighbour_waiting() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    sizes = {"grid": 2, "cluster": 2, "shared": 1024, "sms": 1}
    launch(allocation(256, MEET), out, **sizes)
    assert out.tolist() == [1, 1, 0, 0]
    with pytest.raises(DeadlockError, match=r"permit of SM 0 to allocate, which CTA 0 holds"):
        launch(allocation(256, MEET, relinquish=False), out, **sizes)
    # On an SM each, nobody notices.
    for seed in range(4):
        launch(allocation(256, MEET, relinquish=False), out, grid=4, cluster=4, shared=1024, sms=4, seed=seed)


def test_columns_that_are_not_there_are_waited_for_in_vain() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    more = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+8], 512;"
    with pytest.raises(
        DeadlockError, match=r"512 columns of the tensor memory of SM 0, of which 256 are free"
    ):
        launch(allocation(256, more, relinquish=False), out)


def test_what_is_allocated_is_freed_once_and_by_whom_it_may() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    again = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+8], 32;"
    with pytest.raises(MisuseError, match="after its CTA has relinquished"):
        launch(allocation(32, again), out)
    with pytest.raises(MisuseError, match=r"leaves 32 columns of tensor memory allocated \(from column 32"):
        launch(allocation(32, again, relinquish=False), out)
    twice = "ld.shared.b32 %r9, [%r3]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;"
    with pytest.raises(MisuseError, match="frees columns from 0 on, where nothing is allocated"):
        launch(allocation(32, twice), out)
    with pytest.raises(MisuseError, match="has no peer in its cluster of 1"):
        launch(allocation(32).replace("cta_group::1", "cta_group::2"), out)


def test_what_is_freed_is_gone() -> None:
    body = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r7];" + stores(["%r10"])
    text = ALLOCATE.format(columns=128) + FILL + FREE.format(columns=128) + body
    with pytest.raises(OutOfBoundsError, match=r"columns 0\.\.0 .* of CTA 0; it has none allocated"):
        launch(text, torch.zeros(64, 128, dtype=torch.int32), threads=128)


def test_a_pair_allocates_together() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    pair = allocation(64).replace("cta_group::1", "cta_group::2")
    for seed in (None, 0, 1):
        out.zero_()
        launch(pair, out, grid=2, cluster=2, seed=seed)
        assert out.tolist() == [1, 1]
    alone = "setp.ne.b32 %p5, %r2, 0; @%p5 bra END;" + pair + "END:" + MEET
    with pytest.raises(DeadlockError, match="CTA 1 of the pair to allocate as well"):
        launch(alone, out, grid=2, cluster=2)


def test_pairs_lie_on_neighbouring_sms() -> None:
    processors = Processors(6, 2, None)
    first, second = processors.place(2), processors.place(4)
    assert first is not None
    assert second is not None
    assert [sm.number for sm in first] == [0, 1]
    assert [sm.number for sm in second] == [0, 1, 2, 3]
    for sm in processors.sms[:4]:
        sm.ctas |= {object(), object()}
    assert [sm.number for sm in processors.place(2) or []] == [4, 5]
    assert processors.place(4) is None
