"""What a configuration chooses: its nodes are told by the names in their `_target_`.

Nothing here imports what a node names.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

AUTO = "lockstep.strategies.placing.auto"
DDP = "lockstep.strategies.placing.ddp"
FSDP2 = "lockstep.strategies.placing.fsdp2"
PRECISIONS = ("32-true", "bf16-mixed")  # for which shards work


def trains_language_model(config: DictConfig) -> bool:
    """Return whether a run trains a model whose shape and optimizer are nodes of their own."""
    return all("_target_" in (config.get(name) or {}) for name in ("model", "optim"))


def is_sharded(config: DictConfig) -> bool:
    """Return whether ranks share the states of a model."""
    return bool(config.strategy.get("_target_") == FSDP2)


def tensor_parallel(config: DictConfig) -> int:
    """Return how many ranks split layers."""
    return int(config.strategy.get("tensor_parallel", 1))


def can_shard(config: DictConfig) -> bool:
    """Return whether `strategy=fsdp2` works with the other settings and AdamW or Muon."""
    return (
        config.precision in PRECISIONS
        and config.batch.get("exact_micro_size") is None
        and not config.trainer.get("sync_batchnorm", False)
    )


def with_values(node: DictConfig, **values: Any) -> DictConfig:
    """Return a copy of a node in which those arguments that it has have other values."""
    known = {name: value for name, value in values.items() if name in node}
    return cast(DictConfig, OmegaConf.merge(node, known))


def with_node(config: DictConfig, name: str, node: Any) -> DictConfig:
    """Return a copy of a configuration in which another node has a name."""
    changed = copy.deepcopy(config)
    with open_dict(changed):
        changed[name] = node
    return changed
