"""Apply a later state of the template and keep the project's own changes: `dev.py update`.

usage: python3 scripts/dev.py update [TEMPLATE] [--to COMMIT] [--extras NAMES]

TEMPLATE is a path or URL; the default is the one in .template.json. The script generates the
project twice with its own answers, at the commit of the last update and at the new one, and git
applies the difference as a cherry-pick. The result is staged but not committed.
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
# For our temporary commits, which serve only the merge; nobody sees them.
WHO = ["-c", "user.name=update", "-c", "user.email=update", "-c", "commit.gpgsign=false"]
PLAIN = [
    "-c",
    "core.autocrlf=false",
    "-c",
    "merge.renames=true",
    "-c",
    "core.hooksPath=" + os.devnull,
]


class Refused(Exception):  # noqa: N818 (it is what the person is told, no error of ours)
    """The reason why nothing was changed."""


def main(arguments: "list[str]", project: Path) -> int:
    """Update the project in `project`; return the exit status."""
    parser = argparse.ArgumentParser(prog="dev.py update", description=__doc__.split("\n")[0])
    parser.add_argument("template", nargs="?", metavar="TEMPLATE", help="its path or URL")
    parser.add_argument("--to", default="HEAD", metavar="COMMIT", help="a commit, branch or tag")
    parser.add_argument(
        "--extras", metavar="NAMES", help="all, none, or names; replaces the earlier ones"
    )
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="update-") as folder:
            return update(project, Path(folder), options.template, options.to, options.extras)
    except Refused as refused:
        sys.stderr.write(f"dev.py: update: {refused}\n")
        return 2


def update(project: Path, folder: Path, template: str, to: str, extras: str) -> int:
    """Apply the changes of the template; return 1 if conflicts remain."""
    record = _recorded(project)
    if _git(project, "status", "--porcelain").strip():
        raise Refused("the working tree is not clean; commit or stash your changes, then try again")
    source = template or record["template"]
    clone = folder / "template"
    if Path(source).exists():
        source = str(Path(source).resolve())
    _run(project, ["git", "clone", "-q", "--no-checkout", source, str(clone)], "cannot be cloned")
    last, new = (_commit(clone, name, source) for name in (record["commit"], to))
    answers = {**record["answers"], **({"extras": extras} if extras else {})}
    later = {**record, "template": source, "commit": new, "answers": answers}
    _make(clone, folder, record, "old")
    _make(clone, folder, later, "new")
    shutil.copy(project / RECORD, folder / "old" / RECORD)  # every byte: it must not conflict
    place = _git(project, "rev-parse", "--show-prefix").strip()
    old = _state(project, folder, "old", place)
    change = _state(project, folder, "new", place, "-p", old)
    if _git(project, "rev-parse", f"{old}^{{tree}}") == _git(
        project, "rev-parse", f"{change}^{{tree}}"
    ):
        print(f"up to date with {source} at {new[:12]}")
        return 0
    done = subprocess.run(
        ["git", *WHO, *PLAIN, "cherry-pick", "--no-commit", change],
        cwd=project,
        capture_output=True,
        text=True,
    )
    conflicts = sorted(
        {line.split("\t")[1] for line in _git(project, "ls-files", "-u").splitlines()}
    )
    if done.returncode and not conflicts:  # say, an ignored file in the way; git changed nothing
        raise Refused(f"git could not apply the changes: {' '.join(done.stderr.split())}")
    print(_git(project, "diff", "--cached", "--stat=100", "HEAD"), end="")
    print(f"from {last[:12]} to {new[:12]} of {source}")
    if conflicts:
        print("conflicts remain; resolve these, git add them, test, commit:")
        print("".join(f"  {name}\n" for name in conflicts), end="")
        return 1
    print("all applied and staged; next: python3 scripts/dev.py test, then git commit")
    return 0


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
    for each in (name, f"origin/{name}"):
        if not _status(clone, "rev-parse", "-q", "--verify", f"{each}^{{commit}}"):
            return _git(clone, "rev-parse", f"{each}^{{commit}}").strip()
    raise Refused(f"{source} has no commit {name}; name a template that has it, or another commit")


def _make(clone: Path, folder: Path, record: dict, name: str) -> None:
    """Generate the project from a state of the template, in `folder/name`."""
    state = folder / f"{name}-template"
    _git(clone, "worktree", "add", "-q", "--detach", str(state), record["commit"])
    told = folder / f"{name}.json"
    told.write_text(json.dumps(record), "utf-8")
    script = state / record["directory"] / "hooks" / "generate.py"
    if not script.is_file():
        raise Refused(f"the template at {record['commit'][:12]} is too old for this; use cruft")
    _run(folder, [sys.executable, str(script), str(told), str(folder / name)], "makes no project")


def _state(project: Path, folder: Path, name: str, place: str, *parent: str) -> str:
    """Create a commit that contains only `folder/name`, at `place`; return its id."""
    index = {"GIT_INDEX_FILE": str(folder / f"{name}.index")}
    work = {"GIT_WORK_TREE": str(folder / name), **index}
    work["GIT_DIR"] = _git(project, "rev-parse", "--absolute-git-dir").strip()
    _git(folder / name, *PLAIN, "add", "-A", "-f", ".", **work)
    tree = _git(project, "write-tree", **index).strip()
    if place:
        Path(index["GIT_INDEX_FILE"]).unlink()
        _git(project, "read-tree", f"--prefix={place}", tree, **index)
        tree = _git(project, "write-tree", **index).strip()
    return _git(project, *WHO, "commit-tree", "-m", f"The template, {name}", *parent, tree).strip()


def _git(folder: Path, *words: str, **environment: str) -> str:
    """Run git in `folder`, even if another repository calls us; return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *words],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise Refused(f"git {words[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _status(folder: Path, *words: str) -> int:
    with contextlib.suppress(Refused):
        _git(folder, *words)
        return 0
    return 1


def _run(folder: Path, words: "list[str]", failure: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise Refused(f"the template {failure}: {said}")
