"""The newest state in memory: what it survives, and when it is removed."""

import re
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm"),
    pytest.mark.usefixtures("quick_ranks"),
]

# Before a step, once: a rank does what its plan says.
ACTIONS = """
import os, pathlib, shutil, signal, time, lightning
class Acts(lightning.Callback):
    def __init__(self, plan):
        self.plan = plan
    def on_train_batch_start(self, trainer, *_):
        for entry in self.plan:
            step, rank, action = entry.split(":")
            note = pathlib.Path(f"acted-{entry}")
            here = (int(step), int(rank)) == (trainer.global_step, trainer.global_rank)
            if here and not note.exists():
                note.touch()
                globals()[action](pathlib.Path(trainer.default_root_dir))
def kill(run):
    time.sleep(0.5)  # the other ranks wait; the last state becomes complete
    kill_at_once(run)
def kill_at_once(run):
    os.kill(os.getpid(), signal.SIGKILL)
def fail(run):
    raise ValueError("on purpose")
def damage(run):
    for path in (run / "checkpoints").glob("*.ckpt"):
        path.write_bytes(b"damaged")
def remove(run):
    shutil.rmtree(folder_of(run))
def damage_memory(run):
    for path in folder_of(run).glob("*.[01]"):
        with path.open("r+b") as file:
            file.seek(50_000)
            file.write(b"damaged")
def folder_of(run):
    token = (run / ".token").read_text().strip()
    return next(pathlib.Path("/dev/shm").glob(f"lockstep-*-{token}"))
"""
TWO = ("trainer=cpu", "trainer.devices=2", "checkpoint.every=100", "val_every=100")


@pytest.fixture
def train(command):
    """Return a function that trains two ranks with a plan, and returns what they printed."""
    (command.folder / "acts.py").write_text(ACTIONS)

    def run(*plan, words=(), status=0):
        node = "+callbacks.acts"
        entries = ",".join(map(repr, plan))
        callback = [f"{node}._target_=acts.Acts", f"{node}.plan=[{entries}]"]
        overrides = [*TWO, "memory=3", "run_dir=run", *callback, *words]
        place = {"PYTHONPATH": str(command.folder)}
        return output(command.train(*overrides, status=status, **place))

    return run


def output(printed):
    return printed.stdout + printed.stderr


def folders(command):
    """Return the run's folders in memory."""
    token = (command.folder / "run/.token").read_text().strip()
    return [*Path("/dev/shm").glob(f"*-{token}")]


def weights(command, run="run"):
    path = command.folder / run / "checkpoints/step=000020.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def assert_undisturbed(command):
    """Compare the last weights with those of a run that nothing happened to."""
    command.train(*TWO, "memory=false", "run_dir=whole")
    ours, theirs = weights(command), weights(command, "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_killed_ranks_continue_from_memory_and_read_no_checkpoint(train, command):
    words = ["checkpoint.every=5"]
    printed = train("7:0:damage", "8:1:kill", "17:0:kill", words=words)
    assert re.findall(r"continues from step (\d+), kept in memory", printed) == ["6", "15"]
    assert "skipped" not in printed
    assert_undisturbed(command)
    assert folders(command) == []


@pytest.mark.slow
def test_a_command_that_was_killed_continues_from_memory_on_another_number_of_ranks(train, command):
    exact = ["batch.exact_micro_size=2", "launch.max_restarts=0"]
    printed = train("14:1:kill", words=exact, status=1)
    last = printed.strip().splitlines()[-1]
    assert "no restarts are left; step 12 stays in this machine's memory (" in last
    assert last.endswith("resume=auto")
    assert len(folders(command)) == 1
    refused = command("train", "run_dir=run", "resume=auto", "max_steps=8", status=2)
    line = "run's state in memory is after step 12, but this run ends after 8 steps"
    assert line in refused.stderr
    resume = ["train", "run_dir=run", "resume=auto", "trainer.devices=1"]
    printed = output(command(*resume, PYTHONPATH=str(command.folder)))
    assert "continues from step 12, kept in memory" in printed
    command.train(*TWO, *exact, "run_dir=whole")
    ours, theirs = weights(command), weights(command, "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert folders(command) == []


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["is not a folder", "is a link to /nowhere, which is missing"])
def test_a_folder_that_cannot_take_checkpoints_is_refused_and_memory_stays(train, command, cause):
    """Its next save would fail, and the state in memory would be lost, too."""
    train("14:1:kill", words=["checkpoint.every=5", "launch.max_restarts=0"], status=1)
    folder = command.folder / "run/checkpoints"
    saved = folder.rename(command.folder / "saved")
    if "link" in cause:
        folder.symlink_to("/nowhere")
    else:
        folder.touch()
    resume = ["train", "run_dir=run", "resume=auto", "trainer.devices=1"]
    place = {"PYTHONPATH": str(command.folder)}
    refused = command(*resume, status=2, **place).stderr
    assert f"run/checkpoints {cause}; mount or restore the folder; step 12 stays in this" in refused
    assert refused.count("\n") == 1
    assert len(folders(command)) == 1
    folder.unlink()
    saved.rename(folder)
    assert "continues from step 12, kept in memory" in output(command(*resume, **place))


@pytest.mark.slow
def test_a_newer_checkpoint_comes_before_memory(train):
    printed = train("14:0:kill", words=["memory=6", "checkpoint.every=13"])
    assert "kept in memory" not in printed


@pytest.mark.slow
def test_memory_is_released_when_a_run_has_failed(train, command):
    train("8:1:fail", status=1)
    assert folders(command) == []


@pytest.mark.slow
def test_memory_stays_when_the_command_is_killed_and_is_released_when_it_stops(command, wait_for):
    words = (*TWO, "memory=2", "max_steps=4000", "log_every=1", "run_dir=run")
    log = command.folder / "run/train.log"
    metrics = command.folder / "run/metrics.csv"

    def rows():
        return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0

    process = command.start(*command.smoke(*words))
    wait_for(lambda: rows() >= 30)
    process.kill()
    process.communicate(timeout=120)
    (folder,) = folders(command)
    assert [*folder.glob("*.[01]")]
    process = command.start("train", "run_dir=run", "resume=auto")
    wait_for(lambda: re.search(r"continues from step \d+, kept in memory", log.read_text()))
    step = int(re.findall(r"continues from step (\d+), kept in memory", log.read_text())[0])
    assert step >= 28
    wait_for(lambda: rows() > step + 9)
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert folders(command) == []


@pytest.mark.slow
def test_one_rank_keeps_its_state_only_if_asked(command, train):
    words = ["trainer.devices=1"]
    printed = train("8:0:kill", words=words)
    assert "continues from step 6, kept in memory" in printed
    printed = output(command.train("trainer=cpu", "trainer.devices=1", "run_dir=other"))
    assert "memory  " not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "line"),
    [
        ("remove", r"the state isn't kept in memory any more: .* was removed"),
        ("damage_memory", r"skipped the state of step \d+ in memory: it is damaged"),
    ],
)
def test_without_its_memory_a_run_continues_from_disk(train, command, action, line):
    words = ["checkpoint.every=2"]
    printed = train(f"9:0:{action}", "13:1:kill", words=words)
    if action == "damage_memory":
        printed = train_again(command, words)
    assert len(re.findall(line, printed)) >= 1
    assert_undisturbed(command)


def train_again(command, words):
    """Kill a run right after its states were damaged; return what it printed."""
    (command.folder / "run").rename(command.folder / "first")
    for note in command.folder.glob("acted-*"):
        note.unlink()
    node = "+callbacks.acts"
    plan = "['9:0:damage_memory','9:0:kill_at_once']"
    callback = [f"{node}._target_=acts.Acts", f"{node}.plan={plan}"]
    overrides = [*TWO, "memory=3", "run_dir=run", *callback, *words]
    return output(command.train(*overrides, PYTHONPATH=str(command.folder)))


def test_a_setting_that_is_none_is_refused(command):
    for value in ("0", "true", "often"):
        printed = command.train(f"memory={value}", "run_dir=run", status=2).stderr
        assert f"memory={value} must be auto, false, or a number of steps from 1 on" in printed
