"""Newton-Schulz: the orthogonal matrices nearest to those of a stack, by matrix products alone."""

import torch
from torch import Tensor

from lockstep.patches.torch import has_fast_bfloat16

# a, b, c of x -> a x + b x^3 + c x^5, which brings singular values from 0..1 to about 1 in a
# few steps (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return roughly the nearest orthogonal matrices of (N, rows, columns), in `dtype`.

    Low precision is enough: singular values above 0.5 % of the matrix's norm end up between 0.6 and
    1.25 anyway. Smaller ones remain smaller.
    """
    x = matrices.to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    is_wide = x.shape[1] <= x.shape[2]
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


def product_type(device: torch.device) -> torch.dtype:
    """Return the dtype of the products: bfloat16, or float32 on a CPU where that is faster."""
    if device.type == "cpu" and not has_fast_bfloat16():
        return torch.float32
    return torch.bfloat16


def flops_of(shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of the products for one matrix of (rows, columns)."""
    short, long = sorted(shape)
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)
