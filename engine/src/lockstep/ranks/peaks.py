"""Peak speeds of GPUs: the one table that `plan`, `doctor`, and a run's `mfu` use."""

from __future__ import annotations

from collections.abc import Mapping

# Number format of a precision's matrix products; on GPUs, training uses TF32 for float32.
FORMS = {"64-true": "fp64", "32-true": "tf32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def _peaks(half: float, **others: float) -> dict[str, float]:
    return {**others, "fp16": half, "bf16": half}


# Dense peaks of matrix products with float32 accumulation, in TFLOP/s, by CUDA's name for the
# device and by number format; a name that contains another one comes before it. They are from
# NVIDIA's data sheets and architecture papers, halved where those count sparsity: of the H100 (SXM,
# PCIe, NVL), the H200 (SXM, NVL), and the GH200; of the GB200 NVL72, divided by its 72 GPUs. NVIDIA
# publishes none of the H800 and the H20 outside China; these are from sellers' data sheets.
PEAKS = {
    "GB200": _peaks(2500.0, fp64=40.0, fp32=80.0, tf32=1250.0),
    "B200": _peaks(2250.0, fp64=40.0, fp32=80.0, tf32=1100.0),
    "GH200": _peaks(989.5, fp64=34.0, fp32=67.0, tf32=494.5),
    "H200 NVL": _peaks(835.5, fp64=30.0, fp32=60.0, tf32=417.5),
    "H200": _peaks(989.5, fp64=34.0, fp32=67.0, tf32=494.5),
    "H100 NVL": _peaks(835.5, fp64=30.0, fp32=60.0, tf32=417.5),
    "H100 PCIe": _peaks(756.5, fp64=26.0, fp32=51.0, tf32=378.0),
    "H100": _peaks(989.5, fp64=34.0, fp32=67.0, tf32=494.5),
    "H800 PCIe": _peaks(756.5, fp64=0.8, fp32=51.0, tf32=378.0),
    "H800": _peaks(989.5, fp64=1.0, fp32=67.0, tf32=494.5),
    "H20": _peaks(148.0, fp64=1.0, fp32=44.0, tf32=74.0),
    "A100": _peaks(312.0, fp64=9.7, fp32=19.5, tf32=156.0),
    "L40S": _peaks(362.0, fp32=91.6, tf32=183.0),
    "L4": _peaks(121.0, fp32=30.3, tf32=60.0),
    "T4": {"fp32": 8.1, "fp16": 65.0},
    "RTX 5090": _peaks(209.5, fp32=104.8, tf32=104.8),
    "RTX 4090": _peaks(165.2, fp32=82.6, tf32=82.6),
    "RTX 3090": _peaks(71.0, fp32=35.6, tf32=35.6),
}


def in_form(peaks: Mapping[str, float], form: str) -> float | None:
    """Return the peak in a number format; float32's for TF32 if the device does not have TF32."""
    return peaks.get(form, peaks.get("fp32") if form == "tf32" else None)


def peak_of(device: str, precision: str) -> float | None:
    """Return the peak in TFLOP/s of the GPU that CUDA calls `device`; None if it is unknown."""
    words = f" {device} ".replace("-", " ")
    if " MIG " in words:  # a part of a GPU
        return None
    peaks = next((peaks for name, peaks in PEAKS.items() if f" {name} " in words), {})
    return in_form(peaks, FORMS[precision])
