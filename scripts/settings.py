#!/usr/bin/env python3
"""Write docs/settings.md from the schema in config.py and the choices in configs/.

The settings of an extra are in a section at the end, which hooks/ cuts from projects without it.

usage: python scripts/settings.py
"""

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lockstep_gpt.config import MISSING, OPEN_GROUPS, Config, groups
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.data.data_settings import DataConfig, data_choices
from lockstep_gpt.registry import installed
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
# Indentation, name, value, and comment of a line in our YAML files.
LINE = re.compile(r"( *)(\w+):(?: +([^#]+?))?(?: +# (.+))?")
HEAD = """\
# Every setting

A setting is an argument of a command (`optim.lr=1e-3`) or a line in `configs/`. A wrong value
causes an error that names the allowed ones. `--cfg job` prints all values of a command. A preset,
such as `model=gpt2`, is a file in `configs/`. It changes defaults, and sets what has no default
here. "kept": a resumed run must have the same value.

`python3 scripts/dev.py docs` writes this page. Run it after you change a setting.
"""
CHOICES = """\
## Presets
"""
OPEN = """\
## `callbacks`, `logger`, `strategy`, and `trainer`

These presets name classes and some of their arguments. Others need a plus, as in
`+trainer.profiler=simple`.
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
    """Write the page."""
    path = DOCS / "settings.md"
    path.write_text(page(), encoding="utf-8")
    print(path.relative_to(ROOT))
    return 0


def page() -> str:
    """Return the reference as Markdown: what every project has, then a section for each extra."""
    parts = list(all_parts())
    sections = joined(part for part in parts if part.extra is None)
    for name in installed():
        of_extra = joined(part for part in parts if part.extra == name)
        if of_extra:
            deeper = re.sub(r"^## ", "### ", of_extra, flags=re.MULTILINE)
            sections += f"\n## Extra `{name}`\n\n{deeper}"
    return sections


def joined(parts: Iterable[Part]) -> str:
    """Join parts with empty lines, but not the lines of a list."""
    text = "\n".join(part.text for part in parts)
    return re.sub(r"^(- .+\n)\n(?=- )", r"\1", text, flags=re.MULTILINE)


def all_parts() -> Iterator[Part]:
    """Yield the parts of the page, in their order."""
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


def section(heading: str, schema: type[Checked], introduction: str = "") -> Part:
    """Return a heading, what a class is for, and the settings that it adds to its bases."""
    text = f"\n{introduction or f'{about(schema)}.'}\n"
    rows = [setting_row(schema, item) for item in own_fields(schema)]
    table = table_of(("setting", "default", "meaning"), rows) if rows else ""
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
    choices = ", ".join(f"`{choice}`" for choice in item.metadata["choices"] or ())
    means = f"{choices}: {item.metadata['meaning']}".removeprefix(": ")
    means += "; kept" * ((item.metadata["on_resume"] or schema.on_resume) == "kept")
    return f"`{name}`", default.replace("``", ""), means


def table_of(names: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table, which begins with an empty line."""
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in (names, *rows))
    return "".join(["\n", head, f"|{'---|' * len(names)}\n", *body])


def data_sections() -> Iterator[Part]:
    """Yield a section for each data source, after those for what several have in common."""
    names = {schema: name for name, schema in data_choices().items()}
    files = yaml_files("data")
    written: set[type[Any]] = set()
    for source in names:
        for schema in reversed(source.__mro__):
            is_new = issubclass(schema, DataConfig) and schema not in written
            if is_new and schema in names:
                text = header(files[names[schema]]) or f"{about(schema)}."
                yield section(f"### `data={names[schema]}`", schema, f"{text} {also(schema)}")
            elif is_new and any(own_fields(schema)):
                text = also(schema) or f"{about(schema)}."
                yield section(f"### {SHARED[schema.__name__]}", schema, text)
            written.add(schema)


def also(schema: type[Any]) -> str:
    """Say which other settings a source accepts: those of the nearest class that has some."""
    for base in schema.__mro__[1:]:
        if base.__name__ in SHARED:
            return f"Also the settings of {SHARED[base.__name__].lower()}."
    return ""


def about(schema: type[Any] | None) -> str:
    """Return what a class is for, without the period."""
    return (schema.__doc__ or "").splitlines()[0].rstrip(".")


def choices(group: str) -> Iterator[Part]:
    """Yield each choice of a group, with a link to the file that has its settings."""
    for file in yaml_files(group).values():
        if group != "data" or file.stem not in data_choices():  # which have sections
            place = file.relative_to(ROOT).as_posix()
            yield Part(file, f"- [`{group}={file.stem}`](../{place}): {header(file)}\n")


def header(file: Path) -> str:
    """Return the comment at the top of a YAML file."""
    lines = (line for line in file.read_text("utf-8").splitlines() if "@package" not in line)
    comment = takewhile(lambda line: line.startswith("# ") and "extra " not in line, lines)
    return " ".join(line.removeprefix("# ").strip() for line in comment)


def open_choices(group: str) -> Iterator[Part]:
    """Yield a section for each choice of an open group, with the settings in its file."""
    for file in yaml_files(group).values():
        (base,) = yaml.safe_load(file.read_text("utf-8")).get("defaults", ["_self_"])[:1]
        about = header(file) or "The default choice."
        rows = list(listed(file, group))
        if base != "_self_":
            about += f" Also the settings of `{group}={base}`."
            rows = [row for row in rows if row[-1]]  # without those of the base
        table = table_of(("setting", "default", "meaning"), rows) if rows else ""
        yield Part(file, f"### `{group}={file.stem}`\n\n{about}\n{table}")


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
