"""Code that has changed since a run trained is named: on resume, and when its model is loaded."""

import pytest
import torch
from lockstep_gpt.__main__ import main
from lockstep_gpt.trained_model import load_model

from lockstep.callbacks.arithmetic import Arithmetic
from lockstep.checkpoints.reading import checkpoint_path, find_checkpoint
from lockstep.run import source_code


@pytest.fixture
def edit(monkeypatch, tmp_path):
    """A copy of the package's folders that compute; a function that changes a file in it."""
    package = tmp_path / "package"
    for name in ("model/functional.py", "gpt.py", "training/muon.py"):
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first = 1\n")
    monkeypatch.setattr(source_code, "PACKAGE", package)

    def change(name):
        (package / name).write_text("second = 2\n")
        source_code.file_hashes.cache_clear()

    source_code.file_hashes.cache_clear()
    yield change
    source_code.file_hashes.cache_clear()


def test_changed_and_removed_files_are_named_new_ones_are_not_and_many_are_counted():
    now = source_code.file_hashes()
    assert source_code.changes_since(now) is None
    assert source_code.changes_since(None) is None  # of an earlier version
    before = {**now, "gpt.py": "0", "model/removed.py": "1"}
    del before["training/muon.py"]
    assert source_code.changes_since(before) == "gpt.py, model/removed.py"
    assert source_code.changes_since({**before, "training/a.py": ""}, ["training/"]) == (
        "training/a.py"
    )
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
    edit("training/muon.py")
    (line,) = train(6)
    assert line == (
        "changed since the run last started: training/muon.py; from step 4 on, the new code trains"
    )
    assert train(8) == []
    content = torch.load(checkpoint_path(tmp_path, 8), weights_only=True)
    assert [*content["arithmetic"]] == [0, 4]


@pytest.mark.slow
def test_commands_that_load_a_model_name_changes_of_its_code(finished, monkeypatch, caplog):
    command, _ = finished
    run = command.folder / "runs/first"
    assert main(["evaluate", str(run)]) == 0
    hashes = source_code.file_hashes()
    now = {**hashes, "training/muon.py": "0"}
    monkeypatch.setattr(source_code, "file_hashes", lambda: now)
    assert main(["evaluate", str(run)]) == 0
    assert "changed" not in caplog.text
    now = {**hashes, "gpt.py": "0"}
    assert main(["evaluate", str(run)]) == 0
    changed = f"changed since {find_checkpoint(run)} was trained: gpt.py"
    assert caplog.text.count(changed) == 1
    monkeypatch.setenv("RANK", "1")
    load_model(find_checkpoint(run))
    assert caplog.text.count(changed) == 1
    monkeypatch.setenv("RANK", "0")
    load_model(find_checkpoint(run))
    assert caplog.text.count(changed) == 2
