import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from lockstep_gpt import CONFIGS, PROJECT

import lockstep
from lockstep import commands as cli
from lockstep import project
from lockstep.commands import table
from lockstep.errors import UserError
from lockstep.project import Command
from lockstep.versions import VERSION

ENGINE_CONFIGS = Path(lockstep.__file__).with_name("configs")
COMMANDS = [name for name in table() if name[0] != "-"]  # shells call the others
LIGHT = {  # commands that must work without torch and leave no file: exit status
    "--help": 0,
    "--version": 0,
    "train --help": 0,
    "": 2,
    "trian": 2,
    "train max_step=3": 2,
    "train max_steps=many": 2,
    "train model.n_layers=3": 2,
    "train run_name=${nope}": 2,
    "train trainer=cpu trainer.devices=2 batch.global_size=3": 2,
    "train run_dir=/": 2,
    "prepare data=no_such": 2,
    **{f"{name} --help": 0 for name in COMMANDS},
    **{f"{name} nowhere": 2 for name in COMMANDS if name in ("generate", "evaluate", "export")},
}

FILES = [*CONFIGS.glob("*/*.yaml"), *ENGINE_CONFIGS.glob("*/*.yaml")]
GROUPS = {
    group: sorted(path.stem for path in FILES if path.parent.name == group)
    for group in {path.parent.name for path in FILES}
}


# Run each command in a separate folder, as a fork of a process with all of their imports.
FORKS = """
import json, os, runpy, sys
import lockstep_gpt, lockstep.commands, lockstep.launch.composed
statuses = []
for folder, arguments in json.loads(sys.argv[1]):
    if pid := os.fork():
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["lockstep_gpt", *arguments.split()]
    runpy.run_module("lockstep_gpt", run_name="__main__", alter_sys=True)
print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Each command's exit status, output, errors, and leftover files, with a broken torch."""
    torchless = tmp_path_factory.mktemp("torchless")
    (torchless / "torch.py").write_text("raise ImportError('torch was imported')")
    path = [str(torchless), *filter(None, [os.environ.get("PYTHONPATH")])]
    folders = {arguments: tmp_path_factory.mktemp("work") for arguments in LIGHT}
    jobs = json.dumps([(str(folder), arguments) for arguments, folder in folders.items()])
    done = subprocess.run(
        [sys.executable, "-c", FORKS, jobs],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        check=True,
        stdout=subprocess.PIPE,
        timeout=240,
    )
    ends = {}
    for (arguments, folder), status in zip(folders.items(), json.loads(done.stdout), strict=True):
        out, err = (
            folder.with_name(f"{folder.name}.{name}").read_text() for name in ("out", "err")
        )
        ends[arguments] = (status, out, err, list(folder.iterdir()))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("arguments", LIGHT)
def test_help_and_mistakes_need_no_torch_and_leave_no_file(answers, arguments):
    status, _, err, files = answers[arguments]
    assert "torch was imported" not in err
    assert (status, files) == (LIGHT[arguments], [])


@pytest.mark.parametrize("arguments", [words for words in LIGHT if words and LIGHT[words]])
def test_a_mistake_fails_in_one_line_on_stderr(answers, arguments):
    _, out, err, _ = answers[arguments]
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(PROJECT.program)


def test_help_lists_every_command(answers):
    listed = [line.split()[0] for line in answers["--help"][1].splitlines() if line.startswith(" ")]
    assert listed == COMMANDS
    assert answers[""][2] == answers["--help"][1]


def test_the_version_is_that_of_the_project(answers):
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert (
        answers["--version"][1]
        == f"{PROJECT.program} {about['project']['version']}, lockstep {VERSION}\n"
    )


def test_the_help_of_train_names_every_group_with_its_choices(answers):
    lines = answers["train --help"][1].splitlines()
    expected = {f"{group}: {', '.join(choices)}" for group, choices in GROUPS.items()}
    assert expected - set(lines) == set(), lines


def test_an_unknown_command_is_rejected_with_the_known_ones(answers):
    line = f"{PROJECT.program}: trian is not one of {', '.join(COMMANDS)}; did you mean train?\n"
    assert answers["trian"][2] == line


def fail(_arguments):
    raise UserError("value, rule and remedy")


def interrupt(_arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("function", "status"), [(len, 3), (fail, 2), (interrupt, 130)])
def test_a_command_s_end_is_the_exit_status(monkeypatch, capsys, function, status):
    own = {"try": Command("a_module:main", "", False)}
    monkeypatch.setattr(project, "_begun", [replace(PROJECT, commands=own)])
    monkeypatch.setitem(sys.modules, "a_module", type("Module", (), {"main": function}))
    assert cli.main(["try", "a", "b", "c"]) == status
    assert capsys.readouterr().err in ("", f"{PROJECT.program} try: value, rule and remedy\n")
