import os
import re
import subprocess

import pytest

from lockstep.testing.drill import shocks

DRILLS = [
    "a run without faults",
    "2 kills and stops of ranks",
    "kills between checkpoints",
    "a second command on a run",
    "kill -9 of the command",
    "SIGTERM to the command",
    "a flipped bit on the disk",
    "a NaN on one rank",
    "a rank that hangs",
]


# Validations, samples, and the depth of the model are not part of the drill.
SHORT = ("val_tokens=256", "callbacks.sample.length=1", "model.n_layer=1")


@pytest.fixture
def drill(python_of_forks):
    """Run a drill, whose runs are processes of the same Python."""

    def run(*words, limit=500):
        return subprocess.run(
            [python_of_forks, "-m", "lockstep_gpt", "drill", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )

    return run


@pytest.mark.slow
def test_every_fault_is_survived_or_ends_the_run_as_specified(drill):
    done = drill("--steps", "60", "--faults", "2", *SHORT)
    assert (done.returncode, re.findall("FAILED", done.stdout)) == (0, []), done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith(("  begins", "  ok"))]
    for name, begins, ends in zip(DRILLS, lines[::2], lines[1::2], strict=True):
        assert begins == f"  begins  {name}"
        assert ends.startswith(f"  ok      {name} ")
    assert re.search(r"^  about \d+ min to go$", done.stdout, re.MULTILINE)
    assert done.stdout.count(" 0 differing weights") == 5
    lost = re.search(
        r"kills between checkpoints +(\d+) steps? lost at most, 5 between", done.stdout
    )
    assert int(lost[1]) <= 5


def test_an_unknown_setting_is_refused(drill):
    done = drill("model.n_layers=3", limit=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep-gpt drill: unknown setting model.n_layers; did you")


def test_a_wrong_setting_is_reported_before_anything_else(drill):
    done = drill("optim.lr=-1", limit=60)
    assert done.returncode == 1
    assert "lr=-1 must be above 0" in done.stdout
    assert len(done.stdout.splitlines()) == 3


def test_too_few_steps_are_refused(drill):
    done = drill("--steps", "39", limit=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--steps=39 are too few for a state in memory" in done.stderr


def test_one_fault_is_reported_in_the_singular():
    assert shocks(1) == "1 kill or stop of a rank"
    assert shocks(2) == "2 kills and stops of ranks"
