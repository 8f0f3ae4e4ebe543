import hashlib
import itertools
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from lockstep_gpt.trained_model import load_model

from lockstep.checkpoints import reading as checkpoint
from lockstep.checkpoints.content import NEEDED_TO_RESUME, SavedShards, joined
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import (
    checkpoint_path,
    checkpoints_in,
    find_checkpoint,
    newest_valid,
    read_checkpoint,
    remove_leftovers,
    step_of,
    write_checkpoint,
)
from lockstep.checkpoints.sums import fault_of, sum_path
from lockstep.errors import RunError, UserError
from lockstep.tokens.tokenizer import ByteTokenizer

CONFIG = {"max_steps": 10}


def content(**changes):
    """The content of the smallest checkpoint."""
    tokenizer = ByteTokenizer().to_dict()
    return {"config": CONFIG, "tokenizer": tokenizer, "state_dict": {}, **changes}


def save(path, **changes):
    AtomicCheckpointIO().save_checkpoint(content(**changes), path)
    return path


def put(path, data):
    """Write `data` with its SHA-256."""
    path.write_bytes(data)
    sum_path(path).write_text(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
    return path


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Unsaveable:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_saved_checkpoint_is_read_back(tmp_path):
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    path = save(checkpoint_path(tmp_path / "new" / "folder", 500), state_dict=weights, step=7)
    read = read_checkpoint(path)
    assert path.name == "step=000500.ckpt"
    assert (read["config"], read["step"]) == (CONFIG, 7)
    assert torch.equal(read["state_dict"]["w"], weights["w"])


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum on this machine")
def test_sha256sum_accepts_the_sum(tmp_path):
    path = save(checkpoint_path(tmp_path, 1))
    command = ["sha256sum", "--check", "--strict", sum_path(path).name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "step=000001.ckpt: OK\n")


@pytest.mark.parametrize("old", [True, False])
def test_a_failed_save_keeps_the_old_file(tmp_path, old):
    path = checkpoint_path(tmp_path, 1)
    if old:
        save(path, step=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RunError, match="No space left"):
        save(path, state_dict={"w": torch.zeros(1000), "broken": Unsaveable()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def save_for_ever(folder):
    torch.set_num_threads(1)  # a forked process lacks the threads that OpenMP relies on
    weights = {"w": torch.zeros(4_000_000)}
    for step in itertools.chain([1], itertools.repeat(2)):
        save(checkpoint_path(folder, step), state_dict=weights)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("written", [0, 8_000_000])
def test_a_kill_in_the_middle_of_a_save_leaves_whole_checkpoints_only(tmp_path, written, wait_for):
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=save_for_ever, args=(tmp_path,), daemon=True)
    writer.start()
    wait_for(lambda: size_of(tmp_path / ".step=000002.ckpt.tmp") > written, poll=0)
    writer.kill()
    writer.join()
    present = checkpoints_in(tmp_path)
    assert checkpoint_path(tmp_path, 1) in present
    assert [fault_of(path) for path in present] == [None] * len(present)
    assert newest_valid(tmp_path) == present[-1]


@pytest.mark.parametrize("again", [1, 2])
def test_a_checkpoint_that_a_run_replaces_before_it_is_read_gives_the_next(
    tmp_path, monkeypatch, again
):
    for step in (1, 2):
        save(checkpoint_path(tmp_path, step))
    verified = checkpoint.load_content
    replaced = []

    def load_after_replacement(path, *others):
        if len(replaced) < again:
            replaced.append(path)
            path.unlink()
            save(checkpoint_path(tmp_path, 2 + len(replaced)))
        return verified(path, *others)

    monkeypatch.setattr(checkpoint, "load_content", load_after_replacement)
    assert newest_valid(tmp_path) == checkpoint_path(tmp_path, 2 + again)
    assert replaced == [checkpoint_path(tmp_path, 2 + number) for number in range(again)]


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path):
    steps = [5, 999_999, 1_000_000, 40]
    for step in steps:
        save(checkpoint_path(tmp_path, step))
    for name in (".step=000041.ckpt.tmp", "step=41.ckpt", "last.ckpt", "step=000041.ckpt.old"):
        (tmp_path / name).touch()
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == sorted(steps)
    assert checkpoints_in(tmp_path / "none") == []


def test_a_flipped_bit_is_seen_and_skipped_by_name(tmp_path, caplog):
    old, new = (save(checkpoint_path(tmp_path, step)) for step in (1, 2))
    flip_a_bit(new)
    assert fault_of(new) == "does not match its SHA-256"
    with caplog.at_level(logging.WARNING):
        assert newest_valid(tmp_path) == old
    assert caplog.messages == [f"skipped {new}: it does not match its SHA-256"]
    with pytest.raises(UserError, match=r"step=000002\.ckpt does not match its SHA-256; use"):
        read_checkpoint(new)


@pytest.mark.parametrize("sum_text", [None, "", "\xff", "0a  step=000001.ckpt\n0b  metrics.csv\n"])
def test_a_checkpoint_without_a_readable_checksum_is_skipped(tmp_path, sum_text):
    path = save(checkpoint_path(tmp_path, 1))
    if sum_text is None:
        sum_path(path).unlink()
    else:
        sum_path(path).write_bytes(sum_text.encode("latin-1"))
    assert fault_of(path).startswith("has no SHA-256 file next to it; copy step=000001.ckpt.sha256")
    assert newest_valid(tmp_path) is None


def test_the_command_for_a_lost_checksum_makes_the_checkpoint_valid(tmp_path):
    path = save(checkpoint_path(tmp_path / "my run", 1))
    sum_path(path).unlink()
    command = fault_of(path).partition("intact: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert fault_of(path) is None


def test_a_file_that_is_no_checkpoint_is_named_as_such(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("trainer/step,train/loss\n")
    with pytest.raises(UserError, match=r"metrics\.csv is not a checkpoint; give a run"):
        read_checkpoint(path)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_code_in_a_checkpoint_is_rejected_and_does_not_run(tmp_path, writer):
    path, target = checkpoint_path(tmp_path, 1), tmp_path / "touched"
    evil = content(state_dict={"w": Payload(target)})
    if writer == "torch":
        AtomicCheckpointIO().save_checkpoint(evil, path)
    else:
        put(path, pickle.dumps(evil, protocol=2))
    assert fault_of(path) is None
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint, load_model):
        with pytest.raises(
            UserError, match="has objects other than tensors and plain values"
        ) as refusal:
            read(path)
        assert "\n" not in str(refusal.value)
    assert not target.exists()


@pytest.mark.parametrize(
    "data", [b"", b"just text\n", b"PK\3\4 cut off", pickle.dumps({"a": object}, protocol=2)]
)
def test_another_kind_of_file_is_rejected_in_one_line(tmp_path, data):
    path = put(checkpoint_path(tmp_path, 1), data)
    with pytest.raises(UserError, match=r"^checkpoint \S+step=000001\.ckpt [^\n]+$"):
        read_checkpoint(path)


@pytest.mark.parametrize("foreign", [[1, 2], {"state_dict": {}}, torch.zeros(3)])
def test_a_checkpoint_of_another_program_is_rejected(tmp_path, foreign):
    path = checkpoint_path(tmp_path, 1)
    write_checkpoint(foreign, path)
    with pytest.raises(UserError, match="was not written by"):
        read_checkpoint(path)


def test_a_checkpoint_that_was_damaged_with_its_sum_is_skipped_by_what_is_wrong(tmp_path, caplog):
    whole = content(**{name: {} for name in NEEDED_TO_RESUME[2:]})
    AtomicCheckpointIO().save_checkpoint(whole, checkpoint_path(tmp_path, 1))
    torn = save(checkpoint_path(tmp_path, 2), state_dict={"w": torch.zeros(9999)})
    put(torn, torn.read_bytes()[:20_000])
    put(checkpoint_path(tmp_path, 3), b"")
    put(checkpoint_path(tmp_path, 4), b"just text\n")
    save(checkpoint_path(tmp_path, 5))
    write_checkpoint([], checkpoint_path(tmp_path, 6))
    save(checkpoint_path(tmp_path, 7), config=5)
    checkpoint_path(tmp_path, 8).mkdir()
    with caplog.at_level(logging.WARNING):
        assert newest_valid(tmp_path, NEEDED_TO_RESUME) == checkpoint_path(tmp_path, 1)
    faults = [
        "is a folder",
        "lacks optimizer_states, lr_schedulers, loops, global_step",
        "was not written by lockstep",
        "lacks optimizer_states, lr_schedulers, loops, global_step",
        "is damaged: it is not a whole zip archive",
        "is empty",
        "is damaged: it is not a whole zip archive",
    ]
    assert len(caplog.messages) == len(faults)
    for step, fault, line in zip(range(8, 1, -1), faults, caplog.messages, strict=True):
        assert f"skipped {checkpoint_path(tmp_path, step)}: it " in line
        assert fault in line
    assert newest_valid(tmp_path) == checkpoint_path(tmp_path, 5)  # for a reader of weights
    assert caplog.messages[-2].endswith("config is of another type")


def test_a_missing_checkpoint_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"step=000009\.ckpt is missing"):
        read_checkpoint(checkpoint_path(tmp_path, 9))


def test_removing_also_removes_the_checksum_and_can_be_repeated(tmp_path):
    path = save(checkpoint_path(tmp_path, 1))
    for _ in range(2):
        AtomicCheckpointIO().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_in_several_files_is_verified_and_removed_whole(tmp_path):
    path, part = checkpoint_path(tmp_path, 1), tmp_path / "step=000001.part"
    part.write_bytes(b"weights")
    sums = {part.name: hashlib.sha256(b"weights").hexdigest()}
    AtomicCheckpointIO().save_checkpoint(content(), path, sums)
    assert fault_of(path) is None
    part.write_bytes(b"weight?")
    assert fault_of(path) == f"has a {part.name} that does not match its SHA-256"
    AtomicCheckpointIO().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", range(7))
def test_rows_of_a_tensor_in_parts_are_those_of_the_whole(first):
    whole = torch.arange(12.0).reshape(6, 2)
    saved = SavedShards((whole[:0], whole[:1], whole[1:4], whole[4:]))
    assert saved.shape == whole.shape
    assert torch.equal(joined({"w": [saved]})["w"][0], whole)
    for last in range(9):
        assert torch.equal(saved[first:last], whole[first:last]), last
    within_a_part = saved[4:6]
    assert within_a_part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_run_directory_means_its_newest_checkpoint_and_a_file_itself(tmp_path):
    old, new = (save(checkpoint_path(tmp_path / "checkpoints", step)) for step in (1, 2))
    assert find_checkpoint(tmp_path) == new
    assert find_checkpoint(tmp_path / "checkpoints") == new
    assert find_checkpoint(old) == old
    flip_a_bit(new)
    assert find_checkpoint(tmp_path) == old


def test_a_path_without_a_checkpoint_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; give a run directory, a"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"contains no valid checkpoint"):
        find_checkpoint(tmp_path)


def test_a_path_after_the_name_of_a_setting_is_answered_with_the_path_alone(tmp_path, monkeypatch):
    """Elsewhere, one evaluates `ckpt_path=FILE`; here, a name may have `=`, as step=000001.ckpt."""
    monkeypatch.chdir(tmp_path)
    path = save(checkpoint_path(Path("checkpoints"), step=1))
    with pytest.raises(UserError, match=f"give the path without ckpt_path=: {path}$"):
        find_checkpoint(Path(f"ckpt_path={path}"))
    assert find_checkpoint(path) == path


@pytest.fixture
def small_files():
    """Let this process write at most 100,000 bytes into a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_a_checkpoint_above_the_limit_of_files_is_refused_before_it_is_written(tmp_path):
    path = save(tmp_path / "step=000001.ckpt")
    rule = r"a file may have at most 100,000 bytes .*, but a checkpoint needs 400,000; run: ulimit"
    with pytest.raises(RunError, match=rule):
        save(tmp_path / "step=000002.ckpt", state_dict={"w": torch.zeros(100_000)})
    # Tensors alone would fit: the system stops torch, whose own error doesn't say why.
    with pytest.raises(RunError, match=r"cannot be written: File too large; run: ulimit -f"):
        save(tmp_path / "step=000002.ckpt", state_dict={"w": torch.zeros(24_990)})
    assert newest_valid(tmp_path) == path
    assert set(tmp_path.iterdir()) == {path, sum_path(path)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_or_read_only_disk_is_rejected(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        save(tmp_path / "step=000001.ckpt")
        with pytest.raises(RunError, match=r"bytes left, but a checkpoint needs 4,000,000; free"):
            save(tmp_path / "step=000002.ckpt", state_dict={"w": torch.zeros(1_000_000)})
        assert checkpoints_in(tmp_path) == [tmp_path / "step=000001.ckpt"]
        assert newest_valid(tmp_path) == tmp_path / "step=000001.ckpt"
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(RunError, match="Read-only file system; free space there, or make"):
            save(tmp_path / "step=000002.ckpt")
        assert newest_valid(tmp_path) == tmp_path / "step=000001.ckpt"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_only_leftovers_of_dead_processes_are_removed(tmp_path):
    path = save(tmp_path / "step=000001.ckpt")
    before = {*tmp_path.iterdir()}
    for name in (".step=000002.ckpt.tmp", ".step=000002.ckpt.sha256.tmp"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert {*tmp_path.iterdir()} == before
    assert path in before


def test_a_file_in_the_place_of_the_folder_is_named_and_no_space_is_asked_for(tmp_path):
    (tmp_path / "checkpoints").touch()
    rule = r"cannot be written: the folder is not a folder; restore it$"
    with pytest.raises(RunError, match=rule):
        save(tmp_path / "checkpoints/step=000001.ckpt")
