"""Which way each operand of a call takes, and what is launched for it; none of it needs a GPU."""

import pytest
import torch
from gpu_stand_ins import gemm_on_torch, on_gpu, zeros

import cutegemm
from cutegemm import GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.parts.paths import LoadPath, Paths

BF16 = torch.bfloat16
A, B = zeros(16, 64), zeros(24, 64).t()


def test_matrices_without_a_contiguous_mode_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    strided = on_gpu(torch.randn(16, 128, dtype=BF16))[:, ::2]
    before = strided.clone()
    b, out = on_gpu(torch.randn(128, 48, dtype=BF16))[::2, ::2], zeros(32, 48)[::2, ::2]
    wanted = (strided.float() @ b.float()).to(BF16)
    assert torch.equal(gemm(strided, b), wanted)
    assert gemm(strided, b, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(strided, before)
    assert [call[-1] for call in prepared] == [Paths()]


@pytest.mark.parametrize(("k", "load"), [(100, "realigned"), (999, "realigned"), (1000, "tma")])
def test_pitch_decides_how_an_operand_is_loaded(
    monkeypatch: pytest.MonkeyPatch, k: int, load: LoadPath
) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    a, b = on_gpu(torch.randn(16, k, dtype=BF16)), on_gpu(torch.randn(24, k, dtype=BF16)).t()
    for _ in range(3):
        assert torch.equal(gemm(a, b), (a.float() @ b.float()).to(BF16))
    assert [call[-1] for call in prepared] == [Paths(load, load)]


def test_pitch_of_each_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    odd_a, odd_b = zeros(16, 68)[:, :64], zeros(24, 68)[:, :64].t()
    for a, b in ((A, odd_b), (odd_a, B), (odd_a, odd_b), (A, B), (A, odd_b)):
        gemm(a, b)
    assert [call[-1] for call in prepared] == [
        Paths("tma", "realigned"), Paths("realigned", "tma"), Paths("realigned", "realigned"), Paths()
    ]  # fmt: skip


def test_batches_of_odd_matrices_are_launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch, (None, None, None, None))
    memory = on_gpu(torch.randn(3 * (16 * 64 + 4), dtype=BF16))
    a, b = memory.as_strided((3, 16, 64), (16 * 64 + 4, 64, 1)), on_gpu(torch.randn(3, 24, 64, dtype=BF16)).mT
    assert torch.equal(gemm(a, b), (a.float() @ b.float()).to(BF16))
    assert [call[0] for call in prepared] == [1, 1], "a launch for aligned matrices and one for the others"
    assert {call[-1] for call in prepared} == {Paths(), Paths("realigned")}
    gemm(a.contiguous(), b)
    assert prepared[-1][0] == 3


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["a", "b"])
def test_start_decides_how_an_operand_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str, offset: int
) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    operands = {"a": A, "b": B, "out": zeros(16, 24)}
    shape, stride = operands[name].shape, operands[name].stride()
    operands[name] = zeros(shape.numel() + 8).as_strided(shape, stride, offset)
    gemm(**operands)
    expected = Paths(**{name: "tma" if offset == 8 else "realigned"})
    assert [call[-1] for call in prepared] == [expected]


def test_out_that_tma_cannot_store_takes_the_direct_store(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, prepared = gemm_on_torch(monkeypatch)
    a = on_gpu(torch.randn(16, 64, dtype=BF16))
    wanted = (a.float() @ B.float()).to(BF16)
    aligned, pitched, offset = (
        zeros(16, 24),
        zeros(16, 28)[:, :24],
        zeros(16 * 24 + 1)[1:].view(16, 24),
    )
    for out in (aligned, pitched, offset, aligned, offset):
        assert torch.equal(gemm(a, B, out=out), wanted)
    gemm(a, zeros(23, 64).t())
    stores = [call[-1].store for call in prepared]
    assert stores == ["tma", "direct", "direct"], "lines of 24, odd pitches and starts, lines of 23"
    wide, prepared = gemm_on_torch(monkeypatch, out_dtype=torch.float32)
    wide(A, B, out=zeros(16, 26, dtype=torch.float32)[:, :24])
    wide(A, B, out=zeros(16, 28, dtype=torch.float32)[:, :24])
    assert [call[-1].store for call in prepared] == ["direct", "tma"]


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("sm_90a", GemmConfig(64, 64, cluster_m=2, consumers=1)),
        ("sm_90a", GemmConfig(64, 64, 128, consumers=1)),
        ("sm_100a", GemmConfig(64, 64, 128)),
        ("sm_100a", GemmConfig(128, 128, cluster_m=4, mma_ctas=2)),
    ],
    ids=str,
)
def test_a_kernel_for_aligned_operands_takes_padded_ones_of_any_size(
    target: str, config: GemmConfig | None
) -> None:
    gemm = cutegemm.compile((70, 72, 69), "bfloat16", config=config, target=target)
    assert "70x72x69" in gemm.explain()
    a, b = torch.randn(70, 72, dtype=BF16)[:, :69], torch.randn(72, 72, dtype=BF16)[:, :69].t()
    found = gemm.emulate(a, b).out
    assert found is not None
    assert torch.allclose(found.float(), a.float() @ b.float(), rtol=2**-7, atol=1e-2)
    with pytest.raises(ConfigError, match="16 bytes"):
        gemm.emulate(a.contiguous(), b)
