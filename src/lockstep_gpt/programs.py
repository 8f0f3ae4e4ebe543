"""The programs of this project, which the commands start."""

from lockstep.launch.main import Program
from lockstep.processes import invocation

from lockstep_gpt import CONFIGS


def train_program() -> Program:
    """Return the program of train.py, which only its ranks import."""
    name = f"{invocation()} train"
    return Program.named("lockstep_gpt.train:main", name, str(CONFIGS), "train")
