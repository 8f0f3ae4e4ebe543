"""The norm of gradients that this rank has, and gradients that can be clipped together."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm


def norm_of_gradients(weights: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of `weights`, some of which may have none."""
    return get_total_norm([weight.grad for weight in weights if weight.grad is not None])


def on_same_mesh(weights: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Return the weights in lists, whose operations torch can do in one call.

    If tensor ranks split some, these are on another mesh of ranks than the others.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for weight in weights:
        by_mesh.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    return by_mesh.values()
