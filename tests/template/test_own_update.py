"""`scripts/dev.py update`: applies the template's changes to a project, with only git."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIRST, LAST = "# the template's first line\n", "# the user's last line\n"


def edit(path: Path, before: str = "", after: str = "") -> None:
    path.write_text(before + path.read_text("utf-8") + after, "utf-8")


@pytest.fixture
def project(upstream, generate, tmp_path, begun):
    """A project that its user has started to change."""
    generate.of(upstream)(tmp_path)
    return begun(tmp_path / "my-gpt")


@pytest.fixture
def update(environment):
    def run(project: Path, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "scripts/dev.py", "update", *words],
            cwd=project,
            env=environment(PYTHONDONTWRITEBYTECODE="1"),
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status == 2 else done.stdout

    return run


def change(upstream: Path, committed) -> None:
    """Change, add, rename, and delete a source file."""
    source = upstream / "src/lockstep_gpt"
    edit(source / "model/gpt.py", before=FIRST)
    (source / "model/new.py").write_text("import lockstep_gpt.model.gpt\n")
    (source / "data/order.py").rename(source / "data/sequence.py")
    (source / "inference/generate.py").unlink()
    committed(upstream)


def changes(project: Path, git) -> list[str]:
    lines = git(project, "diff", "--cached", "--name-status", "-M", "HEAD").splitlines()
    return sorted("\t".join([line[0], line.split("\t")[-1]]) for line in lines)


CHANGED = [
    "A\tsrc/my_gpt/model/new.py",
    "D\tsrc/my_gpt/inference/generate.py",
    "M\t.template.json",
    "M\tsrc/my_gpt/model/gpt.py",
    "R\tsrc/my_gpt/data/sequence.py",
]


def test_an_update_brings_changes_and_keeps_user_edits(project, upstream, update, committed, git):
    change(upstream, committed)
    said = update(project)
    assert "all applied and staged" in said
    assert changes(project, git) == CHANGED
    model = (project / "src/my_gpt/model/gpt.py").read_text("utf-8")
    assert model.startswith(FIRST)
    assert model.endswith(LAST)
    assert (project / "src/my_gpt/model/new.py").read_text() == "import my_gpt.model.gpt\n"
    assert (project / "README.md").read_text("utf-8").endswith(LAST)
    record = json.loads((project / ".template.json").read_text("utf-8"))
    assert record["commit"] == git(upstream, "rev-parse", "HEAD").strip()
    assert record["answers"]["project_slug"] == "my-gpt"
    git(project, "commit", "-qm", "Updated")
    assert "up to date" in update(project)
    assert git(project, "status", "--porcelain") == ""


def test_a_second_update_starts_from_the_first(project, upstream, update, committed, git):
    change(upstream, committed)
    update(project)
    committed(project)
    edit(upstream / "src/lockstep_gpt/model/new.py", after="# more\n")
    committed(upstream)
    update(project)
    assert changes(project, git) == ["M\t.template.json", "M\tsrc/my_gpt/model/new.py"]


def test_a_renamed_file_is_updated_under_its_new_name(project, upstream, update, committed, git):
    git(project, "mv", "src/my_gpt/model/gpt.py", "src/my_gpt/model/mine.py")
    committed(project)
    change(upstream, committed)
    update(project)
    assert (project / "src/my_gpt/model/mine.py").read_text("utf-8").startswith(FIRST)
    assert not (project / "src/my_gpt/model/gpt.py").exists()


def test_conflicting_changes_get_conflict_markers(project, upstream, update, committed):
    edit(project / "src/my_gpt/model/gpt.py", before="# the user's first line\n")
    edit(project / "src/my_gpt/inference/generate.py", after=LAST)
    committed(project)
    change(upstream, committed)
    said = update(project, status=1)
    names = ["src/my_gpt/inference/generate.py", "src/my_gpt/model/gpt.py"]
    assert said.endswith("".join(f"  {name}\n" for name in names))
    model = (project / "src/my_gpt/model/gpt.py").read_text("utf-8")
    assert {"<<<<<<<", "=======", ">>>>>>>"} <= {line[:7] for line in model.splitlines()}
    assert (project / "src/my_gpt/model/new.py").is_file()
    refused = update(project, status=2)  # not before these are fixed
    assert "the working tree is not clean" in refused


def test_an_extra_is_added_and_removed_later(project, update, committed, git):
    before = git(project, "ls-files").splitlines()
    update(project, "--extras", "sweep warm")
    assert (project / "src/my_gpt/extras/warm/fork.py").is_file()
    assert "optuna" in (project / "pyproject.toml").read_text("utf-8")
    committed(project)
    update(project, "--extras", "sweep")
    assert not (project / "src/my_gpt/extras/warm").exists()
    assert (project / "src/hydra_plugins/optuna_sweeper.py").is_file()
    committed(project)
    update(project, "--extras", "none")
    committed(project)
    assert git(project, "ls-files").splitlines() == before
    assert (project / "README.md").read_text("utf-8").endswith(LAST)


def test_a_project_in_a_folder_of_a_repository_is_updated_there(
    upstream, generate, tmp_path, committed, update, git
):
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / "pyproject.toml").write_text("# another\n")
    committed(outer)
    generate.of(upstream)(outer / "inner")
    committed(outer)
    change(upstream, committed)
    update(outer / "inner/my-gpt")
    expected = [line.replace("\t", "\tinner/my-gpt/") for line in CHANGED]
    assert changes(outer, git) == sorted(expected)


def test_another_template_and_commit_can_be_given(project, upstream, update, committed, git):
    last = git(upstream, "rev-parse", "HEAD").strip()
    change(upstream, committed)
    moved = upstream.rename(upstream.with_name("moved"))
    assert "cannot be cloned" in update(project, status=2)
    assert "up to date" not in update(project, str(moved), "--to", last)
    assert changes(project, git) == ["M\t.template.json"]  # it names the other location now
    committed(project)
    update(project)
    assert changes(project, git) == CHANGED


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda project: (project / "new").touch(), "the working tree is not clean"),
        (lambda project: (project / ".template.json").unlink(), ".template.json is missing"),
        (lambda project: (project / ".git").rename(project / "git"), "in a git repository"),
    ],
    ids=["dirty", "no record", "no repository"],
)
def test_projects_that_cannot_be_updated_stay_unchanged(spoil, said, project, update, tree):
    spoil(project)
    before = tree(project)
    refused = update(project, status=2)
    assert said in refused
    assert refused.count("\n") == 1
    assert tree(project) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "nowhere"], "has no commit nowhere"),
        (["--extras", "wram"], "did you mean warm?"),
    ],
)
def test_unknown_extras_are_rejected_in_one_line(words, said, project, update, tree):
    before = tree(project)
    refused = update(project, *words, status=2)
    assert said in refused
    assert refused.count("\n") == 1
    assert tree(project) == before


def test_help_is_shown_without_an_environment(project, update):
    assert "--extras" in update(project, "--help")
    assert not (project / ".venv").exists()
