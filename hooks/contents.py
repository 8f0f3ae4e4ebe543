"""Makes the content of a new project's files from those of the living one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from hooks.answers import Answers

# Our own names, which mean nothing else anywhere.
PACKAGE = "lockstep_gpt"
SLUG = "lockstep-gpt"
ENGINE = "engine/"  # the same in every project
# Files with lines for the template alone.
MARKED = (".github/dependabot.yml", "README.md", "pyproject.toml")
MARKER = re.compile(r"template-only: (begin|end)\b")
ROW_MARKER = " <!-- template-only -->"  # a line of it would end a table
OWNER = re.compile(r"\d{4} The Lockstep GPT authors|\[yyyy\] \[name of copyright owner\]")
README = "{{cookiecutter.project_slug}}/README.md"
FIELD = re.compile(r"\{\{ cookiecutter\.(\w+) \}\}")
SECTION = re.compile(r"^<!-- section of the living README: (.+) -->$", flags=re.MULTILINE)


def new_content(name: str, content: bytes, answers: Answers) -> bytes:
    """Return the new project's version of a file of ours.

    The engine's files don't change, nor do binary ones.
    """
    if name.startswith(ENGINE):
        return content
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return content
    if name in MARKED:
        text = _project_lines(text)
    text = _renamed(text, answers)
    for pattern, line in EDITS.get(name, {}).items():
        text = _replaced_once(name, text, pattern, line(answers))
    return text.encode()


def _project_lines(text: str) -> str:
    """Drop the template's own lines, and the markers around them."""
    lines = []
    dropping = False
    for line in text.splitlines(keepends=True):
        marker = MARKER.search(line)
        if marker:
            dropping = marker[1] == "begin"
        elif not dropping and ROW_MARKER not in line:
            lines.append(line)
    return "".join(lines)


def _renamed(text: str, answers: Answers) -> str:
    return text.replace(PACKAGE, answers.package_name).replace(SLUG, answers.project_slug)


def _replaced_once(name: str, text: str, pattern: str, line: str) -> str:
    """Replace the one line that `pattern` matches from its start; an empty `line` removes it."""
    lines = re.findall(rf"^{pattern}.*\n", text, flags=re.MULTILINE)
    assert len(lines) == 1, f"{name}: {pattern} matches {len(lines)} lines"
    if line:
        line += "\n"
    return text.replace(lines[0], line)


def _quoted(value: str) -> str:
    """Quote a line so that it is a string in JSON, TOML, and YAML."""
    return json.dumps(value, ensure_ascii=False)


def _authors(answers: Answers) -> str:
    name = _quoted(answers.author)
    if answers.email:
        return f"authors = [{{ name = {name}, email = {_quoted(answers.email)} }}]"
    return f"authors = [{{ name = {name} }}]"


def _license_line(answers: Answers) -> str:
    if answers.license == "none":
        return ""
    return f"license = {_quoted(answers.license)}"


def _license_files_line(answers: Answers) -> str:
    if answers.license == "none":
        return ""
    return 'license-files = ["LICENSE"]'


def _entity_line(answers: Answers) -> str:
    entity = "null"
    if answers.wandb_entity:
        entity = _quoted(answers.wandb_entity)
    return f"  entity: {entity} # null: the account's default"


# A new project starts with this. Its owner counts on, so an update must not change it.
VERSION = "0.1.0"
# file -> start of a line -> the line in the new project
EDITS: dict[str, dict[str, Callable[[Answers], str]]] = {
    "pyproject.toml": {
        'version = "[0-9]': lambda _: f'version = "{VERSION}"',
        "description = ": lambda answers: f"description = {_quoted(answers.description)}",
        "authors = ": _authors,
        "license = ": _license_line,
        "license-files = ": _license_files_line,
        "extend-exclude = ": lambda _: 'extend-exclude = ["engine"] # not this project\'s to lint',
    },
    f"src/{PACKAGE}/__init__.py": {
        "        version=": lambda _: f'        version="{VERSION}",  # as in pyproject.toml',
    },
    "configs/logger/wandb.yaml": {
        "  project: ": lambda answers: f"  project: {_quoted(answers.wandb_project)}",
        "  entity: ": _entity_line,
    },
    "configs/sweep.yaml": {
        "project: ": lambda answers: f"project: {_quoted(answers.wandb_project)}",
    },
}


def new_readme(root: Path, answers: Answers) -> str:
    """Return the new README: its own text, and sections of the living one with their headings."""
    living = (root / "README.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", living, flags=re.MULTILINE))

    def section(match: re.Match[str]) -> str:
        text = f"## {match[1]}\n{sections[match[1]]}".rstrip("\n")
        return _renamed(_project_lines(text), answers)

    readme = SECTION.sub(section, (root / README).read_text("utf-8"))
    filled = FIELD.sub(lambda field: getattr(answers, field[1]), readme)
    if answers.license != "none":
        filled += f"\n## License\n\n{answers.license}, see [LICENSE](LICENSE).\n"
    return re.sub(r"\n{3,}", "\n\n", filled).strip("\n") + "\n"


def license_text(root: Path, answers: Answers) -> str:
    """Return the text of the chosen license with its year and owner; empty for `none`."""
    if answers.license == "none":
        return ""
    if answers.license == "MIT":
        path = root / "LICENSE"  # ours
    else:
        path = root / "hooks" / "licenses" / f"{answers.license}.txt"
    owner = f"{time.strftime('%Y')} {answers.author}"
    return OWNER.sub(lambda _: owner, path.read_text("utf-8"), count=1)
