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
    paths = [str(tmp_path / "absent"), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
def test_a_run_without_a_tracker_needs_no_wandb(command, without_wandb):
    code = "import wandb"
    absent = command.start_words([sys.executable, "-c", code], **without_wandb)
    assert "ModuleNotFoundError: import of wandb" in absent.communicate()[1]
    words = [sys.executable, "-m", "lockstep_gpt", *command.smoke("run_dir=run")]
    process = command.start_words(words, **without_wandb)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, command.summary("run")["status"]) == (0, "done"), err


@pytest.mark.slow
def test_all_tests_are_collected_and_ranks_start_without_wandb(without_wandb):
    """One process for both: it takes long to import and collect everything."""
    wanted = "nccl_trains_at_world_size_one or keeps_its_threads_on_other_numbers_of_devices"
    words = ["-m", "pytest", "-k", wanted, "-v", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **without_wandb},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "tests/test_gpu.py::test_nccl_trains_at_world_size_one" in done.stdout
    ranks = "tests/strategies/test_exact_runs.py::test_a_resumed_run_keeps_its_threads"
    assert f"{ranks}_on_other_numbers_of_devices PASSED" in done.stdout
