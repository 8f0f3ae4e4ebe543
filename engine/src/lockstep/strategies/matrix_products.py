"""Which library multiplies float32 matrices: by rule, and the same on all ranks."""

import contextlib
from collections.abc import Iterator

import torch

from lockstep.ranks.ranks import from_each_rank

EXACT_ENOUGH = 1e-5  # relative error of a matrix product; one float32 operation rounds by 6e-8
OF_GPUS = {"cuda": "TF32", "mps": "Metal"}  # as a receipt names them


def choose_matrix_products(device: str) -> str:
    """Select the float32 matrix products of this process, and return their name.

    All ranks call this. On CPUs, oneDNN computes if it is exact enough on all of them, else BLAS,
    which is often MKL: a rule that asks for no time, so each start of a run decides alike.

        >>> lockstep.choose_matrix_products("cuda")
        'TF32'

    Args:
        device: `cpu`, `cuda`, or `mps`, as `torch.device.type`.
    """
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
        return OF_GPUS[device]
    if all(from_each_rank(onednn_is_exact())):
        torch.set_float32_matmul_precision("medium")
        return "oneDNN"
    torch.set_float32_matmul_precision("highest")
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return "MKL" if has_mkl else "BLAS"


@contextlib.contextmanager
def restored_afterward() -> Iterator[None]:
    """Restore the products that were selected before when the context ends."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def onednn_is_exact() -> bool:
    """Return whether oneDNN's float32 matrix products are exact enough here.

    torch's "medium" uses oneDNN. On many processors it is faster and equally exact, but on some it
    computes in bfloat16. So the error is measured.
    """
    with restored_afterward():
        torch.set_float32_matmul_precision("medium")
        return product_error() < EXACT_ENOUGH


def product_error() -> float:
    """Return the largest error of a float32 matrix product, relative to its largest element."""
    source = torch.Generator().manual_seed(0)
    left = torch.randn(512, 512, generator=source)
    right = torch.randn(512, 512, generator=source)
    exact = left.double() @ right.double()
    return float((left @ right - exact).abs().max() / exact.abs().max())
