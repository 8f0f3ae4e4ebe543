"""The YAML files of `configs/` and of extras, read without Hydra."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from lockstep_gpt.errors import UserError
from lockstep_gpt.registry import config_folders_of_extras

# What YAML 1.1 takes for a number of base 8 or 60.
OTHER_NUMBER = re.compile(r"[-+]?(0[\d_]+|[\d_]+(:\d+)+(\.\d*)?)")
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


def first_not_utf8(folders: Iterable[Path]) -> Path | None:
    """Return the first choice's file in `folders` that isn't UTF-8; None if all are."""
    for file in (file for folder in folders for file in sorted(folder.glob("*/*.yaml"))):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return file
    return None


def misread_value(file: Path, texts: Iterable[str]) -> str | None:
    """Return the line about a value that YAML 1.1 reads as another one; None if there is none.

    It reads 010 as 8, 1:30 as 90, and without quotes a name that is no, 1e3, or 0x10 as a value.

    Args:
        file: a choice's file.
        texts: settings whose values are texts.
    """
    root = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    for name, node in _plain_values(root, ""):
        written = node.value
        looks_other = OTHER_NUMBER.fullmatch(written)
        if not written or not (looks_other or name in texts):
            continue
        read = _as_read(written)
        if read is None or str(read) == written:
            continue
        remedy = f"quote a text, as in '{written}'"
        if looks_other:
            remedy = f"write a number without colons or a leading 0; {remedy}"
        line = node.start_mark.line + 1
        return f"{file}, line {line}: YAML reads {name}: {written} as {read}; {remedy}"
    return None


def _as_read(text: str) -> Any:
    """Return the value that Hydra's loader reads from the text of a YAML file."""
    node = OmegaConf.create(f"value: {text}")
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=False))["value"]


def _plain_values(node: yaml.Node | None, name: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield the name and the node of each value without quotes below `node`."""
    if isinstance(node, yaml.ScalarNode) and not node.style:
        yield name, node
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _plain_values(child, name)
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            yield from _plain_values(child, f"{name}.{key.value}".lstrip("."))
