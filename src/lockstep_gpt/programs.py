"""The programs of this project, which the commands start."""

import shlex
from pathlib import Path

from lockstep_gpt import CONFIGS
from lockstep_gpt.launch.main import Program
from lockstep_gpt.processes import invocation


def next_commands(run: Path, *, is_gpt: bool) -> list[str]:
    """Return what one may do with a trained run; only a GPT generates text."""
    names = ["generate", "evaluate"] if is_gpt else ["evaluate"]
    return [f"{invocation()} {name} {shlex.quote(str(run))}" for name in names]


def train_program() -> Program:
    """Return the program of train.py, which only its ranks import."""
    name = f"{invocation()} train"
    return Program.named("lockstep_gpt.train:main", name, str(CONFIGS), "train")
