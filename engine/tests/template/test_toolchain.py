"""Hooks, editors, and workflows use the project's own versions and rules, here and in projects.

A project's owner may use other tools, so projects don't have these tests.
"""

import re
import tomllib

import pytest
import yaml


@pytest.fixture
def about(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))


@pytest.fixture
def read(repository):
    return lambda name: yaml.safe_load((repository / name).read_text("utf-8"))


def test_git_s_hooks_have_the_ruff_of_the_pins_and_the_mypy_of_the_environment(repository, read):
    text = (repository / "constraints.txt").read_text("utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(.+)$", text, re.MULTILINE))
    hooks = {each["repo"]: each for each in read(".pre-commit-config.yaml")["repos"]}
    ruff = hooks["https://github.com/astral-sh/ruff-pre-commit"]
    assert ruff["rev"] == f"v{pins['ruff']}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    zizmor = hooks["https://github.com/zizmorcore/zizmor-pre-commit"]
    assert zizmor["rev"] == f"v{pins.get('zizmor', zizmor['rev'][1:])}"
    (mypy,) = hooks["local"]["hooks"]
    assert (mypy["entry"], mypy["pass_filenames"]) == (".venv/bin/python -m mypy", False)


def test_the_python_of_tools_is_the_oldest_that_is_supported(about):
    oldest = re.match(r">=([\d.]+)", about["project"]["requires-python"])[1]
    assert about["tool"]["mypy"]["python_version"] == oldest


def test_github_tests_every_python_with_the_pins_and_the_oldest_and_newest_versions(about, read):
    low, high = re.match(r">=3\.(\d+),<3\.(\d+)", about["project"]["requires-python"]).groups()
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(int(low), int(high))]
    assert matrix["versions"] == ["pinned"]
    others = {(each["python"], each["versions"]) for each in matrix["include"]}
    assert {(matrix["python"][0], "oldest"), (matrix["python"][-1], "newest")} <= others
    last = job["steps"][-1]
    assert last["run"] == 'python scripts/dev.py test --all --versions "$VERSIONS"'
    assert last["env"]["VERSIONS"] == "${{ matrix.versions }}"


def test_workflows_are_read_only_but_to_publish_and_pin_actions_by_hash(repository, read):
    paths = sorted(repository.glob(".github/workflows/*.yml"))
    assert paths
    for path in paths:
        workflow = read(path)
        jobs = workflow["jobs"].items()
        assert workflow["permissions"] == {"contents": "read"}
        more = {name: job["permissions"] for name, job in jobs if "permissions" in job}
        publishes = {"publish": {"id-token": "write"}}
        assert more == (publishes if path.name == "release.yml" else {}), path.name
        steps = [step for _, job in jobs for step in job["steps"]]
        uses = [step["uses"] for step in steps if "uses" in step]
        assert uses
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", each) for each in uses)
        checkouts = [each for each in steps if each.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_dependabot_follows_the_actions_and_the_image(repository, read):
    followed = {each["package-ecosystem"] for each in read(".github/dependabot.yml")["updates"]}
    image = {"docker"} if (repository / "Dockerfile").is_file() else set()
    tools = {"pip"} if (repository / ".github/requirements").is_dir() else set()
    assert followed == {"github-actions", *image, *tools}


def test_every_declined_check_of_scientific_python_has_a_reason(repository, about):
    text = (repository / "pyproject.toml").read_text("utf-8")
    for check in about["tool"]["repo-review"]["ignore"]:
        assert re.search(rf'^    "{check}", # \w.+$', text, re.MULTILINE), check


def test_no_file_contains_the_address_of_an_index(repository):
    for name in ("pyproject.toml", "constraints.txt"):
        assert "://" not in (repository / name).read_text("utf-8"), name
