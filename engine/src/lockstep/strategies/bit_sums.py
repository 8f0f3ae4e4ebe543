"""Sums of a tensor's bits: equal for equal bits, and added in any order without rounding."""

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers, read as integers; one flipped bit always changes it."""
    integers = tensor.detach().contiguous().view(INTEGERS[tensor.itemsize])
    return integers.sum(dtype=torch.int64)
