"""Loads the trained model that a command is given."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lockstep_gpt import PROGRAM, catalog
from lockstep_gpt.config import Config, from_container
from lockstep_gpt.errors import UserError
from lockstep_gpt.registry import MODEL, additions
from lockstep_gpt.run.checkpoint import find_checkpoint, read_checkpoint
from lockstep_gpt.run.checkpoint_content import refuse_broken_weights
from lockstep_gpt.run.directory import literal
from lockstep_gpt.run.source_code import changes_since
from lockstep_gpt.tokens.tokenizer import Tokenizer
from lockstep_gpt.tokens.tokenizer_choice import from_dict

if TYPE_CHECKING:
    from lockstep_gpt.model.language_model import LanguageModel

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

# What a model needs, and what a configuration requires.
NEEDED = (
    *("seed", "max_steps", "precision", "module"),
    *("batch", "model", "data", "packing", "optim"),
)


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `UserError`, with the usage."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def parser_of(command: str, description: str) -> OneLineParser:
    """Return a command's parser with the argument that says where the model is."""
    parser = OneLineParser(prog=f"{PROGRAM} {command}", description=description)
    sources = "a run directory, a checkpoint in one, or wandb://ENTITY/PROJECT/NAME:ALIAS"
    parser.add_argument("source", type=Path, help=sources)
    return parser


def load_named_model(source: Path) -> tuple[Path, LanguageModel, Config, Tokenizer]:
    """Return the checkpoint at `source`, or that run's newest, and what `load_model` returns."""
    return with_newest(source, lambda path: (path, *load_model(path)))


def with_newest(source: Path, read: Callable[[Path], Result]) -> Result:
    """Return what `read` makes of the checkpoint at `source`, or of that run's newest.

    A run that is training may replace its newest checkpoint before it is read; then, the next is.
    """
    while True:
        checkpoint = find_checkpoint(source)
        try:
            return read(checkpoint)
        except (UserError, FileNotFoundError):
            if checkpoint.exists():
                raise


def load_for_inference(source: Path) -> tuple[Path, LanguageModel, Config, Tokenizer]:
    """Do as `load_named_model`, and move the model to a GPU if there is one."""
    checkpoint, model, config, tokenizer = load_named_model(source)
    import torch  # late, so that mistakes are reported at once

    if torch.cuda.is_available():
        model.to("cuda")
    return checkpoint, model, config, tokenizer


def load_model(path: Path) -> tuple[LanguageModel, Config, Tokenizer]:
    """Return a checkpoint's model in evaluation mode, its configuration, and its tokenizer.

    Raises:
        UserError: the file isn't a checkpoint, or its weights don't fit this version's model.
    """
    content = read_checkpoint(path)
    return model_of(path, content, config_of(path, content))


def config_of(path: Path, content: dict[str, Any]) -> Config:
    """Return what decides the model and the data of the checkpoint at `path`.

    Its references to the environment stay texts: the file may be someone else's.
    """
    frozen = literal(content["config"])
    needed = (*NEEDED, *catalog.GROUPS)
    return from_container({name: frozen[name] for name in needed if name in frozen}, path)


def model_of(
    path: Path, content: dict[str, Any], config: Config
) -> tuple[LanguageModel, Config, Tokenizer]:
    """Do as `load_model` with the `content` of the checkpoint at `path`."""
    from lockstep_gpt.model.model_settings import build_gpt

    if not config.trains_gpt:
        target = config.module["_target_"]
        raise UserError(
            f"{path} has weights of {target}, and this command is for the GPT of module=gpt; to "
            f"measure another module: {PROGRAM} evaluate {path}"
        )
    if "tokenizer" not in content:
        raise UserError(f"{path} has no tokenizer; use another checkpoint")
    tokenizer = from_dict(content["tokenizer"])
    model = build_gpt(config.model, tokenizer.vocab_size)
    for transform in additions(MODEL):
        transform(model, config, tokenizer)
    prefix = "model."  # Lightning saves them as weights of the module's attribute `model`
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in content["state_dict"].items()
        if name.startswith(prefix)
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: {reason}; use the code that wrote it") from None
    refuse_broken_weights(model.named_parameters(), f"checkpoint {path}")
    starts = content.get("arithmetic", {})  # an earlier version has none
    trained_by = starts[max(starts)].get("code") if starts else None
    changed = changes_since(trained_by, ["model"])
    if changed and os.environ.get("RANK", "0") == "0":  # under torchrun, one of the ranks
        logger.warning("changed since %s was trained: %s", path, changed)
    return model.eval(), config, tokenizer
