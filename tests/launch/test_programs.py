"""The commands that start agents and ranks."""

import os
import sys

from lockstep_gpt.launch import agent_program, rank_program
from lockstep_gpt.run.directory import RunDirectory


def test_a_command_starts_this_python_on_the_run_and_names_its_parent(tmp_path):
    run = RunDirectory(tmp_path / "a run")
    start, rest = [sys.executable, "-m"], [str(run.path), str(os.getpid())]
    assert rank_program.command(run) == [*start, rank_program.__name__, *rest]
    assert agent_program.command(run, 3) == [*start, agent_program.__name__, *rest, "3"]
