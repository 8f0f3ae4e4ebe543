"""The weights of a run for a model of the same shape, or the setting in which they differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoints.reading import read_checkpoint, with_newest
from lockstep.checkpoints.weights import weights_for
from lockstep.errors import UserError
from lockstep.run.directory import settled
from lockstep.settings import as_typed
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.tokenizer_choice import encode_alike, saved_tokenizer


def is_run(path: Path) -> bool:
    """Return whether `path` is a run directory, a checkpoint, or a tracker's."""
    return path.is_file() or (path / "checkpoints").is_dir() or str(path).startswith("wandb:")


def weights_of_run(
    path: Path,
    model: nn.Module,
    tokenizer: Tokenizer | None,
    where: str,
    shape: Collection[str],
    positions: str,
) -> tuple[dict[str, Tensor], int]:
    """Return the weights of a run for a language model, and the run's context.

    Args:
        path: a run, or a checkpoint in one.
        model: that begins with the weights; the run's configuration has its class in `model`.
        tokenizer: of the data; None: they have none.
        where: begins each error.
        shape: attributes of the model, also settings of `model`, that must be equal.
        positions: the end of the name of the weight with a row per position; a shorter context
            uses the first ones.

    Raises:
        UserError: the run's shape or tokenizer differs.
    """
    checkpoint, content = with_newest(path, lambda path: (path, read_checkpoint(path)))
    settings = settled(content["config"]).get("model")
    if not isinstance(settings, dict):
        raise UserError(f"{where} has no model like ours; name a run of this program")
    _refuse_other_shape(settings, model, where, shape)
    saved = dict(content["state_dict"])
    context = int(settings["block_size"])
    longest = int(getattr(model, "block_size", context))
    for name in saved:
        if name.endswith(positions):
            if context < longest:
                raise UserError(
                    f"{where} has learned positions for {context} tokens, and model.block_size="
                    f"{longest}; set model.block_size={context}"
                )
            saved[name] = saved[name][:longest]
    if tokenizer is not None and not encode_alike(saved_tokenizer(checkpoint, content), tokenizer):
        raise UserError(
            f"{where} has another tokenizer than the data; set data and tokenizer as in its config"
        )
    return weights_for(model, saved, where), context


def _refuse_other_shape(
    saved: Mapping[str, Any], model: nn.Module, where: str, shape: Collection[str]
) -> None:
    ours = f"{type(model).__module__}.{type(model).__qualname__}"
    theirs = saved.get("_target_")
    if theirs != ours:
        raise UserError(
            f"{where} has model._target_={theirs}, and here it is {ours}; choose a model of its "
            "kind, such as model=gpt or model=modern"
        )
    for name in shape:
        if name not in saved or not hasattr(model, name):
            continue
        value = getattr(model, name)
        saved_value = saved[name]
        if name == "n_kv_head":
            saved_value = saved_value or saved["n_head"]
        is_used = name != "longest_ngram" or saved.get("ngram_rows")
        if is_used and saved_value != value:
            raise UserError(
                f"{where} has {name}={as_typed(saved_value)}, and model.{name}={as_typed(value)}; "
                f"set model.{name}={as_typed(saved_value)}"
            )
