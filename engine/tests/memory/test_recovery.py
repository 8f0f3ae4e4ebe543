"""The newest state in any machine's memory: which one counts, and how machines get it."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from lockstep.memory import files, recovery
from lockstep.memory.files import identity_of, states_in
from lockstep.memory.recovery import newest_in_memory
from lockstep.memory.states import read_state
from lockstep.memory.writer import MemoryWriter
from lockstep.ranks import machine_ring
from lockstep.ranks.ranks import Ranks
from lockstep.run.directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    """A run whose machines have memory in folders."""
    directory = RunDirectory(tmp_path / "run")
    directory.create({"seed": 1})
    for machine in range(4):
        (tmp_path / f"machine{machine}").mkdir()
    return directory


def use_machine(run, machine):
    """Give this process the memory of a machine."""
    files.SHARED_MEMORY = run.path.with_name(f"machine{machine}")


def newest_steps(run, machines):
    """Return the step of the newest state in each machine's own memory."""
    steps = []
    for machine in range(machines):
        use_machine(run, machine)
        steps.append(states_in(identity_of(run))[0].step)
    return steps


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    monkeypatch.setattr(files, "SHARED_MEMORY", files.SHARED_MEMORY)


def keep(run, machine, *steps):
    """Write states as a rank of an earlier start has."""
    use_machine(run, machine)
    keep_here(run, machine, *steps)


def keep_here(run, machine, *steps):
    writer = MemoryWriter(identity_of(run))
    writer.start(1 << 10, None)
    for step in steps:
        writer.write(step, {"weight": torch.full((1000,), float(step)), "machine": machine})
    writer.close()


def damage(run, machine):
    """Change a number in the newest state of a machine."""
    use_machine(run, machine)
    newest = states_in(identity_of(run))[0]
    with newest.path.open("r+b") as file:
        file.seek(files.HEADER_BYTES + 100)
        file.write(b"damaged!")


def recover(run, on_ranks, machines=2, at_least=0):
    """Return what each of two ranks of each machine continues from: step, machine of origin."""

    def rank_of_machine(rank):
        machine, local_rank = divmod(rank, 2)
        use_machine(run, machine)
        numbers = (rank, local_rank, 2 * machines, 2)
        Ranks.from_environment = classmethod(lambda cls: cls(*numbers))  # of this process alone
        writer = None if local_rank else MemoryWriter(identity_of(run))
        state = newest_in_memory(identity_of(run), writer, at_least, 60)
        if state is None:
            return None
        content = read_state(state)
        assert bool((content["weight"] == state.step).all())
        return state.step, content["machine"]

    return on_ranks(2 * machines, rank_of_machine)


def test_a_machine_with_an_older_state_gets_the_newest(run, on_ranks, monkeypatch):
    monkeypatch.setattr(machine_ring, "PIECE", 1000)  # it travels in several pieces
    keep(run, 0, 4, 6)
    keep(run, 1, 6, 8)
    assert recover(run, on_ranks) == [(8, 1)] * 4
    assert newest_steps(run, 2) == [8, 8]


def test_the_group_of_a_transfer_waits_as_long_as_is_set(run, on_ranks, monkeypatch):
    make = recovery.gloo_group

    def make_checked(seconds, members):
        assert seconds == 60  # as `recover` says
        return make(seconds, members)

    monkeypatch.setattr(recovery, "gloo_group", make_checked)
    keep(run, 0, 4, 6)
    keep(run, 1, 6, 8)
    assert recover(run, on_ranks) == [(8, 1)] * 4


def test_two_machines_without_a_state_get_it_from_the_third(run, on_ranks):
    keep(run, 1, 5)
    assert recover(run, on_ranks, machines=3) == [(5, 1)] * 6
    assert newest_steps(run, 3) == [5, 5, 5]


def test_a_damaged_state_does_not_count(run, on_ranks):
    keep(run, 0, 4, 6)
    keep(run, 1, 4)
    damage(run, 0)
    assert recover(run, on_ranks) == [(4, 0)] * 4


@pytest.mark.parametrize(("saved", "expected"), [(5, [(5, 0)] * 4), (6, [None] * 4)])
def test_a_newer_checkpoint_counts_more(run, on_ranks, saved, expected):
    keep(run, 0, 5)
    assert recover(run, on_ranks, at_least=saved) == expected


def test_a_machine_without_room_sends_all_to_the_disk(run, on_ranks):
    keep(run, 0, 5)
    run.path.with_name("machine1").rmdir()
    assert recover(run, on_ranks) == [None] * 4


def test_states_of_runs_that_nobody_continues_are_removed(run, tmp_path):
    use_machine(run, 0)
    folders = {}
    for name in ("done", "deleted", "unfinished"):
        directory = RunDirectory(tmp_path / name)
        directory.create({"seed": 1})
        keep(directory, 0, 1)
        folders[name] = identity_of(directory).folder
    RunDirectory(tmp_path / "done").write_summary({"status": "done"})
    (tmp_path / "deleted/config.yaml").unlink()
    (tmp_path / "deleted/.token").unlink()
    files.remove_abandoned()
    assert {name for name in folders if folders[name].exists()} == {"unfinished"}


def test_a_folder_stays_while_a_process_uses_it_that_has_read_it(run):
    use_machine(run, 0)
    identity = identity_of(run)
    writer = MemoryWriter(identity)
    writer.start(1 << 10, None)
    assert states_in(identity) == []
    run.write_summary({"status": "done"})  # so that only the process keeps the folder
    code = (
        "from pathlib import Path; from lockstep.memory import files; "
        f"files.SHARED_MEMORY = Path({str(files.SHARED_MEMORY)!r}); files.remove_abandoned()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert identity.folder.exists()
    writer.close()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not identity.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_states_of_runs_on_a_disk_that_is_away_stay(run, tmp_path):
    use_machine(run, 0)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        directory = RunDirectory(disk / "runs/first")
        directory.create({"seed": 1})
        keep_here(directory, 0, 1)
        folder = identity_of(directory).folder
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    files.remove_abandoned()
    assert folder.exists()


def test_states_of_a_run_stay_until_it_is_deleted_also_with_all_around_it(run, tmp_path):
    use_machine(run, 0)
    directory = RunDirectory(tmp_path / "project/runs/first")
    directory.create({"seed": 1})
    keep_here(directory, 0, 1)
    folder = identity_of(directory).folder
    token = directory.path / ".token"
    token.rename(tmp_path / "token")
    token.mkdir()  # which can't be read
    files.remove_abandoned()
    assert folder.exists()
    shutil.rmtree(tmp_path / "project")
    files.remove_abandoned()
    assert not folder.exists()
