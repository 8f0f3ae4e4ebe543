"""How processes end: which exit handlers run."""

import subprocess
import sys

CODE = """
import atexit, os, weakref
from lockstep_gpt import python_patches

class Thing:
    pass

thing = Thing()
weakref.finalize(thing, print, "finalized", flush=True)
atexit.register(print, "handled", flush=True)
{line}
"""


def said(line):
    code = CODE.format(line=line)
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_a_normal_exit_runs_all_handlers():
    assert sorted(said("pass")) == ["finalized", "handled"]


def test_handlers_run_before_an_exit_without_teardown():
    assert said("os._exit(0)") == []
    assert sorted(said("python_patches.run_exit_handlers(); os._exit(0)")) == [
        "finalized",
        "handled",
    ]


def test_a_fork_that_forgets_handlers_runs_none_of_them():
    end = "python_patches.run_exit_handlers(); os._exit(0)"
    assert said(f"python_patches.forget_exit_handlers(); {end}") == []
