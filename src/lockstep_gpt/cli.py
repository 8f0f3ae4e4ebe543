"""The `lockstep-gpt` command: this project's commands, then the engine's."""

from lockstep.commands import main as main
from lockstep.commands import run as run
