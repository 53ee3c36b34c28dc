"""Single instructions and small kernels written in PTX: lanes, memory, clusters, parsing, tensor maps."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm.emulator.decode import PARAM_SPACE
from cutegemm.emulator.faults import (
    ConvergenceError,
    DeadlockError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
    UnknownInstructionError,
)
from cutegemm.emulator.machine import LaunchRecord, Machine
from cutegemm.emulator.memory import GlobalMemory, tensor_region
from cutegemm.emulator.mlir import parse_type
from cutegemm.emulator.ops_float import fused_multiply_add
from cutegemm.emulator.ptx import parse
from cutegemm.emulator.run import program_of
from cutegemm.emulator.tma import decode_map, swizzled_units, write_box
from cutegemm.emulator.values import bfloat16_bits
from cutegemm.emulator.wgmma import to_fragments

HEADER = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 k_param_0)
{
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>; .reg .b32 %f<9>;
    ld.param.b64 %rd0, [k_param_0];
    mov.u32 %r0, %tid.x;
    mov.u32 %r30, %ctaid.x;
    mul.wide.u32 %rd1, %r0, 4;
    add.s64 %rd1, %rd0, %rd1;
"""


def launch(
    body: str,
    out: torch.Tensor,
    grid: int = 1,
    threads: int = 32,
    cluster: int = 1,
    seed: int | None = None,
    check: bool = False,
) -> Machine:
    """Runs a body with %rd0 = address of ``out``, %rd1 = the thread's own 32-bit word of it."""
    memory = GlobalMemory()
    memory.add(tensor_region("out", out))
    record = LaunchRecord(
        (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), 4096, struct.pack("<Q", out.data_ptr())
    )
    machine = Machine(program_of(HEADER + body + "\nret;\n}\n"), record, memory, seed, check)
    machine.run()
    return machine


def words(body: str, count: int = 32, **sizes: int) -> list[int]:
    """What a body leaves in its words."""
    out = torch.zeros(count, dtype=torch.int32)
    launch(body, out, **sizes)
    return [value & 0xFFFFFFFF for value in out.tolist()]


U32 = st.integers(0, 2**32 - 1)


def as_signed(value: int) -> int:
    return value - 2**32 if value >> 31 else value


def truncated_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


REFERENCES = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: as_signed(a) * as_signed(b) >> 32,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.s32": lambda a, b: min(as_signed(a), as_signed(b)),
    "max.u32": max,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: as_signed(a) >> min(b, 31),
    "div.u32": lambda a, b: a // b if b else 0xFFFFFFFF,
    "rem.u32": lambda a, b: a % b if b else a,
    "div.s32": lambda a, b: truncated_quotient(as_signed(a), as_signed(b)) if b else -1,
}


@settings(max_examples=25, deadline=None)
@given(a=U32, b=U32, c=U32)
def test_multiply_add_of_uniform_values_and_of_lanes(a: int, b: int, c: int) -> None:
    body = f"""
        mov.b32 %r1, {a}; mov.b32 %r2, {b}; mov.b32 %r3, {c}; mov.b64 %rd3, {{%r3, 0}};
        xor.b32 %r4, %r1, %r0; xor.b32 %r5, %r2, %r0; xor.b32 %r6, %r3, %r0; mov.b64 %rd4, {{%r6, 0}};
        mad.lo.s32 %r7, %r1, %r2, %r3; mad.lo.s32 %r8, %r4, %r5, %r6;
        mad.wide.s32 %rd5, %r1, %r2, %rd3; mad.wide.s32 %rd6, %r4, %r5, %rd4;
        mad.wide.u32 %rd7, %r1, %r2, %rd3; mad.wide.u32 %rd8, %r4, %r5, %rd4;
        setp.ne.b32 %p0, %r0, 0; @%p0 bra DONE;
        st.global.v2.b32 [%rd0], {{%r7, %r8}};
        st.global.v2.b64 [%rd0+16], {{%rd5, %rd6}}; st.global.v2.b64 [%rd0+32], {{%rd7, %rd8}};
        DONE:"""
    found = words(body, 12)
    assert found[:2] == [(a * b + c) % 2**32] * 2
    wide = [low | high << 32 for low, high in zip(found[4::2], found[5::2], strict=True)]
    assert wide[:2] == [(as_signed(a) * as_signed(b) + c) % 2**64] * 2
    assert wide[2:] == [(a * b + c) % 2**64] * 2


@settings(max_examples=25, deadline=None)
@given(a=U32, b=st.one_of(U32, st.integers(0, 40)))
@pytest.mark.parametrize("name", REFERENCES)
def test_integer_arithmetic_of_uniform_values_and_of_lanes(name: str, a: int, b: int) -> None:
    """The first word is computed once for the warp, the second per lane (lane 0 adds nothing)."""
    body = f"""
        mov.b32 %r1, {a}; mov.b32 %r2, {b};
        {name} %r3, %r1, %r2;
        xor.b32 %r4, %r1, %r0; xor.b32 %r5, %r2, %r0;
        {name} %r6, %r4, %r5;
        setp.ne.b32 %p0, %r0, 0; @%p0 bra DONE;
        st.global.v2.b32 [%rd0], {{%r3, %r6}};
        DONE:"""
    expected = REFERENCES[name](a, b) & 0xFFFFFFFF
    assert words(body, 2) == [expected, expected]


def test_lanes_part_and_meet_again() -> None:
    body = """
        mov.b32 %r1, 7;
        and.b32 %r2, %r0, 3;
        setp.eq.b32 %p0, %r2, 1; @%p0 bra ONE;
        setp.eq.b32 %p1, %r2, 2; @%p1 bra TWO;
        add.s32 %r1, %r1, 100; bra JOIN;
        ONE: add.s32 %r1, %r0, 0; bra JOIN;
        TWO: mov.b32 %r1, 5;
        JOIN: add.s32 %r1, %r1, 1;
        st.global.b32 [%rd1], %r1;"""
    assert words(body) == [{1: i + 1, 2: 6}.get(i % 4, 108) for i in range(32)]


def test_loops_of_different_length_in_each_lane() -> None:
    body = """
        mov.b32 %r1, 0; mov.b32 %r2, %r0;
        LOOP: setp.eq.b32 %p0, %r2, 0; @%p0 bra DONE;
        add.s32 %r1, %r1, %r2; sub.s32 %r2, %r2, 1; bra LOOP;
        DONE: st.global.b32 [%rd1], %r1;"""
    assert words(body) == [i * (i + 1) // 2 for i in range(32)]


def test_guards_write_only_their_lanes() -> None:
    body = """
        mov.b32 %r1, 1; setp.lt.u32 %p0, %r0, 5;
        @%p0 mov.b32 %r1, 2; @!%p0 add.s32 %r1, %r1, 10;
        @%p0 st.global.b32 [%rd1], %r1;"""
    assert words(body) == [2] * 5 + [0] * 27


def test_convergent_instructions_wait_for_the_other_lanes() -> None:
    body = """
        mov.b32 %r1, 3; setp.lt.u32 %p0, %r0, 9; @%p0 bra SKIP;
        add.s32 %r1, %r1, %r0;
        SKIP: shfl.sync.idx.b32 %r2, %r1, 31, 31, -1;
        st.global.b32 [%rd1], %r2;"""
    assert words(body) == [34] * 32
    apart = """
        setp.lt.u32 %p0, %r0, 9; @%p0 bra A;
        elect.sync %r1|%p1, -1; bra B;
        A: elect.sync %r2|%p2, -1;
        B: st.global.b32 [%rd1], %r1;"""
    with pytest.raises(ConvergenceError, match=r"wait for each other at elect\.sync"):
        words(apart)


def test_a_lane_that_jumps_back_meets_those_that_wait_for_it() -> None:
    body = """
        mov.b32 %r1, 0; mov.b32 %r2, 0; setp.eq.b32 %p0, %r0, 0;
        LOOP: bar.warp.sync -1; @%p0 bra EXTRA;
        NEXT: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 3; @%p1 bra LOOP;
        add.s32 %r3, %r1, %r2; st.global.b32 [%rd1], %r3; bra END;
        EXTRA: add.s32 %r2, %r2, 10; bra NEXT;
        END:"""
    assert words(body) == [33] + [3] * 31


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_barrier_of_all_threads_counts_those_that_have_not_exited(seed: int | None) -> None:
    body = """
        shr.u32 %r1, %r0, 5; setp.eq.b32 %p0, %r1, 1; @%p0 exit;
        barrier.sync 0; st.global.b32 [%rd1], 1; bar.sync 0;"""
    assert words(body, 96, threads=96, seed=seed) == [1] * 32 + [0] * 32 + [1] * 32


def test_scopes_have_registers_and_labels_of_their_own() -> None:
    block = "{ .reg .b32 t; mov.b32 t, %s; bra.uni DONE; mov.b32 t, 99; DONE: add.s32 %%r1, %%r1, t; }"
    body = "mov.b32 %r1, 0;" + block % 3 + block % 4 + "st.global.b32 [%rd1], %r1;"
    assert words(body) == [7] * 32


def test_prmt_bits_and_packing() -> None:
    body = """
        mov.b32 %r1, 0x44332211; mov.b32 %r2, 0x88776655;
        prmt.b32 %r3, %r1, %r2, 0x7410;
        mov.b64 %rd2, {%r1, %r2}; mov.b64 {%r4, %r5}, %rd2; mov.b32 {%h0, %h1}, %r5;
        cvt.u32.u16 %r6, %h1; shr.u64 %rd3, %rd2, 16; cvt.u32.u64 %r7, %rd3;
        st.global.v4.b32 [%rd0], {%r3, %r4, %r6, %r7};"""
    assert words(body, 4) == [0x88552211, 0x44332211, 0x8877, 0x66554433]


def test_floats_add_multiply_compare_and_narrow() -> None:
    body = """
        cvt.rn.f32.u32 %f0, %r0; mul.rn.f32 %f1, %f0, 0f3F000000; add.f32 %f1, %f1, 0f3F800000;
        fma.rn.f32 %f2, %f0, %f0, %f1;
        setp.gt.f32 %p0, %f0, 0f41200000; selp.f32 %f3, %f2, %f1, %p0;
        st.global.f32 [%rd1], %f3;"""
    out = torch.zeros(32)
    launch(body, out)
    lane = torch.arange(32.0)
    half = lane * 0.5 + 1
    assert torch.equal(out, torch.where(lane > 10, lane * lane + half, half))


@settings(max_examples=200, deadline=None)
@given(*(st.floats(-(2.0**60), 2.0**60, width=32) for _ in range(3)))
def test_a_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    from fractions import Fraction

    mine = float(fused_multiply_add(np.float32(a), np.float32(b), np.float32(c)))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(mine)
    neighbours = [
        float(near),
        float(np.nextafter(near, np.float32(np.inf))),
        float(np.nextafter(near, np.float32(-np.inf))),
    ]
    best = min(abs(Fraction(x) - exact) for x in neighbours if math.isfinite(x))
    assert abs(Fraction(mine) - exact) == best


def test_bfloat16_rounds_like_torch() -> None:
    values = torch.randn(10000) * 10 ** torch.randint(-30, 30, (10000,)).float()
    values[:4] = torch.tensor([0.0, float("inf"), -float("inf"), 1.00390625])
    expected = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16_bits(values.numpy()), expected)


def test_atomics_of_all_lanes_add_up() -> None:
    body = (
        "atom.global.add.u32 %r1, [%rd0+128], 2; red.global.add.u32 [%rd0+132], 1; st.global.b32 [%rd1], %r1;"
    )
    result = words(body, 34)
    assert sorted(result[:32]) == [2 * i for i in range(32)]
    assert result[32:] == [64, 32]
    wrapped = words("atom.global.inc.u32 %r1, [%rd0+128], 4;", 33)
    assert wrapped[32] == 32 % 5


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_clusters_wait_for_each_other_through_global_memory(seed: int | None) -> None:
    """The first CTA polls a flag that only the last one sets: all are resident and take turns."""
    body = """
        setp.ne.b32 %p0, %r30, 0; @%p0 bra OTHERS;
        POLL: ld.acquire.gpu.global.b32 %r1, [%rd0+128]; setp.lt.u32 %p1, %r1, 3; @%p1 bra POLL;
        st.global.b32 [%rd1], %r1; bra END;
        OTHERS: elect.sync %r2|%p2, -1; not.pred %p2, %p2; @%p2 bra END;
        fence.acq_rel.gpu; atom.add.release.gpu.global.u32 %r3, [%rd0+128], 1;
        END:"""
    out = torch.zeros(33, dtype=torch.int32)
    launch(body, out, grid=4, seed=seed)
    assert out.tolist() == [3] * 33


def checked(body: str, **sizes: int) -> list[int]:
    """What a body leaves in its words, with the search for races."""
    out = torch.zeros(64, dtype=torch.int32)
    launch(body, out, check=True, **sizes)
    return [int(value) for value in out.tolist()]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("st.global.b32 [%rd1], 1;", "st.global.b32 [%rd1], 2;", "write-after-write"),
        ("st.global.b32 [%rd1], 1;", "ld.global.b32 %r5, [%rd1];", "read-after-write"),
        ("ld.global.b32 %r5, [%rd1];", "st.global.b32 [%rd1], 1;", "write-after-read"),
    ],
)
@pytest.mark.parametrize("cluster", [1, 2])
def test_ctas_that_meet_in_global_memory_unordered(first: str, second: str, kind: str, cluster: int) -> None:
    body = f"""
        setp.ne.b32 %p0, %r30, 0; @%p0 bra SECOND;
        {first} bra END;
        SECOND: {second}
        END:"""
    with pytest.raises(
        RaceError, match=rf"{kind} in global memory, element 0 of out: .* of CTA 1 meets .*CTA 0"
    ):
        checked(body, grid=2, cluster=cluster)
    ordered = f"""
        setp.ne.b32 %p0, %r30, 0; @%p0 bra SECOND;
        {first} barrier.cluster.arrive; barrier.cluster.wait; bra END;
        SECOND: barrier.cluster.arrive; barrier.cluster.wait; {second}
        END:"""
    if cluster == 2:
        checked(ordered, grid=2, cluster=2)


@pytest.mark.parametrize("wait", ["bra POLL;", ""])
def test_a_flag_in_global_memory_orders_if_it_is_waited_for(wait: str) -> None:
    body = f"""
        setp.ne.b32 %p0, %r30, 0; @%p0 bra READER;
        st.global.b32 [%rd1], 7; bar.warp.sync -1;
        fence.acq_rel.gpu; st.release.gpu.global.b32 [%rd0+128], 1; bra END;
        READER: POLL: ld.acquire.gpu.global.b32 %r1, [%rd0+128]; setp.eq.b32 %p1, %r1, 1; @%p1 bra GO; {wait}
        GO: ld.global.b32 %r2, [%rd1]; add.s32 %r2, %r2, 1; st.global.b32 [%rd1], %r2;
        END:"""
    if wait:
        assert checked(body, grid=2)[:33] == [8] * 32 + [1]
    else:
        with pytest.raises(RaceError, match="read-after-write in global memory"):
            checked(body.replace("st.release.gpu.global.b32 [%rd0+128], 1;", ""), grid=2)


def test_polling_for_what_nobody_writes_is_a_deadlock() -> None:
    body = "POLL: ld.volatile.global.b32 %r1, [%rd0]; setp.eq.b32 %p1, %r1, 0; @%p1 bra POLL;"
    with pytest.raises(DeadlockError, match="poll memory that nobody writes"):
        words(body)


def test_shared_memory_of_the_neighbour() -> None:
    """Each CTA writes its number into the other's shared memory, then reads its own."""
    body = """
        mov.b32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
        mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1;
        mapa.shared::cluster.u32 %r6, %r3, %r5;
        add.s32 %r7, %r4, 10; st.shared::cluster.b32 [%r6], %r7;
        barrier.cluster.arrive; barrier.cluster.wait;
        ld.shared.b32 %r8, [%r3];
        shl.b32 %r9, %r4, 7; cvt.u64.u32 %rd3, %r9; add.s64 %rd4, %rd1, %rd3;
        st.global.b32 [%rd4], %r8;"""
    assert words(body, 64, grid=2, cluster=2) == [11] * 32 + [10] * 32


def test_remote_arrivals_complete_a_barrier() -> None:
    body = """
        mov.b32 %r1, dynamic; mov.u32 %r4, %cluster_ctarank;
        elect.sync %r2|%p0, -1; @%p0 mbarrier.init.shared.b64 [%r1], 64;
        fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;
        mapa.shared::cluster.u32 %r6, %r1, 0;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
        setp.ne.b32 %p1, %r4, 0; @%p1 bra END;
        AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra AGAIN;
        st.global.b32 [%rd1], 1;
        END: barrier.cluster.arrive; barrier.cluster.wait;"""
    assert words(body, grid=2, cluster=2) == [1] * 32


ASYNC_STORE = """
    mov.b32 %r1, dynamic; mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1;
    elect.sync %r2|%p0, -1;
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
    shl.b32 %r2, %r0, 4; add.s32 %r2, %r2, %r1; add.s32 %r2, %r2, 1024;
    mapa.shared::cluster.u32 %r6, %r2, %r5; mapa.shared::cluster.u32 %r7, %r1, %r5;
    add.s32 %r8, %r4, 10;
    {
    .reg .v4 .b32 quad;
    mov.b32 quad.x, %r8; mov.b32 quad.y, %r0; mov.b32 quad.z, 7; mov.b32 quad.w, 8;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r6], quad, [%r7];
    }
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT;
    ld.shared.v4.b32 {%r9, %r10, %r11, %r12}, [%r2];
    shl.b32 %r13, %r4, 9; cvt.u64.u32 %rd3, %r13; add.s64 %rd4, %rd0, %rd3;
    mul.wide.u32 %rd5, %r0, 16; add.s64 %rd4, %rd4, %rd5;
    st.global.v4.b32 [%rd4], {%r9, %r10, %r11, %r12};
    barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_asynchronous_store_tells_the_neighbours_barrier(seed: int | None) -> None:
    out = torch.zeros(256, dtype=torch.int32)
    launch(ASYNC_STORE, out, grid=2, cluster=2, seed=seed, check=True)
    expected = [[[11 - cta, lane, 7, 8] for lane in range(32)] for cta in range(2)]
    assert out.reshape(2, 32, 4).tolist() == expected


def test_an_asynchronous_store_that_nobody_waits_for() -> None:
    out = torch.zeros(256, dtype=torch.int32)
    with pytest.raises((RaceError, UninitializedReadError)):
        launch(ASYNC_STORE.replace("@!%p1 bra WAIT;", ""), out, grid=2, cluster=2, seed=0, check=True)
    with pytest.raises(OutOfBoundsError, match=r"tell a barrier of rank \d"):
        launch(ASYNC_STORE.replace("%r7, %r1, %r5", "%r7, %r1, %r4"), out, grid=2, cluster=2)


def test_addresses_outside_of_everything_are_refused() -> None:
    with pytest.raises(OutOfBoundsError, match=r"st\.global\.b32 .*warp 0 of CTA 0 touches global memory"):
        words("st.global.b32 [%rd1+4], %r0;")
    for statement in ("st.global.b32 [%rd0+2], %r0;", "st.global.v2.b32 [%rd0+4], {%r0, %r0};"):
        with pytest.raises(OutOfBoundsError, match="not aligned"):
            words(statement)
    with pytest.raises(OutOfBoundsError, match="it has 4096 bytes"):
        words("mov.b32 %r1, dynamic; st.shared.b32 [%r1+4096], %r0;")
    with pytest.raises(OutOfBoundsError, match="rank 1 of a cluster of 1"):
        words("mov.b32 %r1, dynamic; mapa.shared::cluster.u32 %r2, %r1, 1; st.shared::cluster.b32 [%r2], 1;")


def test_unknown_things_are_named() -> None:
    for body, words_ in (
        ("frob.b32 %r1, %r2;", r"frob\.b32 \(PTX line \d+\)"),
        ("cvt.rz.bf16.f32 %h1, %f1;", "rounding rz"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("bra NOWHERE;", "label 'NOWHERE'"),
    ):
        with pytest.raises(UnknownInstructionError, match=words_):
            words(body)
    with pytest.raises(UnknownInstructionError, match=r"no \.entry"):
        parse(".version 8.8")


def test_parameters_are_laid_out_as_declared() -> None:
    text = """
    .visible .entry k(.param .align 64 .b8 a[128], .param .u32 b, .param .align 1 .b8 c[1], .param .u64 d)
    .reqntid 64, 2, 1
    { ret; }"""
    program = program_of(text)
    assert program.param_offsets == {"a": 0, "b": 128, "c": 132, "d": 136}
    assert program.module.threads == 128
    assert PARAM_SPACE > 1 << 48


def map_words(address: int, **changes: int) -> bytes:
    """A bf16 matrix of 256 x 128, boxes of 64 x 128, 128-byte swizzle."""
    numbers = [address, 0x0000001000046512, 0, 0, 0x000000FF0000007F, 0, 0x3F << 56, 0x7F]
    for place, number in changes.items():
        numbers[int(place[1:])] = number
    return struct.pack("<8Q", *numbers) + bytes(64)


def test_a_tensor_map_is_read() -> None:
    found = decode_map(map_words(0x7F00_0000_1230))
    assert found.address == 0x7F00_0000_1230
    assert (found.sizes, found.strides, found.box) == ((128, 256), (256,), (64, 128))
    assert (found.element, found.swizzle, found.box_bytes) == (2, 3, 64 * 128 * 2)
    wide = decode_map(map_words(0, w3=0x5 << 32))
    assert wide.strides == ((0x10 | 0x5 << 32) * 16,)


def test_swizzling_is_an_exchange_on_absolute_addresses() -> None:
    for swizzle, span in ((0, 128), (1, 32), (2, 64), (3, 128)):
        units = swizzled_units(0, 64, span // 16, swizzle)
        assert sorted(units.ravel().tolist()) == list(range(64 * span // 16))
    assert swizzled_units(0, 8, 8, 3)[1].tolist() == [9, 8, 11, 10, 13, 12, 15, 14]
    pairs = decode_map(map_words(0, w1=0x0000001000046512 | 1 << 19)).swizzle
    assert swizzled_units(0, 8, 8, pairs)[1].tolist() == [10, 11, 8, 9, 14, 15, 12, 13]
    assert swizzled_units(0, 8, 8, pairs)[4].tolist() == list(range(32, 40))


def test_a_tma_store_writes_whole_16_byte_units() -> None:
    """A row that ends inside a unit is written to the unit's end, and not beyond."""
    data = torch.zeros(4, 64, dtype=torch.int16)
    view = data[:3, :21]
    memory = GlobalMemory()
    memory.add(tensor_region("d", view))
    tensor_map = decode_map(map_words(data.data_ptr(), w1=0x0000000800046512, w4=20 | 2 << 32, w7=3))
    box = np.full((4, 128), 0x11, dtype=np.uint8)
    write_box(tensor_map, (0, 0), box, memory, "a store")
    expected = torch.zeros_like(data)
    expected[:3, :24] = 0x1111
    assert torch.equal(data, expected)


def test_a_fragment_holds_every_element_once() -> None:
    tile = np.arange(64 * 24, dtype=np.float32).reshape(64, 24)
    blocks = to_fragments(tile)
    assert blocks.shape == (4, 12, 32)
    # register 4j + 2h + e of lane 4g + q of warp w: row 16w + 8h + g, column 8j + 2q + e
    assert blocks[3, 4 * 2 + 2 * 1 + 1, 4 * 5 + 3] == tile[48 + 8 + 5, 16 + 6 + 1]
    assert sorted(blocks.ravel().tolist()) == list(range(64 * 24))


def test_llvm_types_have_their_natural_layout() -> None:
    config = parse_type("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
    assert (config.offsets, config.size) == ((0, 12, 24, 32, 40, 48), 56)
    attribute = parse_type("struct<(i32, array<4 x i8>, array<64 x i8>)>")
    assert (attribute.offsets, attribute.size) == ((0, 4, 8), 72)
    assert parse_type("!llvm.struct<(struct<()>, struct<(i1)>)>").size == 1


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats_there_and_back(name: str) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    numbers = torch.randn(64) * 10 ** torch.randint(-4, 6, (64,)).float()
    numbers[:6] = torch.tensor([0.0, -0.0, 1e9, -float("inf"), float("nan"), 17.0])
    body = f"""
        mul.wide.u32 %rd2, %r0, 8; add.s64 %rd2, %rd0, %rd2; ld.global.v2.f32 {{%f0, %f1}}, [%rd2];
        cvt.rn.satfinite.{name}x2.f32 %h1, %f1, %f0; cvt.rn.f16x2.{name}x2 %r1, %h1;
        mov.b32 {{%h2, %h3}}, %r1; cvt.f32.f16 %f2, %h2; cvt.f32.f16 %f3, %h3;
        st.global.v2.f32 [%rd2], {{%f2, %f3}};"""
    out = numbers.clone()
    launch(body, out)
    largest = torch.finfo(dtype).max
    expected = numbers.clamp(-largest, largest).to(dtype).float()
    assert torch.equal(out.nan_to_num(12345.0), expected.nan_to_num(12345.0))


def test_a_sign_is_copied() -> None:
    body = """
        cvt.rn.f32.s32 %f0, %r0; sub.f32 %f1, %f0, 0f41800000;
        copysign.f32 %f2, %f1, %f0; st.global.f32 [%rd1], %f2;"""
    out = torch.zeros(32)
    launch(body, out)
    lane = torch.arange(32.0)
    assert torch.equal(out, torch.copysign(lane, lane - 16))
