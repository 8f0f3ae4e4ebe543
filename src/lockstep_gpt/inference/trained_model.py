"""Loads the trained model that a command is given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep_gpt.config import PROGRAM, Config, UserError, from_container
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.data.tokenizer_choice import from_dict
from lockstep_gpt.registry import asked
from lockstep_gpt.run.checkpoint import read_checkpoint
from lockstep_gpt.run.directory import literal, readable

if TYPE_CHECKING:
    from lockstep_gpt.model.gpt import GPT

# What a model needs, and what a configuration requires.
NEEDED = ("max_steps", "max_tokens", "batch", "model", "data", "packing", "optim")


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Return a command's parser with the argument that says where the model is."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {command}", description=description)
    sources = "a run directory, a checkpoint in one, or wandb://ENTITY/PROJECT/NAME:ALIAS"
    parser.add_argument("source", type=Path, help=sources)
    return parser


def load_model(path: Path) -> tuple[GPT, Config, Tokenizer]:
    """Return a checkpoint's model in evaluation mode, its configuration, and its tokenizer."""
    from lockstep_gpt.model.gpt import build_gpt

    content = read_checkpoint(path)
    text = from_dict(content["tokenizer"])
    values = {name: each for name, each in content["config"].items() if name in NEEDED}
    config = from_container(readable(literal(values)), path)
    model = build_gpt(config.model, text.vocab_size)
    asked("MODEL", model, text)
    saved, prefix = content["state_dict"], "model."
    own = {name: each for name, each in saved.items() if name.startswith(prefix)}
    try:
        model.load_state_dict({name.removeprefix(prefix): each for name, each in own.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: {reason}; use the code that wrote it") from None
    return model.eval(), config, text
