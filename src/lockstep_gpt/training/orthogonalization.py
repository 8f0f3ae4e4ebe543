"""Newton-Schulz: the orthogonal matrices nearest to those of a stack, by matrix products alone."""

import torch
from torch import Tensor

from lockstep_gpt.model import cpu_kernels
from lockstep_gpt.torch_patches import has_fast_bfloat16

# a, b, c of x -> a x + b x^3 + c x^5, which brings singular values from 0..1 to about 1 in a
# few steps (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LONG = 2  # times as many columns as rows: from here on, iterating on Gram matrices is faster


def orthogonalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return roughly the nearest orthogonal matrices of (N, rows, columns), in `dtype`.

    Low precision is enough: singular values above 0.5 % of the matrix's norm end up between 0.6 and
    1.25 anyway. Smaller ones remain smaller.
    """
    x = matrices.to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    is_wide = x.shape[1] <= x.shape[2]
    if _saves_operations_by_gram(x):
        return _by_gram(x) if is_wide else _by_gram(x.mT).mT
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        if is_wide:  # x @ x.mT is the smaller of the two products
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        else:
            gram = x.mT @ x
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, x, polynomial, beta=a)
    return x


def _saves_operations_by_gram(x: Tensor) -> bool:
    """Return whether this run iterates on Gram matrices, and these matrices are long enough."""
    if cpu_kernels.in_use.newton_schulz != "gram" or x.dtype == torch.bfloat16:
        return False
    short, long = sorted(x.shape[1:])
    return x.device.type == "cpu" and long >= LONG * short


def _by_gram(x: Tensor) -> Tensor:
    """Return what the same iterations make of normalized wide matrices, (N, rows, columns).

    Each iteration multiplies x from the left by a polynomial of its Gram matrix, x x^T. All these
    matrices commute, so they can be multiplied together first, at the size of the short edge. For
    4 times as many columns as rows, that takes 5/9 of the operations. The Gram matrix has the
    squares of the singular values, so bfloat16 would lose the small ones.
    """
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    factor = None  # what has multiplied x so far
    for iteration in range(ITERATIONS):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # without its a times one
        if factor is None:
            one = torch.eye(gram.shape[1], dtype=x.dtype, device=x.device)
            factor = polynomial + a * one
        else:
            factor = torch.baddbmm(factor, polynomial, factor, beta=a)
        if iteration < ITERATIONS - 1:
            half = torch.baddbmm(gram, gram, polynomial, beta=a)
            gram = torch.baddbmm(half, polynomial, half, beta=a)
    assert factor is not None
    return factor @ x


def product_type(device: torch.device) -> torch.dtype:
    """Return the dtype of the products: this run's on a CPU, else the narrowest fast one."""
    form = cpu_kernels.in_use.newton_schulz
    if device.type == "cpu" and form is not None:
        return torch.bfloat16 if form == "bfloat16" else torch.float32
    if device.type == "cpu" and not has_fast_bfloat16():
        return torch.float32
    return torch.bfloat16


def flops_of(shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of the products for one matrix of (rows, columns)."""
    short, long = sorted(shape)
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)
