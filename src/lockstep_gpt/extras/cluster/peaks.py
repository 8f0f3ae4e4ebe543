"""What GPUs can do at most."""

# Dense peaks of 16-bit matrix products with float32 accumulation, in TFLOP/s, by what CUDA calls
# the device; from NVIDIA's data sheets and architecture papers, halved where they count sparsity.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "T4": 65.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_of(device: str) -> float | None:
    """Return the peak in TFLOP/s of the GPU that CUDA calls `device`, None where none is known."""
    words = f" {device} ".replace("-", " ")
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
