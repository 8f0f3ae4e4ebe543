#!/usr/bin/env python3
"""Write docs/settings.md from the schema in config.py and the choices in configs/.

The settings of an extra are on a page of their own, docs/NAME_settings.md.

usage: python scripts/settings.py
"""

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from lockstep_gpt.config import MISSING, OPEN_GROUPS, Config, groups
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.data.data_settings import DataConfig, data_choices
from lockstep_gpt.registry import installed
from lockstep_gpt.run.directory import flat
from lockstep_gpt.settings import Checked, as_typed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXTRAS = ROOT / "src/lockstep_gpt/extras"
# Classes whose settings several choices of `data` share, and what they are in words.
SHARED = {
    "DataConfig": "All data",
    "Source": "Sources",
    "Documents": "Sources of text",
    "PathDocuments": "Text in files",
}
GROUPS = ("experiment", "model", "data", "optim")  # their choices set what the schema declares
TYPES = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}
TYPES |= {"dict": "values by name", "list": "list"}
# Indentation, name, value, and comment of a line in our YAML files.
LINE = re.compile(r"( *)(\w+):(?: +([^#]+?))?(?: +# (.+))?")
HEAD = """\
# Every setting

`python scripts/settings.py` writes this page from `configs/` and `src/`.
Run the script again after you change a setting there.

A setting is an argument of the command (`optim.lr=1e-3`) or a line in `configs/`.
Presets change some defaults: `model=gpt2` uses `gpt2.yaml` in `configs/model/`.
They also set all settings without a default, except `data.path`: some sources need that from you.
"Kept on resume": a resumed run must have the same value.
Add `--cfg job` to a command to print all its values.
"""
CHOICES = """\
## Presets

The presets of `experiment`, `model`, `data`, and `optim`, and what each sets.
"""
OPEN = """\

## `callbacks`, `logger`, `strategy`, and `trainer`

These presets name classes and list some of their arguments. Other arguments need a plus,
as in `+trainer.profiler=simple`.
"""


EXTRA = """\
# Settings of the extra `{name}`

`python scripts/settings.py` writes this page, like that of [all other settings](settings.md).
"""


class Part(NamedTuple):
    """A part of a page, and the file that it describes."""

    file: Path
    text: str

    @property
    def extra(self) -> str | None:
        """The extra that has the file; None if it is the core's."""
        if not self.file.is_relative_to(EXTRAS):
            return None
        return self.file.relative_to(EXTRAS).parts[0]


def main() -> int:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def pages() -> dict[Path, str]:
    """Return each page of the reference as Markdown, by its file."""
    parts = list(all_parts())
    core = [part.text for part in parts if part.extra is None]
    written = {DOCS / "settings.md": "\n".join(core)}
    for name in installed():
        page_parts = [part.text.rstrip() + "\n" for part in parts if part.extra == name]
        presets = "".join(text for text in page_parts if text.startswith("- "))
        sections = [text for text in page_parts if not text.startswith("- ")]
        if presets:
            sections.append(f"## Presets\n\n{presets}")
        if page_parts:
            page = [EXTRA.format(name=name), *sections]
            written[DOCS / f"{name}_settings.md"] = "\n".join(page)
    return written


def all_parts() -> Iterator[Part]:
    """Yield the parts of all pages, in their order."""
    yield Part(ROOT, HEAD)
    yield section("## The run", Config)
    for schema in groups().values():
        if schema is not DataConfig:
            yield section(f"## `{schema.node}`", schema)
    yield Part(ROOT, "## `data`\n")
    yield from data_sections()
    yield Part(ROOT, CHOICES)
    for group in GROUPS:
        yield from choices(group)
    yield Part(ROOT, OPEN)
    for group in sorted(OPEN_GROUPS):
        yield from open_choices(group)


def section(heading: str, schema: type[Checked], bases: str = "") -> Part:
    """Return a heading, what a class is for, and the settings that it adds to its bases."""
    introduction = "" if about(schema) in heading else f"{about(schema)}."
    text = "".join(f"\n{line}\n" for line in [f"{introduction} {bases}".strip()] if line)
    rows = [setting_row(schema, item) for item in own_fields(schema)]
    table = table_of(("setting", "type", "default", "meaning"), rows) if rows else ""
    file = ROOT / "src" / Path(*schema.__module__.split(".")).with_suffix(".py")
    return Part(file, f"{heading}\n{text}{table}")


def own_fields(schema: type[Any]) -> Iterator[dataclasses.Field[Any]]:
    """Yield the settings that are new in a class or have a new meaning; nodes are not settings."""
    bases = filter(dataclasses.is_dataclass, schema.__mro__[1:])
    inherited = {meaning_of(item) for base in bases for item in dataclasses.fields(base)}
    for item in dataclasses.fields(schema):
        if "meaning" in item.metadata and meaning_of(item) not in inherited:
            yield item


def meaning_of(item: dataclasses.Field[Any]) -> tuple[str, str]:
    """Return a setting's name and meaning."""
    return item.name, item.metadata.get("meaning", "")


def setting_row(schema: type[Any], item: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the cells of a setting's row."""
    name = f"{schema.node}.{item.name}" if schema.node else item.name
    default_value = item.default
    if item.default_factory is not dataclasses.MISSING:
        default_value = item.default_factory()
    default = "" if default_value is MISSING else f"`{as_typed(default_value)}`"
    means = item.metadata["meaning"]
    means += "; kept on resume" * ((item.metadata["on_resume"] or schema.on_resume) == "kept")
    return f"`{name}`", values_of(schema, item), default.replace("``", ""), means


def values_of(schema: type[Any], item: dataclasses.Field[Any]) -> str:
    """Describe which values a setting accepts."""
    hint = get_type_hints(schema)[item.name]
    kinds = [hint.__name__] if isinstance(hint, type) else str(hint).split(" | ")
    limits = " and ".join(
        f"{rule.replace('_', ' ')} {limit}" for rule, limit in item.metadata["limits"].items()
    )
    chosen = ", ".join(f"`{choice}`" for choice in item.metadata["choices"] or ())
    types = [TYPES[kind.partition("[")[0]] for kind in kinds if kind != "None"]
    values = chosen or f"{'; or '.join(types)} {limits}".rstrip()
    return f"{values}; or null" if "None" in kinds else values


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table, which begins with an empty line."""
    names = tuple(head)
    lines = [" | ".join(cells) for cells in (names, ["---"] * len(names), *rows)]
    return "".join(["\n", *(f"| {line} |\n" for line in lines)])


def data_sections() -> Iterator[Part]:
    """Yield a section for each data source, after those for what several have in common."""
    names = {schema: f"### `data={name}`" for name, schema in data_choices().items()}
    written: set[type[Any]] = set()
    for source in names:
        for schema in reversed(source.__mro__):
            is_new = issubclass(schema, DataConfig) and schema not in written
            if is_new and (schema in names or any(own_fields(schema))):
                written.add(schema)
                heading = names.get(schema) or f"### {SHARED[schema.__name__]}"
                yield section(heading, schema, also(schema))


def also(schema: type[Any]) -> str:
    """Say which other settings a source accepts: those of the nearest class that has some."""
    for base in schema.__mro__[1:]:
        if base.__name__ in SHARED:
            return f"Also accepts the settings of {SHARED[base.__name__].lower()}."
    return ""


def about(schema: type[Any] | None) -> str:
    """Return what a class is for, without the period."""
    return (schema.__doc__ or "").splitlines()[0].rstrip(".")


def choices(group: str) -> Iterator[Part]:
    """Yield each choice of a group and the settings that it makes."""
    for file in yaml_files(group).values():
        sets = " ".join(f"`{word}`" for word in settings_in(file))
        text = f"`{group}={file.stem}`: {header(file)}"
        yield Part(file, f"- {text}\n  {sets}" if sets else f"- {text}")


def header(file: Path) -> str:
    """Return the comment at the top of a YAML file."""
    lines = (line for line in file.read_text("utf-8").splitlines() if "@package" not in line)
    comment = takewhile(lambda line: line.startswith("# ") and "extra " not in line, lines)
    return " ".join(line.removeprefix("# ").strip() for line in comment)


def settings_in(file: Path) -> Iterator[str]:
    """Yield a YAML file's settings as overrides, with its choices of groups first."""
    content = yaml.safe_load(file.read_text("utf-8")) or {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            ((group, choice),) = entry.items()
            if not group.startswith("optional "):  # what an extra may add
                yield f"{group.removeprefix('override /')}={choice}"
    is_whole = "@package _global_" in file.read_text("utf-8")
    group = "" if is_whole else f"{file.parent.name}."
    yield from (f"{name}={as_typed(value)}" for name, value in flat(content, group))


def open_choices(group: str) -> Iterator[Part]:
    """Yield a section for each choice of an open group, with the settings in its file."""
    for file in yaml_files(group).values():
        known = yaml.safe_load(file.read_text("utf-8")).get("defaults", ["_self_"])
        base = f" Also accepts settings of `{group}={known[0]}`." if known[0] != "_self_" else ""
        about = f"{header(file)}{base}".strip() or "The default choice."
        yield Part(file, f"### `{group}={file.stem}`\n\n{about}\n{table_in(file, group)}")


def table_in(file: Path, group: str) -> str:
    """Format the settings in a YAML file as a table; an empty string if there are none."""
    rows = list(listed(file, group))
    return table_of(("setting", "default", "meaning"), rows) if rows else ""


def listed(file: Path, group: str) -> Iterator[tuple[str, ...]]:
    """Yield name, default, and meaning of each setting in a YAML file."""
    parents: list[str] = [group]
    for line in file.read_text("utf-8").splitlines():
        match = LINE.fullmatch(line)
        if not match or match[2] in ("_target_", "defaults"):
            continue
        depth = len(match[1]) // 2
        parents[depth + 1 :] = [match[2]]
        if match[3]:
            value = yaml.safe_load(match[3])
            meaning = (match[4] or "").replace(" | ", ", ")
            yield f"`{'.'.join(parents)}`", f"`{as_typed(value)}`", meaning


if __name__ == "__main__":
    sys.exit(main())
