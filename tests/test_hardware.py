"""The GPU table, target names and detection, none of it on a GPU (but the last)."""

from types import SimpleNamespace

import pytest

from cutegemm import hardware
from cutegemm.errors import DeviceError, TargetError
from cutegemm.hardware import GPUS, SUPPORTED_TARGETS, gpu_by_name, gpu_from_properties, normalise_target


def properties(**changes: object) -> SimpleNamespace:
    """What torch reports of an H200, with ``changes``."""
    facts = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "L2_cache_size": 62_914_560,
    }
    return SimpleNamespace(**{**facts, **changes})


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_each_model_is_plausible_and_found_under_each_of_its_names(gpu: hardware.Gpu) -> None:
    assert gpu.target in SUPPORTED_TARGETS
    assert gpu.compute_capability == SUPPORTED_TARGETS[gpu.target]
    assert 70 <= gpu.sms <= 160
    # A unit slip (GHz for Hz, GB for bytes) moves a figure by a thousand.
    assert 1e9 < gpu.sm_clock_hz < 3e9
    assert 1e12 < gpu.memory_bytes_per_s < 1e13
    assert 40 * 2**20 < gpu.l2_bytes < 200 * 2**20
    per_sm_and_clock = {"sm_90a": 4096, "sm_100a": 8192}[gpu.target]
    assert gpu.bf16_flops <= gpu.sms * per_sm_and_clock * gpu.sm_clock_hz * 1.01
    for name in (gpu.name, gpu.name.lower(), gpu.name.replace(" ", "-"), *gpu.device_names):
        assert gpu_by_name(name) is gpu


def test_no_name_belongs_to_two_models() -> None:
    names = [
        name for gpu in GPUS for name in {hardware._simplified(n) for n in (gpu.name, *gpu.device_names)}
    ]
    assert sorted(names) == sorted(set(names))


def test_the_sm_counts_that_tile_choices_hang_on() -> None:
    assert {gpu.name: gpu.sms for gpu in GPUS} == {
        "H20": 78,
        "H100 SXM": 132,
        "H100 PCIe": 114,
        "H200": 132,
        "H800 PCIe": 114,
        "B200": 148,
        "GB200": 152,
    }


def test_an_unknown_model_is_refused_with_the_list() -> None:
    with pytest.raises(DeviceError, match=r"'A100'.*H20, H100 SXM.*GB200"):
        gpu_by_name("A100")


@pytest.mark.parametrize("name", ["sm_90a", " SM_90A ", "sm_100a"])
def test_supported_targets_pass(name: str) -> None:
    assert normalise_target(name) == name.strip().lower()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sm_90", "write 'sm_90a'"),
        ("90", "write 'sm_90a'"),
        ("9.0", "write 'sm_90a'"),
        ("sm90a", "write 'sm_90a'"),
        ("hopper", "write 'sm_90a'"),
        ("Hopper", "write 'sm_90a'"),
        ("compute_90", "write 'sm_90a'"),
        ("sm_100", "write 'sm_100a'"),
        ("blackwell", "write 'sm_100a'"),
        ("sm_100f", "there are kernels for: sm_90a, sm_100a"),
        ("sm_103a", "B300"),
        ("sm_120a", "consumer Blackwell"),
        ("sm_121a", "consumer Blackwell"),
        ("H200", "is a GPU, not the architecture that its kernels are compiled for; write 'sm_90a'"),
        ("h100-sxm", "is a GPU"),
        ("NVIDIA B200", "write 'sm_100a'"),
        ("sm_80", "unknown; there are kernels for: sm_90a"),
        ("", "unknown; there are kernels for"),
        ("gfx942", "unknown; there are kernels for"),
    ],
)
def test_other_targets_are_refused_with_what_to_write(given: str, said: str) -> None:
    with pytest.raises(TargetError) as caught:
        normalise_target(given)
    assert said in str(caught.value)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", [90, None, ("sm_90a",)])
def test_a_target_that_is_no_string_is_refused(given: object) -> None:
    with pytest.raises(TargetError, match=r"as a string, one of: sm_90a, sm_100a$"):
        normalise_target(given)  # type: ignore[arg-type]


def test_detection_takes_the_drivers_counts_and_the_tables_rates() -> None:
    gpu = gpu_from_properties(properties())
    assert gpu == gpu_by_name("H200")
    slice_of_it = gpu_from_properties(properties(multi_processor_count=60, L2_cache_size=31_457_280))
    assert (slice_of_it.sms, slice_of_it.l2_bytes) == (60, 31_457_280)
    assert slice_of_it.memory_bytes_per_s == gpu.memory_bytes_per_s


def test_a_model_not_in_the_table_gets_the_drivers_clocks() -> None:
    gpu = gpu_from_properties(
        properties(
            name="NVIDIA H100 NVL",
            memory_bus_width=6144,
            memory_clock_rate=2_619_000,
            clock_rate=1_785_000,
        )
    )
    assert gpu.name == "H100 NVL"
    assert gpu.target == "sm_90a"
    assert gpu.memory_bytes_per_s == pytest.approx(4.02e12, rel=1e-3)
    assert gpu.sm_clock_hz == 1.785e9


def test_a_model_not_in_the_table_whose_driver_tells_nothing_gets_the_nearest_models_rates() -> None:
    gpu = gpu_from_properties(properties(name="NVIDIA H800 NVL", multi_processor_count=116, L2_cache_size=0))
    assert gpu.sms == 116
    assert gpu.memory_bytes_per_s == gpu_by_name("H100 PCIe").memory_bytes_per_s
    assert gpu.l2_bytes == gpu_by_name("H100 PCIe").l2_bytes


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 3), (12, 0)])
def test_a_gpu_of_another_architecture_is_refused_by_name(capability: tuple[int, int]) -> None:
    major, minor = capability
    with pytest.raises(
        TargetError,
        match=rf"NVIDIA X1 has compute capability {major}\.{minor}.*"
        r"are sm_90a \(capability 9\.0\), sm_100a \(capability 10\.0\)$",
    ):
        gpu_from_properties(properties(name="NVIDIA X1", major=major, minor=minor))


def test_without_a_gpu_the_error_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"built without CUDA.*target='sm_90a'"):
        hardware.current_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"torch sees none.*doctor.*target='sm_90a'"):
        hardware.current_target()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A torch that sees an H200 and an H20, the second one current; the list records what was asked."""
    import torch

    asked: list[int] = []

    def get_device_properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return [properties(), properties(name="NVIDIA H20", multi_processor_count=78)][index]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    hardware._gpu_at.cache_clear()
    yield asked
    hardware._gpu_at.cache_clear()


def test_the_device_asked_for_is_the_one_described_and_only_asked_once(two_gpus: list[int]) -> None:
    assert hardware.current_gpu().name == "H20"
    assert hardware.current_gpu(0).name == "H200"
    assert hardware.current_gpu("cuda:0").name == "H200"
    assert hardware.current_gpu("cuda").name == "H20"
    assert hardware.current_target(1) == "sm_90a"
    assert sorted(two_gpus) == [0, 1]


@pytest.mark.parametrize("device", [2, -1, "cuda:7"])
def test_a_device_that_does_not_exist_is_refused(two_gpus: list[int], device: object) -> None:
    with pytest.raises(DeviceError, match="sees 2 GPU"):
        hardware.current_gpu(device)


def test_a_device_that_is_no_gpu_is_refused(two_gpus: list[int]) -> None:
    with pytest.raises(DeviceError, match="not a CUDA device"):
        hardware.current_gpu("cpu")


@pytest.mark.gpu
def test_the_gpu_here_is_described() -> None:
    import torch

    gpu = hardware.current_gpu()
    assert gpu.sms == torch.cuda.get_device_properties().multi_processor_count
    assert gpu.compute_capability == torch.cuda.get_device_capability()


def test_clusters_that_run_at_once() -> None:
    h200 = gpu_by_name("H200")
    assert [h200.resident_clusters(ctas) for ctas in (1, 2, 4, 8)] == [132, 66, 31, 14]
    for gpu in GPUS:
        found = [gpu.resident_clusters(ctas) for ctas in (1, 2, 4, 8, 16)]
        assert found[0] == gpu.sms
        assert all(1 <= count <= gpu.sms // ctas for count, ctas in zip(found, (1, 2, 4, 8, 16), strict=True))
