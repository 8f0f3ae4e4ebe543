"""States of models and optimizers in shards: gathered, cut, and taken apart.

A state is nested dicts and lists of tensors and plain values. A shard is a `DTensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.strategies.tensor_parallel import tensor_part, whole_of


@dataclass(frozen=True)
class OwnShard:
    """A saved shard of this very rank, among as many ranks as now.

    Args:
        shard: its numbers.
        shape: of the whole tensor.
    """

    shard: Tensor
    shape: tuple[int, ...]

    @property
    def shards(self) -> tuple[Tensor]:
        """Return the shards that this rank can read."""
        return (self.shard,)


def gathered(states: Any) -> Any:
    """Make every shard in nested containers whole, in host memory and only on rank 0.

    Every rank must call this; ranks other than 0 keep their shards.
    """
    if isinstance(states, dict):
        return {name: gathered(state) for name, state in states.items()}
    if isinstance(states, list):
        return [gathered(state) for state in states]
    if not isinstance(states, DTensor):
        return states
    tensor = whole_of(states)
    if states.device_mesh.get_rank() == 0:
        return tensor.cpu()
    return states


def share_of(value: Any, place: Tensor) -> Any:
    """Return this rank's shard of `value`, which all ranks have, sharded in the way of `place`.

    On the device of `value`, the shard is a view. Values whose shape is not `place`'s, such as a
    step count, stay as they are.

    Args:
        value: a tensor, one whose slices along the first dimension are in several files, or this
            rank's own shard.
        place: a parameter, whose part FSDP2 shards along the first dimension.
    """
    if isinstance(value, OwnShard):
        assert isinstance(place, DTensor)
        return _placed(value.shard, place)
    if not isinstance(place, DTensor) or getattr(value, "shape", None) != place.shape:
        return value
    length, mesh = len(place), place.device_mesh
    part = tensor_part(place)
    if part is not None:
        length, value = part.shape[0], part.of(value[:])  # also of slices in several files
    rows = math.ceil(length / mesh.size(0))
    first = mesh.get_local_rank(0) * rows
    return _placed(value[first : first + rows], place)


def _placed(shard: Tensor, place: DTensor) -> DTensor:
    return DTensor.from_local(
        shard.to(place.device),
        place.device_mesh,
        place.placements,
        shape=place.shape,
        stride=place.stride(),
    )


def shares_in(states: Any) -> dict[Any, Any]:
    """Return the shards in nested containers, in the same memory, by their keys and indices."""
    shares: dict[Any, Any] = {}
    for key, state in _items(states):
        if isinstance(state, DTensor):
            shares[key] = state.to_local().detach()
            continue
        inner_shares = shares_in(state)
        if inner_shares:
            shares[key] = inner_shares
    return shares


def copied_to_host(shares: dict[Any, Any]) -> dict[Any, Any]:
    """Return shards in memory of their own, as a file gets them.

    A view's whole storage would be saved, which may be that of a block.
    """
    copies: dict[Any, Any] = {}
    for key, share in shares.items():
        if isinstance(share, Tensor):
            copies[key] = share.cpu().clone()
        else:
            copies[key] = copied_to_host(share)
    return copies


def without_shares(states: Any) -> Any:
    """Return nested containers in which each shard is replaced by None."""
    if isinstance(states, dict):
        return {name: without_shares(state) for name, state in states.items()}
    if isinstance(states, list):
        return [without_shares(state) for state in states]
    if isinstance(states, DTensor):
        return None
    return states


def _items(states: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(states, dict):
        return states.items()
    if isinstance(states, list):
        return enumerate(states)
    return ()
