"""Resuming: a run in its own directory, and from another run's checkpoint."""

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from lockstep.run.directory import RunDirectory

KILL = """
import os, signal, lightning
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 13 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        names = ("trainer/step", "train/loss", "val/loss", "optim/lr", "optim/grad_norm")
        return [{name: row[name] for name in names} for row in csv.DictReader(file)]


def weights(folder):
    return torch.load(folder / "checkpoints/step=000020.ckpt")["state_dict"]


@pytest.fixture(scope="module")
def resumed(finished, tmp_path_factory, python_of_forks):
    """A run like the finished one that was killed in step 14 and resumed by hand."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("resumed"))
    (command.folder / "killer.py").write_text(KILL)
    kill = ("+callbacks.kill._target_=killer.Kill", "launch.max_restarts=0", "run_dir=run")
    words = ("train", "run_dir=run", "resume=auto", "launch.max_restarts=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python_of_forks)
        failed = command.train(*kill, status=1, PYTHONPATH=str(command.folder))
        assert "rank 0 was killed by SIGKILL; no restarts are left" in failed.stderr
        return command, command(*words, PYTHONPATH=str(command.folder)).stdout


def test_killed_and_resumed_run_ends_with_the_same_bits(resumed, finished):
    (command, _), (other, _) = resumed, finished
    ours, theirs = weights(command.folder / "run"), weights(other.folder / "runs/first")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resumed_metrics_have_no_gap_and_no_double_step(resumed, finished):
    (command, _), (other, _) = resumed, finished
    assert rows(command.folder / "run")[2:] == rows(other.folder / "runs/first")[2:]
    assert [row["trainer/step"] for row in rows(command.folder / "run")] == ["5", "10", "15", "20"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_run_killed_between_validation_and_save_loses_no_validation(finished, command):
    after_validation = KILL.replace("on_train_batch_start", "on_validation_end")
    (command.folder / "killer.py").write_text(after_validation.replace("== 13", "== 10"))
    kill = ("+callbacks.kill._target_=killer.Kill", "run_dir=run", "trainer=cpu")
    result = command.train(*kill, PYTHONPATH=str(command.folder))
    assert "restarting all ranks (1 of 3)" in result.stderr
    assert rows(command.folder / "run") == rows(finished[0].folder / "runs/first")


def test_changed_settings_of_a_resume_are_shown_and_kept(resumed):
    command, screen = resumed
    assert "  launch.max_restarts: 0 -> 1" in screen
    log = (command.folder / "run/overrides.log").read_text()
    assert log.endswith("  launch.max_restarts: 0 -> 1\n")
    assert "max_restarts: 1" in (command.folder / "run/config.yaml").read_text()
    assert not (command.folder / "run/failed.json").exists()


@pytest.mark.slow
def test_a_resume_with_accumulation_validates_at_the_steps_of_an_undisturbed_run(command):
    keep = ("checkpoint.every=6", "checkpoint.keep_last=9", "val_every=4", "batch.micro_size=2")
    command.train("run_dir=run", *keep, "log_every=1", "launch.inline=true")
    undisturbed = rows(command.folder / "run")
    for path in (command.folder / "run/checkpoints").iterdir():
        if "step=000006" not in path.name:  # after 24 micro-batches of 2 samples
            path.unlink()
    command("train", "run_dir=run", "resume=auto", "launch.inline=true")
    assert rows(command.folder / "run") == undisturbed
    validated = [row["trainer/step"] for row in undisturbed if row["val/loss"]]
    assert validated == ["4", "8", "12", "16", "20"]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), ("batch.global_size=null",)])
@pytest.mark.usefixtures("quick_ranks")
def test_resume_at_another_world_size_gives_the_same_losses(finished, command, batch):
    other, _ = finished
    keep = ("checkpoint.every=9", "checkpoint.keep_last=9", "batch.micro_size=4", *batch)
    command.train("run_dir=run", *keep, "trainer=cpu", "trainer.devices=2")
    for path in (command.folder / "run/checkpoints").iterdir():
        if "step=000009" not in path.name:  # after 9 micro-batches, now 18
            path.unlink()
    words = ("train", "run_dir=run", "resume=auto", "trainer.devices=1")
    if batch:  # as a script repeats it, with group choices; null keeps earlier decisions
        words = (*command.smoke("trainer=cpu", *keep), *words[1:])
    command(*words)
    assert command.summary("run")["world_size"] == 1
    ours, theirs = command.summary("run"), other.summary("runs/first")
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=1e-5)


def test_a_new_run_from_a_checkpoint_uses_its_state_but_new_settings(finished, command):
    other, _ = finished
    source = other.folder / "runs/first/checkpoints/step=000020.ckpt"
    command.train(f"resume={source}", "max_steps=30", "optim.lr=0.01", "run_dir=run")
    steps = rows(command.folder / "run")
    assert [row["trainer/step"] for row in steps] == ["25", "30"]
    assert float(steps[-1]["optim/lr"]) == pytest.approx(0.001)  # 0.01 at its final tenth
    assert float(steps[-1]["val/loss"]) < other.summary("runs/first")["val_loss"]


@pytest.mark.slow
def test_a_run_of_another_model_is_rejected_and_force_loads_no_part_of_it(finished, command):
    other, _ = finished
    words = [f"resume={other.folder}/runs/first", "model.n_layer=3", "run_dir=run"]
    line = command.train(*words, status=2).stderr
    assert "but got model.n_layer=3 instead of 2; use the same, or set resume_force" in line
    assert line.endswith(f"run_dir={other.folder}/runs/first resume=auto\n")
    assert not (command.folder / "run").exists()
    line = command.train(*words, "resume_force=true", "max_steps=30", status=2).stderr
    assert "weights fit this model's" in line
    assert line.count("\n") == 1
    assert not (command.folder / "run").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "model.n_layer=3",
            "run_dir=run keeps its settings, but got model.n_layer=3",
        ),
        ("data.source.val_fraction=0.5", "data.source.val_fraction=0.5 gives other tokens than"),
        (
            "seed=1",
            "but got seed=1 instead of 1337; use the same, or set resume_force=true",
        ),
        ("batch.global_size=16", "but got batch.global_size=16 instead of 8"),
        (
            "optim=muon",
            "keeps its settings, but got "
            "optim._target_=lockstep_gpt.optim.muon instead of "
            "lockstep_gpt.optim.adamw; use the same, or set resume_force=true",
        ),
        ("model=gpt2", "keeps its settings, but got model.block_size=1024 instead of 32, model.n_"),
        ("experiment=smoke model.n_layer=3", "but got model.n_layer=3 instead of 2; use the same"),
        ("experiment=quickstart", "keeps its settings, but got"),
        ("max_stepz=3", "unknown setting max_stepz; did you mean max_steps?"),
        ("max_steps=-3", "max_steps=-3 must be at least 1"),
    ],
)
def test_an_invalid_change_is_rejected_and_leaves_the_run_unchanged(
    finished, tmp_path, command, override, line
):
    other, _ = finished
    shutil.copytree(other.folder / "runs/first", tmp_path / "run")
    before = (tmp_path / "run/config.yaml").read_bytes()
    result = command("train", "run_dir=run", "resume=auto", *override.split(), status=2)
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "run/config.yaml").read_bytes() == before


def test_a_choice_that_no_experiment_needs_is_an_override(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    words = ("logger=tensorboard", "launch.inline=true", "max_steps=22")
    stdout = command("train", "run_dir=run", "resume=auto", *words).stdout
    assert "max_steps: 20 -> 22" in stdout
    frozen = RunDirectory(command.folder / "run").values()
    assert [*frozen["logger"]] == ["tensorboard"]
    assert frozen["model"]["block_size"] == 32  # the experiment's, which this command doesn't name
    assert command.summary("run")["step"] == 22


@pytest.mark.slow
def test_a_resume_without_a_choice_of_loggers_keeps_those_of_the_run(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    frozen = command.folder / "run/config.yaml"
    frozen.write_text(frozen.read_text().replace("mode: auto", "mode: offline"))
    same = ("experiment=smoke", "callbacks.sample.length=9")  # mode=auto by default
    command("train", "run_dir=run", "resume=auto", "max_steps=22", *same)
    assert RunDirectory(frozen.parent).values()["logger"]["wandb"]["mode"] == "offline"
    assert command.summary("run")["step"] == 22


@pytest.fixture
def corpus(command):
    """A folder of text, and the arguments to train on it."""
    folder = command.folder / "corpus"
    folder.mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(f"{name}: a text to learn from. " * 400)
    data = (
        f"data.root={command.folder}/data",
        f"data.source.path={folder}",
        "data.source.val_fraction=0.3",
    )
    return folder, ("data=text", *data, "schedule.decay=constant")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_data(command, corpus):
    folder, words = corpus
    command.train(*words, "run_dir=whole")
    command.train(*words, "run_dir=run", "max_steps=12")
    (folder / "three.txt").write_text("one that came later. " * 999)
    command("train", "run_dir=run", "resume=auto", "max_steps=20")
    again = command.smoke(*words, "launch.inline=true", "run_dir=run", "resume=auto")
    command(*again, "max_steps=20")
    ours, theirs = weights(command.folder / "run"), weights(command.folder / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    (prepared,) = (command.folder / "data").glob("text-*")
    shutil.rmtree(prepared)
    stderr = command("train", "run_dir=run", "resume=auto", "max_steps=25", status=2).stderr
    assert f"{prepared} is missing, and the corpus or its tokenizer has changed" in stderr
    stderr = command.train(*words, "resume=run", "run_dir=new", "max_steps=30", status=2).stderr
    assert "is of a run on other tokens than" in stderr


def test_a_path_that_a_resume_changes_must_have_the_same_text(command, corpus):
    folder, words = corpus
    command.train(*words, "run_dir=run", "max_steps=12")
    resume = ("train", "run_dir=run", "resume=auto", "max_steps=14")
    other = command.folder / "other"
    other.mkdir()
    (other / "one.txt").write_text("other words. " * 999)
    before = kept(command.folder / "run")
    stderr = command(*resume, f"data.source.path={other}", status=2).stderr
    assert f"data.source.path={other} gives other tokens than {command.folder}/data/text-" in stderr
    assert stderr.endswith("leave it out, or set resume_force=true\n")
    assert kept(command.folder / "run") == before
    folder.rename(command.folder / "moved")
    stdout = command(*resume, f"data.source.path={command.folder}/moved").stdout
    assert f"data.source.path: {folder} -> {command.folder}/moved" in stdout
    assert command.summary("run")["step"] == 14


def test_missing_data_is_prepared_again_from_the_same_corpus(command, corpus):
    _, words = corpus
    command.train(*words, "run_dir=run", "max_steps=12")
    (prepared,) = (command.folder / "data").glob("text-*")
    shutil.rmtree(prepared)
    command("train", "run_dir=run", "resume=auto", "max_steps=20")
    assert prepared.is_dir()


def test_samples_are_counted_not_computed_from_the_batch_of_today(command):
    command.train("run_dir=run", "batch.global_size=4", "batch.micro_size=4")
    command.train("resume=run", "resume_force=true", "max_steps=30", "run_dir=more")
    saved = torch.load(command.folder / "more/checkpoints/step=000030.ckpt")
    loader = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    assert loader == {"step": 30, "samples": 20 * 4 + 10 * 8}


FORCED = ("run_dir=run", "resume=auto", "resume_force=true")


@pytest.mark.slow
def test_a_forced_resume_has_other_data(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    before = RunDirectory(command.folder / "run").notes()["tokens"]["fingerprint"]
    changed = ("data.source.val_fraction=0.5", f"data.root={command.data_root}")
    command("train", *FORCED, *changed, "launch.inline=true", "max_steps=23")
    assert command.summary("run")["status"] == "done"
    assert RunDirectory(command.folder / "run").notes()["tokens"]["fingerprint"] != before


def test_a_forced_resume_with_another_optimizer_is_refused_in_one_line(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    words = ("optim=muon", "launch.inline=true", "max_steps=23")
    stderr = command("train", *FORCED, *words, status=2).stderr
    assert "the checkpoint has no state of Muon, but of another optimizer" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.slow
def test_a_forced_resume_with_a_mistake_leaves_the_run_unchanged(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    mistake = ("seed=3", "max_steps=30", "+callbacks.bad._target_=math.Bad", "launch.inline=true")
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for _ in range(2):
        assert wandb.run is None  # and the first leaves none to the second
        stderr = command("train", *FORCED, *mistake, status=2).stderr
        assert (stderr.count("\n"), "math.Bad" in stderr) == (1, True)
        assert (command.folder / "run/config.yaml").read_bytes() == frozen
        assert not (command.folder / "run/overrides.log").exists()
        assert (command.folder / "run/checkpoints/step=000020.ckpt").is_file()


def test_a_mistake_after_other_tokens_were_decided_leaves_the_run_s_own(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    before = (command.folder / "run/decided.json").read_bytes()
    mistake = ("data.source.val_fraction=0.3", "max_steps=30", "callbacks.sample.length=-1")
    stderr = command("train", *FORCED, *mistake, status=2).stderr
    assert "callbacks.sample.length=-1" in stderr
    assert (command.folder / "run/decided.json").read_bytes() == before


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def kept(folder):
    """Return what a run has, beside logs, in which a rank also says why it refuses to train."""
    return {
        path: data
        for path, (_, data) in content(folder).items()
        if path.name != "train.log" and "wandb" not in path.parts
    }


@pytest.mark.parametrize("again", [(), ("experiment=smoke",)])
def test_a_finished_run_is_not_changed_by_a_resume(finished, command, again):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    before = content(command.folder / "run")
    data = (f"data.root={command.data_root}",) if again else ()
    stdout = command("train", *again, *data, "run_dir=run", "resume=auto").stdout
    line = "run is done after 20 steps; to train it longer: "
    assert stdout.startswith(line)
    assert stdout.endswith(" train run_dir=run resume=auto max_steps=40\n")
    assert stdout.count("\n") == 1
    assert content(command.folder / "run") == before


def test_a_new_run_from_a_checkpoint_that_has_all_its_steps_is_refused(finished, command):
    last = finished[0].folder / "runs/first/checkpoints/step=000020.ckpt"
    for steps in (20, 15):
        words = (f"resume={last}", f"max_steps={steps}", "run_dir=run")
        stderr = command.train(*words, status=2).stderr
        assert f"is after step 20, but this run ends after {steps} steps; " in stderr
        assert "; raise max_steps, or train less in a new run" in stderr
        assert not (command.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_run_killed_after_its_last_save_keeps_its_result(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    before = command.summary("run")
    (command.folder / "run/summary.json").unlink()
    rows_before = (command.folder / "run/metrics.csv").read_bytes()
    stdout = command("train", "run_dir=run", "resume=auto").stdout
    assert f"step 20, val/loss {before['val_loss']:.4f}" in stdout
    after = command.summary("run")
    same = ("status", "step", "tokens", "train_loss", "val_loss", "val_perplexity")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["tokens_per_second"] is None
    assert (command.folder / "run/metrics.csv").read_bytes() == rows_before
    assert not (command.folder / "run/failed.json").exists()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def checkpoints(command):
    """The folder of a run that kept its checkpoints of steps 10 and 20."""
    folder = command.folder / "run/checkpoints"
    words = ("checkpoint.keep_last=2", "run_dir=run")
    command.train(*words)
    assert sorted(path.stem for path in folder.glob("*.ckpt")) == ["step=000010", "step=000020"]
    return folder


def test_an_unfinished_run_cannot_end_before_the_step_it_has_reached(finished, command):
    run = command.folder / "run"
    shutil.copytree(finished[0].folder / "runs/first", run)
    (run / "summary.json").unlink()
    before = kept(run)
    err = command("train", "run_dir=run", "resume=auto", "max_steps=10", status=2).stderr
    assert err.endswith(
        "run/checkpoints/step=000020.ckpt is after step 20, but this run ends after 10 steps; "
        "raise max_steps, or train less in a new run\n"
    )
    assert kept(run) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_and_later_saves_stay(command, checkpoints):
    flip(checkpoints / "step=000020.ckpt")
    command("train", "run_dir=run", "resume=auto", "checkpoint.every=5", "max_steps=16")
    names = sorted(path.stem for path in checkpoints.glob("*.ckpt"))
    assert names == ["step=000015", "step=000016"]
    assert (checkpoints / "damaged/step=000020.ckpt").is_file()
    log = (checkpoints.parent / "train.log").read_text()
    assert "moved run/checkpoints/step=000020.ckpt to" in log


@pytest.mark.slow
def test_without_a_valid_checkpoint_no_run_starts_over(command, checkpoints):
    for path in checkpoints.glob("*.ckpt"):
        flip(path)
    rows = (checkpoints.parent / "metrics.csv").read_bytes()
    stderr = command("train", "run_dir=run", "resume=auto", "max_steps=30", status=2).stderr
    assert "run/checkpoints has 2 checkpoints, but none is valid; put a valid copy" in stderr
    assert (checkpoints.parent / "metrics.csv").read_bytes() == rows
    assert len(list(checkpoints.glob("*.ckpt"))) == 2


@pytest.mark.slow
def test_the_same_command_resumes_the_run_it_started(command):
    words = ("experiment=smoke", f"data.root={command.data_root}", "logger=none", "run_dir=run")
    command("train", *words, "resume=auto", "launch.inline=true")
    stdout = command("train", *words, "resume=auto", "launch.inline=true", "max_steps=25").stdout
    assert "resuming run\n  max_steps: 20 -> 25\n" in stdout
    assert command.summary("run")["step"] == 25
    stdout = command("train", *words, "resume=auto").stdout  # how ranks start is frozen
    assert stdout.startswith("run is done")  # with its later number of steps


@pytest.mark.slow
def test_a_sweep_resumes_its_jobs(command):
    words = ("--multirun", "optim.lr=1e-3,2e-3", "run_dir=sweep", "resume=auto")
    command.train(*words)
    shutil.rmtree(command.folder / "sweep/1")
    before = content(command.folder / "sweep/0")
    stdout = command.train(*words).stdout
    assert content(command.folder / "sweep/0") == before
    assert "sweep/0 is done" in stdout
    assert command.summary("sweep/1")["status"] == "done"
    losses = [command.summary(f"sweep/{job}")["val_loss"] for job in (0, 1)]
    assert [f"{loss:.4f}" in stdout.rpartition("job  exit")[2] for loss in losses] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swept", "other", "fault"),
    [
        ("optim.lr=1e-3,2e-3", "optim.lr=2e-3,1e-3", "has optim.lr=0.001, and job 0 of this sweep"),
        ("optim=adamw,muon", "optim=muon,adamw", "has optim._target_="),
    ],
)
def test_a_sweep_takes_no_run_of_another_sweep_for_its_own(command, swept, other, fault):
    words = ("--multirun", "run_dir=sweep", "resume=auto", "max_steps=2")
    command.train(*words, swept)
    before = [content(command.folder / f"sweep/{job}") for job in (0, 1)]
    done = command.train(*words, other, status=2)
    assert done.stderr.count(fault) >= 1
    assert done.stdout.count("nan") == 2
    assert [content(command.folder / f"sweep/{job}") for job in (0, 1)] == before


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_restarts_as_frozen(finished, command):
    (command.folder / "run").mkdir()
    frozen = finished[0].folder / "runs/first/config.yaml"
    shutil.copy(frozen, command.folder / "run")
    shutil.copytree(frozen.with_name(".hydra"), command.folder / "run/.hydra")
    command("train", "run_dir=run", "resume=auto")
    ours, theirs = weights(command.folder / "run"), weights(finished[0].folder / "runs/first")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resume_after_a_killed_start_starts_the_run(command):
    (command.folder / "run").mkdir()
    (command.folder / "run/.config.yaml.tmp").write_text("max_st")
    command.train("run_dir=run", "resume=auto", "max_steps=6")
    assert command.summary("run")["status"] == "done"
    assert not list((command.folder / "run").glob(".*.tmp"))


def test_resume_in_a_folder_of_other_files_is_rejected(command):
    (command.folder / "run").mkdir()
    (command.folder / "run/mine.txt").write_text("mine")
    stderr = command.train("run_dir=run", "resume=auto", status=2).stderr
    assert "run_dir=run already exists and is not empty; name another one" in stderr
    assert [path.name for path in (command.folder / "run").iterdir()] == ["mine.txt"]


def test_resume_of_a_missing_run_says_so_and_starts_it(command):
    stdout = command.train("run_dir=run", "resume=auto", "max_steps=6").stdout
    assert "run does not exist yet: starting a new run\n" in stdout
    assert command.summary("run")["status"] == "done"


@pytest.mark.slow
def test_a_checkpoint_of_lightning_s_own_callback_continues_a_new_run(command):
    kind = "+callbacks.theirs._target_=lightning.pytorch.callbacks.ModelCheckpoint"
    every = ("+callbacks.theirs.every_n_train_steps=6", "+callbacks.theirs.save_top_k=-1")
    command.train(kind, *every, "run_dir=first")
    theirs = command.folder / "first/lightning/checkpoints/epoch=0-step=12.ckpt"
    best = theirs.rename(theirs.with_name("best.ckpt"))
    sums = theirs.with_name(f"{theirs.name}.sha256")
    text = sums.read_text().replace(theirs.name, best.name)
    best.with_name(f"{best.name}.sha256").write_text(text)
    stdout = command.train(f"resume={best}", "run_dir=second").stdout
    assert "continues from step 12, " in stdout
    first, second = (command.summary(name) for name in ("first", "second"))
    assert first["weights"]["20"] == second["weights"]["20"]


FILL = """
import errno, lightning
class Fill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 31 and trainer.is_global_zero:
            try:
                with open("disk/filler", "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
"""
SMALL = ("run_dir=disk/run", "log_every=1")


@pytest.fixture
def disk(command):
    """A small disk in the command's folder."""
    (folder := command.folder / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    (command.folder / "fill.py").write_text(FILL)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


LINES = {
    30: "No space left on device: disk/run cannot be written; fix that",  # metrics.csv's first
    5: r"disk/run/checkpoints has 0 bytes left, but a checkpoint needs [\d,]+; free some "
    "space there",
}
# 29 rows until the next validation are longer than what metrics.csv's last page has left.
# Without memory: if failed.json has no room, a newer state there is what the last line names.
MEMORY = "memory=false"
FILLED = ("+callbacks.fill._target_=fill.Fill", "max_steps=60", "val_every=30", MEMORY, *SMALL)


@pytest.mark.slow
@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("ranks", [["launch.inline=true"], ["trainer=cpu", "trainer.devices=2"]])
@pytest.mark.parametrize("every", LINES)
def test_a_full_disk_ends_a_run_in_one_line_and_keeps_checkpoints(command, every, ranks):
    words = (*FILLED, f"checkpoint.every={every}", *ranks)
    stderr = command.train(*words, status=1, PYTHONPATH=str(command.folder)).stderr
    end = "; step 30 is saved; to continue: .* train run_dir=disk/run resume=auto"
    assert re.fullmatch(f"rank 0 failed: {LINES[every]}{end}\n", stderr)
    failed = command.folder / "disk/run/failed.json"
    assert not failed.exists() or json.loads(failed.read_text())["status"] == 1
    (command.folder / "disk/filler").unlink()
    go_on = ("run_dir=disk/run", "resume=auto", "callbacks.fill._target_=lightning.Callback")
    assert "resuming disk/run" in command("train", *go_on).stdout
    assert command.summary("disk/run")["status"] == "done"


@pytest.fixture
def stopped(disk, command):
    """A run on the small disk that reached its tenth step; its files."""
    command.train(*SMALL, "max_steps=10")
    return disk / "run"


@pytest.mark.slow
def test_a_resume_on_a_full_disk_fails_in_one_line_and_works_later(command, stopped):
    with contextlib.suppress(OSError), (stopped.parent / "filler").open("wb") as file:
        while True:
            file.write(bytes(4096))
    words = ("train", "run_dir=disk/run", "resume=auto", "max_steps=20")
    frozen = (stopped / "config.yaml").read_bytes()
    assert command(*words, status=1).stderr == (
        "lockstep-gpt train: "
        "No space left on device: disk/run cannot be written; fix that, then "
        "resume=auto continues from disk/run/checkpoints/step=000010.ckpt\n"
    )
    assert (stopped / "config.yaml").read_bytes() == frozen
    (stopped.parent / "filler").unlink()
    command(*words)
    assert command.summary("disk/run")["step"] == 20


@pytest.mark.slow
def test_a_resume_on_a_read_only_disk_is_rejected_in_one_line(command, stopped):
    subprocess.run(["mount", "-o", "remount,ro", str(stopped.parent)], check=True)
    words = ("train", "run_dir=disk/run", "resume=auto", "max_steps=20")
    assert command(*words, status=2).stderr == (
        "lockstep-gpt train: "
        "Read-only file system: disk/run cannot be written; fix that, then "
        "resume=auto continues from disk/run/checkpoints/step=000010.ckpt\n"
    )
