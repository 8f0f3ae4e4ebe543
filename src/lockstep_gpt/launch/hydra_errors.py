"""Errors of Hydra and OmegaConf in one line.

A wrong name, choice, or kind of value gets a line of ours; all others keep their own texts.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from lockstep_gpt import PROGRAM
from lockstep_gpt.catalog import extra_of_choice, extra_of_group, how_to_add
from lockstep_gpt.config import OPEN_GROUPS
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import choices
from lockstep_gpt.settings import as_typed

KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
QUOTES = """to set a text, quote it for Hydra and for the shell: 'NAME="TEXT"'"""


@contextlib.contextmanager
def as_user_error(
    arguments: list[str], check_first: Callable[[], Any] | None = None
) -> Iterator[None]:
    """Raise a `UserError` for an error of Hydra or OmegaConf.

    Args:
        arguments: the overrides, of which one may be the cause.
        check_first: is called after an error, and may raise a better one.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if check_first is not None:
            check_first()
        raise UserError(one_line(error, arguments)) from None


def one_line(error: Exception, arguments: list[str]) -> str:
    """Return an error that composing has raised, in one line."""
    own_text = _joined(str(error))
    if isinstance(error, OverrideParseException):
        return f"{_joined(error.override)}: {own_text}; {QUOTES}"
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error) or own_text
    cause = error
    nested = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(nested, OmegaConfBaseException):
        cause = nested
    typed = dict(word.lstrip("+~").split("=", 1) for word in arguments if "=" in word)
    # Of a group that doesn't exist, an error only names the group.
    path = getattr(cause, "full_key", None) or ""
    path = next((name for name in typed if name.startswith(f"{path}.")), path)
    line = _mistake_in(cause, path, typed.get(path))
    if line is None:
        return own_text
    if path not in typed and cause is not error:
        return f"{own_text.partition(':')[0]}: {line}"  # which begins with the file at fault
    return line


def _mistake_in(error: BaseException, path: str, typed: str | None) -> str | None:
    """Return a line about a setting, from OmegaConf's error; None if its own text is better."""
    if path and isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown_setting(path, "..." if typed is None else typed)
    if path and isinstance(error, ValidationError):
        return _wrong_kind(error, path, typed)
    return None


def _joined(text: str) -> str:
    """Return a text in one line, without what follows an empty line, such as Hydra's folders."""
    return " ".join(text.partition("\n\n")[0].split())


def _unknown_choice(error: MissingConfigException) -> str | None:
    """Return that a group has no such choice, and which it has; None for another file."""
    missing = error.missing_cfg_file or ""
    is_hydras = missing.startswith("hydra/")  # such as hydra/launcher
    group, _, choice = missing.rpartition("/") if is_hydras else missing.partition("/")
    extra = extra_of_choice(group, choice)
    if extra is not None:
        return f"{group}={choice} needs {how_to_add(extra)}"
    # For one of a list of choices, Hydra doesn't say which there are.
    names = sorted(yaml_files(group)) if error.options is None else [*error.options]
    if not names or not (is_hydras or group in choices.group_names()):
        return None
    near = choices.did_you_mean(choice, names)
    return f"{group}={choice} is not one of {', '.join(names)}{near}"


def _unknown_setting(path: str, value: str) -> str | None:
    """Return that there is no such setting, and the nearest; None if Hydra's text is better."""
    group = path.partition(".")[0]
    parent = path.rpartition(".")[0]
    if group == "hydra":
        return None
    extra = extra_of_group(group)
    if extra is not None:
        return f"{path}={value} needs {how_to_add(extra)}"
    owners = choices.all_settings().get(path)
    if owners:
        choice = " or ".join(sorted(owners))
        return f"{path} is a setting of {parent}={choice}, which is not chosen here"
    if owners is not None or path in choices.group_names():
        return None  # the name is right, but its place is not
    near = choices.suggested_setting(path)
    if near:
        return f"unknown setting {path}{near}"
    if group in OPEN_GROUPS:
        return None  # Hydra says how to add it
    return f"unknown setting {path}; to see all settings, run: {PROGRAM} train --cfg job"


def _wrong_kind(error: ValidationError, path: str, typed: str | None) -> str:
    """Return a setting's value, and which kind it must have."""
    value = as_typed(error.value) if typed is None else typed
    hints = get_type_hints(error.object_type) if isinstance(error.object_type, type) else {}
    hint = hints.get(str(error.key))
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if len(kinds) == 1 and kinds[0] in KINDS and value != "null":  # as of a reference
        return f"{path}={value} must be {KINDS[kinds[0]]}"
    return f"{path}: {str(error).splitlines()[0]}"
