"""The table of GPUs: what people and drivers call them, and the data sheets' figures."""

from __future__ import annotations

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.hardware import load_hardware, near_gpus

HARDWARE = load_hardware()


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("h100", "H100-SXM"),
        ("h100sxm5", "H100-SXM"),
        ("H100 SXM", "H100-SXM"),
        ("nvidia-h100-sxm5-80gb", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("h100 nvl", "H100-NVL"),
        ("DGX H100", "H100-SXM"),
        ("A100", "A100-80"),
        ("a100 40gb", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("b200", "B200-SXM"),
        ("GB200 NVL72", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_names_of_people_and_drivers(asked: str, key: str) -> None:
    assert HARDWARE.gpu(asked) is HARDWARE.gpus[key]


def test_every_gpu_is_found_by_its_key_and_by_its_name() -> None:
    for key, gpu in HARDWARE.gpus.items():
        assert HARDWARE.gpu(key.lower().replace("-", " ")) is gpu
        assert HARDWARE.gpu(gpu.name) is gpu


@pytest.mark.parametrize(
    ("asked", "near"),
    [("mi300", "MI300X"), ("A100-60", "A100-40"), ("h10", "H100-SXM"), ("GH200 480GB", "GH200"), ("gb220", "GB200")],
)
def test_what_is_not_in_the_table_is_refused_with_what_is_near(asked: str, near: str) -> None:
    assert near_gpus(asked, HARDWARE.gpus)[0] == near
    with pytest.raises(UsageError, match=f"--gpu {asked}: unknown; expected one of A100-40.*; did you mean {near}"):
        HARDWARE.gpu(asked)


@pytest.mark.parametrize("asked", ["", "sxm", "80gb", "K80", "nvidia"])
def test_a_detail_alone_names_no_gpu(asked: str) -> None:
    with pytest.raises(UsageError, match="unknown"):
        HARDWARE.gpu(asked)


@pytest.mark.parametrize(
    ("key", "memory_gb", "bf16_tflop_per_s", "gb_per_s", "link_gb_per_s", "domain"),
    [
        ("A100-PCIe-80", 80, 312, 1935, 32, 8),
        ("H800", 80, 989, 3350, 200, 8),
        ("H20", 96, 148, 4000, 450, 8),
        ("H100-PCIe", 80, 756, 2000, 64, 8),
        ("H200-SXM", 141, 989, 4800, 450, 8),
        ("B200-SXM", 180, 2250, 8000, 900, 8),
        ("B300-SXM", 288, 2250, 8000, 900, 8),
        ("GB200", 186, 2500, 8000, 900, 72),
        ("GB300", 288, 2500, 8000, 900, 72),
        ("MI300X", 192, 1307, 5300, 64, 8),
        ("MI325X", 256, 1307, 6000, 64, 8),
        ("MI355X", 288, 2516.6, 8000, 76.8, 8),
        ("L40S", 48, 362, 864, 32, 8),
        ("RTX-4090", 24, 165.2, 1008, 32, 8),
    ],
)
def test_data_sheets(
    key: str, memory_gb: float, bf16_tflop_per_s: float, gb_per_s: float, link_gb_per_s: float, domain: int
) -> None:
    gpu = HARDWARE.gpus[key]
    assert gpu.memory_bytes == memory_gb * 1e9
    assert gpu.matrix_flop_per_s == pytest.approx(bf16_tflop_per_s * 1e12)
    assert gpu.memory_bytes_per_s == gb_per_s * 1e9
    assert gpu.link_bytes_per_s == pytest.approx(link_gb_per_s * 1e9)
    assert gpu.domain_of(None) == domain


def test_narrower_numbers_are_multiplied_at_twice_the_rate_or_faster() -> None:
    """By every data sheet; where there are no units for them the rate is 0."""
    for key, gpu in HARDWARE.gpus.items():
        assert gpu.matrix_tf32_flop_per_s in (0.0, pytest.approx(gpu.matrix_flop_per_s / 2, rel=0.02)), key
        assert gpu.matrix_fp8_flop_per_s in (0.0, pytest.approx(gpu.matrix_flop_per_s * 2, rel=0.02)), key
        assert gpu.matrix_fp4_flop_per_s == 0.0 or gpu.matrix_fp4_flop_per_s > 1.9 * gpu.matrix_fp8_flop_per_s, key


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("h100", "GPU h100: H100-SXM is assumed; H100-PCIe and H100-NVL are also called h100"),
        ("A100", "GPU A100: A100-80 is assumed; A100-PCIe-80 and A100-40 and A100-PCIe-40 are also called A100"),
        ("H100-SXM", None),
        ("mi300x", None),
        ("nothing", None),
    ],
)
def test_a_name_that_leaves_a_choice_is_told(asked: str, told: str | None) -> None:
    found = HARDWARE.choice_note(asked)
    assert (found is None) == (told is None)
    if told is not None and found is not None:
        assert found.split(";")[0] == told.split(";")[0]
        assert set(found.replace(" and ", " ").split()) == set(told.replace(" and ", " ").split())
