"""Loads the trained GPT that a command, or a notebook, is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import build
from lockstep.checkpoints import read_checkpoint, with_newest
from lockstep.errors import UserError
from lockstep.run import literal, refuse_foreign, settled
from lockstep.tokens import Tokenizer, saved_tokenizer
from omegaconf import DictConfig, OmegaConf

from lockstep_gpt import PROJECT

if TYPE_CHECKING:
    from lockstep_gpt.language_model import LanguageModel

OUR_MODULE = "lockstep_gpt.module.GPTModule"
DOCUMENTS = "lockstep.mixtures.MaskDocuments"  # of callbacks=documents
PREFIX = "model."  # Lightning saves the weights of the module's attribute `model` with it


def load_for_inference(
    source: str | Path, trusted: bool = False
) -> tuple[Path, LanguageModel, DictConfig, Tokenizer]:
    """Return a trained GPT, on a GPU if there is one, and what belongs to it.

        path, model, cfg, tokenizer = load_for_inference("runs/first")

    Args:
        source: a run, whose newest checkpoint is meant, or a checkpoint.
        trusted: whether classes may be used that only its configuration names.

    Returns:
        the checkpoint, the model in evaluation mode, its configuration, and its tokenizer. In the
        configuration, references to the environment are texts.

    Raises:
        UserError: there is no such checkpoint, it is of another module, or its weights don't fit
            this version's model.
    """
    load = partial(load_model, trusted=trusted)
    path, (model, cfg, tokenizer) = with_newest(Path(source), lambda path: (path, load(path)))
    import torch  # late, so that mistakes are reported at once

    if torch.cuda.is_available():
        model.to("cuda")
    return path, model, cfg, tokenizer


def load_model(path: Path, trusted: bool = False) -> tuple[LanguageModel, DictConfig, Tokenizer]:
    """Return a checkpoint's model on the CPU, its configuration, and its tokenizer."""
    return model_of(path, read_checkpoint(path), trusted)


def model_of(
    path: Path, content: dict[str, Any], trusted: bool = False
) -> tuple[LanguageModel, DictConfig, Tokenizer]:
    """Do as `load_model` with the `content` of the checkpoint at `path`."""
    values = settled(content["config"])
    _refuse_other_module(path, values)
    refuse_foreign(path, content["config"], ["model"], trusted)
    tokenizer = saved_tokenizer(path, content)
    model: LanguageModel = build(values["model"], vocab_size=tokenizer.vocab_size)
    # Late: these need torch.
    from lockstep.checkpoints import restore
    from lockstep.run import tell_changes

    restore(model, content["state_dict"], path, PREFIX)
    tell_changes(path, content, model)
    cfg = OmegaConf.create(literal(values))
    mask_as_trained(cfg, model, tokenizer)
    return model.eval(), cfg, tokenizer


def mask_as_trained(cfg: DictConfig, model: LanguageModel, tokenizer: Tokenizer | None) -> None:
    """Keep documents apart in a model, as `callbacks=documents` did in its run, if it did."""
    nodes = (cfg.get("callbacks") or {}).values()
    if any(node is not None and node.get("_target_") == DOCUMENTS for node in nodes):
        from lockstep.mixtures import mask_documents  # late: few runs need it

        mask_documents(model, tokenizer)


def _refuse_other_module(path: Path, values: dict[str, Any]) -> None:
    """Raise a `UserError` if a configuration isn't one of this project's GPT."""
    module = values.get("module")
    target = module.get("_target_") if isinstance(module, dict) else None
    if target != OUR_MODULE:
        raise UserError(
            f"{path} has weights of {target or 'another program'}, and this command is for the GPT "
            f"of module=gpt; to measure another module: {PROJECT.program} evaluate {path}"
        )
