import pytest

from lockstep.ranks.peaks import PEAKS, peak_of


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800", 989.5),
        ("NVIDIA H800 PCIe", 756.5),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 165.2),
        ("NVIDIA L400", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(device, peak):
    assert peak_of(device, "16-mixed") == peak


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "32-true", 494.5),  # TF32, which training allows
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.5),
        ("NVIDIA H100 80GB HBM3", "64-true", 34),
        ("NVIDIA H100 PCIe", "32-true", 378),
        ("NVIDIA H100 NVL", "32-true", 417.5),
        ("NVIDIA GB200", "32-true", 1250),
        ("NVIDIA H20", "32-true", 74),
        ("NVIDIA H800", "64-true", 1),
        ("Tesla T4", "32-true", 8.1),  # it doesn't have TF32
        ("Tesla T4", "bf16-mixed", None),
    ],
)
def test_each_precision_has_its_own_peak(device, precision, peak):
    assert peak_of(device, precision) == peak


def test_a_name_that_contains_another_one_is_looked_up_first():
    names = [*PEAKS]
    for first, name in enumerate(names):
        assert not [other for other in names[:first] if f" {other} " in f" {name} "]
