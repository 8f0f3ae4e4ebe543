from pathlib import Path

import fsspec
import pytest

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.copies.remote import fetch_newest
from lockstep_gpt.extras.copies.writing import CopyingCheckpointIO
from lockstep_gpt.training.checkpoint import checkpoint_path, read_checkpoint

TOKENIZER = ByteTokenizer().to_dict()


def content(step):
    """What the smallest checkpoint holds."""
    return {"config": {}, "tokenizer": TOKENIZER, "state_dict": {}, "step": step}


def copies(folder):
    files, root = fsspec.core.url_to_fs(folder)
    return sorted(Path(name).name for name in files.ls(root, detail=False))


@pytest.mark.parametrize("place", ["memory://{}", "file://{}", "{}"])
def test_a_copy_elsewhere_follows_every_save_and_brings_a_lost_run_back(tmp_path, place):
    url = place.format(tmp_path / "far")
    io = CopyingCheckpointIO(copy_to=url)
    for step in (1, 2, 3):
        io.save_checkpoint(content(step=step), checkpoint_path(tmp_path / "here", step))
    io.remove_checkpoint(checkpoint_path(tmp_path / "here", 2))
    kept = [f"step=00000{step}.ckpt{end}" for step in (1, 3) for end in ("", ".sha256")]
    assert copies(url) == kept
    newest = fetch_newest(url, tmp_path / "anew")
    assert newest == tmp_path / "anew/step=000003.ckpt"
    assert read_checkpoint(newest)["step"] == 3


def test_a_damaged_copy_is_skipped_for_the_one_before(tmp_path, caplog):
    io = CopyingCheckpointIO(copy_to=str(tmp_path / "far"))
    for step in (1, 2):
        io.save_checkpoint(content(step=step), checkpoint_path(tmp_path / "here", step))
    damaged = tmp_path / "far/step=000002.ckpt"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert fetch_newest(str(tmp_path / "far"), tmp_path / "anew").name == "step=000001.ckpt"
    assert "step=000002.ckpt: it is not what its SHA-256 says" in caplog.text
    assert fetch_newest(str(tmp_path / "nothing"), tmp_path / "anew") is None


def test_a_reference_that_leads_nowhere_is_one_line(command):
    source = "wandb://nobody/nothing/none:latest"
    offline = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    err = command("generate", source, "--prompt", "a", status=2, **offline).stderr
    assert err.count("\n") == 1
    assert f"{source} cannot be downloaded" in err
