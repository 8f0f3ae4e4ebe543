"""Updates with cruft: they apply the template's changes and keep the project's own."""

import json
import re
from pathlib import Path

import pytest

FIRST, LAST = "# the template's first line\n", "# the user's last line\n"


def edit(path: Path, before: str = "", after: str = "") -> None:
    path.write_text(before + path.read_text("utf-8") + after, "utf-8")


@pytest.fixture
def project(upstream, generate, tmp_path, committed, begun):
    """A project from `cruft create` that its user has started to change."""
    words = ["create", f"file://{upstream}", "--no-input"]
    generate.run("cruft", *words, cwd=tmp_path)
    return begun(committed(tmp_path / "my-gpt"))


def change(upstream: Path, committed) -> None:
    """Change, add, rename, and delete a source file."""
    source = upstream / "src/lockstep_gpt"
    edit(source / "model/gpt.py", before=FIRST)
    (source / "model/new.py").write_text("import lockstep_gpt.model.gpt\n")
    (source / "data/order.py").rename(source / "data/sequence.py")
    (source / "inference/generate.py").unlink()
    committed(upstream)


def assert_updated(project: Path, order: str) -> None:
    model = (project / "src/my_gpt/model/gpt.py").read_text("utf-8")
    assert model.startswith(FIRST)
    assert model.endswith(LAST)
    assert (project / "src/my_gpt/model/new.py").read_text() == "import my_gpt.model.gpt\n"
    assert not (project / "src/my_gpt/data/order.py").exists()
    assert (project / "src/my_gpt/data/sequence.py").read_text("utf-8") == order
    assert not (project / "src/my_gpt/inference/generate.py").exists()
    assert (project / "README.md").read_text("utf-8").endswith(LAST)
    assert (project / "src/my_gpt/own.py").read_text() == LAST
    assert list(project.rglob("*.rej")) == []


@pytest.mark.slow
def test_an_update_changes_only_changed_files(project, upstream, generate, committed, git):
    order = (project / "src/my_gpt/data/order.py").read_text("utf-8")
    change(upstream, committed)
    generate.run("cruft", "update", "-y", cwd=project)
    assert_updated(project, order)
    committed(project)
    changes = git(project, "show", "--format=", "--name-status", "-M").splitlines()
    assert [line.split("\t")[0][0] for line in changes] == ["M", "M", "R", "D", "M", "A"]
    record = json.loads((project / ".template.json").read_text("utf-8"))
    assert record["commit"] == git(upstream, "rev-parse", "HEAD").strip()
    generate.run("cruft", "check", cwd=project)


@pytest.mark.slow
def test_project_that_was_linked_later_is_updated_too(
    upstream, generate, tmp_path, committed, begun
):
    answers = {"author": 'O\'Reilly "net"', "git_init": False}
    generate.of(upstream)(tmp_path, *(f"{name}={value}" for name, value in answers.items()))
    project = committed(tmp_path / "my-gpt")
    order = (project / "src/my_gpt/data/order.py").read_text("utf-8")
    link = ["link", f"file://{upstream}", "--no-input", "--extra-context", json.dumps(answers)]
    generate.run("cruft", *link, cwd=project)
    begun(project)
    change(upstream, committed)
    generate.run("cruft", "update", "-y", cwd=project)
    assert_updated(project, order)


def test_the_update_that_brings_an_extra_can_take_it(project, upstream, generate, committed):
    answers = upstream / "hooks/answers.py"
    text = answers.read_text("utf-8")
    new = 'EXTRAS = {\n    "brand": "a new one",\n'
    answers.write_text(text.replace("EXTRAS = {\n", new), "utf-8")
    (upstream / "src/lockstep_gpt/extras/brand").mkdir()
    (upstream / "src/lockstep_gpt/extras/brand/new.py").write_text("import lockstep_gpt\n")
    committed(upstream)
    taken = json.dumps({"extras": "brand"})
    generate.run("cruft", "update", "-y", "--variables-to-update", taken, cwd=project)
    new = project / "src/my_gpt/extras/brand/new.py"
    assert new.read_text() == "import my_gpt\n"


def test_cruft_fails_with_the_same_line(upstream, generate, tmp_path):
    answers = json.dumps({"package_name": "class"})
    words = ["create", f"file://{upstream}", "--no-input", "--extra-context", answers]
    done = generate.run("cruft", *words, cwd=tmp_path / "out", status=1)
    assert done.stdout == ""
    assert re.fullmatch("Error: package_name='class' is a keyword of Python; .*\n", done.stderr)
    assert list((tmp_path / "out").iterdir()) == []
