"""A command's own flags, told apart from the settings that follow them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from omegaconf import DictConfig

from lockstep_gpt.config import UserError
from lockstep_gpt.launch import compose

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Takes the flags it knows and leaves the rest to Hydra; mistakes are `UserError`s.

    Args:
        command: the command's name.
        screen: what `--help` shows.
    """

    def __init__(self, command: str, screen: str) -> None:
        super().__init__(prog=command, add_help=False, allow_abbrev=False)
        self._screen = screen

    def split(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the flags and the settings of `arguments`; `--help` ends the command here."""
        if {"-h", "--help"} & set(arguments):
            print(self._screen)
            sys.exit(0)
        return self.parse_known_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Raise the one line that argparse would print below its usage."""
        raise UserError(f"{message}; --help lists the flags")


def each_job(overrides: list[str], job: Callable[[DictConfig], T]) -> list[T]:
    """Return what `job` makes of each configuration that `overrides` compose.

    Raises:
        UserError: of the first job that raises one; of an error inside, Hydra prints a line.
    """
    made: list[T] = []
    mistakes: list[UserError] = []

    def told(config: DictConfig) -> None:
        try:
            made.append(job(config))
        except UserError as error:
            mistakes.append(error)

    compose.run(overrides, told)
    if mistakes:
        raise mistakes[0]
    return made


def above_zero(text: str) -> float:
    """Return a finite number above 0; digits may be grouped as in 1_000."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Return different whole numbers of at least 1, in order."""
    return tuple(sorted({count(word) for word in text.split(",")}))
