"""Code that has changed since a run trained is named: on resume, and when its model is loaded."""

import hashlib
from pathlib import Path

import lockstep_gpt
import pytest
import torch
from lockstep_gpt.__main__ import main
from lockstep_gpt.trained_model import load_model

from lockstep.callbacks.arithmetic import Arithmetic
from lockstep.checkpoints.reading import checkpoint_path, find_checkpoint
from lockstep.run import source_code


@pytest.fixture
def edit(monkeypatch):
    """Return a function that makes a file look changed; None: gone."""
    changed = {}
    real = source_code.hash_of
    monkeypatch.setattr(
        source_code, "hash_of", lambda name: changed[name] if name in changed else real(name)
    )

    def change(name, digest="0"):
        assert name in source_code.file_hashes()
        changed[name] = digest

    return change


def test_files_of_the_project_and_of_the_engine_compute():
    now = source_code.file_hashes()
    assert {"gpt.py", "module.py", "data.py", "optim.py"} <= now.keys()
    assert {"lockstep/functional.py", "lockstep/muon/optimizer.py"} <= now.keys()
    file = Path(lockstep_gpt.__file__).with_name("gpt.py")
    assert now["gpt.py"] == hashlib.sha256(file.read_bytes()).hexdigest()[:8]


def test_changed_and_removed_files_are_named_new_ones_are_not_and_many_are_counted():
    now = source_code.file_hashes()
    assert source_code.changes_since(now) is None
    assert source_code.changes_since(None) is None  # of an earlier version
    before = {**now, "gpt.py": "0", "lockstep/model/removed.py": "1"}
    del before["lockstep/muon/optimizer.py"]
    assert source_code.changes_since(before) == "gpt.py, lockstep/model/removed.py"
    assert source_code.changes_since(before, ["gpt.py"]) == "gpt.py"
    others = dict.fromkeys(now, "another")
    assert source_code.changes_since(others) == (
        f"{', '.join(sorted(now)[:3])} and {len(now) - 3} more"
    )


def test_a_resume_names_the_code_that_has_changed_once(edit, new_run, tmp_path, caplog):
    def train(steps):
        caplog.clear()
        path = checkpoint_path(tmp_path, steps - 2) if steps > 2 else None
        run = new_run(max_steps=steps)
        run.fit(Arithmetic(), run.checkpoints(tmp_path), ckpt_path=path)
        return [each.getMessage() for each in caplog.records if "changed" in each.getMessage()]

    assert train(2) == []
    assert train(4) == []
    edit("lockstep/muon/optimizer.py")
    (line,) = train(6)
    assert line == (
        "changed since the run last started: lockstep/muon/optimizer.py; from step 4 on, the new "
        "code trains"
    )
    assert train(8) == []
    content = torch.load(checkpoint_path(tmp_path, 8), weights_only=True)
    assert [*content["arithmetic"]] == [0, 4]


@pytest.mark.slow
def test_commands_that_load_a_model_name_changes_of_its_code(finished, edit, monkeypatch, caplog):
    command, _ = finished
    run = command.folder / "runs/first"
    assert main(["evaluate", str(run)]) == 0
    edit("lockstep/muon/optimizer.py")
    assert main(["evaluate", str(run)]) == 0
    assert "changed" not in caplog.text
    edit("gpt.py")
    assert main(["evaluate", str(run)]) == 0
    changed = f"changed since {find_checkpoint(run)} was trained: gpt.py"
    assert caplog.text.count(changed) == 1
    monkeypatch.setenv("RANK", "1")
    load_model(find_checkpoint(run))
    assert caplog.text.count(changed) == 1
    monkeypatch.setenv("RANK", "0")
    load_model(find_checkpoint(run))
    assert caplog.text.count(changed) == 2
