"""An extra can be deleted by hand: the rest lints, collects its tests, and trains.

`scripts/deletions.py` runs the whole test suite of the rest, and also deletes every pair.
"""

import compileall
import os
import shutil
import subprocess
import sys

import pytest

from hooks.answers import EXTRAS
from scripts.deletions import delete

COLLECT_AND_TRAIN = """
import gc, sys, pytest
gc.disable()
slow = ("cacheprovider", "hypothesispytest", "unraisableexception")
quiet = ["-qq", "--assert=plain", *(f"-pno:{name}" for name in slow)]
if status := pytest.main(["--collect-only", *quiet]):
    sys.exit(int(status))
import my_gpt.cli
words = ["train", "experiment=smoke", "logger=none", "launch.inline=true"]
sys.exit(my_gpt.cli.main([*words, "callbacks.sample.length=9", "run_dir=runs/one"]))
"""


@pytest.fixture
def everything(projects, once, baked):
    """A project with all extras, compiled: each deletion is imported again. Read only."""

    def make(folder):
        shutil.copytree(baked(extras="all"), folder)
        for part in ("src", "tests"):
            assert compileall.compile_dir(folder / part, quiet=2)

    return once(projects / "compiled", make)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_without_any_one_extra_a_project_collects_its_tests_and_trains(
    extra, everything, tmp_path, environment, mypy, python_of_forks
):
    project = tmp_path / extra
    shutil.copytree(everything, project, copy_function=os.link)  # nothing here changes a file
    delete(project, [extra])
    of_the_project = {"PYTHONPATH": str(project / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    for words, settings in (
        ([sys.executable, "-m", "ruff", "check", "--no-cache"], {}),
        ([sys.executable, *mypy(project)], {}),
        ([python_of_forks, "-c", COLLECT_AND_TRAIN], {**of_the_project, "OMP_NUM_THREADS": "1"}),
    ):
        done = subprocess.run(
            words,
            cwd=project,
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stdout[-3000:]
