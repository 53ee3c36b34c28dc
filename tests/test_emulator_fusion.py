"""Runs of instructions done in one step give what they give one by one."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm.emulator.decode import Decoder, Program
from cutegemm.emulator.faults import RaceError
from cutegemm.emulator.fusion import Fused
from cutegemm.emulator.machine import LaunchRecord, Machine
from cutegemm.emulator.memory import SHARED_BASE, GlobalMemory, tensor_region
from cutegemm.emulator.ptx import parse

COUNT = 4  # registers of each kind that instructions work on
R, RD, P = (st.integers(0, COUNT - 1).map(lambda i, kind=kind: f"%{kind}{i}") for kind in ("r", "rd", "p"))
LITERAL = st.sampled_from([0, 1, 7, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, -1, -64]).map(str)
SOURCE = R | LITERAL
FORMS = {
    "{op}.s32 {r}, {s}, {t};": ("add", "sub", "mul.lo"),
    "{op}.b32 {r}, {s}, {t};": ("and", "or", "xor"),
    "{op}.s64 {d}, {e}, {f};": ("add", "sub"),
    "{op} {r}, {s}, {n};": ("shl.b32", "shr.u32", "shr.s32"),
    "{op} {d}, {e}, {n};": ("shl.b64", "shr.u64"),
    "{op} {r}, {s}, {t};": ("min.s32", "max.s32", "min.u32", "max.u32", "mul.hi.u32"),
    "{op} {d}, {s}, {t};": ("mul.wide.s32", "mul.wide.u32"),
    "{op} {r}, {s}, {t}, {u};": ("mad.lo.s32",),
    "{op} {p}, {s}, {t};": tuple(
        f"setp.{relation}.{kind}"
        for kind in ("s32", "u32")
        for relation in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    "{op} {p}, {q}, {o};": ("and.pred", "or.pred", "xor.pred"),
    "{op} {p}, {q};": ("not.pred",),
    "{op} {r}, {s}, {t}, {p};": ("selp.b32",),
    "{op} {r}, {s};": ("mov.b32", "neg.s32", "not.b32"),
    "{op} {d}, {e};": ("mov.b64",),
    "{op} {d}, {s};": ("cvt.u64.u32", "cvt.s64.s32"),
    "{op} {r}, {e};": ("cvt.u32.u64",),
    "mov.b64 {d}, {{{s}, {t}}};": ("",),
    "mov.b64 {{{r}, {v}}}, {e};": ("",),
}


@st.composite
def instructions(draw: st.DrawFn) -> str:
    form = draw(st.sampled_from(sorted(FORMS)))
    parts = {"r": R, "s": SOURCE, "t": SOURCE, "u": SOURCE, "v": R, "d": RD, "e": RD, "f": RD}
    parts |= {"p": P, "q": P, "o": P, "n": st.integers(0, 31)}
    text = form.format(op=draw(st.sampled_from(FORMS[form])), **{name: draw(s) for name, s in parts.items()})
    first, _, second = text.partition("{")[2].partition(",")
    if "mov.b64 {" in text and first.strip() == second.partition("}")[0].strip():
        return "mov.b32 %r0, %r1;"  # an instruction must not write a register twice
    return text


def program(body: str) -> Program:
    stores = "".join(
        f"st.global.b32 [%rd9+{4 * i}], %r{i}; st.global.b64 [%rd9+{16 + 8 * i}], %rd{i};"
        f"selp.b32 %r8, 1, 0, %p{i}; st.global.b32 [%rd9+{48 + 4 * i}], %r8;"
        for i in range(COUNT)
    )
    text = f"""
    .version 8.8
    .target sm_90a
    .visible .entry k(.param .u64 out)
    {{
        .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .b32 %f<20>;
        ld.param.b64 %rd9, [out];
        {body}
        {stores}
        ret;
    }}"""
    return Decoder(parse(text), SHARED_BASE).decode()


def outcome(made: Program, words: int = 16) -> tuple[list[int], int]:
    out = torch.zeros(words, dtype=torch.int32)
    memory = GlobalMemory()
    memory.add(tensor_region("out", out))
    launch = LaunchRecord((1, 1, 1), (32, 1, 1), (1, 1, 1), 1024, struct.pack("<Q", out.data_ptr()))
    machine = Machine(made, launch, memory)
    machine.run()
    return out.tolist(), machine.instructions


def one_by_one(made: Program) -> Program:
    made.fused = Fused(made.ops, [1] * len(made.ops))
    return made


@settings(max_examples=300, deadline=None)
@given(
    body=st.lists(instructions(), min_size=1, max_size=12),
    start=st.lists(st.integers(0, 2**32 - 1), min_size=COUNT, max_size=COUNT),
    lanes=st.booleans(),
)
def test_integer_runs_do_what_their_instructions_do(body: list[str], start: list[int], lanes: bool) -> None:
    first = "".join(
        f"mov.b32 %r{i}, {value}; mov.b64 %rd{i}, {{%r{i}, {value >> 1}}};"
        f"setp.lt.u32 %p{i}, {value}, {2**31};"
        for i, value in enumerate(start)
    )
    # A register that differs from lane to lane, though not in the lane that stores: nothing can be fused.
    differ = "mov.u32 %r10, %laneid; shr.u32 %r10, %r10, 5; add.s32 %r0, %r0, %r10;" if lanes else ""
    whole = first + differ + "".join(body)
    made = program(whole)
    assert any(count > 1 for count in made.fused.counts)
    assert outcome(made) == outcome(one_by_one(program(whole)))


CONVERSIONS = """
    mov.u32 %r10, %laneid; cvt.rn.f32.u32 %f0, %r10;
    add.f32 %f1, %f0, 0f3F810000; mul.f32 %f2, %f0, 0f4B800001;
    neg.f32 %f3, %f2; {cvt} %r0, %f0, %f1; {cvt} %r1, %f2, %f3; {cvt} %r2, %f3, %f0; {cvt} %r3, %f1, %f1;
    shl.b32 %r11, %r10, 6; cvt.u64.u32 %rd8, %r11; add.s64 %rd9, %rd9, %rd8;
"""


@pytest.mark.parametrize("cvt", ["cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"])
def test_conversions_of_lanes_together(cvt: str) -> None:
    made = program(CONVERSIONS.format(cvt=cvt))
    assert 4 in made.fused.counts
    assert outcome(made, 32 * 16) == outcome(one_by_one(program(CONVERSIONS.format(cvt=cvt))), 32 * 16)


def test_a_conversion_that_reads_what_another_has_written_comes_after_it() -> None:
    body = CONVERSIONS.format(cvt="cvt.rn.bf16x2.f32") + (
        "mov.b32 %f4, %r1; cvt.rn.bf16x2.f32 %f4, %f0, %f4; cvt.rn.bf16x2.f32 %r0, %f4, %f0;"
    )
    assert outcome(program(body), 32 * 16) == outcome(one_by_one(program(body)), 32 * 16)


def test_a_label_inside_divides_a_run() -> None:
    body = """
        mov.b32 %r0, 0; mov.b32 %r1, 1; mov.b32 %r2, 0; mov.b32 %r3, 0;
        LOOP: add.s32 %r0, %r0, 1; add.s32 %r1, %r1, %r1; setp.lt.s32 %p0, %r0, 5; @%p0 bra LOOP;"""
    words, instructions_executed = outcome(program(body))
    assert words[:2] == [5, 32]
    assert (words, instructions_executed) == outcome(one_by_one(program(body)))


def test_a_fault_inside_a_run_names_its_own_line() -> None:
    body = """
        mov.b32 %r0, 3; mov.b32 %r1, 4; mov.b64 %rd1, 64;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd1, %p0, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        add.s32 %r0, %r0, %r1;
        add.s32 %r1, %f0, 1;
        add.s32 %r2, %r0, %r1;"""
    made = program(body)
    line = next(s.line for s in made.module.statements if s.operands[1:] == ("%f0", "1"))
    with pytest.raises(RaceError, match=rf"add\.s32 \(PTX line {line}\) .* reads an accumulator"):
        outcome(made)
