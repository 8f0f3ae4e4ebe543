"""Whatever ends a run, the last line says why, what is saved, and how to go on."""

import errno
import os
import shlex
import shutil
from pathlib import Path

import pytest

from lockstep.checkpoints.content import NEEDED_TO_RESUME
from lockstep.checkpoints.reading import checkpoint_path, write_checkpoint
from lockstep.checkpoints.sums import sum_path
from lockstep.errors import UserError, describe_error
from lockstep.processes import typed
from lockstep.run.directory import RunDirectory
from lockstep.run.last_line import resume_command, way_on

ENDS = """
import os, resource, signal, sys, time
import lightning

class Bare(BaseException):
    pass

def exit_quietly():
    os._exit(0)

def kill_agent():
    if not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

def lose_config():
    os.unlink("run/config.yaml")
    os.kill(os.getpid(), signal.SIGKILL)

def open_no_more_files():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))

def end_later():
    time.sleep(1)
    os._exit(1)

def raise_error(kind, *arguments):
    raise kind(*arguments)

ACTIONS = {
    "interrupt": lambda: raise_error(KeyboardInterrupt),
    "bare": lambda: raise_error(Bare, "one\\ntwo"),
    "exit": lambda: sys.exit(0),
    "memory": lambda: raise_error(MemoryError),
    "exit_quietly": exit_quietly,
    "kill_agent": kill_agent,
    "lose_config": lose_config,
    "end_later": end_later,
    "lose_peers": lambda: raise_error(RuntimeError, "Connection closed by peer"),
    "open_no_more_files": open_no_more_files,
}

class Ends(lightning.Callback):
    def __init__(self, how, rank=0):
        self.how = how
        self.rank = rank

    def on_train_batch_end(self, trainer, *_):
        if (trainer.global_step, trainer.global_rank) == (3, self.rank):
            ACTIONS[self.how]()

"""
TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
SMALL = ("checkpoint.every=2", "val_every=100")


@pytest.fixture
def ending(command):
    """Return a function that runs the smoke experiment until something ends it at step 3.

    It returns the last line, without the command at its end, and that command's words.
    """
    (command.folder / "leaves_early.py").write_text(ENDS)

    def end(how, *overrides, run="run", status=1, rank=0):
        callback = (f"+callbacks.ends={{_target_:leaves_early.Ends,how:{how},rank:{rank}}}",)
        words = command.smoke(*SMALL, *callback, f"run_dir={run}", *overrides)
        path = str(command.folder)
        result = command(*words, status=status, PYTHONPATH=path)
        log = command.folder / run / "train.log"
        line = result.stderr.splitlines()[-1]
        assert log.read_text().splitlines()[-1] == line
        reason, _, words = line.rpartition(": ")
        return reason, shlex.split(words)

    return end


EXCEPTIONS = {
    "interrupt": "rank 0 failed: KeyboardInterrupt",
    "bare": "rank 0 failed: Bare: one",
    "exit": "rank 0 failed: SystemExit: 0",
    "memory": f"rank 0 failed: {describe_error(MemoryError())}",
}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "cause"), EXCEPTIONS.items())
def test_any_exception_is_named_by_its_class(ending, how, cause):
    reason, _ = ending(how, "launch.inline=true")
    assert reason == f"{cause}; step 2 is saved; to continue"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_rank_that_leaves_the_others_is_named(ending):
    reason, _ = ending("exit_quietly", *TWO, rank=1)
    assert reason == "rank 1 ended with status 0; step 2 is saved; to continue"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_rank_is_named_that_ends_after_those_that_lost_it(ending):
    lost = "+callbacks.lost={_target_:leaves_early.Ends,how:lose_peers,rank:1}"
    reason, _ = ending("end_later", *TWO, lost)
    cause = "rank 0 ended with status 1; its last output, above or in ranks/, says why"
    assert reason == f"{cause}; step 2 is saved; to continue"


@pytest.mark.usefixtures("quick_ranks")
def test_a_run_whose_ranks_all_leave_early_is_not_done(ending):
    reason, _ = ending("exit_quietly", "launch.max_restarts=0")
    cause = "a rank ended with status 0 before training ended"
    assert reason == f"{cause}; step 2 is saved; to continue"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_after_the_agent_was_killed_the_printed_command_goes_on(ending, command):
    reason, words = ending("kill_agent", "launch.max_restarts=0", "max_steps=6", run="my run")
    assert reason.startswith("the agent, which starts the ranks, was killed by SIGKILL; if nobody")
    assert reason.endswith("; step 2 is saved; to continue")
    arguments = words[words.index("train") :]
    assert arguments == ["train", "run_dir=my run", "resume=auto"]
    command(*arguments, "launch.inline=true", PYTHONPATH=str(command.folder))
    assert command.summary("my run")["step"] == 6


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_lost_configuration_is_named_when_ranks_restart(ending):
    reason, _ = ending("lose_config", "launch.max_restarts=1")
    cause = "rank 0 failed: run is not a run directory: it has no config.yaml"
    assert reason == f"{cause}; restore run/config.yaml, then continue"


def test_a_limit_of_the_system_is_named_even_if_nothing_can_be_recorded(command):
    (command.folder / "leaves_early.py").write_text(ENDS)
    callback = "+callbacks.ends={_target_:leaves_early.Ends,how:open_no_more_files}"
    words = command.smoke(*SMALL, callback, "run_dir=run", "launch.inline=true")
    process = command.start(*words, PYTHONPATH=str(command.folder))
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert not (command.folder / "run/failed.json").exists()
    line = err.splitlines()[-1]
    assert line.startswith("rank 0 failed: checkpoint run/checkpoints/step=000004.ckpt cannot be")
    assert "; raise the limit of open files (ulimit -n); run/checkpoints cannot be read" in line
    assert line.endswith(" train run_dir=run resume=auto")


def test_a_folder_of_checkpoints_that_cannot_be_written_is_refused_before_training(
    command, finished
):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    shutil.rmtree(command.folder / "run/checkpoints")
    (command.folder / "run/checkpoints").write_text("a file")
    words = ("train", "run_dir=run", "resume=auto", "max_steps=30")
    err = command(*words, "launch.inline=true", status=2).stderr
    assert "run/checkpoints is not a folder; mount or restore the folder" in err
    assert err.count("\n") == 1


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that saved steps 1 and 2, named from the current folder."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("it's a run"))
    run.create({"trainer": {"num_nodes": 1}})
    content = {name: {} for name in NEEDED_TO_RESUME}
    for step in (1, 2):
        write_checkpoint(content, checkpoint_path(run.checkpoints, step))
    return run


def test_a_damaged_checkpoint_does_not_count_as_saved(run):
    sum_path(checkpoint_path(run.checkpoints, 2)).write_text("0  step=000002.ckpt\n")
    assert way_on(run) == f"step 1 is saved; to continue: {resume_command(run)}"
    sum_path(checkpoint_path(run.checkpoints, 1)).unlink()
    assert way_on(run).startswith(f"no checkpoint in {run.checkpoints} is intact; restore one")


def test_without_a_checkpoint_the_run_starts_over(run):
    shutil.rmtree(run.checkpoints)
    assert way_on(run) == f"nothing is saved; to start over: {resume_command(run)}"


def test_a_run_that_has_saved_is_never_told_to_start_over(run):
    run.note_save()
    shutil.rmtree(run.checkpoints)
    for fault in ("is missing", "is not a folder"):
        line = f"{run.checkpoints} {fault}; restore it, then continue: {resume_command(run)}"
        assert way_on(run) == line
        run.checkpoints.touch()


def test_a_folder_of_checkpoints_that_cannot_be_read_is_named(run, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read all
    fault = f"{run.checkpoints} cannot be read: Permission denied; make it readable"
    assert way_on(run) == f"{fault}; to continue: {resume_command(run)}"


def test_a_shell_reads_the_command_as_it_was_meant(run):
    words = shlex.split(resume_command(run))
    assert words == [*shlex.split(typed("train")), f"run_dir={run.path}", "resume=auto"]


def test_each_machine_gets_its_own_command(run):
    run.refreeze({"trainer": {"num_nodes": 2}})
    start = "step 2 is saved; to continue on all machines, each with its launch.node_rank: "
    assert way_on(run, 1) == start + resume_command(run, 1)
    assert resume_command(run, 1).endswith(" resume=auto launch.node_rank=1")


def test_an_error_is_one_line_and_names_the_limit_that_it_hit():
    assert describe_error(UserError("value, rule, remedy")) == "value, rule, remedy"
    assert describe_error(KeyError("name")) == "KeyError: 'name'"
    assert describe_error(ValueError("one\ntwo")) == "ValueError: one"
    assert "(ulimit -n)" in describe_error(OSError(24, "Too many open files"))
    assert "(ulimit -u, " in describe_error(RuntimeError("can't start new thread"))
    assert "(ulimit -v, " in describe_error(MemoryError())
