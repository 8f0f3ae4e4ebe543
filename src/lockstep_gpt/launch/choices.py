"""What you can set: groups, their choices and settings, and suggestions for a wrong name."""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep_gpt.config import OPEN_GROUPS, Config, groups
from lockstep_gpt.config_files import config_folders, yaml_files
from lockstep_gpt.data.data_settings import data_choices
from lockstep_gpt.launch.other_names import our_name
from lockstep_gpt.training.trainer_settings import door_of


def group_names() -> set[str]:
    """Return the names of the config groups."""
    return {path.name for folder in config_folders() for path in folder.iterdir() if path.is_dir()}


def known_groups() -> list[str]:
    """Return the names of the groups that have settings."""
    return [*groups(), *OPEN_GROUPS]


def settings_below(parent: str) -> dict[str, list[str]]:
    """Return choice -> the settings directly below `parent`, from the schema or YAML files."""
    group, _, inside = parent.partition(".")
    if group in OPEN_GROUPS:
        nodes = {choice: OmegaConf.load(file) for choice, file in yaml_files(group).items()}
        if inside:
            nodes = {choice: OmegaConf.select(node, inside) for choice, node in nodes.items()}
        return {choice: _settings_of(node) for choice, node in nodes.items()}
    classes: dict[str, Any] = {"": Config}
    if group == "data":
        classes = {**data_choices()}
    elif parent in groups():
        classes = {"": groups()[parent]}
    elif parent:  # there is no such group
        classes = {}
    below = {choice: [item.name for item in fields(kind)] for choice, kind in classes.items()}
    if not parent:
        below[""].remove("of_extras")  # no setting: their groups have names of their own
    return below


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest our name for other projects' `word`, or the nearest to it among `known`."""
    name = (prefix + word).replace("-", "_")
    if name in group_names():  # a known group, so it was given as a flag
        return f"; write {name}=CHOICE"
    for settings in data_choices().values():
        hint = settings.suggestion(name)
        if hint:
            return f"; {hint}"
    ours = our_name(name)
    if ours is not None:
        return f"; use {ours}"
    near = difflib.get_close_matches(word, known, n=1)
    if not near:
        return ""
    return f"; did you mean {prefix}{near[0]}?"


def suggested_setting(path: str) -> str:
    """Suggest the setting nearest to `path`, or one with its name in a group."""
    parent, dot, name = path.rpartition(".")
    if parent and parent.partition(".")[0] not in {*known_groups(), *group_names()}:
        return _suggestion_for_wrong_group(path)
    door = door_of(name) if parent == "trainer" else None
    if door is not None:
        return f"; use {door}"
    known = [setting for settings in settings_below(parent).values() for setting in settings]
    if not parent:
        known += group_names()
    near = suggestion(name, known, parent + dot)
    if near or parent in (*OPEN_GROUPS, ""):
        return near or _nested_suggestion(parent, name)
    return ""


def _suggestion_for_wrong_group(path: str) -> str:
    """Suggest a setting for one of a group that doesn't exist."""
    group, _, rest = path.partition(".")
    near = difflib.get_close_matches(group.lower(), known_groups(), n=1)
    ours = our_name(group)
    if ours in known_groups():
        near = [ours]
    else:
        hint = suggestion(rest, (), f"{group}.")  # for names of other projects
        if hint or not near:
            return hint or suggestion(path.replace(".", "_"), settings_below("")[""])
    if "." in rest:
        return f"; did you mean {near[0]}.{rest}?"
    return suggested_setting(f"{near[0]}.{rest}") or f"; did you mean the group {near[0]}?"


def _settings_of(node: Any) -> list[str]:
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _nested_suggestion(parent: str, name: str) -> str:
    """Suggest a setting that has the name, below a group or below a choice of `parent`."""
    if parent:
        configs = [OmegaConf.load(file) for file in yaml_files(parent).values()]
        nodes = {str(key): node for config in configs for key, node in config.items()}
        having = [key for key in sorted(nodes) if name in _settings_of(nodes[key])]
        if not having:
            return ""
        return f"; did you mean {' or '.join(f'{parent}.{key}.{name}' for key in having)}?"
    known = [setting for settings in settings_below("").values() for setting in settings]
    for group in known:
        if any(name in settings for settings in settings_below(group).values()):
            return f"; did you mean {group}.{name}?"
    return ""
