"""Makes a project: copies the living one, renames it, and leaves out what wasn't chosen."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hooks.answers import EXTRAS, QUESTIONS, Answers, Refused, places

PACKAGE, SLUG = "lockstep_gpt", "lockstep-gpt"  # ours; they mean nothing else anywhere
# What belongs only to the template; a name that ends with a slash is a folder.
TEMPLATE_ONLY = (
    ".ci/",
    ".github/ISSUE_TEMPLATE/",
    ".github/workflows/projects.yml",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "cookiecutter.json",
    "docs/first_run.png",
    "docs/lockstep.png",
    "docs/recipe.md",
    "docs/speedrun.md",
    "hooks/",
    "scripts/benchmark.py",
    "scripts/benchmarks/",
    "scripts/deletions.py",
    "scripts/scaling.py",
    "scripts/speedrun.py",
    "scripts/speedrun/",
    "scripts/time_to_loss.py",
    "tests/extras/pages/test_inductor.py",
    "tests/gpu_without_gpu/test_compiled_variants.py",
    "tests/ladder/test_compare.py",
    "tests/ladder/test_pitfalls.py",
    "tests/ladder/test_readme.py",
    "tests/model/test_against_transformers.py",
    "tests/scripts/test_dev.py",
    "tests/scripts/test_environments.py",
    "tests/scripts/test_slurm.py",
    "tests/scripts/test_speedrun.py",
    "tests/template/",
    "tests/test_nodes.py",
    "{{cookiecutter.project_slug}}/",
)
# What is at the root of this repository; without git, nothing else there is copied.
OURS = {name.partition("/")[0] for name in TEMPLATE_ONLY} | {
    ".devcontainer",
    ".editorconfig",
    ".env.example",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    ".python-version",
    "AGENTS.md",
    "Dockerfile",
    "configs",
    "constraints.txt",
    "pyproject.toml",
    "src",
}
# Files with lines for the template alone or for one extra; all other files are the same everywhere.
MARKED = ("README.md", "docs/README.md", "pyproject.toml")
MARKER = re.compile(r"(template-only|extra (\w+)): (begin|end)\b")
ROW_MARKER = re.compile(r" <!-- (template-only|extra (\w+)) -->")  # a line of it would end a table
OWNER = re.compile(r"\d{4} The Lockstep GPT authors|\[yyyy\] \[name of copyright owner\]")
README = "{{cookiecutter.project_slug}}/README.md"
FIELD = re.compile(r"\{\{ cookiecutter\.(\w+) \}\}")
RECORD = ".template.json"  # in a project: its template, the commit, the answers
SECTION = re.compile(r"^<!-- section of the living README: (.+) -->$", flags=re.MULTILINE)


def make(
    root: Path,
    target: Path,
    answers: Answers,
    origin: Mapping[str, Any] | None = None,
    keep: bool = False,
    under_cruft: bool = False,
) -> str:
    """Make a project in `target`.

    Args:
        root: the template.
        target: the new project's folder; the user's own files in it stay.
        answers: the answers for this project.
        origin: what the project records of its template, if it differs from what `root` shows.
        keep: don't overwrite existing files.
        under_cruft: don't use git: cruft adds its own file first, and compares folders.

    Returns:
        A text for the screen: what was made, and the next commands.

    Raises:
        Refused: a file would be written through a link.
    """
    contents = {
        _placed(name, answers): _content(name, (root / name).read_bytes(), answers)
        for name in refuse_links(root, target, answers)
    }
    contents["README.md"] = _readme(root, answers).encode()
    if text := _license(root, answers):
        contents["LICENSE"] = text.encode()
    contents[RECORD] = _record(answers, origin or origin_of(root)).encode()
    for name, content in contents.items():
        if not (keep and _is_of_the_user(target / name)):
            _write(target / name, content)
    history = _first_commit(target, answers) if answers.git_init and not under_cruft else ""
    return _screen(target, answers, len(contents), history)


def _names(root: Path, target: Path, answers: Answers) -> list[str]:
    found = committed_files(root)
    if target.is_relative_to(root):
        found = [name for name in found if not (root / name).is_relative_to(target)]
    patterns = [f"{name}*" if name.endswith("/") else name for name in TEMPLATE_ONLY]
    for extra in EXTRAS:
        if extra not in answers.extras:
            patterns += places(extra)
    left_out = re.compile("|".join(map(fnmatch.translate, patterns)))
    return [name for name in found if not left_out.match(name)]


def _placed(name: str, answers: Answers) -> str:
    return name.replace(PACKAGE, answers.package_name)


def refuse_links(root: Path, target: Path, answers: Answers) -> list[str]:
    """Return the names of the template's files for a project in `target`.

    Raises:
        Refused: one of the project's files would be written through a link.
    """
    names = _names(root, target, answers)
    paths: dict[PurePosixPath, None] = {}  # each once, in order
    for name in [*(_placed(name, answers) for name in names), "README.md", "LICENSE", RECORD]:
        path = PurePosixPath(name)
        paths |= dict.fromkeys((path, *path.parents[:-1]))
    for path in paths:
        if (target / path).is_symlink():
            raise Refused(f"{path} is a link, and files are not written through links; remove it")
    return names


def _is_of_the_user(path: Path) -> bool:
    """Return whether a file was there before: cookiecutter may have just written the README."""
    return path.exists() and not SECTION.search(path.read_bytes().decode("utf-8", "replace"))


def origin_of(root: Path, fetched: str = "") -> dict[str, Any]:
    """Return where a template comes from: its URL or path, its commit, and its folder in it.

    Args:
        root: the local folder of the template.
        fetched: where cookiecutter cloned or unzipped it from; empty if it did neither.
    """
    git = _git(root, "rev-parse", "--show-prefix", "HEAD") if shutil.which("git") else None
    if git is None or git.returncode or not _listed(root):
        place, folder, commit = fetched or str(root.resolve()), "", None
    else:
        folder, commit = git.stdout.split("\n")[:2]
        top = root.resolve().parents[folder.count("/") - 1] if folder else root.resolve()
        place = (fetched and _git(root, "config", "remote.origin.url").stdout.strip()) or str(top)
    return {"template": _without_secrets(place), "commit": commit, "directory": folder.strip("/")}


def _without_secrets(url: str) -> str:
    """Remove the user and password or token from a URL: the record is committed."""
    return re.sub(r"(?<=://)[^/@]+@", "", url)


def _record(answers: Answers, origin: Mapping[str, Any]) -> str:
    """Return the record that `scripts/dev.py update` reads, as JSON."""
    given = {name: getattr(answers, name) for name in QUESTIONS} | {"extras": answers.asked}
    record = {**origin, "answers": given}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def committed_files(root: Path) -> list[str]:
    """Return the files that git knows, sorted by name; other files may be private.

    Without a repository, as in a zip, return the files of `OURS` that aren't junk.
    """
    if shutil.which("git") and (listed := _listed(root)):
        return sorted(name for name in listed if (root / name).is_file())
    ignored = _ignored(root)
    found = []
    for folder, folders, files in os.walk(root):
        place = PurePosixPath(Path(folder).relative_to(root).as_posix())
        if place == PurePosixPath():
            folders[:] = [name for name in folders if name in OURS]
            files = [name for name in files if name in OURS]
        folders[:] = [name for name in folders if not _is_junk(place / name, ignored)]
        found += [str(place / name) for name in files if not _is_junk(place / name, ignored)]
    return sorted(found)


def _listed(root: Path) -> list[str]:
    listing = _git(root, "ls-files", "-z").stdout
    return [name for name in listing.split("\0") if name]


def _ignored(root: Path) -> list[str]:
    lines = (root / ".gitignore").read_text("utf-8").splitlines()
    return [".git/", *(line for line in lines if not line.startswith("#"))]


def _is_junk(path: PurePosixPath, ignored: Iterable[str]) -> bool:
    """Match the few patterns that our .gitignore uses: `name`, `name/`, and `/name/`."""
    if path.name.startswith(".") and str(path) not in OURS:
        return True
    for pattern in ignored:
        tested = str(path) if pattern.startswith("/") else path.name
        if fnmatch.fnmatchcase(tested, pattern.strip("/")):
            return True
    return False


def _content(name: str, content: bytes, answers: Answers) -> bytes:
    """Return the new project's version of a file of ours; a binary file doesn't change."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return content
    if name in MARKED:
        text = _kept(text, answers)
    text = _renamed(text, answers)
    for pattern, line in EDITS.get(name, {}).items():
        text = _replaced_once(name, text, pattern, line(answers))
    return text.encode()


def _kept(text: str, answers: Answers) -> str:
    """Drop the template's own lines, those of extras that weren't chosen, and all markers."""
    lines, dropping = [], False
    for line in text.splitlines(keepends=True):
        if marker := MARKER.search(line):
            dropping = marker[3] == "begin" and marker[2] not in answers.extras
        elif not dropping:
            row = ROW_MARKER.search(line)
            if row is None or row[2] in answers.extras:
                lines.append(ROW_MARKER.sub("", line))
    return "".join(lines)


def _renamed(text: str, answers: Answers) -> str:
    return text.replace(PACKAGE, answers.package_name).replace(SLUG, answers.project_slug)


def _replaced_once(name: str, text: str, pattern: str, line: str) -> str:
    """Replace the one line that `pattern` matches from its start; an empty `line` removes it."""
    found = re.findall(rf"^{pattern}.*\n", text, flags=re.MULTILINE)
    assert len(found) == 1, f"{name}: {pattern} matches {len(found)} lines"
    return text.replace(found[0], f"{line}\n" if line else "")


def _quoted(value: str) -> str:
    """Quote a line so that it is a string in JSON, TOML, and YAML."""
    return json.dumps(value, ensure_ascii=False)


def _authors(answers: Answers) -> str:
    email = f", email = {_quoted(answers.email)}" if answers.email else ""
    return f"authors = [{{ name = {_quoted(answers.author)}{email} }}]"


def _unless_unlicensed(line: str, answers: Answers) -> str:
    return line if answers.license != "none" else ""


# file -> start of a line -> the line in the new project
EDITS: dict[str, dict[str, Callable[[Answers], str]]] = {
    "pyproject.toml": {
        "description = ": lambda answers: f"description = {_quoted(answers.description)}",
        "authors = ": _authors,
        "license = ": lambda answers: _unless_unlicensed(
            f"license = {_quoted(answers.license)}", answers
        ),
        "license-files = ": lambda answers: _unless_unlicensed(
            'license-files = ["LICENSE"]', answers
        ),
    },
    "configs/logger/wandb.yaml": {
        "  project: ": lambda answers: f"  project: {_quoted(answers.wandb_project)}",
        "  entity: ": lambda answers: (
            f"  entity: {_quoted(answers.wandb_entity) if answers.wandb_entity else 'null'}"
            " # null: the account's default"
        ),
    },
    "docs/settings.md": {
        r"\| `logger.wandb.project` ": lambda answers: (
            f"| `logger.wandb.project` | `{answers.wandb_project}` |  |"
        ),
        r"\| `logger.wandb.entity` ": lambda answers: (
            f"| `logger.wandb.entity` | `{answers.wandb_entity or 'null'}` "
            "| null: the account's default |"
        ),
    },
    "configs/sweep.yaml": {
        "project: ": lambda answers: f"project: {_quoted(answers.wandb_project)}",
    },
}


def _readme(root: Path, answers: Answers) -> str:
    """Return the new README: its own text, and sections of the living one with their headings."""
    living = (root / "README.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", living, flags=re.MULTILINE))

    def section(match: re.Match[str]) -> str:
        text = f"## {match[1]}\n{sections[match[1]]}".rstrip("\n")
        return _renamed(_kept(text, answers), answers)

    own = SECTION.sub(section, (root / README).read_text("utf-8"))
    filled = FIELD.sub(lambda field: getattr(answers, field[1]), own)
    if answers.license != "none":
        filled += f"\n## License\n\n{answers.license}, see [LICENSE](LICENSE).\n"
    return re.sub(r"\n{3,}", "\n\n", filled).strip("\n") + "\n"


def _license(root: Path, answers: Answers) -> str:
    """Return the text of the chosen license with its year and owner; empty for `none`."""
    if answers.license == "none":
        return ""
    own = answers.license == "MIT"
    path = root / "LICENSE" if own else root / "hooks" / "licenses" / f"{answers.license}.txt"
    owner = f"{time.strftime('%Y')} {answers.author}"
    return OWNER.sub(lambda _: owner, path.read_text("utf-8"), count=1)


def _write(path: Path, content: bytes) -> None:
    """Write a file; unzipping drops executable bits, so they follow from the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if content.startswith(b"#!") else 0o644)


def _first_commit(target: Path, answers: Answers) -> str:
    """Make `target` a repository with one commit; return the outcome as text."""
    if not shutil.which("git"):
        return "; git is not installed, so there is no repository"
    if _git(target, "rev-parse", "--is-inside-work-tree").returncode == 0:
        return "; in the existing git repository"
    message = f"Start {answers.project_name} from its template"
    name = answers.author if re.search(r"\w", answers.author) else answers.project_slug
    who = {"user.name": name, "user.email": answers.email or answers.project_slug}
    unknown = [key for key in who if not _git(target, "config", key).stdout.strip()]
    quiet = ["-c", "commit.gpgsign=false", "-c", f"core.hooksPath={os.devnull}"]
    quiet += [word for key in unknown for word in ("-c", f"{key}={who[key]}")]
    _git(target, "-c", "init.defaultBranch=main", "init", "-q", check=True)
    _git(target, "add", "-A", check=True)
    _git(target, *quiet, "commit", "-q", "-m", message, check=True)
    return "; a git repository with its first commit"


def _git(folder: Path, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, even if it has another owner or another repository calls this."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(
        command, cwd=folder, env=clean, check=check, capture_output=True, encoding="utf-8"
    )


def _screen(target: Path, answers: Answers, files: int, history: str) -> str:
    terms = "no license" if answers.license == "none" else f"{answers.license} license"
    extras = " ".join(answers.extras) or "none"
    return f"""\
{target.name}: {files} files, package {answers.package_name}, {terms}, extras: {extras}{history}
next:
  cd {target.name}
  python3 scripts/dev.py train
  python3 scripts/dev.py test"""
