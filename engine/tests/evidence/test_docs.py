"""The page on evidence: `compare` understands its commands, and has the options of its table."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT

PROGRAM = PROJECT.program

PAGE = (Path(__file__).parents[3] / "engine/docs/evidence.md").read_text("utf-8")
COMMANDS = re.findall(r"^my-gpt (compare .+)$", PAGE, re.MULTILINE)
TRAINING = [line for line in COMMANDS if "--runs" not in line]
FINISHED = [line for line in COMMANDS if "--runs" in line]


@pytest.mark.parametrize("line", TRAINING)
def test_its_settings_compose_on_all_sides(line, command):
    words = [*shlex.split(line), f"data.root={command.data_root}", "--pairs", "1"]
    done = command(*words, status=2)
    assert done.stderr.startswith(f"{PROGRAM} compare: --pairs=1 are too few"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", FINISHED)
def test_its_finished_runs_are_compared(line, command, compared):
    for side, name in (("base", "a"), ("lr-4e-3", "b")):
        shutil.copytree(compared[0].folder / "pairs" / side, command.folder / "runs" / name)
    assert "\nb is better than a by " in command(*shlex.split(line)).stdout


def test_it_has_a_line_for_each_option(command):
    usage = command("compare", "--help").stdout
    options = {*re.findall(r"^  (--[\w-]+)", usage, re.MULTILINE)}
    assert options >= {"--base", "--variant", "--runs", "--margin"}
    assert options <= {*re.findall(r"--[\w-]+", PAGE)}
