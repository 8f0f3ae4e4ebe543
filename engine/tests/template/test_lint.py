"""Lint and types are clean, for the shortest and longest names."""

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ["a", "z" * 24]  # one sorts before, one after everything imported next to it


@pytest.fixture(params=NAMES, ids=["1 character", "24 characters"])
def name(request):
    return request.param


@pytest.fixture
def project(name, baked):
    return baked(package_name=name, project_slug=name)


def check(project: Path, environment, *words: str) -> str:
    """Run Python on a project; return its findings, empty if there are none."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=project,
        env=environment(MYPYPATH=str(project / "engine/src")),
        capture_output=True,
        encoding="utf-8",
    )
    return (done.stdout + done.stderr) if done.returncode else ""


def test_lint_finds_nothing(project, environment):
    words = ["-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    assert check(project, environment, *words) == ""


def test_every_line_is_formatted(project, environment):
    words = ["-m", "ruff", "format", "--no-cache", "--check", "--diff"]
    assert check(project, environment, *words) == ""


@pytest.mark.slow
def test_types_are_right(baked, environment, mypy):
    """Whatever the names are: no type depends on them."""
    project = baked(package_name=NAMES[-1], project_slug=NAMES[-1])
    assert check(project, environment, *mypy(project)) == ""


OWN = '''"""Prints the size of a dataset."""

import datasets
from lightning import Callback, LightningModule, Trainer


class Texts(datasets.Dataset):
    """Has a class without types as its base."""


class Greeting(Callback):
    """Needs none of its hook's arguments."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Greet."""
        print(len(datasets.load_dataset("own")))  # type: ignore[no-untyped-call]
'''


@pytest.mark.slow
def test_what_lightning_s_users_write_passes(baked, environment, mypy):
    project = baked(package_name="mine", project_slug="mine")
    (project / "src/mine/greeting.py").write_text(OWN)
    assert check(project, environment, "-m", "ruff", "check", "--no-cache") == ""
    assert check(project, environment, *mypy(project)) == ""
