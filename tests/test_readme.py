"""The README: every command in it runs, and it names every file."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from lockstep_gpt import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"^```\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^lockstep-gpt (.+)$", CODE, flags=re.MULTILINE)
NEEDS_GPU = [line for line in COMMANDS if "trainer=gpu" in line or "gpt2_124m" in line]
RESUMES = [line for line in COMMANDS if "resume=" in line]
TRAINS = [line for line in COMMANDS if "experiment=smoke" in line and line not in RESUMES]
LAUNCHED = re.findall(r"^torchrun (.+)$", CODE, flags=re.MULTILINE)
CLUSTER = [line for line in COMMANDS if line.startswith(("plan", "doctor", "drill"))]
READS = [line for line in COMMANDS if line.startswith(("generate", "evaluate"))]


def test_every_command_is_of_a_kind_that_is_tested():
    assert len(COMMANDS) >= 8
    assert sorted(COMMANDS) == sorted(
        [*NEEDS_GPU, *TRAINS, *RESUMES, *READS, *CLUSTER, "train --cfg job"]
    )


@pytest.mark.parametrize("line", TRAINS)
def test_training_command_runs(command, line, shown_elsewhere):
    sweep = ["launch.inline=true"] if "--multirun" in line else []  # imports once for all jobs
    (command.folder / "books").mkdir(exist_ok=True)
    (command.folder / "books/readme.txt").write_text(README, encoding="utf-8")
    if line not in shown_elsewhere:
        command(*shlex.split(line), f"data.root={command.data_root}", *sweep)


def test_commands_that_fixtures_run_are_still_the_readme_s(finished, two, shown_elsewhere):
    assert shown_elsewhere < set(TRAINS)
    assert all(screen.count("done in") == 1 for _, screen in (finished, two))


def test_commands_that_go_on_with_a_run_work_one_after_the_other(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "runs/first")
    for line, steps in zip(RESUMES, (30, 40), strict=True):
        root = [] if "run_dir" in line else [f"data.root={command.data_root}"]
        out = command(*shlex.split(line), *root).stdout
        assert f"step {steps}/{steps}  val_loss" in out


@pytest.mark.parametrize("line", LAUNCHED)
def test_launcher_is_joined(command, line):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    words = [*torchrun, *shlex.split(line), f"data.root={command.data_root}"]
    status, out, err = command.run_words(words)
    assert (status, out.count("step 20/20  val_loss")) == (0, 1), err


@pytest.mark.parametrize("line", [*NEEDS_GPU, "train --cfg job"])
def test_command_for_gpus_composes(command, line):
    assert "max_steps:" in command(*shlex.split(line), "--cfg", "job").stdout


@pytest.mark.parametrize("line", READS)
def test_command_that_reads_a_run_runs(finished, line, monkeypatch, capsys):
    command, _ = finished
    monkeypatch.chdir(command.folder)
    assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr().out


def test_tree_names_every_source_file_once():
    tree = README.split("## Every file")[1]
    files = {path.name for path in (ROOT / "src").rglob("*.py")} - {"__init__.py"}
    assert {name for name in files if len(re.findall(rf"\b{name}\b", tree)) != 1} == set()


def test_readme_is_short_enough_to_be_read():
    shown = [line for line in README.splitlines() if not line.startswith("<!--")]
    assert len(shown) <= 330
