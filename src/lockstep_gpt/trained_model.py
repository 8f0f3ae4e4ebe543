"""Loads the trained model that a command, or a notebook, is given."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.building import build
from lockstep.checkpoints.content import refuse_broken_weights
from lockstep.checkpoints.reading import read_checkpoint, with_newest
from lockstep.errors import UserError
from lockstep.processes import invocation
from lockstep.run import trust
from lockstep.run.directory import literal, settled
from lockstep.run.source_code import changes_since, files_of
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.tokenizer_choice import from_dict
from omegaconf import DictConfig, OmegaConf

from lockstep_gpt import CONFIGS, PROJECT

if TYPE_CHECKING:
    from lockstep_gpt.language_model import LanguageModel

logger = logging.getLogger(__name__)

OUR_MODULE = "lockstep_gpt.module.GPTModule"
# A callback that changes the model.
MASK = "lockstep.mixtures.mask.MaskDocuments"
SAMPLES = 32  # of the GPT that `evaluate` measures at a time
PREFIX = "model."  # Lightning saves the weights of the module's attribute `model` with it


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `UserError`, with the usage."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def parser_of(command: str, description: str) -> OneLineParser:
    """Return a command's parser with the arguments that say where the model is."""
    parser = OneLineParser(prog=f"{PROJECT.program} {command}", description=description)
    sources = "a run directory, a checkpoint in one, or wandb://ENTITY/PROJECT/NAME:ALIAS"
    parser.add_argument("source", type=Path, help=sources)
    trusting = "use classes that only the run's configuration names"
    parser.add_argument("--trust", action="store_true", help=trusting)
    return parser


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
    refuse_other_module(path, values)
    refuse_foreign(path, content["config"], ["model"], trusted)
    tokenizer = tokenizer_of(path, content)
    model: LanguageModel = build(values["model"], vocab_size=tokenizer.vocab_size)
    weights = {
        name.removeprefix(PREFIX): weight
        for name, weight in content["state_dict"].items()
        if name.startswith(PREFIX)
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: {reason}; use the code that wrote it") from None
    refuse_broken_weights(model.named_parameters(PREFIX.rstrip(".")), f"checkpoint {path}")
    tell_changes(path, content, model)
    cfg = OmegaConf.create(literal(values))
    mask_if_configured(cfg, model, tokenizer)
    return model.eval(), cfg, tokenizer


def mask_if_configured(cfg: DictConfig, model: Any, tokenizer: Tokenizer | None) -> None:
    """Change a trained model as `callbacks=documents` did in its run.

    Args:
        cfg: of the run.
        model: to change.
        tokenizer: of the run; None: its data has none, and then no such callback.

    Raises:
        UserError: this project has no such callback.
    """
    nodes = (cfg.get("callbacks") or {}).values()
    if any(node is not None and node.get("_target_") == MASK for node in nodes):
        from lockstep.mixtures.mask import mask  # late: it needs torch

        mask(model, tokenizer)


def refuse_other_module(path: Path, values: dict[str, Any]) -> None:
    """Raise a `UserError` if a configuration isn't one of this project's GPT."""
    module = values.get("module")
    target = module.get("_target_") if isinstance(module, dict) else None
    if target != OUR_MODULE:
        raise UserError(
            f"{path} has weights of {target or 'another program'}, and this command is for the GPT "
            f"of module=gpt; to measure another module: {PROJECT.program} evaluate {path}"
        )


def refuse_foreign(
    path: Path, values: dict[str, Any], groups: Collection[str], trusted: bool
) -> None:
    """Raise a `UserError` for classes of someone else in what a command builds.

    Known are those that configs/ and Lightning have, and those of runs that were started here.

    Args:
        path: of the checkpoint, for the error.
        values: its whole configuration, or its run's.
        groups: what the command builds.
        trusted: whether the user says that the author is trusted.
    """
    whole = settled(values)
    built = {name: whole[name] for name in groups if name in whole}
    if trust.foreign_settings(built, [CONFIGS]):
        file = f"{path}: its configuration"
        trust.permit_values(values, trusted, file, "--trust", folders=[CONFIGS])


def tokenizer_of(path: Path, content: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that the data module has saved, whatever its class is called."""
    for state in content.values():
        if isinstance(state, dict) and {"tokenizer", "fingerprint"} <= state.keys():
            return from_dict(state["tokenizer"])
    raise UserError(f"{path} has no tokenizer; use a checkpoint of a run on tokens")


def next_commands(run: Path, *, has_text: bool) -> list[str]:
    """Return what one may do with a trained run; only a GPT of text generates some."""
    names = ["generate", "evaluate"] if has_text else ["evaluate"]
    return [f"{invocation()} {name} {shlex.quote(str(run))}" for name in names]


def tell_changes(path: Path, content: dict[str, Any], model: Any) -> None:
    """Warn if the model's code has changed since it was trained."""
    starts = content.get("arithmetic") or {}
    trained_by = starts[max(starts)].get("code") if starts else None
    changed = changes_since(trained_by, files_of(model))
    if changed and os.environ.get("RANK", "0") == "0":  # under torchrun, one of the ranks
        logger.warning("changed since %s was trained: %s", path, changed)
