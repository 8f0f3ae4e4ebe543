"""How processes end: which exit handlers run; and the state of `random`."""

import random
import subprocess
import sys

from lockstep.patches import python as python_patches

CODE = """
import atexit, os, weakref
from lockstep.patches import python as python_patches

class Thing:
    pass

thing = Thing()
weakref.finalize(thing, print, "finalized", flush=True)
atexit.register(print, "handled", flush=True)
{line}
"""


def printed_by(line):
    code = CODE.format(line=line)
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_a_normal_exit_runs_all_handlers():
    assert sorted(printed_by("pass")) == ["finalized", "handled"]


def test_handlers_run_before_an_exit_without_teardown():
    assert printed_by("os._exit(0)") == []
    assert sorted(printed_by("python_patches.run_exit_handlers(); os._exit(0)")) == [
        "finalized",
        "handled",
    ]


def test_the_state_of_random_changes_with_each_draw_and_only_then():
    state = python_patches.random_state()
    assert python_patches.random_state() == state
    for draw in (random.random, lambda: random.getrandbits(8), lambda: random.shuffle([1, 2, 3])):
        draw()
        assert python_patches.random_state() != state
        state = python_patches.random_state()
    kept = random.getstate()
    random.setstate(kept)
    assert python_patches.random_state() == state
