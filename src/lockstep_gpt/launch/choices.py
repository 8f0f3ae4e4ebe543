"""What you can set: groups, their choices and settings, and the nearest to a wrong name."""

import difflib
from dataclasses import fields

import yaml

from lockstep_gpt.config import OPEN_GROUPS, Config, groups
from lockstep_gpt.config_files import config_folders, yaml_files
from lockstep_gpt.tokens.data_settings import data_choices
from lockstep_gpt.run.directory import flat

MOST_NAMES = 3  # in a suggestion
SIMILAR = 0.8  # of whole names, whose groups alone are often similar


def group_names() -> set[str]:
    """Return the names of the config groups."""
    return {path.name for folder in config_folders() for path in folder.iterdir() if path.is_dir()}


def all_settings() -> dict[str, list[str]]:
    """Return each setting's full name -> the choices of its group that have it; []: all have it."""
    names = [item.name for item in fields(Config) if item.name != "of_extras"]
    for group, kind in groups().items():
        names += [f"{group}.{item.name}" for item in fields(kind)]
    settings: dict[str, list[str]] = {name: [] for name in names}
    for choice, kind in data_choices().items():
        for item in fields(kind):
            if f"data.{item.name}" not in names:
                settings.setdefault(f"data.{item.name}", []).append(choice)
    for group in OPEN_GROUPS:
        for choice, file in yaml_files(group).items():
            values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            for name, _ in flat(values, f"{group}."):
                settings.setdefault(name, []).append(choice)
    return settings


def did_you_mean(word: str, known: list[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return the end of a sentence that suggests the nearest of the `known`; empty if none is."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def suggested_setting(path: str) -> str:
    """Suggest the setting that has this name in another group, or the nearest."""
    parent, dot, name = path.rpartition(".")
    known = sorted({*all_settings(), *group_names()} - {"hydra"})
    same = [setting for setting in known if setting.rpartition(".")[2] == name]
    nearest = difflib.get_close_matches(path, same, n=1, cutoff=SIMILAR)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    if 0 < len(same) <= MOST_NAMES:
        return f"; did you mean {' or '.join(same)}?"
    beside = [
        setting.rpartition(".")[2] for setting in known if setting.rpartition(".")[0] == parent
    ]
    if beside:
        return did_you_mean(name, beside, parent + dot)
    return did_you_mean(path, known, cutoff=SIMILAR)
