"""The kernels of a CPU between which a run can choose, and those in use in this process.

They compute the same up to rounding, and which is fastest depends on the processor's maker and on
the shapes. `training/kernels.py` decides for a run.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SHORT = 128  # up to this many tokens, plain products are attention's kernel by rule
EXACT_ENOUGH = 1e-5  # relative error of a matrix product; one float32 operation rounds by 6e-8
MODES = {"blas": "highest", "onednn": "medium"}  # torch's names


@dataclass(frozen=True)
class CpuKernels:
    """A choice of kernels."""

    longest_plain: int = SHORT  # tokens of context up to which plain products compute attention
    newton_schulz: str | None = None  # bfloat16, float32, or gram; None: by rule


in_use = CpuKernels()


@contextlib.contextmanager
def restored_afterward() -> Iterator[None]:
    """Restore the kernels, threads, and matrix products in use when the context ends."""
    kernels = in_use
    products = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        use(kernels)
        torch.set_float32_matmul_precision(products)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def use(kernels: CpuKernels) -> None:
    """Use these kernels in this process from now on."""
    global in_use
    in_use = kernels


def use_products(name: str) -> None:
    """Compute float32 matrix products on a CPU by `blas` or `onednn` from now on."""
    torch.set_float32_matmul_precision(MODES[name])


def name_of_products(name: str) -> str:
    """Return what a receipt calls the library of `blas` or `onednn`."""
    if name == "onednn":
        return "oneDNN"
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return "MKL" if has_mkl else "BLAS"


def use_exact_products() -> str:
    """Use oneDNN if it is exact enough, else BLAS; return which.

    torch's "medium" uses oneDNN. On many processors it is faster and equally exact, but on some it
    computes in bfloat16. So the error is measured.
    """
    name = "onednn" if onednn_is_exact() else "blas"
    use_products(name)
    return name


def onednn_is_exact() -> bool:
    """Return whether oneDNN's float32 matrix products are exact enough here."""
    with restored_afterward():
        use_products("onednn")
        return product_error() < EXACT_ENOUGH


def product_error() -> float:
    """Return the largest error of a float32 matrix product, relative to its largest element."""
    source = torch.Generator().manual_seed(0)
    left = torch.randn(512, 512, generator=source)
    right = torch.randn(512, 512, generator=source)
    exact = left.double() @ right.double()
    return float((left @ right - exact).abs().max() / exact.abs().max())
