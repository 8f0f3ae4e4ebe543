"""A machine without wandb trains and runs its tests: `pytest -m gpu` on a bare GPU machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# To this process and its children, wandb is not installed.
ABSENT = """\
import sys

sys.modules["wandb"] = None
"""


@pytest.fixture
def without_wandb(tmp_path):
    """Environment variables for Python processes that can't import wandb."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/sitecustomize.py").write_text(ABSENT)
    return {"PYTHONPATH": str(tmp_path / "absent")}


def test_a_run_without_a_tracker_needs_no_wandb(command, without_wandb):
    code = "import wandb"
    absent = command.start_words([sys.executable, "-c", code], **without_wandb)
    assert "ModuleNotFoundError: import of wandb" in absent.communicate()[1]
    words = [sys.executable, "-m", "lockstep_gpt", *command.smoke("run_dir=run")]
    process = command.start_words(words, **without_wandb)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, command.summary("run")["status"]) == (0, "done"), err


def run_tests(environment, *words):
    """Run pytest in a separate process, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-q", "-n0", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def test_all_tests_can_be_collected_without_wandb(without_wandb):
    collected = run_tests(without_wandb, "-m", "gpu", "--collect-only")
    assert "tests/test_gpu.py::test_nccl_trains_at_world_size_one" in collected


def test_tests_start_ranks_without_wandb(without_wandb):
    tests = ("tests/distributed/test_exact_runs.py", "-k", "on_other_numbers_of_devices")
    assert "1 passed" in run_tests(without_wandb, *tests)
