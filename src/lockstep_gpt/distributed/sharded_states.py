"""States of models and optimizers in shards: gathered, cut, and taken apart.

A state is nested dicts and lists of tensors and plain values. A shard is a `DTensor`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gathered(states: Any) -> Any:
    """Make every shard in nested containers whole, in host memory and only on rank 0.

    Every rank must call this; ranks other than 0 keep their shards.
    """
    if isinstance(states, dict):
        return {name: gathered(each) for name, each in states.items()}
    if isinstance(states, list):
        return [gathered(each) for each in states]
    if not isinstance(states, DTensor):
        return states
    whole = states.full_tensor()
    return whole.cpu() if states.device_mesh.get_rank() == 0 else states


def share_of(whole: Any, place: Tensor) -> Any:
    """Return this rank's shard of `whole`, which all ranks have, sharded in the way of `place`.

    Values whose shape is not `place`'s, such as a step count, stay whole.
    """
    if not isinstance(place, DTensor) or getattr(whole, "shape", None) != place.shape:
        return whole
    # Without a source rank nothing is sent: each rank cuts its shard from its own copy.
    return distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None)


def shares_in(states: Any) -> dict[Any, Any]:
    """Return the shards in nested containers, in host memory, by their keys and indices."""
    found: dict[Any, Any] = {}
    for key, each in _items(states):
        if isinstance(each, DTensor):
            # Copied, because a view's whole storage would be saved, which may be that of a block.
            found[key] = each.to_local().detach().cpu().clone()
        elif inner := shares_in(each):
            found[key] = inner
    return found


def without_shares(states: Any) -> Any:
    """Return nested containers in which each shard is replaced by None."""
    if isinstance(states, dict):
        return {name: without_shares(each) for name, each in states.items()}
    if isinstance(states, list):
        return [without_shares(each) for each in states]
    return None if isinstance(states, DTensor) else states


def _items(states: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(states, dict):
        return states.items()
    return enumerate(states) if isinstance(states, list) else ()
