"""What a single rank keeps of a sharded state: its shards, and everything that has no shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.strategies.sharded_states import OwnShard, shares_in, without_shares
from lockstep.strategies.state_keys import SHAPES, SHARDS


def state_of_rank(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank keeps of a checkpoint with shards, in the same memory.

    Args:
        checkpoint: plain containers, tensors, and shards.
    """
    weights = checkpoint["state_dict"]
    return {
        **without_shares(checkpoint),
        SHARDS: shares_in(checkpoint),
        SHAPES: {name: [*weight.shape] for name, weight in weights.items()},
    }


def is_of_rank(checkpoint: dict[str, Any]) -> bool:
    """Return whether a checkpoint is what `state_of_rank` has returned."""
    return SHARDS in checkpoint


def with_own_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of which `state` is this rank's; its shards are `OwnShard`s."""
    shapes = state[SHAPES]
    checkpoint = {key: value for key, value in state.items() if key not in (SHARDS, SHAPES)}
    _add_shards(checkpoint, state[SHARDS])
    for name, weight in checkpoint["state_dict"].items():
        if isinstance(weight, OwnShard):
            checkpoint["state_dict"][name] = OwnShard(weight.shard, tuple(shapes[name]))
    return checkpoint


def _add_shards(states: Any, shards: dict[Any, Any]) -> None:
    for key, shard in shards.items():
        if isinstance(shard, Tensor):
            states[key] = OwnShard(shard, tuple(shard.shape))
        else:
            _add_shards(states[key], shard)
