"""Run directories and checkpoints of other versions: read, or rejected with a remedy."""

import shutil

import pytest
import torch
import yaml

from lockstep_gpt import extras
from lockstep_gpt.run.checkpoint import write_checkpoint
from lockstep_gpt.run.directory import RunDirectory

READERS = [("generate", "run", "--length", "3"), ("evaluate", "run")]  # of a model
RESUME = ("train", "run_dir=run", "resume=auto", "max_steps=22")


def unchanged(values):
    return values


@pytest.fixture
def changed(finished, command):
    """Copy the finished run, with its frozen values changed by a function."""

    def make(change=unchanged):
        run = command.folder / "run"
        shutil.copytree(finished[0].folder / "runs/first", run)
        values = change(yaml.safe_load((run / "config.yaml").read_text()))
        (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        path = run / "checkpoints/step=000020.ckpt"
        write_checkpoint({**torch.load(path), "config": values}, path)

    return make


def test_a_run_is_readable_without_extras_whose_settings_have_their_defaults(
    monkeypatch, tmp_path, finished
):
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    config = RunDirectory(finished[0].folder / "runs/first").load()
    assert config.model.n_embd == 32
    assert config.of_extras == {}
    assert set(config.callbacks) == {"progress", "sample"}


@pytest.mark.slow
def test_a_run_before_0_2_fails_in_one_line_with_the_version_that_wrote_it(changed, command):
    def as_0_1_0(values):
        values["launch"]["warm"] = None
        values["model"]["lora_rank"] = None
        return values

    changed(as_0_1_0)
    for words in (*READERS, RESUME):
        errors = command(*words, status=2).stderr
        assert errors.count("\n") == 1
        assert "cannot be read (" in errors
        assert "delete that setting, or use the version of" in errors


def with_gone(group):
    def change(values):
        (values[group] if group else values)["gone"] = 3
        return values

    return change


@pytest.mark.parametrize("group", ["model", "launch", ""])
def test_a_removed_setting_fails_in_one_line_with_the_file(changed, command, group):
    changed(with_gone(group))
    name = f"{group}.gone".lstrip(".")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    smoke = command.smoke("launch.inline=true", *RESUME[1:])
    for words in (RESUME, (*RESUME, "trainer.devices=2"), smoke):
        errors = command(*words, status=2).stderr
        assert errors.count("\n") == 1
        assert f"run/config.yaml cannot be read ({name}: Key 'gone' not in" in errors
        assert "delete that setting, or use the version of" in errors
    assert (command.folder / "run/config.yaml").read_bytes() == frozen


@pytest.mark.slow
@pytest.mark.parametrize("group", ["model", "data", "launch", ""])
def test_a_model_is_readable_without_settings_that_do_not_affect_it(changed, command, group):
    changed(with_gone(group))
    needed = group in ("model", "data")
    for words in READERS:
        errors = command(*words, status=2 if needed else 0).stderr
        assert errors.count("\n") == needed
        assert (
            f"step=000020.ckpt cannot be read ({group}.gone: Key 'gone' not" in errors
        ) == needed


def test_a_removed_class_fails_in_one_line_on_every_rank(changed, command):
    def change(values):
        values["callbacks"]["report"] = {"_target_": "lockstep_gpt.gone.Report"}
        return values

    changed(change)
    ranks = ("trainer.devices=2", "launch.inline=false", "trust_run_dir=true")
    errors = command(*RESUME, *ranks, status=2).stderr
    assert "Traceback" not in errors
    assert errors.count("\n") == 1
    assert errors.count("lockstep_gpt.gone.Report") == 1


@pytest.mark.slow
def test_weights_of_other_code_fail_in_one_line_and_leave_the_run_unchanged(changed, command):
    changed()
    path = command.folder / "run/checkpoints/step=000020.ckpt"
    content = torch.load(path)
    name = next(iter(content["state_dict"]))
    content["state_dict"]["model.before"] = content["state_dict"].pop(name)
    write_checkpoint(content, path)
    frozen = yaml.safe_load((command.folder / "run/config.yaml").read_text())
    errors = command(*RESUME, "launch.inline=true", status=2).stderr
    assert errors.count("\n") == 1
    assert "only 27 of its 28 weights fit this model's 28; use the" in errors
    assert yaml.safe_load((command.folder / "run/config.yaml").read_text()) == frozen
    for words in READERS:
        errors = command(*words, status=2).stderr
        assert (errors.count("\n"), "use the model and the code that wrote it" in errors) == (1, True)
    command(*RESUME, "launch.inline=true", "resume_force=true", "max_steps=6")
