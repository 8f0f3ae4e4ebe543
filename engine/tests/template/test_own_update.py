"""`scripts/dev.py update`: applies the template's changes to a project, with only git."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT

ENGINE = "engine/src/lockstep"
CHANGED_FILE = {"lockstep_gpt": "gpt.py", "lockstep": "schedule.py"}
DELETED = {"lockstep_gpt": "generate.py", "lockstep": "logs.py"}
FIRST, LAST = "# the template's first line\n", "# the user's last line\n"


def edit(path: Path, before: str = "", after: str = "") -> None:
    path.write_text(before + path.read_text("utf-8") + after, "utf-8")


@pytest.fixture(scope="module")
def first(generate, projects, once, begun, git):
    """A project that its user has started to change. Read only."""

    def make(folder):
        generate(folder)
        # In a copy, only times differ that git would compare, and then read every file.
        git(folder / "my-gpt", "config", "core.checkStat", "minimal")
        git(folder / "my-gpt", "config", "core.trustctime", "false")
        begun(folder / "my-gpt")

    return once(projects / "begun", make) / "my-gpt"


@pytest.fixture
def project(first, template, upstream, tmp_path, git):
    """A copy of the first project, as if it had been made from `upstream`, a clone."""
    project = shutil.copytree(first, tmp_path / "my-gpt")
    record = project / ".template.json"
    text = record.read_text("utf-8")
    assert text.count(f'"{template}"') == 1
    record.write_text(text.replace(f'"{template}"', f'"{upstream}"'), "utf-8")
    git(project, "commit", "-qam", "Its template is a clone")
    return project


@pytest.fixture
def update(environment):
    def run(project: Path, *words: str, status: int = 0, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "scripts/dev.py", "update", *words],
            cwd=project,
            env=environment(PYTHONDONTWRITEBYTECODE="1", **variables),
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status == 2 else done.stdout

    return run


def change(upstream: Path, committed) -> None:
    """Change, add, rename, and delete a file of the project, and one of the engine."""
    for source, renamed in (
        (upstream / "src/lockstep_gpt", ("optim.py", "optimizers.py")),
        (upstream / ENGINE, ("batch.py", "batches.py")),
    ):
        edit(source / CHANGED_FILE[source.name], before=FIRST)
        (source / "new.py").write_text("import lockstep_gpt.gpt\n")
        (source / renamed[0]).rename(source / renamed[1])
        (source / DELETED[source.name]).unlink()
    committed(upstream)


def changes(project: Path, git) -> list[str]:
    lines = git(project, "diff", "--cached", "--name-status", "-M", "HEAD").splitlines()
    return sorted("\t".join([line[0], line.split("\t")[-1]]) for line in lines)


OF_ENGINE = [
    f"A\t{ENGINE}/new.py",
    f"D\t{ENGINE}/logs.py",
    f"M\t{ENGINE}/schedule.py",
    f"R\t{ENGINE}/batches.py",
]
OF_PROJECT = [
    "A\tsrc/my_gpt/new.py",
    "D\tsrc/my_gpt/generate.py",
    "M\t.template.json",
    "M\tsrc/my_gpt/gpt.py",
    "R\tsrc/my_gpt/optimizers.py",
]
CHANGED = sorted([*OF_ENGINE, *OF_PROJECT])


def engine_of(folder: Path, tree) -> dict[str, tuple[bool, bytes]]:
    """Return the files of an engine, without its tests and what Python writes."""
    files = tree(folder / "engine")
    return {
        name: files[name]
        for name in files
        if not name.startswith("tests/") and "__pycache__" not in name
    }


@pytest.mark.slow
def test_an_update_brings_changes_and_keeps_user_edits(
    project, upstream, update, committed, git, tree
):
    change(upstream, committed)
    output = update(project)
    assert "all applied and staged" in output
    assert "changes of yours" not in output
    assert changes(project, git) == CHANGED
    assert engine_of(project, tree) == engine_of(upstream, tree)
    model = (project / "src/my_gpt/gpt.py").read_text("utf-8")
    assert model.startswith(FIRST)
    assert model.endswith(LAST)
    assert (project / "src/my_gpt/new.py").read_text() == "import my_gpt.gpt\n"
    assert (project / "README.md").read_text("utf-8").endswith(LAST)
    record = json.loads((project / ".template.json").read_text("utf-8"))
    assert record["commit"] == git(upstream, "rev-parse", "HEAD").strip()
    assert record["answers"]["project_slug"] == "my-gpt"
    git(project, "commit", "-qm", "Updated")
    assert "up to date" in update(project)
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.slow
def test_an_owner_s_version_is_not_the_template_s(project, upstream, update, committed):
    changes = {"pyproject.toml": 'version = "{}"', "src/{}/__init__.py": 'version="{}"'}

    def replace(folder: Path, package: str, old: str, new: str) -> None:
        for name, line in changes.items():
            path = folder / name.format(package)
            text = path.read_text("utf-8")
            assert text.count(line.format(old)) == 1
            path.write_text(text.replace(line.format(old), line.format(new)), "utf-8")

    replace(project, "my_gpt", "0.1.0", "3.1.4")
    committed(project)
    replace(upstream, "lockstep_gpt", PROJECT.version, "9.9.9")
    committed(upstream)
    assert "all applied and staged" in update(project)
    replace(project, "my_gpt", "3.1.4", "3.1.5")


@pytest.mark.slow
def test_a_second_update_starts_from_the_first(project, upstream, update, committed, git):
    change(upstream, committed)
    update(project)
    committed(project)
    edit(upstream / "src/lockstep_gpt/new.py", after="# more\n")
    committed(upstream)
    update(project)
    assert changes(project, git) == ["M\t.template.json", "M\tsrc/my_gpt/new.py"]


@pytest.mark.slow
def test_a_renamed_file_is_updated_under_its_new_name(project, upstream, update, committed, git):
    git(project, "mv", "src/my_gpt/gpt.py", "src/my_gpt/mine.py")
    committed(project)
    change(upstream, committed)
    update(project)
    assert (project / "src/my_gpt/mine.py").read_text("utf-8").startswith(FIRST)
    assert not (project / "src/my_gpt/gpt.py").exists()


def test_conflicting_changes_get_conflict_markers(project, upstream, update, committed):
    edit(project / "src/my_gpt/gpt.py", before="# the user's first line\n")
    edit(project / "src/my_gpt/generate.py", after=LAST)
    committed(project)
    change(upstream, committed)
    output = update(project, status=1)
    why = "  (you changed it, the template deleted it)"
    names = [f"src/my_gpt/generate.py{why}", "src/my_gpt/gpt.py"]
    assert output.endswith("".join(f"  {name}\n" for name in names))
    model = (project / "src/my_gpt/gpt.py").read_text("utf-8")
    assert {"<<<<<<<", "=======", ">>>>>>>"} <= {line[:7] for line in model.splitlines()}
    assert (project / "src/my_gpt/new.py").is_file()
    refused = update(project, status=2)  # not before these are fixed
    assert "the working tree is not clean" in refused


@pytest.mark.slow
def test_a_conflict_without_markers_says_what_happened(project, upstream, update, committed):
    (project / "configs/model/mine.yaml").write_text("# the user's model\n")
    (project / "src/my_gpt/generate.py").unlink()
    committed(project)
    edit(upstream / "src/lockstep_gpt/generate.py", before=FIRST)
    (upstream / "configs/model").rename(upstream / "configs/models")
    committed(upstream)
    output = update(project, status=1)
    assert output.endswith(
        "  configs/models/mine.yaml  "
        "(yours, moved with its folder, which the template renamed)\n"
        "  src/my_gpt/generate.py  (you deleted it, the template changed it)\n"
    )
    assert (project / "configs/models/mine.yaml").read_text() == "# the user's model\n"


@pytest.mark.slow
def test_changes_of_the_engine_are_merged_and_named(project, upstream, update, committed, git):
    edited = project / f"{ENGINE}/schedule.py"
    edit(edited, after=LAST)
    (project / f"{ENGINE}/mine.py").write_text(LAST)
    committed(project)
    change(upstream, committed)
    output = update(project)
    names = f"{ENGINE}/mine.py, {ENGINE}/schedule.py"
    assert f"engine/ has changes of yours, which git merges: {names}\n" in output
    assert changes(project, git) == CHANGED
    text = edited.read_text("utf-8")
    assert text.startswith(FIRST)
    assert text.endswith(LAST)
    assert (project / f"{ENGINE}/mine.py").read_text() == LAST


@pytest.mark.slow
def test_a_conflict_in_the_engine_is_one_as_in_any_file(project, upstream, update, committed):
    edit(project / f"{ENGINE}/schedule.py", before="# the user's first line\n")
    committed(project)
    change(upstream, committed)
    output = update(project, status=1)
    assert output.endswith(f"resolve these, git add them, test, commit:\n  {ENGINE}/schedule.py\n")


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [False, True], ids=["gone", "with files that git ignores"])
def test_without_the_engine_s_source_the_rest_is_updated(
    leaves, project, upstream, update, committed, git
):
    """The owner uses a release of it instead."""
    shutil.rmtree(project / "engine")
    if leaves:
        (project / f"{ENGINE}/__pycache__").mkdir(parents=True)
        (project / f"{ENGINE}/__pycache__/batch.pyc").touch()
    about = (project / "pyproject.toml").read_text("utf-8")
    released = "lightning-lockstep[tokens,wandb]==0.3.0"
    (project / "pyproject.toml").write_text(
        about.replace("lightning-lockstep[tokens,wandb]", released), "utf-8"
    )
    committed(project)
    change(upstream, committed)
    assert "all applied and staged" in update(project)
    assert changes(project, git) == OF_PROJECT
    assert git(project, "ls-files", "engine") == ""
    assert released in (project / "pyproject.toml").read_text("utf-8")


def test_a_project_of_0_2_is_told_its_way(project, update, committed, tree):
    """Its engine was in its own package, and its record has an answer on extras."""
    record = json.loads((project / ".template.json").read_text("utf-8"))
    record["answers"]["extras"] = "pages"
    (project / ".template.json").write_text(json.dumps(record), "utf-8")
    committed(project)
    before = tree(project)
    refused = update(project, status=2)
    assert refused.count("\n") == 1
    assert "this project is of 0.2" in refused
    assert "docs/from_0_2.md of the template says how" in refused
    assert tree(project) == before


# What an owner writes: new files, and lines in files of the template.
OWN_FILES = {
    "configs/experiment/ours.yaml": "# @package _global_\n# Ours.\ndefaults:\n  - smoke\n",
    "src/my_gpt/ours.py": '"""Ours."""\n',
    "tests/test_ours.py": "def test_ours():\n    pass\n",
    "docs/results.md": "# Results\n",
}
OWN_LINES = {
    "README.md": ("# My GPT\n", "# Our GPT, trained on our texts\n"),
    "configs/model/nano.yaml": ("n_layer: ", "# ours\nn_layer: "),
    "configs/train.yaml": ("defaults:\n", "# ours\ndefaults:\n"),
    "docs/tutorial.md": ("# From your own", "# From our own"),
    "pyproject.toml": ("\ndependencies = [\n", '\ndependencies = [\n    "einops>=0.8",\n'),
    "src/my_gpt/optim.py": ("def adamw(", "# ours\ndef adamw("),
}


@pytest.mark.slow
def test_all_edits_of_an_owner_survive_an_update(project, upstream, update, committed):
    for name, text in OWN_FILES.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, "utf-8")
    for name, (old, new) in OWN_LINES.items():
        text = (project / name).read_text("utf-8")
        assert text.count(old) == 1, name
        (project / name).write_text(text.replace(old, new), "utf-8")
    committed(project)
    for name in OWN_LINES:  # far from what the owner wrote, so git can merge
        if name != "README.md":
            edit(upstream / name.replace("my_gpt", "lockstep_gpt"), after="\n# the template's\n")
    committed(upstream)
    assert "all applied and staged" in update(project)
    for name, text in OWN_FILES.items():
        assert (project / name).read_text("utf-8") == text
    for name, (_, new) in OWN_LINES.items():
        text = (project / name).read_text("utf-8")
        assert new in text, name
        assert text.endswith("# the template's\n") or name == "README.md"


@pytest.mark.slow
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


@pytest.mark.slow
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
    ("spoil", "message"),
    [
        (lambda project: (project / "new").touch(), "the working tree is not clean"),
        (lambda project: (project / ".template.json").unlink(), ".template.json is missing"),
        (lambda project: (project / ".git").rename(project / "git"), "in a git repository"),
    ],
    ids=["dirty", "no record", "no repository"],
)
def test_projects_that_cannot_be_updated_stay_unchanged(spoil, message, project, update, tree):
    spoil(project)
    before = tree(project)
    refused = update(project, status=2)
    assert message in refused
    assert refused.count("\n") == 1
    assert tree(project) == before


@pytest.mark.slow
def test_the_user_s_git_settings_and_variables_change_no_update(
    project, upstream, update, committed, git, tmp_path
):
    """Those of a hook's repository, an ignore file, hooks, and another name for remotes."""
    change(upstream, committed)
    other = committed(shutil.copytree(tmp_path / "my-gpt/tests", tmp_path / "other"))
    hook = tmp_path / "hooks/post-checkout"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (tmp_path / "ignore").write_text("data/\n*.py\n")
    for key, value in {
        "clone.defaultRemoteName": "theirs",
        "core.autocrlf": "true",
        "core.excludesFile": tmp_path / "ignore",
        "core.hooksPath": hook.parent,
        "core.safecrlf": "true",
    }.items():
        git(tmp_path, "config", "-f", ".gitconfig", key, str(value))
    variables = {
        "GIT_DIR": str(other / ".git"),
        "GIT_INDEX_FILE": str(other / ".git/index"),
        "GIT_WORK_TREE": str(other),
        "HOME": str(tmp_path),
    }
    assert "all applied and staged" in update(project, "--to", "main", **variables)
    assert changes(project, git) == CHANGED
    assert git(other, "status", "--porcelain") == ""


def test_a_file_that_git_ignores_is_not_replaced(project, upstream, update, committed, tree):
    (upstream / "docs/notes.md").write_text("of the template\n")
    committed(upstream)
    (project / "docs/notes.md").write_text("of the user\n")
    with (project / ".git/info/exclude").open("a") as file:
        file.write("notes.md\n")
    before = tree(project)
    refused = update(project, status=2)
    assert "the template has docs/notes.md, which git ignores here" in refused
    assert refused.count("\n") == 1
    assert tree(project) == before


def test_an_unknown_commit_is_rejected_in_one_line(project, update, tree):
    before = tree(project)
    refused = update(project, "--to", "nowhere", status=2)
    assert "has no commit nowhere" in refused
    assert refused.count("\n") == 1
    assert tree(project) == before


def test_help_is_shown_without_an_environment(project, update):
    assert {"TEMPLATE", "--to"} <= set(update(project, "--help").split())
    assert not (project / ".venv").exists()
