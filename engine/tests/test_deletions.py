"""What stands beside the core can be deleted, one folder at a time: nothing else fails."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ENGINE = Path(lockstep.__file__).parent
SCRIPT = Path(__file__).with_name("foreign") / "program.py"
# A folder -> those that are built on it, and that have no use without it.
BESIDE = {
    "cluster": set(),
    "evaluation": set(),
    "evidence": set(),
    "hub": set(),
    "mixtures": set(),
    "pages": set(),
    "plan": {"cluster"},  # the doctor measures what a plan assumes
    "testing": set(),
    "tokens": {"evaluation", "hub", "mixtures"},
}
TRAINING = ("launch.inline=true", "max_steps=2", "run_dir=run")
# Imports all modules that are left, and all public names.
IMPORTS = """
import importlib, pkgutil, sys
import lockstep
for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    last = module.name.rpartition(".")[2]
    if not module.ispkg and last not in ("__main__", "worker", "agent_program", "rank_program"):
        importlib.import_module(module.name)
for name in lockstep.__all__:
    getattr(lockstep, name)
"""


def folders_that_import(folder):
    """Return the engine's folders with a module that imports one of this folder."""
    name = re.compile(rf"lockstep\.{folder}(\.|$)")
    found = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            if any(name.match(each) for each in names):
                found.add(path.relative_to(ENGINE).parts[0])
    return found - {folder}


@pytest.mark.parametrize("folder", sorted(BESIDE))
def test_no_other_folder_imports_it(folder):
    assert folders_that_import(folder) <= BESIDE[folder]


@pytest.fixture
def without(tmp_path):
    """Run Python with an engine that lacks a folder, and what is built on it."""

    def make(folder):
        copy = tmp_path / "src/lockstep"
        shutil.copytree(ENGINE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (folder, *BESIDE[folder]):
            shutil.rmtree(copy / name)
        environment = {**os.environ, "PYTHONPATH": str(copy.parent), "OMP_NUM_THREADS": "1"}

        def run(*words):
            done = subprocess.run(
                [sys.executable, *words],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        return run

    return make


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(BESIDE))
def test_without_it_all_else_imports_and_a_foreign_program_trains(folder, without):
    run = without(folder)
    run("-c", IMPORTS)
    commands = {"testing": "check", "cluster": "doctor", "evidence": "verify", "pages": "panel"}
    commands["plan"] = "plan"
    listed = re.findall(r"^  (\w+) ", run("-m", "lockstep", "--help"), re.MULTILINE)
    assert commands.get(folder) not in listed
    assert "step 2" in run(str(SCRIPT), *TRAINING)
