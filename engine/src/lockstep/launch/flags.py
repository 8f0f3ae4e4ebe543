"""Parse a command's own flags and leave the settings that follow them to Hydra."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from omegaconf import DictConfig

from lockstep import project
from lockstep.errors import UserError
from lockstep.launch import composed
from lockstep.launch.main import Program

T = TypeVar("T")
# What others call a flag.
OTHER_NAMES = {"--gpu": "--hardware", "--gpus": "--devices", "--nodes": "--devices"}


class Parser(argparse.ArgumentParser):
    """Parses the flags it knows and leaves the rest to Hydra; mistakes raise a `UserError`.

    Args:
        command: the command's name.
        screen: the text that `--help` prints; `PROGRAM NAME` stands for a command of
            the project, and `-m PACKAGE NAME` for what starts it as a module.
    """

    def __init__(self, command: str, screen: str) -> None:
        super().__init__(prog=command, add_help=False, allow_abbrev=False)
        self._screen = screen

    def split(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Split `words` into flags and settings; `--help` ends the command."""
        if {"-h", "--help"} & set(words):
            print(self._shown_screen())
            sys.exit(0)
        options, others = self.parse_known_args(words)
        for word in others:
            self._refuse_near_flag(word)
        return options, others

    def _shown_screen(self) -> str:
        """Return the help with the commands as people type them here."""
        ours = project.current()
        screen = re.sub(r"PROGRAM ([\w-]+)", lambda found: ours.typed(found[1]), self._screen)
        own = shlex.join(ours.command(self.prog)[1:])
        return screen.replace(f"-m PACKAGE {self.prog}", own)

    def _refuse_near_flag(self, word: str) -> None:
        """Raise a `UserError` for a flag that is almost one of these; Hydra refuses others."""
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            return
        known = re.findall(r"--[\w-]+", self.format_usage())
        near = [OTHER_NAMES.get(flag, ""), *difflib.get_close_matches(flag, known, n=1, cutoff=0.7)]
        meant = next((name for name in near if name in known), None)
        if meant is not None:
            raise UserError(f"{flag} is not a flag of {self.prog}; did you mean {meant}?")

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `UserError`, without the usage text."""
        raise UserError(f"{message}; --help lists the flags")


def each_job(program: Program, overrides: list[str], job: Callable[[DictConfig], T]) -> list[T]:
    """Call `job` on each configuration that words compose for a program; return the results.

    Args:
        program: whose configuration it is.
        overrides: the words of a command line.
        job: gets the configuration.

    Raises:
        UserError: from the first job that raises one, after Hydra, which would print a line.
    """
    results: list[T] = []
    mistakes: list[UserError] = []

    def run_job(config: DictConfig) -> None:
        try:
            results.append(job(config))
        except UserError as error:
            mistakes.append(error)

    with tempfile.TemporaryDirectory() as folder:  # for what Hydra itself writes
        places = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        words = composed.with_overrides(overrides, places)
        composed.call(program.source, composed.for_hydra(words), run_job)
    if mistakes:
        raise mistakes[0]
    return results


def above_zero(text: str) -> float:
    """Parse a finite number above 0; underscores may group digits, as in 1_000."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers of at least 1; return them sorted, without duplicates."""
    return tuple(sorted({count(word) for word in text.split(",")}))
