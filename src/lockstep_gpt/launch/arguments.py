"""Command-line arguments as users of other projects write them."""

import re
import sys
from typing import cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep

from lockstep_gpt import PROGRAM
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import choices
from lockstep_gpt.launch.hydra_errors import told_in_one_line

MULTIRUN = ("-m", "--multirun")
FLAGS = {  # of Hydra
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "info"),
    *("shell-completion", "config-path", "config-name", "config-dir", "experimental-rerun"),
}
WITH_VALUE = {  # those that take the next word
    *("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun"),
}
# For Hydra's launcher plugins: jobs run, but their parent exits with 0 even if all jobs failed.
LAUNCHER = (
    "would lose the exit status of its jobs; remove it: jobs run one after the other, each on "
    "all devices"
)


def understood(words: list[str]) -> list[str]:
    """Return a command's arguments as Hydra accepts them, or raise a `UserError`."""
    for word in words:
        name, _, value = word.partition("=")
        chooses = name[:1] == "+" and name[1:] in choices.group_names() and value[:1] != "{"
        if chooses and f"~{name[1:]}" not in words:
            rule = f"{name[1:]} already has a choice; write {word[1:]}, without +"
            raise UserError(f"{word}: {rule}")
        if name.lstrip("+") == "hydra/launcher" and value != "basic":
            slurm = "; for SLURM, see docs/sweeps.md" if "submitit" in value else ""
            raise UserError(f"{word} {LAUNCHER}{slurm}")
        if "=" in word and name.lstrip("+") in choices.group_names() and not _is_choice(value):
            raise UserError(f"{word} is not a choice; {PROGRAM} train --help lists them")
        if word.startswith("--") and (flag := word[2:].partition("=")[0]) not in FLAGS:
            near = choices.suggested_setting(flag)
            raise UserError(f"{word} is not a flag; settings are NAME=VALUE, without dashes{near}")
    words = _settings_first(words)
    shows = any(word in ("-c", "--cfg") or word.startswith("--cfg=") for word in words)
    return _first_job(words) if shows and any(word in MULTIRUN for word in words) else words


def quoted(arguments: list[str]) -> list[str]:
    """Quote paths with an `=`, which Hydra could not parse, such as `step=000500.ckpt`."""
    return [re.sub(r"^(resume|run_dir)=([^'\"].*=.*)$", r"\1='\2'", word) for word in arguments]


def _settings_first(words: list[str]) -> list[str]:
    """Return the arguments with all settings before the flags: argparse needs one sequence."""
    settings: list[str] = []
    flags: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        of_flag = before in WITH_VALUE or (before == "--info" and "=" not in word)
        (flags if of_flag or word.startswith("-") else settings).append(word)
    return [*settings, *flags]


def _is_choice(value: str) -> bool:
    """Tell whether Hydra takes it for a choice of a group, several, or what is set in it."""
    try:
        return isinstance(yaml.safe_load(value), str | list | dict)
    except yaml.YAMLError:  # Hydra says what is wrong with it
        return True


def _first_job(words: list[str]) -> list[str]:
    """Return the arguments of a sweep's first job, the one that `--cfg` shows."""
    kept = [word for word in words if word not in MULTIRUN]
    given = [word for word in quoted(kept) if "=" in word and not word.startswith("-")]
    with told_in_one_line(given):
        parsed = OverridesParser.create().parse_overrides(given)
    swept = [override for override in parsed if override.is_sweep_override()]
    first = {}
    for override in swept:
        sweep = override.value()
        interval = [str(sweep.start)] if isinstance(sweep, IntervalSweep) else []
        values = iter(interval or override.sweep_string_iterator())
        word = cast(str, override.input_line)
        first[word] = f"{word.partition('=')[0]}={next(values)}"
    if first:
        print(f"the first job of this sweep: {' '.join(first.values())}", file=sys.stderr)
    return [first.get(word, word) for word in quoted(kept)]
