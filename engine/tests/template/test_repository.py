"""Reviews of the repository: Scientific Python's, and zizmor's of the workflows."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import yaml


def test_scientific_python_finds_nothing(repository, environment):
    words = [sys.executable, "-m", "repo_review", "--show", "err", str(repository)]
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stderr.lower()


def test_the_review_finds_missing_files(environment, tmp_path):
    (tmp_path / "README.md").touch()
    words = [sys.executable, "-m", "repo_review", str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8")
    assert done.returncode == 3


def test_the_citation_has_the_version_and_the_license_of_the_project(template):
    cited = yaml.safe_load((template / "CITATION.cff").read_text("utf-8"))
    about = tomllib.loads((template / "pyproject.toml").read_text("utf-8"))["project"]
    assert (cited["version"], cited["license"]) == (about["version"], about["license"])
    assert [{"name": each["name"]} for each in cited["authors"]] == about["authors"]
    assert cited["cff-version"] == "1.2.0"


def test_issue_forms_have_questions_with_unique_names(template):
    forms = sorted((template / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert [form.stem for form in forms] == ["fault", "wish"]
    for form in forms:
        asked = yaml.safe_load(form.read_text("utf-8"))
        assert {"name", "description", "body"} <= set(asked)
        names = [question["id"] for question in asked["body"]]
        assert len(names) == len(set(names)) > 1
        assert all(question["attributes"]["label"] for question in asked["body"])


def test_zizmor_finds_nothing_in_the_workflows(repository, environment):
    zizmor = Path(sysconfig.get_path("scripts")) / "zizmor"
    words = [zizmor, "--offline", "--strict-collection", "--quiet"]
    done = subprocess.run(
        [*words, str(repository / ".github")],
        env=environment(),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
