"""The norm of gradients that this rank has."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.utils import get_total_norm


def norm_of_gradients(weights: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of `weights`, some of which may have none."""
    return get_total_norm([weight.grad for weight in weights if weight.grad is not None])
