"""What the engine's commands know of the program that they serve: a project's package, or a script.

A project begins in its package, so that its commands, its ranks, and its notebooks know it:

    PROJECT = lockstep.project.begin(Project(program="my-gpt", package="my_gpt", ...))
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UserError


class Command(NamedTuple):
    """A command: its function, which gets the words after the command and returns a status."""

    target: str  # package.module:function
    meaning: str  # in the help
    overrides: bool  # whether its arguments are settings


@dataclass(frozen=True)
class Project:
    """The names of a project, and where its settings and its training function are.

    Args:
        program: what people type, such as `my-gpt`.
        package: what `python -m` runs; None: the program is a script.
        version: of the project.
        configs: the folder of its YAML files.
        train: the function that `lockstep.main` decorates, as `package.module:name`, or as
            `/path/of/script.py:name`; empty: nothing is trained here.
        commands: its own, by name; each is imported only when it runs.
        config_name: its main YAML file.
        small: settings of a small experiment, which `check` and `drill` train by default.
        script: the file of a program without a package, as people type it.
    """

    program: str
    package: str | None
    version: str
    configs: Path
    train: str
    commands: Mapping[str, Command] = field(default_factory=dict)
    config_name: str = "train"
    small: tuple[str, ...] = ()
    script: Path | None = None

    def command(self, name: str, *words: str) -> list[str]:
        """Return the command line of a process that runs a command of this project.

        Raises:
            UserError: it would train, but this is no program.
        """
        if name == "train":
            self.refuse_to_train_nothing()
        if self.package is not None:
            return [*python(), "-m", self.package, name, *words]
        script = [str(self.script)] if self.script is not None else []
        if name == "train":
            return [sys.executable, *script, *words]
        return [*python(), "-m", "lockstep", name, *script, *words]

    def refuse_to_train_nothing(self) -> None:
        """Raise a `UserError` if this is no program that trains."""
        if not self.train:
            raise UserError(
                "this command needs a program that trains; name its file, as in `lockstep check "
                "train.py`, or run a project's own command"
            )

    def typed(self, name: str) -> str:
        """Return how people type a command, such as `my-gpt check` or `lockstep check train.py`."""
        if self.script is None:
            return f"{self.program} {name}"
        script = shlex.quote(str(self.script))
        return f"python {script}" if name == "train" else f"{self.program} {name} {script}"


_begun: list[Project] = []


def begin(project: Project) -> Project:
    """Make this the project of this process, and return it."""
    _begun[:] = [project]
    return project


def found() -> Project | None:
    """Return the project of this process, if one has begun."""
    return _begun[0] if _begun else None


def python() -> list[str]:
    """Return how to start a Python that imports modules from where this process does.

    `python -m` would look into the current folder first, and take a file `random.py` there for
    Python's own module; a console script doesn't.
    """
    has_folder = {"", str(Path.cwd())} & {*sys.path}
    return [sys.executable, *([] if has_folder else ["-P"])]


def current() -> Project:
    """Return the project of this process.

    Raises:
        UserError: none has begun here.
    """
    if not _begun:
        raise UserError(
            "this process belongs to no project; import its package first, which calls "
            "lockstep.project.begin"
        )
    return _begun[0]


def package() -> str | None:
    """Return the package of this process's project, if there is one."""
    return _begun[0].package if _begun else None


def folder() -> Path:
    """Return a folder of the project's own files; without a project, the current folder."""
    return _begun[0].configs if _begun else Path.cwd()


def program() -> str:
    """Return what people type: the project's program; without a project, `lockstep`."""
    return _begun[0].program if _begun else "lockstep"


def with_small_experiment(overrides: Sequence[str]) -> list[str]:
    """Return overrides after those of the project's small experiment, unless they choose one."""
    chosen = {word.lstrip("+").partition("=")[0] for word in overrides}
    small = () if "experiment" in chosen else current().small
    return [*small, *overrides]


def typed(name: str) -> str:
    """Return how people type a command of this process's project."""
    return _begun[0].typed(name) if _begun else f"lockstep {name}"
