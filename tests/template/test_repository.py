"""What others look for in a repository: Scientific Python's review, and zizmor's of workflows."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(params=["ours", "none", "all"])
def repository(request, template, baked):
    return template if request.param == "ours" else baked(extras=request.param)


def test_scientific_python_finds_nothing(repository, environment):
    words = [sys.executable, "-m", "repo_review", "--show", "err", str(repository)]
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stderr.lower()


def test_the_review_sees_what_is_missing(environment, tmp_path):
    (tmp_path / "README.md").touch()
    words = [sys.executable, "-m", "repo_review", str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8")
    assert done.returncode == 3


def test_zizmor_finds_nothing_in_what_runs_on_github(repository, environment):
    zizmor = Path(sysconfig.get_path("scripts")) / "zizmor"
    words = [zizmor, "--offline", "--strict-collection", "--quiet"]
    done = subprocess.run(
        [*words, str(repository / ".github")],
        env=environment(),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
