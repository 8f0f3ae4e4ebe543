"""What you can set: groups, their choices and settings, and suggestions for a wrong name."""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from lockstep_gpt import config as schema
from lockstep_gpt.config import Config, config_folder
from lockstep_gpt.registry import asked

# Choices of earlier versions -> what to do instead.
GONE = {
    ("strategy", "ddp_spawn"): (
        "in a debugger, set launch.inline=true; in a notebook, call "
        'lockstep_gpt.cli.main(["train", ...]), which starts ranks as processes'
    ),
}
# Settings of earlier versions -> what to do instead.
GONE_SETTINGS = {
    "data.source": "choose the source as data=NAME",
    "data.num_workers": "remove it: a thread reads batches ahead from files in memory",
    "data.packing": "choose packing=documents or packing=stream",
}


def groups() -> set[str]:
    """Return the names of the config groups."""
    return {path.name for path in config_folder().iterdir() if path.is_dir()}


def settings_below(parent: str) -> dict[str, list[str]]:
    """Return choice -> the settings directly below `parent`, from the schema or YAML files."""
    group = parent.partition(".")[0]
    if group in schema.OPEN_GROUPS:
        files = (config_folder() / group).glob("*.yaml")
        return {file.stem: [str(key) for key in OmegaConf.load(file)] for file in files}
    one: Any = {"": schema.groups().get(parent) if parent else Config}
    found = (schema.data_choices() if group == "data" else one).items()
    return {name: [item.name for item in fields(each)] for name, each in found if each}


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest our name for other projects' `word`, or the nearest to it among `known`."""
    near = difflib.get_close_matches(word, known, n=1)
    elsewhere = "".join(asked("OTHER_NAME", prefix + word))
    return elsewhere or (f"; did you mean {prefix}{near[0]}?" if near else "")


def suggested_setting(path: str) -> str:
    """Suggest the setting nearest to `path`, or one with its name in a group."""
    parent, _, name = path.rpartition(".")
    known = [each for names in settings_below(parent).values() for each in names]
    if near := suggestion(name, known, f"{parent}." if parent else ""):
        return near
    for group in () if parent else known:
        if any(name in names for names in settings_below(group).values()):
            return f"; did you mean {group}.{name}?"
    return ""
