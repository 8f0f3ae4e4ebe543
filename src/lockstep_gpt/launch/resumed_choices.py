"""What the words of the command line, such as `optim=muon`, mean for a run that continues.

A choice that isn't typed is the run's. A typed one must be what the run has, except `strategy`:
each strategy reads the other's checkpoints.
"""

from collections.abc import Callable
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from lockstep_gpt.config import OPEN_GROUPS
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.launch import choices
from lockstep_gpt.launch.hydra_errors import as_user_error
from lockstep_gpt.launch.quoting import quote_texts
from lockstep_gpt.run.directory import flat
from lockstep_gpt.settings import as_typed


def parsed(words: list[str]) -> list[Override]:
    """Return a command's overrides, or raise a `UserError`."""
    with as_user_error(words):
        return list(OverridesParser.create().parse_overrides(quote_texts(words)))


def setting_of(override: Override) -> str:
    """Return the name of the setting or group."""
    return str(override.get_key_element()).lstrip("+~")


def sets_switch(words: list[str], switch: str) -> bool:
    """Return whether this command sets a switch; earlier commands don't count."""
    return f"{switch}=true" in map(str.lower, words)


def names_group(word: str) -> bool:
    """Return whether an override, or its name, is a group's choice."""
    return _group_of(word) in choices.group_names()


def typed_choices(words: list[str]) -> dict[str, str]:
    """Return group -> choice for each of a command's overrides that makes one."""
    return {_group_of(word): word.partition("=")[2] for word in words if names_group(word)}


def _group_of(word: str) -> str:
    return word.partition("=")[0].partition("@")[0].lstrip("+~")


def may_differ(group: str, typed: dict[str, str]) -> bool:
    """Return whether a group's settings may differ from the run's.

    A typed strategy changes the run's. Loggers that aren't typed stay the run's.
    """
    return (group == "strategy" and group in typed) or (group == "logger" and group not in typed)


def decided_by(typed: dict[str, str]) -> Callable[[str], bool]:
    """Return whether the typed choices decide a setting; an experiment decides all of them."""
    names: set[str] = set()
    whole_groups = []
    for group, choice in typed.items():
        path = yaml_files(group).get(choice)
        text = path.read_text(encoding="utf-8") if path else ""
        if group == "experiment" or "@package" in text:
            return lambda _: True
        if group in OPEN_GROUPS or path is None:
            whole_groups.append(f"{group}.")
        names |= {name for name, _ in flat({group: yaml.safe_load(text)})}
    return lambda name: name in names or name.startswith(tuple(whole_groups))


def changes_of_group(group: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List what changes in a group, each as `setting: old -> new`."""
    before = dict(flat(old, f"{group}."))
    after = dict(flat(new, f"{group}."))
    return [
        f"{name}: {as_typed(before.get(name))} -> {as_typed(after.get(name))}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
