"""The commands that start agents and ranks, and what a rank calls."""

import os
import subprocess
import sys

from lockstep.launch import agent_program, rank_program
from lockstep.run.directory import RunDirectory


def test_a_command_starts_this_python_on_the_run_and_names_its_parent(tmp_path):
    run = RunDirectory(tmp_path / "a run")
    start, rest = [sys.executable, "-m"], [str(run.path), str(os.getpid())]
    assert rank_program.command(run, "a.b:c") == [*start, rank_program.__name__, *rest, "a.b:c"]
    words = [*start, agent_program.__name__, *rest, "3", "a.b:c"]
    assert agent_program.command(run, 3, "a.b:c") == words


SCRIPT = """
import multiprocessing, beside

class Kept:
    value = beside.VALUE

def work():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(type, [Kept()]).__name__ + Kept.value

if __name__ == "__main__":
    raise SystemExit("ran as a program")
"""


def test_a_rank_imports_a_script_with_its_neighbors_and_its_workers_find_its_classes(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = ' beside'")
    (tmp_path / "script.py").write_text(SCRIPT)
    call = f"rank_program.imported({str(tmp_path / 'script.py:work')!r})"
    code = f"from lockstep.launch import rank_program; print({call}())"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd="/", check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout == "Kept beside\n"
