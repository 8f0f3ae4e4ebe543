"""Apply a later state of the template and keep the project's own changes: `dev.py update`.

usage: python3 scripts/dev.py update [TEMPLATE] [--to COMMIT]

TEMPLATE is a path or URL; the default is the one in .template.json. COMMIT is a commit, branch, or
tag; the default is the newest. The script generates the project twice with its own answers, at the
commit of the last update and at the new one, and git applies the difference as a cherry-pick. The
result is staged but not committed.

engine/ becomes the new one as a whole. If you have changed files of it, git merges these, and they
are named. Without an engine/, as with a release of it, the rest is updated.
Exit status: 0 all applied, 1 conflicts remain, 2 rejected, and nothing was changed.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = ".template.json"
ENGINE = "engine"
# How git does all of this, whatever the user's own settings are.
PLAIN = {
    "commit.gpgsign": "false",
    "core.hooksPath": os.devnull,
    "merge.renames": "true",
    # For our temporary commits, which serve only the merge; nobody sees them.
    "user.email": "update",
    "user.name": "update",
}
WRITING = ("add", "cherry-pick", "worktree")  # what these write has the line ends of the template
# How variables of git begin that say how to reach a server, or are settings. All others would name
# another repository, such as GIT_DIR, which git sets for a hook that calls us.
KEPT = (
    "GIT_ALLOW_PROTOCOL",
    "GIT_ASKPASS",
    "GIT_CONFIG",
    "GIT_HTTP_",
    "GIT_PROTOCOL",
    "GIT_PROXY_",
    "GIT_SSH",
    "GIT_SSL_",
    "GIT_TERMINAL_PROMPT",
)
# Why a file without markers is in conflict, by the states of it that git has.
WITHOUT_MARKERS = {
    "2": "  (yours, moved with its folder, which the template renamed)",
    "3": "  (the template's, moved with its folder, which you renamed)",
    "12": "  (you changed it, the template deleted it)",
    "13": "  (you deleted it, the template changed it)",
}


class Refused(Exception):  # noqa: N818 (it is what the person is told, no error of ours)
    """The reason why nothing was changed."""


def main(arguments: "list[str]", project: Path) -> int:
    """Update the project in `project`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="dev.py update",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("template", nargs="?", metavar="TEMPLATE", help="its path or URL")
    to = "commit, branch, or tag (default: the newest)"
    parser.add_argument("--to", metavar="COMMIT", help=to)
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="update-") as folder:
            return update(project, Path(folder), options)
    except Refused as refused:
        sys.stderr.write(f"dev.py: update: {refused}\n")
        return 2


def update(project: Path, folder: Path, options: argparse.Namespace) -> int:
    """Apply the changes of the template; return 1 if conflicts remain."""
    record = _recorded(project)
    changed = _git(project, "status", "--porcelain").splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise Refused(
            f"the working tree is not clean ({names}{more}); commit or stash this, then try again"
        )
    source = options.template or record["template"]
    clone = folder / "template"
    if Path(source).exists():
        source = str(Path(source).resolve())
    words = ["clone", "-q", "--no-checkout", "-o", "origin", source, str(clone)]
    done = _call(project, *words)
    if done.returncode:
        raise Refused(f"the template cannot be cloned: {' '.join(done.stderr.split())}")
    last = _commit(clone, record["commit"], source)
    new = _commit(clone, options.to or "HEAD", source)
    old_template = _checked_out(clone, folder / "old-template", last, record)
    new_template = _checked_out(clone, folder / "new-template", new, record)
    later = {**record, "template": source, "commit": new}
    _make(old_template, record, folder / "old")
    _make(new_template, later, folder / "new")
    if not _git(project, "ls-files", "--", ENGINE):  # what git ignores may be left of it
        for made in ("old", "new"):
            shutil.rmtree(folder / made / ENGINE, ignore_errors=True)
    shutil.copy(project / RECORD, folder / "old" / RECORD)  # every byte: it must not conflict
    place = _git(project, "rev-parse", "--show-prefix").strip()
    old = _state(project, folder, "old", place)
    change = _state(project, folder, "new", place, "-p", old)
    if _git(project, "rev-parse", f"{old}^{{tree}}") == _git(
        project, "rev-parse", f"{change}^{{tree}}"
    ):
        print(f"up to date with {source} at {new[:12]}")
        return 0
    _refuse_ignored(project, change)
    edited = _edited_engine(project, old, place)
    if edited:
        print(f"{ENGINE}/ has changes of yours, which git merges: {', '.join(edited)}")
    _apply(project, change)
    conflicts = _conflicts(project)
    print(_git(project, "diff", "--cached", "--stat=100", "HEAD"), end="")
    if new != last:
        print(f"from {last[:12]} to {new[:12]} of {source}")
    if conflicts:
        print("conflicts remain; resolve these, git add them, test, commit:")
        print("".join(f"  {name}{why}\n" for name, why in conflicts.items()), end="")
        return 1
    print("all applied and staged; next: python3 scripts/dev.py test, then git commit")
    return 0


def _apply(project: Path, change: str) -> None:
    """Apply a commit to the project, as far as there are no conflicts; stage it."""
    done = _call(project, "cherry-pick", "--no-commit", change)
    if done.returncode and not _conflicts(project):  # say, a folder that cannot be written
        raise Refused(f"git could not apply the changes: {' '.join(done.stderr.split())}")


def _refuse_ignored(project: Path, change: str) -> None:
    """Refuse if git ignores files of the project that the template has: it would replace them."""
    names = _listed(project, "ls-tree", "-r", "--name-only", change)
    ours = _listed(project, "ls-files")
    ignored = sorted(name for name in names - ours if os.path.lexists(project / name))
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        raise Refused(
            f"the template has {', '.join(ignored[:3])}{more}, which git ignores here, perhaps "
            "because of your global ignore file; git add --force and commit what is the project's, "
            "move what is yours, then try again"
        )


def _listed(project: Path, *words: str) -> "set[str]":
    return {name for name in _git(project, *words, "-z").split("\0") if name}


def _edited_engine(project: Path, old: str, place: str) -> "list[str]":
    """Return the files of the project's engine that differ from the old template's."""
    differ = _git(project, "diff", "--name-only", "--no-renames", old, "HEAD", "--", ENGINE)
    return [name[len(place) :] for name in differ.splitlines()]


def _conflicts(project: Path) -> "dict[str, str]":
    """Return the files in conflict: name -> why, if there are no markers in the file."""
    stages = {}  # name -> the states that git has: the old template's, the project's, the new one's
    for line in _git(project, "ls-files", "-u").splitlines():
        about, name = line.split("\t")
        stages[name] = stages.get(name, "") + about.split()[2]
    return {name: WITHOUT_MARKERS.get(stages[name], "") for name in sorted(stages)}


def _recorded(project: Path) -> dict:
    """Return the project's record of its template, or raise `Refused`."""
    if not (project / RECORD).is_file():
        raise Refused(f"{RECORD} is missing: only projects of the template can be updated")
    record = json.loads((project / RECORD).read_text("utf-8"))
    if not shutil.which("git") or _status(project, "rev-parse", "HEAD"):
        raise Refused(
            "needs the project in a git repository with a commit; run git init and commit"
        )
    if not record["commit"]:
        raise Refused(f"the template was a copy without git; write its commit into {RECORD}")
    return record


def _commit(clone: Path, name: str, source: str) -> str:
    """Return the id of a template's commit from its name, or from the name of a remote branch."""
    for revision in (name, f"origin/{name}"):
        if not _status(clone, "rev-parse", "-q", "--verify", f"{revision}^{{commit}}"):
            return _git(clone, "rev-parse", f"{revision}^{{commit}}").strip()
    raise Refused(f"{source} has no commit {name}; name a template that has it, or another commit")


def _checked_out(clone: Path, folder: Path, commit: str, record: dict) -> Path:
    """Check a commit of the template out in `folder`; return the template's folder in it."""
    _git(clone, "worktree", "add", "-q", "--detach", str(folder), commit)
    template = folder / record["directory"]
    if not (template / "hooks" / "generate.py").is_file():
        raise Refused(f"the template at {commit[:12]} is too old for this")
    return template


def _make(template: Path, record: dict, target: Path) -> None:
    """Generate the project from a state of the template, in `target`."""
    record_file = target.with_suffix(".json")
    record_file.write_text(json.dumps(record), "utf-8")
    script = str(template / "hooks" / "generate.py")
    _run(target.parent, [sys.executable, script, str(record_file), str(target)], "makes no project")


def _state(project: Path, folder: Path, name: str, place: str, *parent: str) -> str:
    """Create a commit that contains only `folder/name`, at `place`; return its id."""
    index = {"GIT_INDEX_FILE": str(folder / f"{name}.index")}
    work = {"GIT_WORK_TREE": str(folder / name), **index}
    work["GIT_DIR"] = _git(project, "rev-parse", "--absolute-git-dir").strip()
    _git(folder / name, "add", "-A", "-f", ".", **work)
    tree = _git(project, "write-tree", **index).strip()
    if place:
        Path(index["GIT_INDEX_FILE"]).unlink()
        _git(project, "read-tree", f"--prefix={place}", tree, **index)
        tree = _git(project, "write-tree", **index).strip()
    return _git(project, "commit-tree", "-m", f"The template, {name}", *parent, tree).strip()


def _git(folder: Path, *words: str, **environment: str) -> str:
    """Run git in `folder`; return its output, or raise `Refused`."""
    done = _call(folder, *words, **environment)
    if done.returncode:
        raise Refused(f"git {words[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _call(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run git in `folder`, even if another repository calls us."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(KEPT)
    }
    settings = {**PLAIN, "core.autocrlf": "false"} if words[0] in WRITING else PLAIN
    plain = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    return subprocess.run(
        ["git", *plain, *words],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        encoding="utf-8",
    )


def _status(folder: Path, *words: str) -> int:
    with contextlib.suppress(Refused):
        _git(folder, *words)
        return 0
    return 1


def _run(folder: Path, words: "list[str]", failure: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        errors = " ".join((done.stderr or done.stdout).split())
        raise Refused(f"the template {failure}: {errors}")
