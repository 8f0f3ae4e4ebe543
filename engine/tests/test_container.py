"""The Dockerfile and the devcontainer, only read: these tests don't need Docker."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Dockerfile"
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="no repository here")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return name and arguments of each instruction, without comments and line breaks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, " ".join(rest.split()))
        for name, rest in re.findall(r"^(\S+) +(.+)", joined, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def steps():
    return instructions(FILE.read_text("utf-8"))


def words_of(steps, name):
    return [words for instruction, words in steps if instruction == name]


def test_continued_lines_and_comments_are_read_like_docker():
    text = "# one\nFROM a:1\n\nRUN b \\\n  && c\n# two\nUSER d\n"
    assert instructions(text) == [("FROM", "a:1"), ("RUN", "b && c"), ("USER", "d")]


def test_every_instruction_is_one_of_docker_s(steps):
    known = {"ARG", "CMD", "COPY", "FROM", "RUN", "USER", "WORKDIR"}  # those that it needs
    assert {name for name, _ in steps} <= known


def test_the_image_is_pinned_to_a_release_that_the_project_supports(steps):
    (image,) = words_of(steps, "FROM")
    minor = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", image)
    assert minor, image
    wanted = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', pyproject(), re.MULTILINE)
    assert int(wanted[1]) <= int(minor[1]) < int(wanted[2])


def pyproject():
    return (ROOT / "pyproject.toml").read_text("utf-8")


def test_system_packages_are_installed_without_recommendations_and_lists(steps):
    first = words_of(steps, "RUN")[0]
    assert "apt-get install -y --no-install-recommends" in first
    assert "rm -rf /var/lib/apt/lists/*" in first
    assert "sudo" not in FILE.read_text("utf-8")


def test_all_project_files_belong_to_an_unprivileged_user(steps):
    names = [name for name, _ in steps]
    (user,) = words_of(steps, "USER")
    made = re.search(rf"useradd --create-home --uid (\d+) {user}\b", words_of(steps, "RUN")[0])
    assert int(made[1]) >= 1000
    assert names.index("USER") < names.index("COPY") < names.index("CMD")
    assert all(words.startswith(f"--chown={user}:{user} ") for words in words_of(steps, "COPY"))


def test_the_command_trains_and_the_tests_run_inside(steps):
    (command,) = words_of(steps, "CMD")
    words = " ".join(json.loads(command))
    assert words == "python3 scripts/dev.py train"
    assert words in "\n".join(words_of(steps, "RUN"))  # so the first start installs nothing
    of_test = {"scripts", "tests", "src", "engine", "configs", "docs"}
    assert of_test <= copied(steps)


def copied(steps) -> set[str]:
    return {name for words in words_of(steps, "COPY") for name in shlex.split(words)[1:-1]}


@pytest.mark.slow
def test_copied_files_exist_and_suffice_for_the_command(steps, tmp_path):
    for name in sorted(copied(steps)):
        paths = list(ROOT.glob(name))
        assert paths or name.endswith("*"), name
        for path in paths:
            place = tmp_path / path.name
            shutil.copytree(path, place) if path.is_dir() else shutil.copy(path, place)
    words = ["train", "experiment=smoke", "--cfg", "job"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_gpt", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "src:engine/src", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "max_steps: 20" in done.stdout


def test_the_editor_s_container_is_that_image_with_that_user(steps):
    path = ROOT / ".devcontainer/devcontainer.json"
    settings = json.loads(path.read_text("utf-8"))
    assert (path.parent / settings["build"]["dockerfile"]).resolve() == FILE
    assert (path.parent / settings["build"]["context"]).resolve() == ROOT
    assert [settings["remoteUser"]] == words_of(steps, "USER")
    assert settings["postCreateCommand"] in "\n".join(words_of(steps, "RUN"))
    assert not {"privileged", "capAdd", "securityOpt"} & set(settings)
    interpreter = settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter.endswith("/.venv/bin/python")
