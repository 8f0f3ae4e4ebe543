"""Mistakes in a configuration, in one line: the texts of Hydra and OmegaConf, and what to do."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt import PROGRAM
from lockstep_gpt.catalog import extra_of_choice, extra_of_group, how_to_add
from lockstep_gpt.config import OPEN_GROUPS
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import choices, quoting
from lockstep_gpt.training.trainer_settings import door_of, owned_key_line

KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
# Groups with any number of members -> the package that has Lightning's.
CLASSES = {"callbacks": "lightning.pytorch.callbacks", "logger": "lightning.pytorch.loggers"}
UNKNOWN = "..."  # instead of a value that the error doesn't contain
PRIMARY_RULE = "this names a file that replaces configs/train.yaml; for a recipe, set experiment="
CONFIG_PATH_RULE = (
    "--config-path must be the absolute path of a folder that replaces configs/; to add a folder "
    "of YAML files to it, write --config-dir FOLDER"
)
NOISE = r" (full_key|reference_type|object_type)[:=] ?\S*| (See https?://|Config search path).+"


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
    """Return value, rule, and remedy of an error of Hydra or OmegaConf."""
    if isinstance(error, OverrideParseException):
        return quoting.unparsed_line(error.override)

    cause = error
    nested = error.__cause__ or error.__context__  # the latter if a YAML file is at fault
    if isinstance(error, HydraException) and isinstance(nested, OmegaConfBaseException):
        cause = nested
    path = _setting_at_fault(error, cause)
    typed = dict(word.lstrip("+~").split("=", 1) for word in arguments if "=" in word)
    value = typed.get(path, UNKNOWN) if path else ""
    text = re.sub(r"\s*\n\s*", " ", str(cause)).strip()

    mistake = _mistake_in_defaults(text) or _missing_file(text)
    if mistake:
        return mistake

    if path and re.search("not in|Could not override|Could not append", text):
        name = path
        if "." not in path:  # of a group that doesn't exist, the error only names the group
            name = next((setting for setting in typed if setting.startswith(f"{path}.")), path)
        return _unknown_setting(name, typed.get(name, value))

    mismatch = re.search(r"Value '(.*?)' .*(converted to|not a valid) (\w+)", text)
    if path and mismatch:
        wrong = mismatch[1] if value == UNKNOWN else value
        return f"{path}={wrong} must be {KINDS.get(mismatch[3], mismatch[3])}{_written(wrong)}"

    rule = re.match(r"(Value .+?)( full_key: .+)?$", text)
    if path and rule:
        return f"{path}={value}: {rule[1].rstrip('.')}"

    ambiguous = re.search(r"Ambiguous value for argument '(.+?)' ", text)
    if ambiguous:
        return _several_values(ambiguous[1])

    text = re.sub(NOISE, "", text)
    text = re.sub(r"^Error when parsing index: .+?\]\. ", "", text)
    if not path:
        return text
    return f"{path}={value}: {text}"


def _several_values(word: str) -> str:
    """Return that an override has several values, and the remedies."""
    name, _, value = word.partition("=")
    if name not in choices.group_names() and re.search(r"[^\W\d]\w*,? +[^\W\d]", value):
        return quoting.unparsed_line(word)  # a sentence
    line = f"{word} has several values: add --multirun to run each, or write"
    if word.startswith("data.path="):
        return f"{line} one folder or one glob, in quotes, that has all files"
    return f"{line} [a,b]"


def _written(value: str) -> str:
    """Return how to write a value of the wrong kind, as the end of a sentence; often nothing."""
    if value.lower() == "none":
        return "; nothing is written null"
    try:
        number = float(value)
    except ValueError:
        return ""
    return f"; write {int(number)}" if number.is_integer() else ""


def _mistake_in_defaults(text: str) -> str | None:
    """Return how to write a choice in a YAML file's defaults; None for another error."""
    nested = re.search(
        r"In '(experiment/.+?)'.*Could not (?:find|load) 'experiment/(.+)/(.+?)'", text
    )
    if nested:
        file, group, choice = nested.groups()
        return f"configs/{file}.yaml: write `- override /{group}: {choice}` in its defaults"
    twice = re.search(r"Multiple values for .+ use 'override (\w+): (.+?)'", text)
    if twice:
        group, choice = twice.groups()
        return (
            f"{group} already has a choice; write `- override /{group}: {choice}` in the defaults "
            "of the YAML file"
        )
    missed = "(?:Could not override|No earlier Group Default for)"  # Hydra 1.3's words, and 1.4's
    without_slash = re.search(rf"In '(experiment/.+?)'.*{missed} 'experiment/(.+?)@", text)
    if without_slash:
        file, group = without_slash.groups()
        return (
            f"configs/{file}.yaml: write {group} with a slash before it in its defaults, as in "
            f"`- override /{group}: CHOICE`"
        )
    return None


def mistake_in_file(file: Path | None) -> str | None:
    """Return how to write the first group of a YAML file whose value is not its settings."""
    if file is None:  # the error is of a class, not of a file
        return None
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        return "is not a list of settings; write each as `NAME: VALUE`, without a dash"
    for group, value in values.items():
        if group in choices.known_groups() and not isinstance(value, dict):
            return _value_instead_of_settings(group, value)
    return None


def _value_instead_of_settings(group: str, value: Any) -> str:
    """Return that a file sets a group to a value, and how to choose or to set its settings."""
    names = value if isinstance(value, list) else [value]
    words = [name for name in names if isinstance(name, str)]
    if group in CLASSES and not set(words) & set(yaml_files(group)):
        return (
            f"{group} must have names, not dashes or values; write `NAME:` below it, and below "
            f"that `_target_: {CLASSES[group]}.CLASS`"
        )
    if group in choices.group_names() and words == names:
        choice = f"[{', '.join(words)}]" if isinstance(value, list) else value
        return (
            f"{group} is a group, and {choice} its choice; write `- override /{group}: {choice}` "
            "under `defaults:`"
        )
    below = choices.settings_below(group).values()
    known = dict.fromkeys(name for names in below for name in names if name != "defaults")
    return (
        f"{group} is a group of settings; write each below it as `NAME: VALUE`, indented, where "
        f"NAME is one of {', '.join(known)}"
    )


def _missing_file(text: str) -> str | None:
    """Return the line of an error about a YAML file that isn't there; None for another error."""
    if re.search("Primary config (module|directory)", text):
        return CONFIG_PATH_RULE
    primary = re.search(r"Cannot find primary config '(.+?)'", text)
    if primary:
        return f"--config-name={primary[1]}: {PRIMARY_RULE}{primary[1]}"
    choice = re.search(r"Could not (?:find|load) '(.+)/(.+?)'", text)
    if choice and choice[1] in choices.group_names():
        return _unknown_choice(choice[1], choice[2], text)
    return None


def _setting_at_fault(error: Exception, cause: Exception) -> str | None:
    """Return the setting that an error is about; None or empty if it doesn't say."""
    override = re.search(r"Could not override '[+~]*([^']+)'", str(error))
    path: str | None = getattr(cause, "full_key", None)
    if not path and override:
        return override[1]
    return path


def _unknown_choice(group: str, choice: str, text: str) -> str:
    """Return that a group has no such choice, and which it has, from the text of Hydra's error."""
    extra = extra_of_choice(group, choice)
    if extra is not None:
        return f"{group}={choice} needs {how_to_add(extra)}"
    available = re.search(r"Available options in .+?: (.+?)( Config s.+)?$", text)
    names = available[1].split() if available else sorted(yaml_files(group))
    near = _misplaced_file(group, choice, text) or choices.suggestion(choice, names)
    if not near and group in CLASSES:
        near = f"; for a class of Lightning's, write +{group}.NAME._target_={CLASSES[group]}.CLASS"
    return f"{group}={choice} is not one of {', '.join(names)}{near}"


def _misplaced_file(group: str, choice: str, text: str) -> str:
    """Return how to move a choice's file that Hydra doesn't find; empty if there is none.

    The `text` of Hydra's error has the folders of configurations.
    """
    folders = [Path(path) for path in re.findall(r"path=file://(.+?)(?= provider=|$)", text)]
    for folder in folders:
        place = folder / group / f"{choice}.yaml"
        names = (place.with_suffix(".yml"), folder / place.name, folder / f"{choice}.yml")
        file = next((name for name in names if name.is_file()), None)
        if file is not None:
            return _how_to_move(file, place)
    return ""


def another_ending(folders: Iterable[Path]) -> str:
    """Return how to rename a choice's file in `folders` that ends in .yml; empty without one."""
    files = [file for folder in folders for file in sorted(folder.glob("*/*.yml"))]
    return _how_to_move(files[0], files[0].with_suffix(".yaml")) if files else ""


def _how_to_move(file: Path, place: Path) -> str:
    words = [os.path.relpath(path) for path in (file, place)]
    return f"; to choose {words[0]}, run: mv {shlex.join(words)}"


def _unknown_setting(path: str, value: str) -> str:
    """Return that there is no such setting, and the remedy that fits best."""
    parent, _, name = path.rpartition(".")
    door = door_of(name) if parent == "trainer" else None
    if door is not None:
        return owned_key_line(name, value, door)

    settings = choices.settings_below(parent)
    owners = sorted(choice for choice, names in settings.items() if name in names)
    if owners == [""]:  # the setting exists, but not under one key with a dot
        return f"{path} has a dot; in YAML, write {parent}: and, indented below it, {name}: VALUE"
    if owners:
        return f"{path} is a setting of {parent}={' or '.join(owners)}, which is not chosen here"

    extra = extra_of_group(path.partition(".")[0])
    if extra is not None:
        return f"{path}={value} needs {how_to_add(extra)}"

    if path.partition(".")[0] == "experiment":  # where Hydra puts a file without this line
        return (
            f"unknown setting {path}; a recipe's first line must be `# @package _global_`, without "
            "a byte order mark"
        )

    near = choices.suggested_setting(path)
    if near:
        return f"unknown setting {path}{near}"

    if parent.split(".")[0] in OPEN_GROUPS:
        return f"unknown setting {path}; to add one that the YAML lacks, write +{path}={value}"
    known = dict.fromkeys(setting for names in settings.values() for setting in names)
    if not known:
        groups = ", ".join(choices.known_groups())
        show = f"{PROGRAM} train --cfg job"
        return f"unknown setting {path}; the groups are {groups}; to see all settings, run: {show}"
    return f"unknown setting {path}; there are {', '.join(known)}"
