"""What a file system lacks: runs go on without it, and a broken disk ends them with its cause."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import file_systems
from lockstep.checkpoints.room import refuse_full_disk
from lockstep.file_systems import Lock, is_unsupported, lacks_links, locked

UNSUPPORTED = ("ENOSYS", "ENOTSUP", "ENOLCK", "EINVAL")
# Takes operations away in one folder, from every process of a run.
PATCH = """
import errno, fcntl, os
folder, number = os.environ["LACKING"], getattr(errno, os.environ["ANSWER"])

def place(what):
    if isinstance(what, (str, bytes, os.PathLike)):
        return os.path.abspath(os.fsdecode(what))
    return os.readlink(f"/proc/self/fd/{what if isinstance(what, int) else what.fileno()}")

def lacking(operation):
    def call(what, *arguments, **named):
        if place(what).startswith(folder):
            raise OSError(number, os.strerror(number))
        return operation(what, *arguments, **named)
    return call

for name in os.environ["LACKS"].split():
    module = fcntl if hasattr(fcntl, name) else os
    setattr(module, name, lacking(getattr(module, name)))
"""
RAISES = """
import lightning
class Raises(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        raise ZeroDivisionError("on purpose")
"""


def refusing(number):
    def take():
        raise OSError(number, os.strerror(number))

    return take


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_operation_that_is_missing_is_told_from_a_busy_and_a_broken_disk(name):
    assert locked(refusing(getattr(errno, name))) is Lock.UNSUPPORTED
    assert locked(refusing(errno.EAGAIN)) is Lock.BUSY
    assert locked(refusing(errno.EACCES)) is Lock.BUSY
    assert locked(lambda: None) is Lock.TAKEN
    with pytest.raises(OSError, match="Input/output error"):
        locked(refusing(errno.EIO))
    assert is_unsupported(OSError(getattr(errno, name), ""))
    assert lacks_links(OSError(errno.EPERM, ""))
    assert not lacks_links(OSError(errno.ENOSPC, ""))


def test_a_disk_that_does_not_tell_its_room_is_not_full(tmp_path, monkeypatch):
    def answer(_):
        raise OSError(number, os.strerror(number))

    number = errno.ENOSYS
    assert file_systems.bytes_left(tmp_path) > 0
    monkeypatch.setattr(shutil, "disk_usage", answer)
    refuse_full_disk(tmp_path, needed=10**18)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        refuse_full_disk(tmp_path, needed=1)
    nothing = shutil._ntuple_diskusage(0, 0, 0)  # as some of FUSE say
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nothing)
    refuse_full_disk(tmp_path, needed=10**18)


@pytest.mark.parametrize("name", sorted(errno.errorcode.values()))
def test_each_cause_has_a_remedy(name):
    assert file_systems.remedy(OSError(getattr(errno, name), ""), "run_dir")


@pytest.fixture
def train(command):
    """Train two ranks where operations are lacking in a folder."""
    (command.folder / "sitecustomize.py").write_text(PATCH)
    (command.folder / "raises.py").write_text(RAISES)

    def run(lacks, folder, *words, answer="ENOSYS", status=0):
        names = {"LACKS": lacks, "LACKING": str(folder), "ANSWER": answer}
        words = command.smoke("trainer=cpu", "trainer.devices=2", "max_steps=4", *words)
        done = subprocess.run(
            [sys.executable, "-m", "lockstep_gpt", *words],
            cwd=command.folder,
            env={**os.environ, **names, "PYTHONPATH": str(command.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr or status == 1
        return done

    return run


@pytest.mark.slow
def test_a_run_needs_no_locks_flushes_links_or_modes_where_its_directory_is(command, train):
    run = command.folder / "run"
    lacks = "lockf flock fsync link chmod"
    done = train(lacks, run, f"run_dir={run}")
    assert done.stdout.count("is on a disk without locks: start it only once") == 1
    assert command.summary("run")["status"] == "done"
    train(lacks, run, f"run_dir={run}", "resume=auto", "max_steps=6")
    assert command.summary("run")["step"] == 6


@pytest.mark.slow
def test_a_failure_is_recorded_once_without_links(command, train):
    run = command.folder / "run"
    raising = "+callbacks.raises._target_=raises.Raises"
    train("link", run, f"run_dir={run}", raising, answer="EPERM", status=1)
    failed = json.loads((run / "failed.json").read_text("utf-8"))
    assert failed["error"] == "ZeroDivisionError: on purpose"


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["ENOLCK", "ENOSYS"])
def test_memory_without_locks_is_off_and_leaves_nothing_behind(command, train, answer):
    done = train("lockf", "/dev/shm/lockstep", f"run_dir={command.folder}/run", answer=answer)
    assert "has no locks, which tell who writes there" in done.stdout
    token = (command.folder / "run/.token").read_text().strip()
    assert not [*Path("/dev/shm").glob(f"lockstep-*-{token}*")]


@pytest.mark.slow
def test_a_disk_that_fails_to_flush_ends_the_run_with_its_cause(command, train):
    run = command.folder / "run"
    done = train("fsync", run / "checkpoints", f"run_dir={run}", answer="EIO", status=1)
    assert "Input/output error" in done.stderr.splitlines()[-1]
