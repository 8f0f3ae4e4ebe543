import shutil
from functools import partial
from pathlib import Path

import fsspec
import pytest

from lockstep.checkpoints import copies as remote
from lockstep.checkpoints import downloads as checkpoint_downloads
from lockstep.checkpoints.copies import copies_of, fetch, fetch_newest
from lockstep.checkpoints.reading import checkpoint_path, read_checkpoint
from lockstep.checkpoints.writing import CopyingCheckpointIO, checkpoint_io
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.run.frozen_file import frozen_text
from lockstep.run.kept import refuse_other_experiment
from lockstep.tokens.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer().to_dict()


def content(step):
    """The content of the smallest checkpoint."""
    return {"config": {}, "tokenizer": TOKENIZER, "state_dict": {}, "step": step}


def copies(folder):
    files, root = fsspec.core.url_to_fs(folder)
    return sorted(Path(name).name for name in files.ls(root, detail=False))


@pytest.mark.parametrize("place", ["memory://{}", "file://{}", "{}"])
def test_every_save_is_copied_and_a_lost_run_is_restored_from_copies(tmp_path, place):
    url = place.format(tmp_path / "far")
    io = CopyingCheckpointIO(copy_to=url)
    for step in (1, 2, 3):
        io.save_checkpoint(content(step=step), checkpoint_path(tmp_path / "here", step))
    io.remove_checkpoint(checkpoint_path(tmp_path / "here", 2))
    expected = [f"step=00000{step}.ckpt{end}" for step in (1, 3) for end in ("", ".sha256")]
    assert copies(url) == expected
    newest = fetch_newest(url, tmp_path / "anew").path
    assert newest == tmp_path / "anew/step=000003.ckpt"
    assert read_checkpoint(newest)["step"] == 3


def test_a_damaged_copy_is_skipped_for_the_one_before(tmp_path, caplog):
    io = CopyingCheckpointIO(copy_to=str(tmp_path / "far"))
    for step in (1, 2):
        io.save_checkpoint(content(step=step), checkpoint_path(tmp_path / "here", step))
    damaged = tmp_path / "far/step=000002.ckpt"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert fetch_newest(str(tmp_path / "far"), tmp_path / "anew").path.name == "step=000001.ckpt"
    assert "step=000002.ckpt: it does not match its SHA-256" in caplog.text
    assert fetch_newest(str(tmp_path / "nothing"), tmp_path / "anew") is None


def run_in(place, run_dir):
    """Return a run directory `run_dir` below `place`."""
    directory = RunDirectory(place / run_dir)
    directory.path.mkdir(parents=True)
    directory.config.write_text(frozen_text(identity(run_dir)))
    return directory


def writer_to(far, directory, **settings):
    """Return what writes the run's checkpoints, and copies of them for many runs to `far`."""
    place = copies_of(directory.values()["run_dir"], str(far))
    return checkpoint_io(directory, copy_to=place, **settings)


def identity(run_dir, **model):
    return {"run_dir": run_dir, "model": {"n_layer": 1, **model}}


def saved(disk, directory, step, **model):
    """Save a checkpoint as the run of `directory` would."""
    run_dir = directory.values()["run_dir"]
    path = checkpoint_path(directory.checkpoints, step)
    disk.save_checkpoint({**content(step), "config": identity(run_dir, **model)}, path)


def compared(directory):
    """Return what refuses copies of other models than that of the run."""
    return partial(refuse_other_experiment, ours=directory.values(), kept=["model"])


def test_runs_of_two_sweeps_have_separate_folders():
    places = [copies_of(run_dir, "s3://far/") for run_dir in ("runs/one/0", "runs/two/0")]
    assert places == ["s3://far/runs/one/0", "s3://far/runs/two/0"]
    assert copies_of("/scratch/../runs/0", "s3://far") == "s3://far/scratch/runs/0"


def test_a_new_run_never_replaces_another_run_s_copies(tmp_path):
    far = tmp_path / "far"
    first = run_in(tmp_path / "here", "runs/0")
    disk = writer_to(far, first)
    saved(disk, first, 5)
    writer_to(far, first)  # its ranks may be restarted
    other = run_in(tmp_path / "there", "runs/0")
    with pytest.raises(UserError, match="runs/0 contains copies of another run; continue it with"):
        writer_to(far, other)
    assert not other.checkpoints.exists()


def test_a_run_that_lost_its_disk_resumes_from_its_own_copies(tmp_path):
    far = tmp_path / "far"
    first = run_in(tmp_path / "here", "runs/0")
    saved(writer_to(far, first), first, 5)
    anew = run_in(tmp_path / "there", "runs/0")
    disk = writer_to(far, anew, continues=True)
    assert fetch(anew, "runs/0", str(far), compared(anew)).path == checkpoint_path(
        anew.checkpoints, 5
    )
    saved(disk, anew, 7)
    expected = [f"step=00000{step}.ckpt{end}" for step in (5, 7) for end in ("", ".sha256")]
    assert copies(str(far / "runs/0")) == expected
    assert copies(str(far / "runs")) == ["0", "0.run"]
    disk = writer_to(far, first, continues=True)  # the same run, after any loss of its disk
    saved(disk, first, 9)


def test_a_copy_of_another_model_is_rejected_and_removed(tmp_path):
    far = tmp_path / "far"
    first = run_in(tmp_path / "here", "runs/0")
    saved(writer_to(far, first), first, 5, n_layer=2)
    anew = run_in(tmp_path / "there", "runs/0")
    with pytest.raises(UserError, match=r"runs/0/step=000005.ckpt keeps .* model.n_layer=1 inst"):
        fetch(anew, "runs/0", str(far), compared(anew))
    assert not list(anew.checkpoints.iterdir())
    forced = run_in(tmp_path / "forced", "runs/0")
    assert fetch(forced, "runs/0", str(far), compare=None) is not None


def test_a_copy_of_another_run_is_refused_and_removed(tmp_path):
    far = tmp_path / "far"
    first = run_in(tmp_path / "here", "runs/one/0")
    saved(CopyingCheckpointIO(copy_to=str(far / "runs/two/0")), first, 5)
    other = run_in(tmp_path / "there", "runs/two/0")
    rule = r"is a copy of run_dir=runs/one/0, not of runs/two/0; set another"
    with pytest.raises(UserError, match=rule):
        fetch(other, "runs/two/0", str(far), compare=None)
    assert not list(other.checkpoints.iterdir())


def test_a_failed_copy_is_reported_and_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    directory = run_in(tmp_path / "here", "runs/0")
    (tmp_path / "far").touch()  # no folder can exist there
    disk = writer_to(tmp_path / "far", directory)
    assert "far/runs/0 cannot be reached:" in caplog.text
    saved(disk, directory, 5)
    assert "no copy of step=000005.ckpt in" in caplog.text
    (tmp_path / "far").unlink()
    saved(disk, directory, 6)  # it is reachable by now
    assert copies(str(tmp_path / "far/runs/0"))[0] == "step=000006.ckpt"

    def broken(*_):
        raise PermissionError("may not delete")

    monkeypatch.setattr(remote, "remove_copy", broken)
    for step in (5, 6):
        disk.remove_checkpoint(checkpoint_path(directory.checkpoints, step))
    assert "the copy of step=000006.ckpt stays in" in caplog.text
    assert not list(directory.checkpoints.iterdir())


@pytest.mark.slow
def test_a_command_resumes_from_copies_and_keeps_those_of_another_run(command):
    words = ("checkpoint.copy_to=far", "run_dir=runs/0")
    command.train(*words)
    shutil.rmtree(command.folder / "runs")
    errors = command.train(*words, status=2).stderr
    assert "far/runs/0 contains copies of another run" in errors
    assert errors.count("\n") == 1
    assert not (command.folder / "runs/0").exists()
    command.train(*words, "resume=auto", "max_steps=25")
    rows = (command.folder / "runs/0/metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["25"]


def test_a_wrong_reference_fails_in_one_line(command, monkeypatch):
    monkeypatch.setattr(checkpoint_downloads, "SECONDS", 1)
    source = "wandb://nobody/nothing/none:latest"
    offline = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    err = command("generate", source, "--prompt", "a", status=2, **offline).stderr
    assert err.count("\n") == 1
    assert f"{source} cannot be downloaded" in err
