import pytest

from lockstep_gpt.distributed.peaks import peak_of


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.5),
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
        ("Tesla T4", "32-true", 8.1),  # it doesn't have TF32
        ("Tesla T4", "bf16-mixed", None),
    ],
)
def test_each_precision_has_its_own_peak(device, precision, peak):
    assert peak_of(device, precision) == peak
