"""Command lines of commands that read a run: a wrong one is one line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from lockstep import project
from lockstep.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `UserError`, with the usage."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def parser_of_run(command: str, description: str) -> OneLineParser:
    """Return a command's parser with the arguments that say where a trained run is."""
    parser = OneLineParser(prog=project.typed(command), description=description)
    sources = "a run directory, a checkpoint in one, or wandb://ENTITY/PROJECT/NAME:ALIAS"
    parser.add_argument("source", type=Path, help=sources)
    trusting = "use classes that only the run's configuration names"
    parser.add_argument("--trust", action="store_true", help=trusting)
    return parser
