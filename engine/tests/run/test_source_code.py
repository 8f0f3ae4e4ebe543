"""Code that has changed since a run trained is named: on resume, and when its model is loaded."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from lockstep_gpt.trained_model import load_model

from lockstep import project
from lockstep.callbacks.arithmetic import Arithmetic
from lockstep.checkpoints.reading import checkpoint_path, find_checkpoint
from lockstep.commands import main
from lockstep.run import source_code


@pytest.fixture
def edit(monkeypatch, tmp_path):
    """A project whose files compute; a function that changes one of them."""
    package = tmp_path / "a_project"
    package.mkdir()
    for name in ("__init__", "gpt", "optim", "late"):
        (package / f"{name}.py").write_text("first = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_project", "a_project.gpt", "a_project.optim"):  # not `late`
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
    ours = replace(project.current(), package="a_project")
    monkeypatch.setattr(project, "_begun", [ours])

    def forget():
        source_code.file_hashes.cache_clear()
        source_code._folder_of.cache_clear()

    def change(name):
        (tmp_path / name).write_text("second = 2\n")
        forget()

    forget()
    yield change
    forget()
    for name in ("a_project", "a_project.gpt", "a_project.optim"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("edit")
def test_imported_files_of_the_project_and_the_engine_s_that_compute_are_kept():
    kept = [*source_code.file_hashes()]
    ours = ["a_project/__init__.py", "a_project/gpt.py", "a_project/optim.py"]
    assert kept[:3] == ours
    assert {"lockstep/functional.py", "lockstep/muon/optimizer.py"} <= {*kept}
    assert not [name for name in kept[3:] if not name.startswith("lockstep/")]


def test_changed_and_removed_files_are_named_new_ones_are_not_and_many_are_counted(edit):
    now = source_code.file_hashes()
    assert source_code.changes_since(now) is None
    assert source_code.changes_since(None) is None  # of an earlier version
    before = {**now, "a_project/gpt.py": "0", "a_project/removed.py": "1"}
    del before["a_project/optim.py"]
    assert source_code.changes_since(before) == "a_project/gpt.py, a_project/removed.py"
    more = {**before, "lockstep/muon/a.py": ""}
    assert source_code.changes_since(more, ["lockstep/muon/"]) == "lockstep/muon/a.py"
    edit("a_project/optim.py")
    assert source_code.changes_since(now) == "a_project/optim.py"
    others = dict.fromkeys(now, "another")
    assert source_code.changes_since(others) == (
        f"{', '.join(sorted(now)[:3])} and {len(now) - 3} more"
    )


def test_files_of_a_model_are_those_of_its_layers_without_libraries(new_run):
    model = new_run(max_steps=1).module.model
    ours = ["lockstep_gpt/gpt.py", "lockstep_gpt/language_model.py"]  # a base class computes, too
    assert source_code.files_of(model) == ours


def test_a_resume_names_the_code_that_has_changed_once(edit, new_run, tmp_path, caplog):
    def train(steps):
        caplog.clear()
        path = checkpoint_path(tmp_path, steps - 2) if steps > 2 else None
        run = new_run(max_steps=steps)
        run.fit(Arithmetic(), run.checkpoints(tmp_path), ckpt_path=path)
        return [each.getMessage() for each in caplog.records if "changed" in each.getMessage()]

    assert train(2) == []
    assert train(4) == []
    edit("a_project/optim.py")
    (line,) = train(6)
    assert line == (
        "changed since the run last started: a_project/optim.py; from step 4 on, the new code "
        "trains"
    )
    assert train(8) == []
    content = torch.load(checkpoint_path(tmp_path, 8), weights_only=True)
    assert [*content["arithmetic"]] == [0, 4]


@pytest.mark.slow
def test_commands_that_load_a_model_name_changes_of_its_code(finished, monkeypatch, caplog):
    command, _ = finished
    run = command.folder / "runs/first"
    assert main(["evaluate", str(run)]) == 0
    hash_of = source_code._hash_of
    changed_file = "lockstep/muon/optimizer.py"  # computes no model
    monkeypatch.setattr(
        source_code, "_hash_of", lambda name: "0" if name == changed_file else hash_of(name)
    )
    assert main(["evaluate", str(run)]) == 0
    assert "changed" not in caplog.text
    changed_file = "lockstep_gpt/gpt.py"
    assert main(["evaluate", str(run)]) == 0
    changed = f"changed since {find_checkpoint(run)} was trained: lockstep_gpt/gpt.py"
    assert caplog.text.count(changed) == 1
    monkeypatch.setenv("RANK", "1")
    load_model(find_checkpoint(run))
    assert caplog.text.count(changed) == 1
    monkeypatch.setenv("RANK", "0")
    load_model(find_checkpoint(run))
    assert caplog.text.count(changed) == 2
