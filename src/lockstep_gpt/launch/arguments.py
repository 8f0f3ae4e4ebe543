"""Command-line arguments that Hydra would refuse without a suggestion, or ignore."""

import yaml

from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.tokens.data_settings import data_choices
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import choices

MULTIRUN = ("-m", "--multirun")
FLAGS = {  # of Hydra
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "info"),
    *("shell-completion", "config-path", "config-name", "config-dir", "experimental-rerun"),
}
SHORT_FLAGS = {"h", "c", "p", "r", "m", "i", "sc", "cp", "cn", "cd"}  # of Hydra, too
WITH_VALUE = {  # those that take the next word
    *("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun"),
}
# Of Hydra: where it would work or write. A run's files are all in its own directory.
WITHOUT_EFFECT = ("hydra.run.dir", "hydra.sweep.dir", "hydra.job.chdir", "hydra.output_subdir")


def translate_arguments(words: list[str]) -> list[str]:
    """Return a command's arguments as Hydra accepts them, or raise a `UserError`."""
    for word in words:
        if word.startswith("-"):
            _check_flag(word)
        else:
            _check_override(word)
    return _settings_first([_added(word, words) for word in words])


def _added(word: str, words: list[str]) -> str:
    """Let Hydra accept an argument of the user's class that its YAML file doesn't list."""
    group, dot, rest = word.partition(".")
    is_argument = bool(dot) and "=" in rest
    if is_argument and group in ("module", "trainer"):
        return f"++{word}"
    if is_argument and group == "data" and _names_own_data(words):
        return f"++{word}"
    return word


def _names_own_data(words: list[str]) -> bool:
    """Return whether a choice of data is typed that isn't one of our sources."""
    chosen = [word.partition("=")[2] for word in words if word.startswith("data=")]
    return bool(chosen) and chosen[-1] not in data_choices()


def _check_flag(word: str) -> None:
    """Raise a `UserError` for a flag that Hydra doesn't have."""
    flag = word.lstrip("-").partition("=")[0]
    if flag not in (FLAGS if word.startswith("--") else SHORT_FLAGS):
        near = choices.suggested_setting(flag)
        near = near or choices.did_you_mean(flag, sorted(FLAGS), "--")
        raise UserError(f"{word} is not a flag; settings are NAME=VALUE, without dashes{near}")


def _check_override(word: str) -> None:
    """Raise a `UserError` for an override that Hydra would ignore, or refuse without its name."""
    name, equals, value = word.lstrip("+").partition("=")
    if name in WITHOUT_EFFECT and value not in ("false", "null"):
        raise UserError(f"{word} has no effect here; all files of a run are in its run_dir")
    if name in choices.group_names() and equals and not _is_choice(value):
        raise UserError(f"{word} is not one of {', '.join(sorted(yaml_files(name)))}")


def _is_choice(value: str) -> bool:
    """Return whether Hydra takes it for one choice of a group, for several, or for settings."""
    try:
        return isinstance(yaml.safe_load(value), str | list | dict)
    except yaml.YAMLError:  # Hydra says what is wrong with it
        return True


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
