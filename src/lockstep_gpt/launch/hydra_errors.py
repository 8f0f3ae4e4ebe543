"""Mistakes in a configuration, in one line: the texts of Hydra and OmegaConf, and what to do."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt.catalog import extra_of_choice, extra_of_group, how_to_add
from lockstep_gpt.config import OPEN_GROUPS
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import choices
from lockstep_gpt.training.trainer_settings import OWNED_TRAINER_KEYS, owned_key_line

KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


@contextlib.contextmanager
def told_in_one_line(arguments: list[str], first: Callable[[], Any] = list) -> Iterator[None]:
    """Raise a `UserError` for an error of Hydra or OmegaConf; `first` may raise a better one."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        first()
        raise UserError(one_line(error, arguments)) from None


def one_line(error: Exception, arguments: list[str]) -> str:
    """Return value, rule, and remedy of an error of Hydra or OmegaConf."""
    nested = error.__cause__ or error.__context__  # the latter if a YAML file is at fault
    hidden = isinstance(error, HydraException) and isinstance(nested, OmegaConfBaseException)
    cause = nested if hidden else error
    found = re.search(r"Could not override '[+~]*([^']+)'", str(error))
    path = getattr(cause, "full_key", None) or (found and found[1])
    given = dict(word.lstrip("+~").split("=", 1) for word in arguments if "=" in word)
    value = given.get(path, "...") if path else ""
    text = re.sub(r"\s*\n\s*", " ", str(cause)).strip()
    found = re.search(r"Could not (?:find|load) '(.+)/(.+?)'", text)
    if found and found[1] in choices.group_names():
        listed = re.search(r"Available options in .+?: (.+?)( Config s.+)?$", text)
        names = listed[1].split() if listed else sorted(yaml_files(found[1]))
        if extra := extra_of_choice(found[1], found[2]):
            return f"{found[1]}={found[2]} needs {how_to_add(extra)}"
        if instead := choices.GONE.get((found[1], found[2])):
            return f"{found[1]}={found[2]} is gone; {instead}"
        near = choices.suggestion(found[2], names)
        return f"{found[1]}={found[2]} is not one of {', '.join(names)}{near}"
    if path and re.search("not in|Could not override|Could not append", text):
        # Of a group that doesn't exist, the error only names the group.
        below = [word for word in given if word.startswith(f"{path}.") and "." not in path]
        name = below[0] if below else path
        return _unknown_setting(name, given.get(name, value))
    if path and (found := re.search(r"Value '(.*?)' .*(converted to|not a valid) (\w+)", text)):
        wrong = found[1] if value == "..." else value
        return f"{path}={wrong} must be {KINDS.get(found[3], found[3])}"
    if path and (found := re.match(r"(Value .+?)( full_key: .+)?$", text)):
        return f"{path}={value}: {found[1].rstrip('.')}"
    if found := re.search(r"Ambiguous value for argument '(.+?)' ", text):
        return f"{found[1]} has several values: add --multirun to run each, or write [a,b]"
    if found := re.search(r"Error parsing override '(.*?)' missing EQUAL", text):
        return f"{found[1]} has no value; write NAME=VALUE, without spaces"
    noise = r" (full_key|reference_type|object_type)[:=] ?\S*| (See https?://|Config search path).+"
    text = re.sub(r"^Error when parsing index: .+?\]\. ", "", re.sub(noise, "", text))
    return f"{path}={value}: {text}" if path else text


def _unknown_setting(path: str, value: str) -> str:
    parent, _, name = path.rpartition(".")
    if parent == "trainer" and (door := OWNED_TRAINER_KEYS.get(name)):
        return owned_key_line(name, value, door)
    if instead := choices.GONE_SETTINGS.get(path):
        return f"{path} is gone; {instead}"
    settings = choices.settings_below(parent)
    if owners := sorted(choice for choice, names in settings.items() if name in names):
        return f"{path} is a setting of {parent}={' or '.join(owners)}, which is not chosen here"
    if extra := extra_of_group(path.partition(".")[0]):
        return f"{path}={value} needs {how_to_add(extra)}"
    if near := choices.suggested_setting(path):
        return f"unknown setting {path}{near}"
    if parent.split(".")[0] in OPEN_GROUPS:
        return f"unknown setting {path}; to add one that the YAML lacks, write +{path}={value}"
    known = ", ".join(dict.fromkeys(each for names in settings.values() for each in names))
    return f"unknown setting {path}; there are {known}"
