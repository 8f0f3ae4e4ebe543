import re
import subprocess
import sys

import pytest

DRILLS = [
    "a run that is left alone",
    "2 kills and stops of ranks",
    "kill -9 of the command",
    "SIGTERM to the command",
    "a flipped bit on the disk",
    "a NaN on one rank",
    "a rank that hangs",
]


def drill(*words, limit=500):
    command = [sys.executable, "-m", "lockstep_gpt", "drill", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


def test_every_fault_is_survived_or_ends_the_run_as_it_should():
    done = drill("--steps", "60", "--faults", "2")
    assert (done.returncode, re.findall("FAILED", done.stdout)) == (0, []), done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith(("  begins", "  ok"))]
    for name, begins, ends in zip(DRILLS, told[::2], told[1::2], strict=True):
        assert begins == f"  begins  {name}"
        assert ends.startswith(f"  ok      {name} ")
    assert re.search(r"^  about \d+ min to go$", done.stdout, re.MULTILINE)
    assert done.stdout.count(" 0 differing weights") == 4


@pytest.mark.parametrize("wrong", ["optim.lr=-1", "model.n_layers=3"])
def test_a_wrong_setting_is_said_and_nothing_else_is_tried(wrong):
    done = drill(wrong, limit=60)
    assert done.returncode == 1
    assert wrong.partition("=")[0] in done.stdout
    assert len(done.stdout.splitlines()) == 3
