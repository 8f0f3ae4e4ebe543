"""The windows that a run has taken stay what they were, whatever a resume changes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep_gpt.config import Config, from_container
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.datasets.mixed_order import MixedOrder
from lockstep_gpt.run.directory import differences, some_of
from lockstep_gpt.tokens.packing import packing_of

DECIDING = ("weights", "epochs", "schedule", "planned_tokens")
TURNS = "turns"  # the key of a checkpoint of a mixture's run
RULE = "share tree"  # by which the sources take turns


def samples_of(config: Config) -> int:
    """Return the training windows of a whole run whose global batch is decided."""
    size = config.batch.global_size
    assert size is not None, "frozen"
    return config.max_steps * size


def order_of(config: Config, folder: Path) -> MixedOrder:
    """Return the order of a run with frozen settings on a prepared mixture."""
    data: Any = config.data
    block_size = config.model.block_size
    packing = packing_of(config.packing._target_)
    sizes = packing.open(folder, "train", block_size).counts
    order: MixedOrder = data.order(sizes, samples_of(config), block_size, config.seed)
    return order


def keep_past(checkpoint: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise a `UserError` if a run with `config` would have come to its checkpoint otherwise."""
    if checkpoint.get(TURNS) != RULE:
        raise UserError(
            "the sources of this run took turns by the rule of an earlier version; finish it with "
            "that version, or set resume=PATH and another run_dir to go on from a checkpoint"
        )
    before: Any = from_container(checkpoint["config"])
    changed = differences(_sources(before.data), _sources(config.data), free=())
    if changed:
        raise UserError(
            f"a run keeps its sources; here is {some_of(changed)}; set them to the same, or start "
            "a new run"
        )
    samples = checkpoint["samples"]
    past = order_of(before, folder).turns.phases_before(samples)
    if past != order_of(config, folder).turns.phases_before(samples):
        planned = before.data.planned_tokens or samples_of(before) * before.model.block_size
        changed = differences(_deciding(before), _deciding(config), free=())
        raise UserError(
            f"with {some_of(changed)}, the run would have taken other windows so far; set them to "
            f"the same, data.planned_tokens={planned} to train longer, or data.schedule for later "
            "weights"
        )


def _sources(data: Any) -> dict[str, Any]:
    """Return the settings of each source that decide its tokens."""
    return {
        f"data.sources.{name}.{item.name}": getattr(source, item.name)
        for name, source in data.make_sources().items()
        for item in fields(source)
        if item.name in source.names("kept")
    }


def _deciding(config: Config) -> dict[str, Any]:
    of_mixture = {f"data.{name}": getattr(config.data, name) for name in DECIDING}
    return {"max_steps": config.max_steps, **of_mixture}
