"""Makes a project: copies the living one and its engine, as contents.py renames it."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hooks.answers import QUESTIONS, Answers, Refused
from hooks.contents import ENGINE, PACKAGE, SECTION, license_text, new_content, new_readme

# What belongs only to the template; a name that ends with a slash is a folder.
TEMPLATE_ONLY = (
    ".ci/",
    ".github/ISSUE_TEMPLATE/",
    ".github/requirements/",
    ".github/workflows/projects.yml",
    ".github/workflows/release.yml",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "cookiecutter.json",
    "docs/coming_from.md",
    "docs/from_0_2.md",
    "docs/lockstep.png",
    "engine/tests/",
    "hooks/",
    "lab/",
    "{{cookiecutter.project_slug}}/",
)
# What is at the root of this repository; without git, nothing else there is copied.
OURS = {name.partition("/")[0] for name in TEMPLATE_ONLY} | {
    ".devcontainer",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "AGENTS.md",
    "Dockerfile",
    "configs",
    "constraints.txt",
    "docs",
    "engine",
    "pyproject.toml",
    "scripts",
    "src",
    "tests",
}
RECORD = ".template.json"  # in a project: its template, the commit, the answers
# How git makes the first commit, whatever the user's own settings are.
PLAIN = {
    "commit.gpgsign": "false",
    "core.hooksPath": os.devnull,
    "core.safecrlf": "false",  # it may refuse files whose line ends core.autocrlf changes
    "init.defaultBranch": "main",
}


def make(
    root: Path,
    target: Path,
    answers: Answers,
    origin: Mapping[str, Any] | None = None,
    keep: bool = False,
) -> str:
    """Make a project in `target`.

    Args:
        root: the template.
        target: the new project's folder; the user's own files in it stay.
        answers: the answers for this project.
        origin: what the project records of its template, if it differs from what `root` shows.
        keep: don't overwrite existing files.

    Returns:
        A text for the screen: what was made, and the next commands.

    Raises:
        Refused: a file would be written through a link.
    """
    contents = {
        _placed(name, answers): new_content(name, (root / name).read_bytes(), answers)
        for name in refuse_links(root, target, answers)
    }
    contents["README.md"] = new_readme(root, answers).encode()
    license_of_owner = license_text(root, answers)
    if license_of_owner:
        contents["LICENSE"] = license_of_owner.encode()
    contents[RECORD] = _record(answers, origin or origin_of(root)).encode()
    for name, content in contents.items():
        if not (keep and _is_of_the_user(target / name)):
            _write(target / name, content)
    history = ""
    if answers.git_init:
        history = _first_commit(target, contents, answers)
    own = [name for name in contents if not name.startswith(ENGINE)]
    return _screen(target, answers, len(own), history)


def _names(root: Path, target: Path) -> list[str]:
    names = committed_files(root)
    if target.is_relative_to(root):
        names = [name for name in names if not (root / name).is_relative_to(target)]
    patterns = [f"{name}*" if name.endswith("/") else name for name in TEMPLATE_ONLY]
    left_out = re.compile("|".join(map(fnmatch.translate, patterns)))
    return [name for name in names if not left_out.match(name)]


def _placed(name: str, answers: Answers) -> str:
    return name if name.startswith(ENGINE) else name.replace(PACKAGE, answers.package_name)


def refuse_links(root: Path, target: Path, answers: Answers) -> list[str]:
    """Return the names of the template's files for a project in `target`.

    Raises:
        Refused: one of the project's files would be written through a link.
    """
    names = _names(root, target)
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
    place = fetched or str(root.resolve())
    commit = None
    folder = ""
    if shutil.which("git"):
        git = _git(root, "rev-parse", "--show-prefix", "HEAD")
        if git.returncode == 0 and _listed(root):
            folder, commit = git.stdout.split("\n")[:2]
            place = _repository_of(root, folder, fetched)
    return {"template": _without_secrets(place), "commit": commit, "directory": folder.strip("/")}


def _repository_of(root: Path, folder: str, fetched: str) -> str:
    """Return the URL that the template was cloned from, or the path of its local repository."""
    if fetched:
        remote = _git(root, "remote").stdout.strip()  # clone.defaultRemoteName may name it
        url = _git(root, "config", f"remote.{remote}.url").stdout.strip()
        if url:
            return url
    if not folder:
        return str(root.resolve())
    return str(root.resolve().parents[folder.count("/") - 1])


def _without_secrets(url: str) -> str:
    """Remove the user and password or token from a URL: the record is committed."""
    return re.sub(r"(?<=://)[^/@]+@", "", url)


def _record(answers: Answers, origin: Mapping[str, Any]) -> str:
    """Return the record that `scripts/dev.py update` reads, as JSON."""
    values = {name: getattr(answers, name) for name in QUESTIONS}
    record = {**origin, "answers": values}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def committed_files(root: Path) -> list[str]:
    """Return the files that git knows, sorted by name; other files may be private.

    Without a repository, as in a zip, return the files of `OURS` that aren't junk.
    """
    listed = _listed(root) if shutil.which("git") else []
    if listed:
        return sorted(name for name in listed if (root / name).is_file())
    ignored = _ignored(root)
    names = []
    for folder, folders, files in os.walk(root):
        place = PurePosixPath(Path(folder).relative_to(root).as_posix())
        if place == PurePosixPath():
            folders[:] = [name for name in folders if name in OURS]
            files = [name for name in files if name in OURS]
        folders[:] = [name for name in folders if not _is_junk(place / name, ignored)]
        names += [str(place / name) for name in files if not _is_junk(place / name, ignored)]
    return sorted(names)


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
        candidate = str(path) if pattern.startswith("/") else path.name
        if fnmatch.fnmatchcase(candidate, pattern.strip("/")):
            return True
    return False


def _write(path: Path, content: bytes) -> None:
    """Write a file; unzipping drops executable bits, so they follow from the content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if content.startswith(b"#!") else 0o644)


def _first_commit(target: Path, names: Iterable[str], answers: Answers) -> str:
    """Make `target` a repository with one commit; return the outcome as text.

    It has all files of these `names`, also those that the user's own ignore files name, and the
    user's files that were there before, unless they are ignored.
    """
    if not shutil.which("git"):
        return "; git is not installed, so there is no repository"
    if _git(target, "rev-parse", "--is-inside-work-tree").returncode == 0:
        return "; in the existing git repository"
    message = f"Start {answers.project_name} from its template"
    name = answers.author if re.search(r"\w", answers.author) else answers.project_slug
    who = {"user.name": name, "user.email": answers.email or answers.project_slug}
    unknown = [key for key in who if not _git(target, "config", key).stdout.strip()]
    who = {**PLAIN, **{key: who[key] for key in unknown}}
    plain = [word for key, value in who.items() for word in ("-c", f"{key}={value}")]
    _git(target, *plain, "init", "-q", check=True)
    _git(target, *plain, "add", "-A", check=True)
    # Unlike `add`, this reads no ignore file: neither the user's, nor one of init.templateDir.
    words = ("update-index", "--add", "-z", "--stdin")
    _git(target, *plain, *words, check=True, typed="\0".join(names))
    _git(target, *plain, "commit", "-q", "-m", message, check=True)
    return "; a git repository with its first commit"


def _git(
    folder: Path, *arguments: str, check: bool = False, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, even if it has another owner or another repository calls this.

    Args:
        folder: where.
        arguments: of git.
        check: raise an error if git fails.
        typed: what git reads.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=clean,
        check=check,
        input=typed,
        capture_output=True,
        encoding="utf-8",
    )


def _screen(target: Path, answers: Answers, own: int, history: str) -> str:
    terms = "no license" if answers.license == "none" else f"{answers.license} license"
    return f"""\
{target.name}: {own} files and engine/, package {answers.package_name}, {terms}{history}
next:
  cd {target.name}
  python3 scripts/dev.py train
  python3 scripts/dev.py test"""
