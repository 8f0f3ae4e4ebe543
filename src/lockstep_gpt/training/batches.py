"""The data module of a run: ours for prepared tokens, or a LightningDataModule of the user's."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from lightning import LightningDataModule

from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config
from lockstep_gpt.tokens.data_settings import DataConfig, DataModuleConfig
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.packing import packing_of
from lockstep_gpt.tokens.prepare import opened
from lockstep_gpt.tokens.recipe import source_of
from lockstep_gpt.tokens.tokenizer import NumberTokenizer, Tokenizer
from lockstep_gpt.tokens.tokenizer_choice import from_dict
from lockstep_gpt.errors import UserError
from lockstep_gpt.training.building import build, target_of


def build_data(config: Config, batch: Batch) -> LightningDataModule:
    """Return the data module that makes the run's batches, or raise a `UserError`."""
    if isinstance(config.data, DataModuleConfig):
        return _own_data_module(config.data, config, batch)
    source = source_of(config.data)
    folder = opened(config.data)
    return TokenDataModule(
        folder,
        block_size=config.model.block_size,
        micro_size=batch.micro_size,
        seed=config.seed,
        val_tokens=config.data.val_tokens,
        packing=packing_of(config.packing._target_),
        make_order=source.order,
    )


def _own_data_module(data: DataModuleConfig, config: Config, batch: Batch) -> LightningDataModule:
    """Return the user's data module; it gets by name what its `__init__` accepts."""
    known = {"batch": batch, "micro_size": batch.micro_size, "seed": config.seed}
    content = ""
    if config.trains_gpt:
        known["block_size"] = config.model.block_size
        content = " whose batches are (tokens, targets)"
    accepted = inspect.signature(target_of({"_target_": data._target_})).parameters
    of_sources = {item.name for item in fields(DataConfig)}  # an experiment may set some for these
    arguments = {
        name: value
        for name, value in data.arguments.items()
        if name in accepted or name not in of_sources
    }
    node = {"_target_": data._target_, **arguments}
    module = build(node, {name: value for name, value in known.items() if name not in node})
    if not isinstance(module, LightningDataModule):
        raise UserError(
            f"data._target_={data._target_} is a {type(module).__name__}; name a source in this "
            f"package, or a LightningDataModule{content}"
        )
    return module


def tokens_of_sample(config: Config, data: LightningDataModule) -> int:
    """Return the tokens of a sample; 0 if neither settings nor the data module declare them."""
    tokens = config.tokens_per_sample or getattr(data, "tokens_per_sample", None)
    return tokens if isinstance(tokens, int) else 0


def tokenizer_of(data: Any) -> Tokenizer:
    """Return the tokenizer of a data module, or raise a `UserError` if it has none.

    A user's own has a `tokenizer`, or at least a `vocab_size`.
    """
    tokenizer = getattr(data, "tokenizer", None)
    if isinstance(tokenizer, dict):
        return from_dict(tokenizer)
    if tokenizer is not None:
        return tokenizer  # type: ignore[no-any-return]
    vocab_size = getattr(data, "vocab_size", None)
    if isinstance(vocab_size, int):
        return NumberTokenizer(vocab_size)
    raise UserError(
        f"{type(data).__name__} has neither a tokenizer nor a vocab_size; give it one, because the "
        "model needs the number of token ids"
    )


def epochs_of(data: Any, samples: int) -> float | None:
    """Return how often `samples` go through the data; None if a user's data module makes them."""
    if isinstance(data, TokenDataModule):
        return samples / data.train_windows
    return None
