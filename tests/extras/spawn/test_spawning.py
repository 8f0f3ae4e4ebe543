"""Ranks that one process spawns: the same losses as an agent's, and how they end."""

import os
import signal
import threading
import time

import pytest

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.extras.spawn import spawning
from lockstep_gpt.launch.devices import place
from lockstep_gpt.processes import STOP_SIGNALS
from lockstep_gpt.run_directory import RunDirectory


@pytest.mark.usefixtures("quick_ranks")
def test_spawned_ranks_give_the_same_losses(two):
    command, _ = two
    command.train("trainer=cpu", "trainer.devices=2", "strategy=ddp_spawn", "run_dir=runs/spawned")
    assert command.summary("runs/spawned")["val_loss"] == command.summary("runs/two")["val_loss"]


def test_spawning_inside_a_launcher_is_rejected(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = Config(max_steps=1, trainer={"accelerator": "cpu"}, strategy={"start_method": "spawn"})
    line = r"^strategy=ddp_spawn starts its own ranks and cannot run inside"
    with pytest.raises(UserError, match=line):
        place(config)


def test_a_command_that_spawns_inside_a_launcher_is_rejected(command):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = command.train("trainer=cpu", "strategy=ddp_spawn", status=2, **environment)
    assert "cannot run inside a launcher" in result.stderr


RANKS = """
import os, signal, time
def writes(rank, size, port, run):  # in the background: rank 1 is not held up by it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        time.sleep(4)
        (run.path / "written").touch()
    os._exit(143)
def hangs(rank, size, port, run):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run.path / f"hangs{rank}").touch()
    time.sleep(600)
"""


@pytest.fixture
def spawned(tmp_path, monkeypatch):
    """Start two ranks that run a function of `RANKS`; return the exit status."""
    (tmp_path / "fakes.py").write_text(RANKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(spawning, "FAILURE_GRACE", 0.5)
    names = (*STOP_SIGNALS, signal.SIGALRM)
    handlers = {signum: signal.getsignal(signum) for signum in names}

    def start(name, seconds):
        monkeypatch.setattr(spawning, "_spawned_rank", getattr(__import__("fakes"), name))
        config = Config(max_steps=1, trainer={"devices": 2})
        config.launch.grace_seconds = seconds
        return spawning.start(RunDirectory(tmp_path), config)

    yield start
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def test_a_rank_that_still_writes_when_others_have_stopped_is_waited_for(spawned, tmp_path):
    assert spawned("writes", 60) == 128 + signal.SIGTERM
    assert (tmp_path / "written").exists()


def test_spawned_ranks_that_do_not_stop_in_time_are_killed(spawned, tmp_path, wait_for):
    def stop():
        wait_for(lambda: len([*tmp_path.glob("hangs*")]) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    started = time.monotonic()
    assert spawned("hangs", 1) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 60
