"""The YAML files of `configs/` and of extras, read without Hydra."""

import re
from collections.abc import Iterable
from pathlib import Path

from lockstep_gpt.errors import UserError
from lockstep_gpt.registry import config_folders_of_extras

TARGET = r"^_target_: *(\S+)"  # the line of a YAML file that names a class


def config_folder() -> Path:
    """Return the folder of the YAML files: in the installed package, else in the source tree."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    if installed.is_dir():
        return installed
    return package.parents[1] / "configs"


def config_folders() -> list[Path]:
    """Return the project's folder of YAML files, and those of extras."""
    return [config_folder(), *config_folders_of_extras().values()]


def yaml_files(group: str, *other_folders: Path) -> dict[str, Path]:
    """Return the file of each choice of a group.

    Args:
        group: its name.
        other_folders: also search these, such as those of `--config-dir`.
    """
    folders = [*config_folders(), *other_folders]
    paths = [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: path for path in paths}


def refuse_same_names(folders: Iterable[Path]) -> None:
    """Raise a `UserError` for a file in `folders` that Hydra would replace by the project's."""
    known = [(own, file) for own in config_folders() for file in sorted(own.glob("**/*.yaml"))]
    for folder in folders:  # may be large, so it isn't listed
        for own, same in known:
            file = folder / same.relative_to(own)
            if file.is_file() and file.read_bytes() != same.read_bytes():
                raise UserError(
                    f"{file} has the name of {same}, which Hydra would read instead; rename it"
                )


def target_of(group: str, choice: str) -> str | None:
    """Return the class that a choice of a group names; None if there is no such choice."""
    path = yaml_files(group).get(choice)
    if path is None:
        return None
    target_line = re.search(TARGET, path.read_text(encoding="utf-8"), re.MULTILINE)
    if target_line is None:
        return None
    return target_line[1]
