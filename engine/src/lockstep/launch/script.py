"""A script as a project: the engine's commands serve it, if `lockstep.main` decorates a function.

The script isn't imported, which would take seconds: its text says where its settings are.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep import project
from lockstep.errors import UserError
from lockstep.project import Project

ARGUMENTS = ("config_path", "config_name")  # of `lockstep.main`


def begin(script: Path) -> None:
    """Make a script the project of this process, which finds the modules beside it.

    Raises:
        UserError: it is no program; see `project_of`.
    """
    project.begin(project_of(script))
    sys.path.insert(0, str(script.resolve().parent))  # as for a script that is run


def project_of(script: Path) -> Project:
    """Return the project that a script is.

    Args:
        script: its file, as people type it.

    Raises:
        UserError: it can't be read, `lockstep.main` decorates none of its functions or several, or
            their YAML files are not named as plain text.
    """
    functions = _decorated(_tree_of(script))
    if len(functions) != 1:
        count = "none of its functions" if not functions else f"{len(functions)} of its functions"
        raise UserError(
            f"{script} is no program: lockstep.main decorates {count}; it must decorate one"
        )
    (name, call) = functions[0]
    folder, config_name = _settings_of(script, call)
    return Project(
        program="lockstep",
        package=None,
        version="",
        configs=script.resolve().parent / folder,
        train=f"{script.resolve()}:{name}",
        config_name=config_name,
        script=script,
    )


def is_program(script: Path) -> bool:
    """Return whether `lockstep.main` decorates a function of a script.

    Raises:
        UserError: it can't be read.
    """
    return bool(_decorated(_tree_of(script)))


def _decorated(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return the name of each function that `lockstep.main` decorates, and the decorator."""
    names = {*_names_of_main(tree)}
    return [
        (node.name, call)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) in names
    ]


def _tree_of(script: Path) -> ast.Module:
    try:
        return ast.parse(script.read_bytes(), str(script))
    except (OSError, ValueError) as error:
        raise UserError(f"{script} can't be read: {error}; name the program's file") from None
    except SyntaxError as error:
        raise UserError(f"{script}, line {error.lineno}: {error.msg}; correct it") from None


def _names_of_main(tree: ast.Module) -> Iterator[str]:
    """Yield what `lockstep.main` is called in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "lockstep":
                    yield f"{alias.asname or alias.name}.main"
        if isinstance(node, ast.ImportFrom) and node.module == "lockstep":
            for alias in node.names:
                if alias.name == "main":
                    yield alias.asname or alias.name


def _settings_of(script: Path, call: ast.Call) -> tuple[str, str]:
    """Return the folder and the main file of the settings that a decorator names."""
    given = dict(zip(ARGUMENTS, call.args, strict=False))
    given |= {word.arg: word.value for word in call.keywords if word.arg is not None}
    texts = []
    for argument in ARGUMENTS:
        value = given.get(argument)
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            raise UserError(
                f"{script}, line {call.lineno}: {argument} of lockstep.main is not a plain text; "
                "write it as one, or begin a lockstep.project.Project in a package"
            )
        texts.append(value.value)
    return texts[0], texts[1].removesuffix(".yaml")
