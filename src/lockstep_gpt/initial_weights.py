"""`init_from`: begins a run with the weights of another run, or of a transformers folder."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lockstep
from lightning import LightningDataModule, LightningModule
from lockstep.checkpoints import read_checkpoint, set_weights, weights_for, with_newest
from lockstep.errors import UserError
from lockstep.run import settled
from lockstep.settings import as_typed
from lockstep.tokens import Tokenizer, encode_alike, saved_tokenizer
from torch import Tensor

from lockstep_gpt import CONFIGS
from lockstep_gpt.language_model import LanguageModel

logger = logging.getLogger(__name__)

# What decides the function that the weights are of, besides their shapes.
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "ngram_rows", "longest_ngram")
POSITIONS = "position_embedding.weight"  # with a row for each position


def load_initial_weights(
    init_from: str | Path, module: LightningModule, data: LightningDataModule
) -> None:
    """Load weights into a module that has not begun to train; every rank must call this.

    Args:
        init_from: a run, a checkpoint in one, or, for our models, a folder of transformers.
        module: of which the attribute `model` is one of our models; of another one, all weights
            are loaded.
        data: of the run, whose tokenizer must be that of the weights.

    Raises:
        UserError: there is no such run or folder, its shape or vocabulary differs, or the ranks
            read different weights.
    """
    path = Path(init_from).expanduser()
    model = getattr(module, "model", None)
    if not isinstance(model, LanguageModel):
        lockstep.load_weights(path, module)
        return
    where = f"init_from={path}"
    tokenizer = getattr(data, "tokenizer", None)
    if is_run(path):
        weights, saved = weights_of_run(path, model, tokenizer, where)
    else:
        from lockstep.hub import weights_of_folder  # late: few runs need it

        from lockstep_gpt.layouts import layout_of

        layout = layout_of(model, where)
        weights, saved = weights_of_folder(path, model, tokenizer, layout, where)
    set_weights(model, weights, where)
    logger.info("weights of %s, %s of %s positions", path, f"{model.block_size:,}", f"{saved:,}")


def is_run(path: Path) -> bool:
    """Return whether `path` is a run directory, a checkpoint, or a tracker's."""
    return path.is_file() or (path / "checkpoints").is_dir() or str(path).startswith("wandb:")


def weights_of_run(
    path: Path, model: LanguageModel, tokenizer: Tokenizer | None, where: str
) -> tuple[dict[str, Tensor], int]:
    """Return the weights of a run for a model of its shape, and the run's context.

    Args:
        path: a run, or a checkpoint in one.
        model: that begins with the weights; a shorter context uses the first learned positions.
        tokenizer: of the data; None: they have none.
        where: begins each error.

    Raises:
        UserError: the run's shape or tokenizer differs.
    """
    checkpoint, content = with_newest(path, lambda path: (path, read_checkpoint(path)))
    config = settled(content["config"])
    settings = config.get("model")
    if not isinstance(settings, dict):
        raise UserError(f"{where} has no model like ours; name a run of this program")
    tokens = ""
    if tokenizer is not None:
        theirs = saved_tokenizer(checkpoint, content)
        if not encode_alike(theirs, tokenizer):
            tokens = "data and tokenizer as in its config.yaml; for other data, prepare these first"
            if None not in (theirs.end_of_text, tokenizer.end_of_text):  # of texts
                tokens = _choice_of_tokenizer(content, config) or tokens
    _refuse_other_shape(settings, model, where, tokens)
    saved = dict(content["state_dict"])
    context = int(settings["block_size"])
    longest = model.block_size
    for name in saved:
        if name.endswith(POSITIONS):
            if context < longest:
                raise UserError(
                    f"{where} has learned positions for {context} tokens, and model.block_size="
                    f"{longest}; set model.block_size={context}"
                )
            saved[name] = saved[name][:longest]
    if tokens:
        raise UserError(f"{where} has another tokenizer than the data; set {tokens}")
    return weights_for(model, saved, where), context


def _choice_of_tokenizer(content: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return what chooses the tokenizer of a run; None: it was learned, and its tokens are away."""
    name = str(config.get("tokenizer", "bpe"))
    if name.partition(".")[0] not in ("bpe", __package__):
        return f"tokenizer={name}"
    root = Path(config.get("data", {}).get("root", "data"))
    for state in content.values():
        fingerprint = state.get("fingerprint") if isinstance(state, dict) else None
        for folder in root.glob(f"*-{str(fingerprint)[:8]}"):  # with its tokens
            if (folder / "tokenizer.json").is_file():
                return f"tokenizer={folder}"
    return None


def _refuse_other_shape(
    saved: Mapping[str, Any], model: LanguageModel, where: str, more: str
) -> None:
    """Raise a `UserError` that has all settings which would change what the weights compute.

    Args:
        saved: the settings of the model whose weights these are.
        model: that they are for.
        where: begins the error.
        more: what else must be set.
    """
    more = f" {more}" if "=" in more else f", and {more}" if more else ""
    ours = f"{type(model).__module__}.{type(model).__qualname__}"
    theirs = saved.get("_target_")
    if theirs != ours:
        shape = " ".join(f"model.{name}={as_typed(saved[name])}" for name in SHAPE if name in saved)
        choice = f"model._target_={theirs}"
        module = str(theirs).split(".")[-2:-1]
        if module and (CONFIGS / f"model/{module[0]}.yaml").is_file():  # as gpt.yaml for gpt.py
            choice = f"model={module[0]}"
        raise UserError(
            f"{where} has model._target_={theirs}, and here it is {ours}; set {choice} "
            f"{shape}{more}"
        )
    wrong, remedies = [], []
    for name in SHAPE:
        if name not in saved or not hasattr(model, name):
            continue
        value = getattr(model, name)
        saved_value = saved[name]
        if name == "n_kv_head":
            saved_value = saved_value or saved["n_head"]
        is_used = name != "longest_ngram" or saved.get("ngram_rows")
        if is_used and saved_value != value:
            wrong.append(f"{name}={as_typed(saved_value)}, and model.{name}={as_typed(value)}")
            remedies.append(f"model.{name}={as_typed(saved_value)}")
    if wrong:
        raise UserError(f"{where} has {'; '.join(wrong)}; set {' '.join(remedies)}{more}")
