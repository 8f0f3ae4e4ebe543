"""Run directories and checkpoints of other versions: read, or rejected with a remedy."""

import shutil

import pytest
import torch
import yaml

from lockstep.checkpoints.reading import write_checkpoint

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


def with_gone(group):
    def change(values):
        values[group]["gone"] = 3
        return values

    return change


REMOVED = {
    "model": "model.gone=3: GPT has no argument gone; correct it, or leave it out",
    "launch": "launch.gone is not one of ",
}


@pytest.mark.parametrize("group", REMOVED)
def test_a_removed_setting_fails_in_one_line_with_the_file(changed, command, group):
    changed(with_gone(group))
    frozen = (command.folder / "run/config.yaml").read_bytes()
    smoke = command.smoke("launch.inline=true", *RESUME[1:])
    for words in (RESUME, (*RESUME, "trainer.devices=2"), smoke):
        errors = command(*words, status=2).stderr
        assert errors.count("\n") == 1
        assert f"run/config.yaml: {REMOVED[group]}" in errors
    assert (command.folder / "run/config.yaml").read_bytes() == frozen


@pytest.mark.slow
@pytest.mark.parametrize("group", ["model", "launch"])
def test_a_model_is_readable_without_settings_that_do_not_affect_it(changed, command, group):
    changed(with_gone(group))
    is_needed = group == "model"
    for words in READERS:
        errors = command(*words, status=2 if is_needed else 0).stderr
        assert errors.count("\n") == is_needed
        assert ("GPT has no argument gone" in errors) == is_needed


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
        assert (errors.count("\n"), "use the code that wrote it" in errors) == (1, True)
    forced = command(*RESUME, "launch.inline=true", "resume_force=true", status=2).stderr
    assert "only 27 of its 28 weights fit this model's 28; use the" in forced
