import re
import subprocess
import sys

import pytest
from lightning.pytorch.loggers import CSVLogger

from lockstep.loggers.tracking import (
    WANDB_ID,
    TrackedRun,
    git_state,
    known_id,
    tracked_runs,
)


def test_our_runs_are_tracked_runs_and_other_loggers_are_not(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    from lockstep.loggers.wandb_run import WandbRun

    assert issubclass(WandbRun, TrackedRun)
    assert list(tracked_runs([CSVLogger(tmp_path)])) == []


def test_the_state_of_git_names_the_commit_and_whether_files_differ(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", *identity, *words], cwd=tmp_path, text=True).strip()

    assert git_state(tmp_path) == {}
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert git_state(tmp_path) == {"git_revision": git("rev-parse", "HEAD"), "git_dirty": False}
    (tmp_path / "new").touch()
    assert git_state(tmp_path)["git_dirty"] is True


def test_the_state_of_git_is_of_the_folder_whatever_the_variables_say(tmp_path, monkeypatch):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.check_call(["git", "init", "-q", folder])
        words = ["commit", "-q", "--allow-empty", "-m", folder.name]
        subprocess.check_call(["git", *identity, *words], cwd=folder)
    expected = git_state(ours)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert git_state(ours) == expected != git_state(other)


def test_an_id_is_read_back_unless_its_file_is_damaged(tmp_path, caplog):
    path = tmp_path / "id"
    assert known_id(path, WANDB_ID) is None
    path.write_text("ab12cd34")
    assert known_id(path, WANDB_ID) == "ab12cd34"
    assert caplog.messages == []
    for damaged in (b"", b" ", b"a/b", b"ab\n", b"\0" * 8, b"\xff\xfe", b"a" * 65):
        path.write_bytes(damaged)
        caplog.clear()
        assert known_id(path, WANDB_ID) is None
        assert caplog.messages == [f"{path} is damaged; the tracker gets a new run"]


@pytest.mark.parametrize(
    ("choice", "module"),
    [
        ("mlflow", "mlflow"),
        ("tensorboard", "tensorboard"),
    ],
)
def test_a_tracker_that_is_not_installed_is_one_line_with_the_command(
    command, monkeypatch, choice, module
):
    monkeypatch.setitem(sys.modules, choice, None)
    monkeypatch.setitem(sys.modules, module, None)
    refused = command.train(f"logger={choice}", "run_dir=run", status=2)
    line = rf"logger={choice} needs {choice}, which is not installed; run: .+ install .*{choice}"
    assert re.search(line, refused.stderr)
    assert "Traceback" not in refused.stderr
