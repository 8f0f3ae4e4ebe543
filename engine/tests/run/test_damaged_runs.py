"""A run whose files are away, damaged, unreadable, or folders: one line, or a warning."""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import shutil
import sys

import pytest
import torch

from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import checkpoint_path
from lockstep.checkpoints.sums import sum_path
from lockstep.run.directory import RunDirectory

RESUME = ("train", "run_dir=run", "resume=auto", "launch.inline=true")
LONGER = (*RESUME, "max_steps=22")
LAST = "checkpoints/step=000020.ckpt"
GENERATE = ("generate", "run", "--length", "3")


@pytest.fixture
def run(finished, command):
    """A copy of the finished run, in `run`."""
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    return command.folder / "run"


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(command, words):
    """Return the only line of a command that is refused as a mistake."""
    status, _, errors = command.run(*words)
    assert (status, errors.count("\n")) == (2, 1), errors
    return errors


def remove(folder):
    shutil.rmtree(folder)


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def unmount(folder):
    """Leave a link to a disk that isn't there."""
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere/disk")


def replace_by_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


AWAY = {
    remove: "but run/checkpoints is missing; mount or restore it, or start over in another run_dir",
    empty: "but run/checkpoints has no checkpoint; mount or restore it, or start over in another",
    unmount: "run/checkpoints is a link to /nowhere/disk, which is missing; mount or restore",
    replace_by_file: "run/checkpoints is not a folder; mount or restore the folder",
}


@pytest.mark.parametrize("away", AWAY)
def test_a_run_whose_checkpoints_are_away_never_starts_over(run, command, away):
    (run / "summary.json").unlink()  # as after a kill
    away(run / "checkpoints")
    before = content_of(run)
    assert AWAY[away] in refusal(command, RESUME)
    changed = {run / name for name in ("train.log", "failed.json", "overrides.log")}
    after = content_of(run)
    changed |= {*run.glob("wandb/*.log")}  # wandb's own, from before the refusal
    assert all(after[path] == before[path] for path in before.keys() - changed)
    assert AWAY[away].partition("checkpoints ")[2].split(";")[0] in refusal(command, GENERATE)


def test_the_summary_of_an_earlier_version_shows_that_there_were_checkpoints(run, command):
    (run / ".saved").unlink()  # which that version didn't write
    remove(run / "checkpoints")
    assert "run_dir=run has saved checkpoints, but" in refusal(command, RESUME)


def test_a_run_killed_before_its_first_save_starts_over_though_it_has_rows(run, command):
    rows = [line.split(",")[:3] for line in (run / "metrics.csv").read_text().splitlines()]
    remove(run / "checkpoints")
    for name in (".saved", "summary.json"):
        (run / name).unlink()
    command(*RESUME)
    assert (run / LAST).is_file()
    again = [line.split(",")[:3] for line in (run / "metrics.csv").read_text().splitlines()]
    assert again == rows


def test_a_run_remembers_a_save_once_it_is_complete(tmp_path):
    directory = RunDirectory(tmp_path)
    disk = AtomicCheckpointIO(directory)
    with pytest.raises(AttributeError):  # in the middle of the save
        disk.save_checkpoint({"callback": lambda: None}, checkpoint_path(directory.checkpoints, 1))
    disk.save_checkpoint({}, tmp_path / "elsewhere/step=000001.ckpt")
    assert not directory.has_saved()
    disk.save_checkpoint({}, checkpoint_path(directory.checkpoints, 2))
    assert directory.has_saved()


@pytest.mark.slow
def test_damaged_files_that_only_inform_are_ignored_by_name_and_replaced(run, command):
    metrics = run / "metrics.csv"
    rows = metrics.read_text().splitlines()
    damaged = f"{rows[0]}\n{rows[1]}\nabc\n{rows[2]}\n\0\0\0\n{rows[3]}\n{rows[4]}\n{rows[4][:9]}"
    metrics.write_text(damaged)
    (run / "summary.json").write_text('{"status": "do')
    (run / "failed.json").write_text("")
    (run / "overrides.log").write_bytes(b"\xff\xfe\nx\n")
    printed = command(*LONGER).stdout
    assert "run/summary.json is damaged (not JSON); ignored" in printed
    assert "run/metrics.csv: left out 2 damaged lines; run/metrics.csv.damaged is the" in printed
    assert (run / "metrics.csv.damaged").read_text() == damaged
    assert metrics.read_text().splitlines()[:5] == rows
    assert command.summary("run")["status"] == "done"
    assert (run / "overrides.log").read_bytes().startswith(b"\xff\xfe\nx\n")
    assert "run is done" in command(*LONGER).stdout


@pytest.mark.parametrize("content", [None, b"\0\1", b"- 1\n", b"hydra: {job: 5}\n"])
def test_a_copy_without_hydra_s_own_file_continues_with_this_command_s(run, command, content):
    file = run / ".hydra/hydra.yaml"
    before = file.read_text()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    printed = command(*LONGER).stdout
    line = "run/.hydra/hydra.yaml is damaged; this command's takes its place"
    assert (line in printed) == (content is not None)
    assert file.read_text().splitlines()[0] == before.splitlines()[0]
    assert command.summary("run")["step"] == 22


def test_a_file_in_the_place_of_hydra_s_folder_is_refused(run, command):
    shutil.rmtree(run / ".hydra")
    (run / ".hydra").touch()
    assert "run/.hydra is not a folder; move it away" in refusal(command, LONGER)


@pytest.mark.parametrize("decided", [5, [], {}, {"marks": 1, "fingerprint": "a"}])
def test_damaged_notes_about_tokens_are_refused_by_their_name(run, command, decided):
    (run / "decided.json").write_text(json.dumps({"tokens": decided}))
    line = refusal(command, LONGER)
    assert "tokens in the run's decided.json is damaged; restore the original" in line


@pytest.mark.parametrize("name", ["metrics.csv", "train.log", "overrides.log", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_by_its_name(run, command, name):
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    assert f"run/{name} is a folder; move it away" in refusal(command, LONGER)


@pytest.mark.parametrize("name", ["metrics.csv", "train.log", "overrides.log", "summary.json"])
def test_a_pipe_in_the_place_of_a_file_blocks_nobody(run, command, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    status, _, errors = command.run(*LONGER)
    assert status == 2
    assert f"run/{name} is not a file; move it away" in errors


@pytest.fixture
def permissions():
    """Let the permissions of files bind root too, as far as this system can."""
    if os.geteuid() == 0:
        if sys.platform != "linux":
            pytest.skip("root may read every file")
        with _without_capabilities():
            yield
    else:
        yield


@contextlib.contextmanager
def _without_capabilities():
    """Take from this thread what lets root read every file (CAP_DAC_*), for a while."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if libc.capget(header, before):
        pytest.skip("this system has no capabilities")
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= ~0b110
    libc.capset(header, fewer)
    try:
        yield
    finally:
        libc.capset(header, before)


@pytest.mark.usefixtures("permissions")
@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("config.yaml", [LONGER]),
        ("metrics.csv", [LONGER]),
        ("train.log", [LONGER]),
        (LAST, [RESUME, GENERATE]),
        (f"{LAST}.sha256", [RESUME, GENERATE]),
        ("checkpoints", [RESUME, GENERATE]),
    ],
)
def test_an_unreadable_file_is_refused_by_its_name(run, command, name, commands):
    path = run / name
    path.chmod(0)
    try:
        with contextlib.suppress(PermissionError):
            os.close(os.open(path, os.O_RDONLY))
            pytest.skip("permissions do not bind this user here")
        for words in commands:
            line = refusal(command, words)
            assert f": run/{name}" in line
            assert "Permission denied; make it" in line
    finally:
        path.chmod(0o755)


@pytest.fixture
def change(run):
    """Return a function that changes what is in the run's checkpoint, and its SHA-256."""

    def changed(action):
        path = run / LAST
        content = torch.load(path)
        action(content)
        torch.save(content, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sum_path(path).write_text(f"{digest}  {path.name}\n")

    return changed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_every_command(change, command, value):
    def spoil(content):
        content["state_dict"]["model.blocks.1.attention.qkv.weight"][0, 0] = value

    change(spoil)
    fault = f"checkpoint run/{LAST} has weights that are not finite, such as "
    for words in (GENERATE, ("evaluate", "run")):
        line = refusal(command, words)
        assert f"{fault}model.blocks.1.attention.qkv.weight; use another checkpoint" in line
    line = refusal(command, LONGER)
    assert f"{fault}model.blocks.1.attention.qkv.weight; move it to another folder" in line


@pytest.mark.parametrize("name", ["loops", "optimizer_states"])
def test_a_checkpoint_that_lacks_parts_is_refused_by_its_name(change, run, command, name):
    change(lambda content: content.pop(name))
    words = command.smoke(
        f"resume={run / LAST}", "run_dir=new", "launch.inline=true", "max_steps=30"
    )
    assert f"step=000020.ckpt lacks {name}; move it" in refusal(command, words)
    if name == "optimizer_states":
        assert "has 1 checkpoint, but none is valid" in refusal(command, LONGER)
