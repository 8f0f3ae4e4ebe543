"""What an epoch of training has measured so far, in checkpoints: torchmetrics, and `self.log`.

Lightning saves neither, so a run that is killed in mid-epoch would report the rest of it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lockstep.metrics.mean import Mean
from lockstep.patches.lightning import epoch_sums
from lockstep.ranks.ranks import from_each_rank

logger = logging.getLogger(__name__)

State = dict[str, Any]  # of a metric: tensors, or lists of them, by name


class EpochValues:
    """Saves and restores the metrics of a module, and the sums of its `self.log`."""

    def __init__(self) -> None:
        self._sums: list[dict[str, State]] = []  # of ranks, to add to what is logged first
        self._counts: dict[str, int] = {}  # metric -> its updates before a validation
        self._validated: set[str] = set()  # metrics of validations, which begin anew in each

    def begin_validation(self, module: LightningModule) -> None:
        """Note the metrics before a validation."""
        self._counts = {name: metric.update_count for name, metric in metrics_in(module)}

    def end_validation(self, module: LightningModule) -> None:
        """Note which metrics are of validations: they are not of the epoch."""
        for name, metric in metrics_in(module):
            if metric.update_count != self._counts.get(name, 0):
                self._validated.add(name)

    def save(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """Return the values of each rank; every rank must call this."""
        own = {
            "metrics": {
                name: state_of(metric)
                for name, metric in metrics_in(module)
                if name not in self._validated
            },
            "sums": {name: state_of(metric) for name, metric in sums_in(trainer)},
        }
        ranks: list[dict[str, Any]] = from_each_rank(own)
        return {kind: [of_rank[kind] for of_rank in ranks] for kind in own}

    def load(self, trainer: Trainer, module: LightningModule, saved: Mapping[str, Any]) -> None:
        """Continue with what the ranks had; of another number of ranks, rank 0 gets it all."""
        metrics = own_part(saved.get("metrics", []), trainer)
        for name, metric in module.named_modules():
            if isinstance(metric, Metric) and not isinstance(metric, Mean):
                load_states(metric, [of_rank[name] for of_rank in metrics if name in of_rank])
        self._sums = [dict(of_rank) for of_rank in own_part(saved.get("sums", []), trainer)]

    def after_batch(self, trainer: Trainer) -> None:
        """Add what was saved to the sums that this run has begun."""
        if not any(self._sums):
            return
        for name, metric in sums_in(trainer):
            for of_rank in self._sums:
                add(metric, of_rank.pop(name, {}))

    def end_epoch(self) -> None:
        """Forget what this epoch has not logged again."""
        self._sums = []


def metrics_in(module: LightningModule) -> Iterator[tuple[str, Metric]]:
    """Yield the metrics that have values, by name; a `Mean` has its own place in checkpoints."""
    for name, part in module.named_modules():
        if isinstance(part, Metric) and not isinstance(part, Mean) and part.update_called:
            yield name, part


def sums_in(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield what `self.log` has added up in this epoch, by name."""
    for name, metric in epoch_sums(trainer).items():
        if metric.is_tensor and metric.meta.on_epoch and metric.update_called:
            yield name, metric


def state_of(metric: Metric) -> State:
    """Return a copy of a metric's state on the host."""
    return {name: on(value, torch.device("cpu")) for name, value in metric.metric_state.items()}


def on(value: Any, device: torch.device) -> Any:
    """Return a copy of a tensor, or of a list of tensors, on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return [on(part, device) for part in value]


def own_part(ranks: Sequence[Any], trainer: Trainer) -> Sequence[Any]:
    """Return what this rank continues with: its own, or, if there were others, rank 0 all."""
    if len(ranks) == trainer.world_size:
        return [ranks[trainer.global_rank]]
    return ranks if trainer.is_global_zero else []


def load_states(metric: Metric, states: Sequence[State]) -> None:
    """Let a metric continue with these states together."""
    metric.reset()
    copies = [{name: on(value, metric.device) for name, value in state.items()} for state in states]
    for state in copies[:1]:
        metric.load_state_dict(state, strict=False)
    try:
        for state in copies[1:]:
            metric.merge_state(state)
    except (RuntimeError, ValueError) as error:
        metric.reset()
        logger.warning(
            "%s starts anew within this epoch: its values can't move to another number of ranks "
            "(%s)",
            type(metric).__name__,
            error,
        )


def add(metric: Any, state: State) -> None:
    """Add what was saved to a sum of `self.log`, as it reduces its values."""
    for attribute, value in state.items():
        ours: Tensor = getattr(metric, attribute)
        theirs = value.to(ours.device)
        is_extreme = metric.meta.is_max_reduction or metric.meta.is_min_reduction
        both = metric.meta.reduce_fx(ours, theirs) if is_extreme else ours + theirs
        setattr(metric, attribute, both)
