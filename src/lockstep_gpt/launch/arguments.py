"""Command-line arguments as users of other projects write them."""

import sys
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import choices
from lockstep_gpt.launch.hydra_errors import as_user_error
from lockstep_gpt.launch.quoting import quote_texts
from lockstep_gpt.optional import library_command

MULTIRUN = ("-m", "--multirun")
FLAGS = {  # of Hydra
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "info"),
    *("shell-completion", "config-path", "config-name", "config-dir", "experimental-rerun"),
}
SHORT_FLAGS = {"h", "c", "p", "r", "m", "i", "sc", "cp", "cn", "cd"}  # of Hydra, too
OTHER_FLAGS = {  # of our other commands, and of other projects
    "config": "choose configs/experiment/NAME.yaml with experiment=NAME",
    "split": "to test at the end, set test=true; afterward, use evaluate RUN --split test",
}
WITH_VALUE = {  # those that take the next word -> an example of it
    **dict.fromkeys(("-c", "--cfg"), "job"),
    **dict.fromkeys(("-p", "--package"), "optim"),
    **dict.fromkeys(("-cp", "--config-path"), "/ABSOLUTE/FOLDER"),
    **dict.fromkeys(("-cn", "--config-name"), "train"),
    **dict.fromkeys(("-cd", "--config-dir"), "FOLDER"),
    "--experimental-rerun": "FILE",
}
CFG_VALUES = ("job", "hydra", "all")
# Hydra's launcher plugins: choice -> the package that has it.
LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}


def refuse_missing_values(words: list[str]) -> None:
    """Raise a `UserError` for a flag without the word that it takes; argparse names another."""
    for word, value in pairwise([*words, ""]):
        example = WITH_VALUE.get(word)
        if example is None:
            continue
        if word in ("-c", "--cfg") and value not in CFG_VALUES:
            raise UserError(f"{word} needs one of {', '.join(CFG_VALUES)}; write {word} {example}")
        if not value or value.startswith("-"):
            raise UserError(f"{word} needs a value; write {word} {example}")


def translate_arguments(words: list[str]) -> list[str]:
    """Return a command's arguments as Hydra accepts them, or raise a `UserError`."""
    for word in words:
        if word.startswith("-"):
            _check_flag(word)
        else:
            _check_override(word, words)
    words = _settings_first(words)
    shows_config = any(word in ("-c", "--cfg") or word.startswith("--cfg=") for word in words)
    is_sweep = any(word in MULTIRUN for word in words)
    if shows_config and is_sweep:
        return _first_job(words)
    return words


def _check_flag(word: str) -> None:
    """Raise a `UserError` for a flag that Hydra doesn't have."""
    flag = word.lstrip("-").partition("=")[0]
    if flag not in (FLAGS if word.startswith("--") else SHORT_FLAGS):
        if flag in OTHER_FLAGS:
            raise UserError(f"{word} is not a flag of train; {OTHER_FLAGS[flag]}")
        near = choices.suggested_setting(flag)
        raise UserError(f"{word} is not a flag; settings are NAME=VALUE, without dashes{near}")


def _check_override(word: str, words: list[str]) -> None:
    """Raise a `UserError` for an override that Hydra would misunderstand or not explain."""
    prefixed, equals, value = word.partition("=")
    name = prefixed.lstrip("+")
    if equals and not name.strip("~"):
        raise UserError(f"{word} has no name; write NAME=VALUE, without spaces, as in seed=1")
    is_group = name in choices.group_names()
    adds_choice = is_group and prefixed == f"+{name}" and not value.startswith("{")
    if adds_choice and f"~{name}" not in words:
        raise UserError(f"{word}: {name} already has a choice; write {word[1:]}, without +")
    if name == "hydra/launcher" and value in LAUNCHERS:
        _check_launcher(word, LAUNCHERS[value])
    if name in ("hydra.run.dir", "hydra.sweep.dir"):
        raise UserError(f"{word} has no effect here; set run_dir={value}")
    if name in ("hydra.job.chdir", "hydra.output_subdir") and value not in ("false", "null"):
        raise UserError(f"{word} has no effect here; all files of a run are in its run_dir")
    known = sorted(yaml_files(name)) if is_group else []
    if known and value.endswith((".yaml", ".yml")):
        raise UserError(f"{word}: write the name alone, {name}={Path(value).stem}")
    if known and equals and not _is_choice(value):
        raise UserError(f"{word} is not one of {', '.join(known)}")
    if not is_group and equals and name in choices.known_groups() and value[:1] not in "{$":
        names = ", ".join(choices.settings_below(name)[""])
        raise UserError(
            f"{word}: {name} is a group of settings; write {name}.NAME={value}, where NAME is one "
            f"of {names}"
        )


def _check_launcher(word: str, package: str) -> None:
    """Raise a `UserError` if the package with a launcher plugin is not installed."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        command = library_command(package)
        raise UserError(f"{word} needs {package}, which is not installed; run: {command}") from None


def _settings_first(words: list[str]) -> list[str]:
    """Return the arguments with all settings before the flags: argparse needs one sequence."""
    settings: list[str] = []
    flags: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before in WITH_VALUE or (before == "--info" and "=" not in word)
        if is_value or word.startswith("-"):
            flags.append(word)
        else:
            settings.append(word)
    return [*settings, *flags]


def _is_choice(value: str) -> bool:
    """Return whether Hydra takes it for one choice of a group, for several, or for settings."""
    try:
        return isinstance(yaml.safe_load(value), str | list | dict)
    except yaml.YAMLError:  # Hydra says what is wrong with it
        return True


def _first_job(words: list[str]) -> list[str]:
    """Return the arguments of a sweep's first job, the one that `--cfg` shows."""
    words = quote_texts([word for word in words if word not in MULTIRUN])
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    with as_user_error(settings):
        overrides = OverridesParser.create().parse_overrides(settings)
    of_first_job = {}  # a swept override -> the same with its first value
    for override in overrides:
        if override.is_sweep_override():
            word = cast(str, override.input_line)
            of_first_job[word] = f"{word.partition('=')[0]}={_first_value(override)}"
    if of_first_job:
        print(f"the first job of this sweep: {' '.join(of_first_job.values())}", file=sys.stderr)
    return [of_first_job.get(word, word) for word in words]


def _first_value(override: Override) -> str:
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        return str(sweep.start)
    return next(iter(override.sweep_string_iterator()))
