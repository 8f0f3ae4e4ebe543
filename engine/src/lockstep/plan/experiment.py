"""What a configuration of a language model says of its run, in the values that a plan takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lockstep.building import build, partial_of
from lockstep.errors import UserError
from lockstep.plan.counting import Uninitialized
from lockstep.plan.hardware import Hardware
from lockstep.plan.prediction import (
    SHARDING,
    TOKENS_PER_PARAMETER,
    Plan,
    Rate,
    Rhythm,
    Tokens,
    can_shard,
    predict,
    sharded,
)
from lockstep.plan.training import Training

AUTO = "lockstep.strategies.placing.auto"
DDP = "lockstep.strategies.placing.ddp"
FSDP2 = "lockstep.strategies.placing.fsdp2"
CHECKPOINTING = "model.activation_checkpointing=true"


def trains_language_model(config: DictConfig) -> bool:
    """Return whether a run trains a model of tokens, which is a node like its optimizer."""
    has_nodes = all("_target_" in (config.get(name) or {}) for name in ("model", "optim"))
    return has_nodes and "block_size" in (config.get("data") or {})


def training_of(config: DictConfig, vocab_size: int) -> Training:
    """Return what the run of a configuration trains, without content.

    Its model is a function of tokens and targets, (B, T), which returns the mean loss.
    """
    with torch.device("meta"), Uninitialized():  # type: ignore[no-untyped-call]
        model: nn.Module = build(config.model, vocab_size=vocab_size)
    optim: Any = OmegaConf.to_container(config.optim, resolve=True)
    tokens = torch.empty(1, config.data.block_size, dtype=torch.int64, device="meta")
    return Training(
        model=model,
        example=(tokens, tokens),
        batch=build(config.batch),
        optimizer=partial(partial_of(optim, "optim"), lr=config.optim.lr),
        precision=config.precision,
        strategy="fsdp2" if config.strategy.get("_target_") == FSDP2 else "ddp",
        settings={str(name): value for name, value in config.strategy.items()},
        clips=config.clip_norm is not None,
        compiled=config.compile,
    )


def predicted(
    config: DictConfig,
    hardware: Hardware,
    devices: Sequence[int],
    *,
    vocab_size: int | None = None,
    samples: float | None = None,
    scaling: str | None = None,
    price: float | None = None,
) -> Plan:
    """Predict the run of a configuration on each number of devices; its own number is ignored.

    Args:
        config: the run's settings.
        hardware: the devices and their links.
        devices: numbers of devices.
        vocab_size: None: that of the data.
        samples: that time and cost are for; None: the Chinchilla point.
        scaling: as in `predict`.
        price: of a device for an hour.
    """
    vocab_size = vocab_size or vocabulary(config.data)
    training = training_of(config, vocab_size)
    length = config.data.block_size
    plan = predict(
        training,
        hardware,
        devices,
        samples=samples or TOKENS_PER_PARAMETER * training.parameters / length,
        scaling=scaling,
        price=price,
        rate=Rate(config.optim.lr, config.lr_scaling),
        rhythm=_rhythm(config),
        tokens=Tokens(length, vocab_size),
        others=_others(config, training, vocab_size),
    )
    return replace(plan, notes=[*_notes(config, hardware), *plan.notes])


def _others(config: DictConfig, training: Training, vocab_size: int) -> dict[str, Training]:
    """Return the same with less memory: recomputed blocks, shards, and both."""
    others = {}
    shards = can_shard(training) and not config.trainer.get("sync_batchnorm", False)
    if shards:
        others[SHARDING] = sharded(training)
    if config.model.get("activation_checkpointing") is False:
        changed = with_values(config.model, activation_checkpointing=True)
        recomputing = training_of(with_node(config, "model", changed), vocab_size)
        others = {CHECKPOINTING: recomputing, **others}
        if shards:
            others[f"{SHARDING} {CHECKPOINTING}"] = sharded(recomputing)
    return others


def _rhythm(config: DictConfig) -> Rhythm | None:
    """Return how often the run stops to validate and to save; None: the Trainer decides."""
    if config.val_every is None:
        return None
    samples = None if config.val_tokens is None else config.val_tokens / config.data.block_size
    return Rhythm(
        val_every=config.val_every,
        val_samples=samples,
        save_every=config.checkpoint.every,
        keeps_best=config.checkpoint.keep_best > 0,
        in_background=config.checkpoint.background,
    )


def vocabulary(data: DictConfig) -> int:
    """Return the number of token ids in `data`; read its corpus only if settings do not say."""
    if "source" not in data:
        raise UserError(
            f"data._target_={data.get('_target_')} has no source that tells how many tokens there "
            "are; choose another data, such as data=stdlib"
        )
    count: Callable[[DictConfig], int] = resolve_name("lockstep.tokens.command:vocab_size_of")
    return count(data.source)


def _notes(config: DictConfig, hardware: Hardware) -> list[str]:
    """Return notes on settings that the plan for a device leaves out."""
    notes = []
    if config.trainer.get("accelerator") == "cpu" and hardware.accelerator != "cpu":
        notes.append(
            f"trainer=cpu, but this plan is for {hardware.name}; for this machine: doctor "
            "--save-profile profile.json, then plan --hardware profile.json"
        )
    if config.strategy.get("_target_") not in (AUTO, DDP, FSDP2):
        notes.append("this strategy is planned as ddp: every rank has the whole model")
    return notes


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
