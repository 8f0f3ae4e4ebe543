import threading

import pytest
import torch

from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import checkpoints_in
from lockstep.checkpoints.sums import fault_of
from lockstep.checkpoints.writing import CopyingCheckpointIO
from lockstep.errors import RunError


def test_writing_in_the_background_leaves_the_same_files(new_run, tmp_path):
    settings = {"max_steps": 6, "val_every": 2, "checkpoint": {"every": 1, "keep_last": 2}}
    plain, background = new_run(**settings), new_run(**settings)
    plain.fit(plain.checkpoints(tmp_path / "plain"))
    io = CopyingCheckpointIO(background=True)
    background.fit(background.checkpoints(tmp_path / "back"), io=io)
    there, back = (checkpoints_in(tmp_path / name) for name in ("plain", "back"))
    assert [path.name for path in back] == [path.name for path in there]
    pairs = zip(there, back, strict=True)
    for left, right in pairs:
        ours, theirs = (torch.load(path, weights_only=True)["state_dict"] for path in (left, right))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Slow(CopyingCheckpointIO):
    """Writes only when allowed."""

    def __init__(self):
        super().__init__(background=True)
        self.let = threading.Event()

    def _write(self, *arguments):
        assert self.let.wait(30)
        super()._write(*arguments)


def test_a_background_save_writes_the_state_at_the_save(tmp_path):
    io, weight = Slow(), torch.zeros(4)
    io.save_checkpoint({"w": weight, "n": (1, [weight])}, tmp_path / "step=000001.ckpt")
    weight += 1
    io.let.set()
    io.wait()
    content = torch.load(tmp_path / "step=000001.ckpt", weights_only=True)
    assert torch.equal(content["w"], torch.zeros(4))
    assert torch.equal(content["n"][1][0], torch.zeros(4))


def test_an_old_checkpoint_is_removed_only_after_the_new_one_is_written(tmp_path):
    io = Slow()
    old, new = tmp_path / "step=000001.ckpt", tmp_path / "step=000002.ckpt"
    AtomicCheckpointIO().save_checkpoint({}, old)
    io.save_checkpoint({}, new)
    io.remove_checkpoint(old)
    assert (old.exists(), new.exists()) == (True, False)
    io.let.set()
    io.wait()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_failed_background_save_is_reported_and_removes_nothing(tmp_path):
    io, old = CopyingCheckpointIO(background=True), tmp_path / "step=000001.ckpt"
    io.save_checkpoint({}, old)
    (tmp_path / "file").touch()
    io.save_checkpoint({}, tmp_path / "file" / "step=000002.ckpt")
    io.remove_checkpoint(old)
    with pytest.raises(RunError, match=r"cannot be written: the folder is not a folder; restore"):
        io.wait()
    assert fault_of(old) is None
