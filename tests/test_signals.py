"""Signals to a whole run: the first decides, repeats change nothing, and Ctrl-Z pauses all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lockstep_gpt.stop_signals import REPEAT_SECONDS

TWO_RANKS = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
# What happens in a run waits for a file, and shows with a file that it waits.
WAITS = """
import os, time, lightning

def wait(name):
    if os.path.exists("wait in " + name):
        open("waits in " + name, "w").close()
        while os.path.exists("wait in " + name):
            time.sleep(0.02)

class Waits(lightning.Callback):
    def __init__(self):
        wait("assembly")

    def on_train_batch_start(self, *_):
        wait("step")

    def on_save_checkpoint(self, *_):
        wait("save")

    def on_validation_end(self, trainer, *_):
        if trainer.global_step == trainer.max_steps:
            wait("last validation")
"""
CALLBACK = "+callbacks.waits._target_=waits.Waits"
LONG = ("max_steps=100000", CALLBACK)
RUN = ("-m", "lockstep_gpt")


@pytest.fixture
def start(command):
    """Start the real program on an experiment with `Waits`."""
    (command.folder / "waits.py").write_text(WAITS)

    def start_run(*words):
        run_dir = f"run_dir={command.folder}/run"
        environment = {"PYTHONPATH": str(command.folder)}
        return command.start_python(*RUN, *command.smoke(run_dir, *words), **environment)

    return start_run


@pytest.fixture
def let_wait(command, wait_for):
    """Let what has a name wait from now on; return a function that waits until it does."""

    def let(name):
        (command.folder / f"wait in {name}").touch()
        return lambda: wait_for((command.folder / f"waits in {name}").exists)

    return let


@pytest.fixture
def go_on(command):
    """Let what has a name wait no longer."""
    return lambda name: (command.folder / f"wait in {name}").unlink()


def ended(process):
    """Return the exit status and the output of a process, which has no traceback."""
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in out + err, out + err
    assert "SignalException" not in out + err, out + err
    return process.returncode, out


@pytest.mark.slow
def test_signals_during_the_save_change_nothing_for_any_process(
    command, start, let_wait, go_on, wait_for_checkpoint, processes_of
):
    process = start(*LONG, *TWO_RANKS)
    wait_for_checkpoint(command.folder / "run")
    wait_until_it_saves = let_wait("save")
    process.send_signal(signal.SIGHUP)
    wait_until_it_saves()
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        for pid in {process.pid, *processes_of(command.folder)}:
            os.kill(pid, signum)
        time.sleep(0.05)
    go_on("save")
    status, out = ended(process)
    assert status == 128 + signal.SIGHUP
    assert out.splitlines()[-1].startswith("stopped by SIGHUP; step ")
    summary = command.summary("run")
    assert (summary["status"], summary["saved"]) == ("stopped", True)
    assert summary["last_checkpoint"].endswith(f"step={summary['step']:06d}.ckpt")
    assert not processes_of(command.folder)


def test_only_an_explicit_second_interrupt_stops_without_a_save(
    command, start, let_wait, wait_for_checkpoint
):
    process = start(*LONG, "launch.grace_seconds=500")
    wait_for_checkpoint(command.folder / "run")
    wait_until_a_step_hangs = let_wait("step")
    wait_until_a_step_hangs()
    process.send_signal(signal.SIGINT)
    time.sleep(2 * REPEAT_SECONDS)
    process.send_signal(signal.SIGINT)
    status, out = ended(process)
    assert status == 128 + signal.SIGINT
    *_, saving, at_once, last = filter(None, out.splitlines())
    assert saving == "saving after this step; press Ctrl-C again to stop at once"
    assert at_once == "stopping at once, without a save"
    assert last.startswith("stopped by SIGINT before all ranks saved; step ")
    assert command.summary("run")["saved"] is False


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_leaves_nothing_and_the_same_command_works(
    command, start, let_wait, go_on
):
    wait_until_it_assembles = let_wait("assembly")
    process = start("max_steps=6", CALLBACK)
    wait_until_it_assembles()
    process.send_signal(signal.SIGINT)
    status, out = ended(process)
    assert status == 128 + signal.SIGINT
    line = "stopped by SIGINT before the first step; nothing is kept: start it again"
    assert out.splitlines()[-1] == line
    assert not (command.folder / "run").exists()

    go_on("assembly")
    wait_until_it_validates = let_wait("last validation")
    process = start("max_steps=6", CALLBACK)
    wait_until_it_validates()
    process.send_signal(signal.SIGTERM)  # too late: it is about to end anyway
    go_on("last validation")
    status, out = ended(process)
    assert status == 0
    assert "\ndone in " in out
    assert command.summary("run")["status"] == "done"


PREPARES = """
import sys, time
from lockstep_gpt import cli
from lockstep_gpt.data import prepare
def hang(*_):
    open("prepares", "w").close()
    time.sleep(600)
prepare.prepare = hang
cli.run()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_signal_before_there_is_a_run_ends_with_one_line(command, wait_for, signum):
    process = command.start_python("-c", PREPARES, *command.smoke("run_dir=run"))
    wait_for((command.folder / "prepares").exists)
    process.send_signal(signum)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signum
    assert out == ""
    assert err.endswith(f" train: stopped by {signum.name} before training began\n")
    assert len(err.splitlines()) == 1
    assert not (command.folder / "run").exists()


def test_an_inline_run_saves_once_and_ends_with_the_first_signal(
    command, start, let_wait, go_on, wait_for_checkpoint
):
    process = start(*LONG, "launch.inline=true")
    wait_for_checkpoint(command.folder / "run")
    wait_until_it_saves = let_wait("save")
    process.send_signal(signal.SIGUSR1)
    wait_until_it_saves()
    process.send_signal(signal.SIGTERM)
    go_on("save")
    status, out = ended(process)
    assert status == 128 + signal.SIGUSR1
    assert out.splitlines()[-1].startswith("stopped by SIGUSR1; step ")


def state_of(pid):
    """Return the state of a process, such as T: it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_rank(pid):
    """Return whether the command line of a process is that of a rank."""
    return b"rank_program" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("start")  # for its callback
def test_a_paused_run_continues_to_the_same_bits(command, let_wait, go_on, wait_for, processes_of):
    run = command.folder / "run"
    words = ("max_steps=6", CALLBACK, "launch.max_restarts=0")
    wait_until_a_step_waits = let_wait("step")
    process = subprocess.Popen(
        # In a group of its own, as a shell starts it.
        [sys.executable, *RUN, *command.smoke(*words, *TWO_RANKS, f"run_dir={run}")],
        cwd=command.folder,
        env={**os.environ, "PYTHONPATH": str(command.folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        wait_until_a_step_waits()
        process.send_signal(signal.SIGTSTP)
        wait_for(lambda: state_of(process.pid) == "T")
        ranks = [pid for pid in processes_of(run) if is_rank(pid)]
        assert len(ranks) == 2
        wait_for(lambda: [state_of(pid) for pid in ranks] == ["T", "T"])
        go_on("step")
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out
    command.train(*words, *TWO_RANKS, "run_dir=undisturbed", PYTHONPATH=str(command.folder))
    ours, theirs = (weights_of(command.folder / name) for name in ("run", "undisturbed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def weights_of(run):
    """Return the weights of a run's newest checkpoint."""
    path = max(run.glob("checkpoints/*.ckpt"))
    return torch.load(path, weights_only=True)["state_dict"]


GUARDED = """
import os, sys, time
from types import SimpleNamespace
from lockstep_gpt.run.callbacks.guards import Guards
guard = SimpleNamespace(stall_after=6, replicas_every=None)
config = SimpleNamespace(guard=guard, strategy={}, trainer={"accelerator": "cpu"})
directory = SimpleNamespace(record_failure=print, rank_logs=None)
guards = Guards(config, directory, 0, sys.stderr)
guards.on_train_start(SimpleNamespace(global_step=0, world_size=1), None)
open("ready", "w").close()
while not os.path.exists("end"):
    time.sleep(0.02)
guards.on_train_end()
"""


@pytest.mark.slow
def test_a_limit_on_stalls_does_not_count_a_pause(command, wait_for):
    process = command.start_python("-c", GUARDED)
    wait_for((command.folder / "ready").exists)
    for signum in (signal.SIGTSTP, signal.SIGSTOP):  # as an agent sends them
        process.send_signal(signum)
    time.sleep(7)  # of 6 allowed
    process.send_signal(signal.SIGCONT)
    time.sleep(1.5)  # more than twice the time between its looks
    (command.folder / "end").touch()
    assert ended(process)[0] == 0
