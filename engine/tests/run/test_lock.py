import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lockstep.errors import UserError
from lockstep.run import lock
from lockstep.run.directory import RunDirectory

RANK = """
import sys, time
from pathlib import Path
from lockstep.run.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock.of_rank(int(sys.argv[2])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


@pytest.fixture
def start_rank(run):
    """Start a rank, which holds its part of the lock until it is killed."""
    started = []

    def start(rank):
        words = [sys.executable, "-c", RANK, str(run.path), str(rank)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("rank", "name"), [(0, "rank 0"), (1, "a rank"), (7, "a rank")])
def test_a_stopped_rank_without_its_command_keeps_others_out(
    run, start_rank, monkeypatch, rank, name
):
    monkeypatch.setattr(lock, "RANK_SECONDS", 0.1)
    run.lock.path.write_text("process 77 on another")  # it was killed
    process = start_rank(rank)
    process.send_signal(signal.SIGSTOP)
    holder = f"process {process.pid} on {socket.gethostname()}, {name} of process 77 on another"
    remedy = f"wait for it to end, or stop it: kill -9 {process.pid}"
    line = f"run_dir={run.path} is in use by {holder}; {remedy}"
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"), run.locked():
        pass
    process.kill()
    process.wait()
    with run.locked():
        pass


def test_a_command_waits_for_ranks_that_are_about_to_end(run, start_rank, monkeypatch):
    monkeypatch.setattr(lock, "RANK_SECONDS", 240.0)
    processes = [start_rank(rank) for rank in range(3)]
    waited = []

    def end_one(_):
        waited.append(processes.pop())
        waited[-1].kill()
        waited[-1].wait()

    # Not of the module `time`: other threads sleep, too.
    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=end_one))
    with run.locked():
        assert (len(waited), processes) == (3, [])


def test_all_ranks_of_a_command_can_write_and_only_one_of_them_as_rank_zero(
    run, start_rank, monkeypatch
):
    monkeypatch.setattr(lock, "RANK_SECONDS", 0.1)
    with run.locked():
        zero, *_ = [start_rank(rank) for rank in (0, 1, 2, 2)]
        in_use = f"is in use by process {zero.pid} on {socket.gethostname()}, rank 0 of process"
        with pytest.raises(UserError, match=f"{in_use} {os.getpid()} on"), run.lock.of_rank(0):
            pass


def test_a_new_rank_zero_follows_a_killed_one(run, start_rank):
    with run.locked():
        for _ in range(2):
            process = start_rank(0)
            process.kill()
            process.wait()


def test_a_rank_keeps_others_out_also_after_its_command_has_ended(run, start_rank, monkeypatch):
    monkeypatch.setattr(lock, "RANK_SECONDS", 0.1)
    with run.locked():
        start_rank(1)
    with pytest.raises(UserError, match="in use by process"), run.locked():
        pass


def test_a_command_leaves_no_file_and_never_trusts_one_that_another_has_removed(run, monkeypatch):
    acquire = lock.RunLock._acquire
    removed = []

    def remove_once(self, file, part, *arguments, **names):
        if not removed:
            removed.append(file)
            self.path.unlink()  # as another command does at its end
        acquire(self, file, part, *arguments, **names)

    monkeypatch.setattr(lock.RunLock, "_acquire", remove_once)
    with run.locked():
        assert run.lock.path.is_file()
        assert removed[0].closed
    assert not run.lock.path.exists()


def test_a_file_system_without_locks_is_reported_once(run, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    with run.locked(), run.lock.of_rank(0), run.lock.of_rank(1):
        pass
    line = f"run_dir={run.path} is on a disk without locks: start it only once\n"
    assert capsys.readouterr().out == line
