"""Our commands, pages, and package in their first state: a project's owner may add others."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def commands():
    """The module that tests the commands of pages."""
    path = ROOT / "engine/tests/docs/test_commands.py"
    spec = importlib.util.spec_from_file_location("commands_of_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_help_of_train_fits_a_screen(environment, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_gpt", "train", "--help"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{ROOT}/src:{ROOT}/engine/src"),
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    lines = done.stdout.splitlines()
    assert 20 < len(lines) <= 50
    assert max(map(len, lines)) <= 120


def test_every_page_of_commands_is_tested(commands):
    """By the commands' own test or, if another test names the page, by that one."""
    tests = "".join(path.read_text("utf-8") for path in ROOT.glob("engine/tests/*/**/*.py"))
    for name in ["README.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]:
        if commands.commands_of((ROOT / name).read_text("utf-8")):
            assert name in commands.PAGES or f'"{name}"' in tests, name


def test_every_line_of_a_block_is_a_command_of_a_kind_that_is_tested(commands):
    assert [line for _, line in commands.OURS if not line.startswith(commands.STARTS)] == []
    assert len(commands.HERE) > 20
    assert {*commands.RECEIPT_PAGES} <= {*commands.RUN_FOR.values()}
    assert sum(map(len, commands.RECEIPTS.values())) > 7


def test_commands_that_fixtures_run_are_still_the_readme_s(
    commands, finished, two, commands_of_fixtures
):
    assert commands_of_fixtures < {line for page, line in commands.HERE if page == "README.md"}
    assert all(screen.count("done in") == 1 for _, screen in (finished, two))
