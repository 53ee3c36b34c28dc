"""Clusters that take over the work of others, and arithmetic that only sm_100a has."""

import pytest
import torch
from ptx_kernels import launch

# A CTA counts its own tile, then asks for the next until there is none.
WORKER = """
    setp.ne.b32 %p0, %r0, 0; @%p0 bra READY; mbarrier.init.shared.b64 [%r3+64], 1;
    fence.mbarrier_init.release.cluster; READY: bar.sync 0;
    mov.b32 %r10, %r1; mov.b32 %r11, 0;
    AGAIN: setp.ne.b32 %p1, %r0, 0; @%p1 bra ASKED;
    mul.wide.u32 %rd2, %r10, 4; add.s64 %rd3, %rd0, %rd2; red.global.add.u32 [%rd3], 1;
    red.global.add.u32 [%rd0+256], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3+64], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r3+64];
    ASKED: WAITING: mbarrier.try_wait.parity.shared.b64 %p3, [%r3+64], %r11; @!%p3 bra WAITING;
    xor.b32 %r11, %r11, 1;
    ld.shared.v2.b64 {%rd4, %rd5}, [%r3]; mov.b128 %q0, {%rd4, %rd5};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %q0;
    @%p4 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r12, %r13, %r14}, %q0;
    bar.sync 0; fence.proxy.async.shared::cta;
    @%p4 bra AGAIN;
"""


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_running_ctas_take_over_those_that_wait(seed: int | None) -> None:
    out = torch.zeros(65, dtype=torch.int32)
    machine = launch(WORKER, out, grid=40, shared=200 * 1024, sms=3, seed=seed, check=True)
    assert out[:40].tolist() == [1] * 40
    assert out[64] == 40
    if seed is None:  # three CTAs did it all
        assert machine.instructions < 5000


def test_an_answer_reaches_every_cta_of_a_cluster() -> None:
    """Both CTAs of the one resident cluster count the tiles they hear of: ranks 0 and 1 of each cluster."""
    body = WORKER.replace(
        "mov.b32 %r10, %r1;", "mov.b32 %r10, %r1; barrier.cluster.arrive; barrier.cluster.wait;"
    )
    body = body.replace(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128",
        "setp.ne.b32 %p7, %r2, 0; @%p7 bra ASKED;"
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        ".multicast::cluster::all.b128",
    ).replace(
        "bar.sync 0; fence.proxy.async.shared::cta;",
        "add.s32 %r10, %r10, %r2; fence.proxy.async.shared::cta;"
        "barrier.cluster.arrive; barrier.cluster.wait;",
    )
    for seed in (None, 0, 1, 2):
        out = torch.zeros(65, dtype=torch.int32)
        launch(body, out, grid=12, cluster=2, shared=200 * 1024, sms=2, seed=seed, check=True)
        assert out[:12].tolist() == [1] * 12


def test_packed_floats_and_reductions_over_lanes() -> None:
    body = """
        cvt.rn.f32.u32 %r10, %r0; mov.b64 %rd2, {%r10, 0f3F000000}; mov.b64 %rd3, {0f40000000, 0f40400000};
        mul.rn.f32x2 %rd4, %rd2, %rd3; add.rn.f32x2 %rd5, %rd4, %rd2; fma.rn.f32x2 %rd6, %rd2, %rd3, %rd5;
        mov.b64 {%r11, %r12}, %rd6;
        redux.sync.add.s32 %r13, %r0, -1; redux.sync.max.f32 %r14, %r10, -1; redux.sync.or.b32 %r15, %r0, -1;
        redux.sync.min.u32 %r16, %r0, -1;
        shl.b32 %r17, %r0, 2; cvt.u64.u32 %rd7, %r17; add.s64 %rd8, %rd0, %rd7;
        st.global.b32 [%rd8], %r11; st.global.b32 [%rd8+128], %r12; st.global.b32 [%rd8+256], %r13;
        st.global.b32 [%rd8+384], %r14; st.global.b32 [%rd8+512], %r15; st.global.b32 [%rd8+640], %r16;"""
    out = torch.zeros(6, 32, dtype=torch.int32)
    launch(body, out)
    lane = torch.arange(32.0)
    assert torch.equal(out[0].view(torch.float32), lane * 2 + (lane * 2 + lane))
    assert torch.equal(out[1].view(torch.float32), torch.full((32,), 0.5 * 3 + (0.5 * 3 + 0.5)))
    assert out[2].tolist() == [sum(range(32))] * 32
    assert torch.equal(out[3].view(torch.float32), torch.full((32,), 31.0))
    assert out[4:, 0].tolist() == [31, 0]


def test_bytes_are_multiplied_and_added() -> None:
    body = """
        mov.b32 %r10, 0x80FF0203; mov.b32 %r11, 0x7F010A04; add.s32 %r12, %r0, 5;
        dp4a.s32.s32 %r13, %r10, %r11, %r12; dp4a.u32.u32 %r14, %r10, %r11, %r12;
        shl.b32 %r17, %r0, 2; cvt.u64.u32 %rd7, %r17; add.s64 %rd8, %rd0, %rd7;
        st.global.b32 [%rd8], %r13; st.global.b32 [%rd8+128], %r14;"""
    out = torch.zeros(2, 32, dtype=torch.int32)
    launch(body, out)
    products = 2 * 10 + 3 * 4
    assert out[0].tolist() == [i + 5 + products - 128 * 127 - 1 for i in range(32)]
    assert out[1].tolist() == [i + 5 + products + 128 * 127 + 255 for i in range(32)]


def test_conversions_may_stay_finite() -> None:
    body = """
        cvt.rn.satfinite.bf16x2.f32 %r10, 0f7F800000, 0fFF7FFFFF;
        cvt.rn.satfinite.f16x2.f32 %r11, 0f47800000, 0f3F800000;
        st.global.b32 [%rd0], %r10; st.global.b32 [%rd0+4], %r11;"""
    out = torch.zeros(2, dtype=torch.int32)
    launch(body, out)
    assert [word & 0xFFFFFFFF for word in out.tolist()] == [0x7F7FFF7F, 0x7BFF3C00]
