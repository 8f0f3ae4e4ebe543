"""Reviews of the repository: Scientific Python's, zizmor's of the workflows; and its releases."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

VERSIONED = ("CHANGELOG.md", "engine/CHANGELOG.md", "engine/pyproject.toml", "pyproject.toml")


@pytest.fixture(scope="module")
def release(template):
    return yaml.safe_load((template / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]


@pytest.fixture
def run_step(template, release, tmp_path):
    """Run the step of the release's build with a name, in a copy; return its exit status."""
    (tmp_path / "engine").mkdir()
    for name in (*VERSIONED, "engine/README.md"):
        (tmp_path / name).write_bytes((template / name).read_bytes())

    def run(start: str, tag: str) -> int:
        (step,) = (each for each in release["build"]["steps"] if start in each.get("name", ""))
        variables = {
            "PATH": os.environ["PATH"],
            "GITHUB_REF_NAME": tag,
            "GITHUB_REPOSITORY": "owner/name",
            "GITHUB_SERVER_URL": "https://forge.example",
        }
        words = ["bash", "-e", "-c", step["run"]]
        return subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True).returncode

    return run


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


def test_a_release_has_the_version_of_its_tag_in_both_projects_and_changelogs(
    template, run_step, tmp_path
):
    version = tomllib.loads((template / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert run_step("Compare the tag", f"v{version}") == 0
    assert run_step("Compare the tag", "v99.0.0") == 1
    for name in VERSIONED:
        path = tmp_path / name
        text = path.read_text("utf-8")
        path.write_text(text.replace(version, "99.0.0"), "utf-8")
        assert run_step("Compare the tag", f"v{version}") == 1, name
        path.write_text(text, "utf-8")


def test_a_published_readme_has_absolute_links_to_existing_files(template, run_step, tmp_path):
    readme = tmp_path / "engine/README.md"
    picture = "\n![Its page](docs/report.png)\n"
    readme.write_text(readme.read_text("utf-8") + picture, "utf-8")
    assert run_step("Make the links", "v1.2.3") == 0
    text = readme.read_text("utf-8")
    assert (
        picture.replace("docs", "https://forge.example/owner/name/raw/v1.2.3/engine/docs") in text
    )
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all(link.startswith(("https://", "#")) for link in links), links
    ours = re.findall(r"/owner/name/(?:raw|blob)/v1\.2\.3/([^)#]+)", text)
    assert len(ours) > 10
    assert [name for name in ours if not (template / name).is_file()] == []


def test_only_a_tested_wheel_is_published_and_by_a_job_without_our_code(release):
    assert (release["test"]["needs"], release["publish"]["needs"]) == ("build", "test")
    uses = [step["uses"].partition("@")[0] for step in release["publish"]["steps"]]
    assert uses == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert release["publish"]["environment"] == "pypi"


def test_the_tools_of_a_release_are_locked_by_hash(template):
    folder = template / ".github/requirements"
    text = (folder / "release.txt").read_text("utf-8")
    locked = re.findall(r"^([\w.-]+)==[^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len(locked) == text.count("==") > 10
    asked = re.findall(r"^\w+$", (folder / "release.in").read_text("utf-8"), re.MULTILINE)
    assert {"build", "hatchling", "twine"} == {*asked} < {*locked}
    assert "://" not in text
