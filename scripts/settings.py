#!/usr/bin/env python3
"""Write docs/settings.md from the schema in config.py and the choices in configs/.

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

from lockstep_gpt.config import (
    MISSING,
    OPEN_GROUPS,
    Checked,
    Config,
    DataConfig,
    as_typed,
    data_choices,
)
from lockstep_gpt.registry import additions, resolved
from lockstep_gpt.run.directory import flat

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, PAGE = ROOT / "configs", ROOT / "docs/settings.md"
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


class Part(NamedTuple):
    """A part of the page, and the file that it describes."""

    file: Path
    text: str


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


def page() -> str:
    """Return the whole reference as Markdown."""
    own = [each for each in Checked.__subclasses__() if each.node]
    parts = [Part(ROOT, HEAD), section("## The run", Config)]
    parts += [part for each in own if each is not DataConfig for part in own_sections(each)]
    parts += [Part(ROOT, "## `data`\n"), *data_sections(), *[*own_sections(DataConfig)][1:]]
    parts += [Part(ROOT, CHOICES), *(part for group in GROUPS for part in choices(group))]
    parts += [
        Part(ROOT, OPEN),
        *(part for group in sorted(OPEN_GROUPS) for part in open_choices(group)),
    ]
    # template-only: begin
    parts = list(map(in_markers, parts))
    if (last := parts[-1].text).startswith("<!--"):  # the empty line before it belongs to it
        begin, _, rest = last.partition("\n")
        moved = f"{begin}\n\n{rest}\n".replace("\n\n<!--", "\n<!--")
        parts[-2:] = [Part(ROOT, parts[-2].text + moved)]
    # template-only: end
    return "\n".join(part.text for part in parts)


# template-only: begin
def in_markers(part: Part) -> Part:
    """Put an extra's part in markers, so that a project without the extra does not mention it."""
    if not (ROOT / "hooks").is_dir():  # a source distribution does not contain the template
        return part
    sys.path.append(str(ROOT))
    from hooks.answers import EXTRAS

    name = part.file.relative_to(ROOT).as_posix()
    for extra, paths in EXTRAS.items():
        if name.startswith(paths):
            begin, end = (f"<!-- extra {extra}: {word} -->\n" for word in ("begin", "end"))
            return Part(part.file, f"{begin}{part.text}\n{end.rstrip()}")
    return part


# template-only: end
def own_sections(schema: type[Checked]) -> Iterator[Part]:
    """Yield the section of a class with its own place in the tree, and the sections of extras."""
    yield section(f"## `{schema.node}`", schema)
    for table in additions("SETTINGS"):
        if schema.node in table:
            yield section(f"### More of `{schema.node}`", resolved(table[schema.node]))


def section(heading: str, schema: type[Checked], bases: str = "") -> Part:
    """Return a heading, what a class is for, and the settings that it adds to its bases."""
    own = "" if about(schema) in heading else f"{about(schema)}."
    text = "".join(f"\n{line}\n" for line in [f"{own} {bases}".strip()] if line)
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
    given = item.default
    if item.default_factory is not dataclasses.MISSING:
        given = item.default_factory()
    default = "" if given is MISSING else f"`{as_typed(given)}`"
    means = item.metadata["meaning"]
    means += "; kept on resume" * ((item.metadata["on_resume"] or schema.on_resume) == "kept")
    return f"`{name}`", values_of(schema, item), default.replace("``", ""), means


def values_of(schema: type[Any], item: dataclasses.Field[Any]) -> str:
    """Describe which values a setting accepts."""
    hint = get_type_hints(schema)[item.name]
    kind, *null = [hint.__name__] if isinstance(hint, type) else str(hint).split(" | ")
    limits = " and ".join(
        f"{rule.replace('_', ' ')} {limit}" for rule, limit in item.metadata["limits"].items()
    )
    chosen = ", ".join(f"`{choice}`" for choice in item.metadata["choices"] or ())
    values = chosen or f"{TYPES[kind.partition('[')[0]]} {limits}".rstrip()
    return f"{values}; or null" if null else values


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table, which begins with an empty line."""
    names = tuple(head)
    lines = [" | ".join(cells) for cells in (names, ["---"] * len(names), *rows)]
    return "".join(["\n", *(f"| {line} |\n" for line in lines)])


def data_sections() -> Iterator[Part]:
    """Yield a section for each data source, after those for what several have in common."""
    names = {schema: f"### `data={name}`" for name, schema in data_choices().items()}
    shown: set[type[Any]] = set()
    for source in names:
        for schema in reversed(source.__mro__):
            is_new = issubclass(schema, DataConfig) and schema not in shown
            if is_new and (schema in names or any(own_fields(schema))):
                shown.add(schema)
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
    for file in sorted((CONFIGS / group).glob("*.yaml")):
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
    group = "" if file.parent.name == "experiment" else f"{file.parent.name}."
    yield from (f"{name}={as_typed(value)}" for name, value in flat(content, group))


def open_choices(group: str) -> Iterator[Part]:
    """Yield a section for each choice of an open group, with the settings in its file."""
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        known = yaml.safe_load(file.read_text("utf-8")).get("defaults", ["_self_"])
        base = f" Also accepts settings of `{group}={known[0]}`." if known[0] != "_self_" else ""
        about = f"{header(file)}{base}".strip() or "The default choice."
        yield Part(file, f"### `{group}={file.stem}`\n\n{about}\n{table_in(file, group)}")
        added = file.parent / "added" / file.name
        if added.exists():
            more = f"### More of `{group}={file.stem}`\n\n{header(added)}"
            yield Part(added, f"{more}\n{table_in(added, group)}")


def table_in(file: Path, group: str) -> str:
    """Format the settings in a YAML file as a table; an empty string if there are none."""
    rows = list(listed(file, group))
    return table_of(("setting", "default", "meaning"), rows) if rows else ""


def listed(file: Path, group: str) -> Iterator[tuple[str, ...]]:
    """Yield name, default, and meaning of each setting in a YAML file."""
    parents: list[str] = [group]
    for line in file.read_text("utf-8").splitlines():
        found = LINE.fullmatch(line)
        if not found or found[2] in ("_target_", "defaults"):
            continue
        depth = len(found[1]) // 2
        parents[depth + 1 :] = [found[2]]
        if found[3]:
            value = yaml.safe_load(found[3])
            meaning = (found[4] or "").replace(" | ", ", ")
            yield f"`{'.'.join(parents)}`", f"`{as_typed(value)}`", meaning


if __name__ == "__main__":
    sys.exit(main())
