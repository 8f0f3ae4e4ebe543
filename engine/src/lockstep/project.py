"""What the engine's commands know of the project that they serve.

A project begins in its package, so that its commands, its ranks, and its notebooks know it:

    PROJECT = lockstep.project.begin(Project(program="my-gpt", package="my_gpt", ...))
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
        package: what `python -m` runs.
        version: of the project.
        configs: the folder of its YAML files.
        train: the function that `lockstep.main` decorates, as `package.module:name`.
        commands: its own, by name; each is imported only when it runs.
        config_name: its main YAML file.
    """

    program: str
    package: str
    version: str
    configs: Path
    train: str
    commands: Mapping[str, Command] = field(default_factory=dict)
    config_name: str = "train"

    def command(self, *words: str) -> list[str]:
        """Return the command line of a process of this project."""
        return [sys.executable, "-m", self.package, *words]


_begun: list[Project] = []


def begin(project: Project) -> Project:
    """Make this the project of this process, and return it."""
    _begun[:] = [project]
    return project


def found() -> Project | None:
    """Return the project of this process, if one has begun."""
    return _begun[0] if _begun else None


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


def program() -> str:
    """Return what people type: the project's program; without a project, `lockstep`."""
    return _begun[0].program if _begun else "lockstep"
