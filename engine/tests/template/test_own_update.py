"""`scripts/dev.py update`: applies the template's changes to a project, with only git."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hooks.answers import EXTRAS, Refused
from hooks.extras import choose
from lockstep_gpt import PROJECT

FIRST, LAST = "# the template's first line\n", "# the user's last line\n"


def edit(path: Path, before: str = "", after: str = "") -> None:
    path.write_text(before + path.read_text("utf-8") + after, "utf-8")


@pytest.fixture(scope="module")
def first(generate, projects, once, begun, git):
    """A project without extras that its user has started to change. Read only."""

    def make(folder):
        generate(folder, "extras=none")
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
    edit(source / "gpt.py", before=FIRST)
    (source / "model/new.py").write_text("import lockstep_gpt.gpt\n")
    (source / "loading/order.py").rename(source / "loading/sequence.py")
    (source / "generate.py").unlink()
    committed(upstream)


def changes(project: Path, git) -> list[str]:
    lines = git(project, "diff", "--cached", "--name-status", "-M", "HEAD").splitlines()
    return sorted("\t".join([line[0], line.split("\t")[-1]]) for line in lines)


CHANGED = [
    "A\tsrc/my_gpt/model/new.py",
    "D\tsrc/my_gpt/generate.py",
    "M\t.template.json",
    "M\tsrc/my_gpt/gpt.py",
    "R\tsrc/my_gpt/loading/sequence.py",
]


@pytest.mark.slow
def test_an_update_brings_changes_and_keeps_user_edits(project, upstream, update, committed, git):
    change(upstream, committed)
    output = update(project)
    assert "all applied and staged" in output
    assert changes(project, git) == CHANGED
    model = (project / "src/my_gpt/gpt.py").read_text("utf-8")
    assert model.startswith(FIRST)
    assert model.endswith(LAST)
    assert (project / "src/my_gpt/model/new.py").read_text() == "import my_gpt.gpt\n"
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
    edit(upstream / "src/lockstep_gpt/model/new.py", after="# more\n")
    committed(upstream)
    update(project)
    assert changes(project, git) == ["M\t.template.json", "M\tsrc/my_gpt/model/new.py"]


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
    assert (project / "src/my_gpt/model/new.py").is_file()
    refused = update(project, status=2)  # not before these are fixed
    assert "the working tree is not clean" in refused


@pytest.mark.slow
def test_a_conflict_without_markers_says_what_happened(project, upstream, update, committed):
    mine = project / "src/my_gpt/run/loggers/mine.py"
    mine.write_text("# the user's logger\n")
    (project / "src/my_gpt/generate.py").unlink()
    committed(project)
    edit(upstream / "src/lockstep_gpt/generate.py", before=FIRST)
    loggers = upstream / "engine/src/lockstep/run/loggers"
    loggers.rename(loggers.with_name("trackers"))
    committed(upstream)
    output = update(project, status=1)
    assert output.endswith(
        "  src/my_gpt/generate.py  (you deleted it, the template changed it)\n"
        "  src/my_gpt/run/trackers/mine.py  "
        "(yours, moved with its folder, which the template renamed)\n"
    )
    assert (project / "src/my_gpt/run/trackers/mine.py").read_text() == "# the user's logger\n"


def extras_of(project: Path) -> str:
    """Return the project's answer to the question `extras`."""
    return json.loads((project / ".template.json").read_text("utf-8"))["answers"]["extras"]


@pytest.mark.slow
def test_extras_are_added_to_those_that_are_there_and_removed_by_name(
    project, update, committed, git
):
    before = git(project, "ls-files").splitlines()
    assert update(project, "--add", "hub").startswith("adds hub, removes nothing\n")
    committed(project)
    assert (project / "src/my_gpt/extras/hub/pretrained.py").is_file()
    assert "transformers>=" in (project / "pyproject.toml").read_text("utf-8")
    assert update(project, "--extras", "pages", "--add", "hub").startswith(
        "adds pages, removes nothing\n"
    )
    committed(project)
    assert set(extras_of(project).split()) == {"hub", "pages"}
    assert (project / "src/my_gpt/extras/hub/pretrained.py").is_file()
    assert update(project, "--remove", "hub").startswith("adds nothing, removes hub\n")
    committed(project)
    assert extras_of(project) == "pages"
    assert not (project / "src/my_gpt/extras/hub").exists()
    assert (project / "src/my_gpt/extras/pages").is_dir()
    update(project, "--remove", "all")
    committed(project)
    assert extras_of(project) == "none"
    assert git(project, "ls-files").splitlines() == before
    assert (project / "README.md").read_text("utf-8").endswith(LAST)


@pytest.mark.slow
def test_extras_come_without_the_template_s_later_changes(project, upstream, update, committed):
    change(upstream, committed)
    update(project, "--add", "evidence")
    committed(project)
    assert extras_of(project) == "evidence"
    assert FIRST not in (project / "src/my_gpt/gpt.py").read_text("utf-8")
    update(project, "--add", "hub", "--to", "HEAD")
    assert set(extras_of(project).split()) == {"hub", "evidence"}
    assert (project / "src/my_gpt/gpt.py").read_text("utf-8").startswith(FIRST)


@pytest.mark.slow
def test_former_names_in_a_record_and_on_the_command_line_are_understood(
    upstream, generate, tmp_path, update
):
    generate.of(upstream)(tmp_path, "extras=fsdp2 documents")
    project = tmp_path / "my-gpt"
    assert extras_of(project) == "fsdp2 documents"
    output = update(project, "--add", "trackers mixtures export warm")
    assert output.startswith("adds hub, removes nothing\n")
    assert set(extras_of(project).split()) == {"datasets", "hub"}


def test_all_stays_all_until_one_is_removed():
    everything = choose("none", "all", "")["extras"]
    assert everything == choose(everything, "evidence", "")["extras"] == "all"
    assert set(choose(everything, "", "evidence")["extras"].split()) == {*EXTRAS} - {"evidence"}


@pytest.mark.parametrize(
    ("add", "remove", "message"),
    [
        ("evidense", "", "--add=evidense is not one of .*; did you mean evidence[?]"),
        ("", "evidense", "--remove=evidense is not one of .*; did you mean evidence[?]"),
        ("", "evidence", "--remove=evidence is not in the project, whose extras are: hub"),
        ("", "fsdp2", "--remove=fsdp2 is not an extra: every project has it, or none does"),
        ("none", "", '--add=none adds nothing; .* update --remove "hub"'),
    ],
)
def test_extras_that_cannot_be_added_or_removed_are_rejected(add, remove, message):
    with pytest.raises(Refused) as refused:
        choose("hub", add, remove)
    assert re.fullmatch(message, str(refused.value))


@pytest.mark.parametrize("option", ["--extras", "--remove"])
def test_an_update_with_rejected_extras_changes_nothing(option, project, update, tree):
    before = tree(project)
    refused = update(project, option, "evidense", status=2)
    name = option.replace("--extras", "--add")
    line = f"dev.py: update: {name}=evidense is not one of .*; did you mean evidence[?]\n"
    assert re.fullmatch(line, refused)
    assert tree(project) == before


def test_several_names_without_quotes_are_answered_with_quotes(project, update):
    refused = update(project, "--add", "evidence", "hub", status=2)
    assert re.fullmatch('.*: hub is not a path .*: --add "evidence hub"\n', refused)


# What an owner writes: new files, and lines in files of the template.
OWN_FILES = {
    "configs/experiment/ours.yaml": "# @package _global_\n# Ours.\ndefaults:\n  - smoke\n",
    "src/my_gpt/training/own.py": '"""Ours."""\n',
    "tests/training/test_own.py": "def test_own():\n    pass\n",
    "docs/results.md": "# Results\n",
}
OWN_LINES = {
    "README.md": ("# My GPT\n", "# Our GPT, trained on our texts\n"),
    "configs/model/nano.yaml": ("n_layer: ", "# ours\nn_layer: "),
    "configs/train.yaml": ("defaults:\n", "# ours\ndefaults:\n"),
    "docs/README.md": ("# Documentation\n", "# Our documentation\n"),
    "pyproject.toml": ("\ndependencies = [\n", '\ndependencies = [\n    "einops>=0.8",\n'),
    "src/my_gpt/optim.py": ("def adamw(", "# ours\ndef adamw("),
}


@pytest.mark.slow
def test_all_edits_of_an_owner_survive_added_and_removed_extras(project, update, committed, git):
    for name, text in OWN_FILES.items():
        (project / name).write_text(text, "utf-8")
    for name, (old, new) in OWN_LINES.items():
        text = (project / name).read_text("utf-8")
        assert text.count(old) == 1, name
        (project / name).write_text(text.replace(old, new), "utf-8")
    committed(project)
    edited = git(project, "rev-parse", "HEAD").strip()
    assert "all applied and staged" in update(project, "--add", "all")
    committed(project)
    assert extras_of(project) == "all"
    for name, text in OWN_FILES.items():
        assert (project / name).read_text("utf-8") == text
    for name, (_, new) in OWN_LINES.items():
        assert new in (project / name).read_text("utf-8"), name
    assert "all applied and staged" in update(project, "--remove", "all")
    committed(project)
    assert git(project, "diff", edited, "HEAD", "--", ".", ":!.template.json") == ""
    assert extras_of(project) == "none"


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


def test_an_unknown_commit_is_rejected_in_one_line(project, update, tree):
    before = tree(project)
    refused = update(project, "--to", "nowhere", status=2)
    assert "has no commit nowhere" in refused
    assert refused.count("\n") == 1
    assert tree(project) == before


def test_help_is_shown_without_an_environment(project, update):
    assert {"--add", "--remove"} <= set(update(project, "--help").split())
    assert not (project / ".venv").exists()
