"""The command from end to end: the files of a run, and how it ends."""

import csv
import json
import signal
import socket
import time

import pytest
import torch
import yaml

OF_EXTRAS = {"environment.json"}  # its own tests check when it exists


def test_the_run_directory_contains_the_documented_files(finished):
    command, _ = finished
    present = {
        str(path.relative_to(command.folder / "runs/first"))
        for path in (command.folder / "runs/first").rglob("*")
        if path.parent.name != "wandb" and "wandb/" not in str(path.parent)
    }
    assert present - OF_EXTRAS == {
        ".hydra",
        ".hydra/hydra.yaml",
        ".saved",
        ".token",
        "decided.json",
        "config.yaml",
        "train.log",
        "metrics.csv",
        "summary.json",
        "wandb",
        "checkpoints",
        "checkpoints/step=000020.ckpt",
        "checkpoints/step=000020.ckpt.sha256",
    }
    assert [path.name for path in command.folder.iterdir()] == ["runs"]  # data is elsewhere


def test_the_summary_records_how_the_run_ended(finished):
    command, _ = finished
    summary = command.summary("runs/first")
    assert summary["status"] == "done"
    assert (summary["step"], summary["tokens"]) == (20, 20 * 8 * 32)
    assert summary["val_perplexity"] == pytest.approx(2.718281828 ** summary["val_loss"])
    assert summary["last_checkpoint"] == "runs/first/checkpoints/step=000020.ckpt"
    assert 0 < summary["wall_seconds"] < 100
    assert summary["val_loss"] < 5.0  # ln(256) = 5.55 is the loss without knowledge


def test_metrics_have_one_row_for_each_logged_step(finished):
    command, _ = finished
    with (command.folder / "runs/first/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["trainer/step"]) for row in rows] == [5, 10, 15, 20]
    assert [row["trainer/step"] for row in rows if row["val/loss"]] == ["10", "20"]
    assert float(rows[-1]["val/loss"]) == command.summary("runs/first")["val_loss"]


def test_a_frozen_configuration_is_complete(finished):
    command, _ = finished
    frozen = yaml.safe_load((command.folder / "runs/first/config.yaml").read_text())
    assert frozen["trainer"]["accelerator"] in ("cpu", "cuda")
    assert frozen["trainer"]["devices"] >= 1
    assert frozen["run_dir"] == "runs/first"
    assert frozen["run_name"] is None  # for trackers: that of the folder


def test_the_screen_shows_receipt_sample_and_next_command(finished):
    command, screen = finished
    for line in (
        "1 device x 1 node x 8 samples x 1 accumulation = 8 samples per step",
        "0.003 x 1 = 0.003 (linear)",
        "  | class to read",
        " generate runs/first\n",
    ):
        assert line in screen
    log = (command.folder / "runs/first/train.log").read_text()
    assert screen.partition("  run ")[2] == log.partition("  run ")[2]


@pytest.mark.slow
def test_a_second_launch_inline_gives_the_same_bits(finished):
    command, _ = finished
    command.train("run_dir=runs/inline", "launch.inline=true")
    first, again = (
        torch.load(command.folder / f"runs/{run}/checkpoints/step=000020.ckpt")["state_dict"]
        for run in ("first", "inline")
    )
    assert all(torch.equal(first[name], again[name]) for name in first)


def losses_of(command, *words):
    """Return the training losses of a run, and what it said."""
    output = command.train("model.dropout=0.2", "max_steps=3", "log_every=1", *words).stdout
    run = next(word for word in words if word.startswith("run_dir=")).partition("=")[2]
    with (command.folder / run / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)], output


@pytest.mark.slow
def test_dropout_is_equal_on_other_numbers_of_devices_only_where_the_receipt_says_so(command):
    two = ["trainer=cpu", "trainer.devices=2", "strategy=ddp"]
    ours, said = losses_of(command, "run_dir=open")
    theirs, _ = losses_of(command, "run_dir=open-two", *two)
    assert "layers with dropout, whose numbers belong to a micro-batch" in said
    assert ours[0] != pytest.approx(theirs[0], rel=1e-5)
    ours, said = losses_of(command, "run_dir=fixed", "batch.micro_size=2")
    theirs, _ = losses_of(command, "run_dir=fixed-two", "batch.micro_size=2", *two)
    assert "with dropout" not in said
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_growing_batch_scales_the_learning_rate(command):
    out = command.train("batch.global_size=null", "batch.micro_size=16", "max_steps=8").stdout
    assert "0.003 x 2 = 0.006" in out
    assert "  schedule   8 steps: " in out


@pytest.mark.slow
def test_signal_saves_and_exits_with_its_number(command, wait_for_checkpoint, processes_of):
    process = command.start(*command.smoke("max_steps=100000", "run_dir=runs/long"))
    wait_for_checkpoint(command.folder / "runs/long")
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 25  # of 30 allowed
    summary = command.summary("runs/long")
    assert (summary["status"], summary["saved"]) == ("stopped", True)
    assert summary["last_checkpoint"].endswith(f"step={summary['step']:06d}.ckpt")
    assert not processes_of(command.folder)


HANGS = """
import os, time, lightning
class Hangs(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if os.path.exists("hang"):
            open("hanging", "w").close()
            time.sleep(600)
"""


@pytest.mark.slow
def test_a_stop_that_could_not_save_in_time_names_the_last_checkpoint(
    command, wait_for, wait_for_checkpoint
):
    (command.folder / "hangs.py").write_text(HANGS)
    callback = "+callbacks.hangs._target_=hangs.Hangs"
    words = command.smoke("max_steps=100000", "run_dir=run", callback, "launch.grace_seconds=2")
    run, path = command.folder / "run", {"PYTHONPATH": str(command.folder)}
    process = command.start(*words, **path)
    wait_for_checkpoint(run)
    process.terminate()
    out, _ = process.communicate(timeout=240)
    assert (process.returncode, command.summary("run")["saved"]) == (143, True)
    step = command.summary("run")["step"]
    start = f"stopped by SIGTERM; step {step} is saved; to continue: "
    assert out.splitlines()[-1].startswith(start)
    assert out.splitlines()[-1].endswith(" train run_dir=run resume=auto")
    (command.folder / "hang").touch()
    process = command.start("train", "run_dir=run", "resume=auto", **path)
    wait_for((command.folder / "hanging").exists)
    process.terminate()
    started = time.monotonic()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 60  # of 600
    summary = command.summary("run")
    assert (summary["status"], summary["saved"]) == ("stopped", False)
    line = f"stopped by SIGTERM before all ranks saved; step {step} is saved; to continue: "
    assert out.splitlines()[-1].startswith(line)


@pytest.mark.slow
def test_a_stop_before_the_first_save_is_reported(command, wait_for):
    (command.folder / "hangs.py").write_text(HANGS)
    (command.folder / "hang").touch()
    callback = ("+callbacks.hangs._target_=hangs.Hangs", "launch.grace_seconds=1")
    words = command.smoke("run_dir=run", *callback)
    process = command.start(*words, PYTHONPATH=str(command.folder))
    wait_for((command.folder / "hanging").exists)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    assert command.summary("run") == {"status": "stopped", "saved": False}
    assert out.count("\nsaving after this step; press Ctrl-C again to stop at once\n") == 1
    line = "stopped by SIGINT before all ranks saved; nothing is saved; to start over: "
    assert out.splitlines()[-1].startswith(line)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_signal_ends_the_whole_sweep(command, wait_for_checkpoint):
    words = ("--multirun", "seed=1,2,3", "max_steps=100000", "run_dir=sweep")
    process = command.start(*command.smoke(*words))
    wait_for_checkpoint(command.folder / "sweep/0")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "job 1" not in out
    assert not (command.folder / "sweep/1").exists()


@pytest.mark.slow
def test_a_second_command_on_a_live_run_names_the_first_process(command, wait_for_checkpoint):
    words = command.smoke("max_steps=100000", "run_dir=run")
    process = command.start(*words)
    wait_for_checkpoint(command.folder / "run")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    stderr = command("train", "run_dir=run", "resume=auto", "log_every=7", status=2).stderr
    assert f"run_dir=run is in use by process {process.pid} on {socket.gethostname()}; " in stderr
    assert (command.folder / "run/config.yaml").read_bytes() == frozen
    process.terminate()
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("setting", ["temperature=-1", "prompt=''"])
def test_invalid_sampling_settings_are_rejected_before_training(command, setting):
    stderr = command.train(f"callbacks.sample.{setting}", "run_dir=run", status=2).stderr
    assert "must be at least 0" in stderr or "prompt is empty" in stderr
    assert not (command.folder / "run").exists()


BAD_SETTINGS = {
    "model.n_layers=3": "unknown setting model.n_layers; did you mean model.n_layer?",
    "model.n_layer=many": "model.n_layer=many must be a whole number",
    "model=no_such": "model=no_such is not one of ",
    "trainer.max_steps=7": "trainer.max_steps=7: the program gives max_steps=20; set max_steps "
    "instead",
    "model.n_embd=33": "model.n_embd=33 is not divisible by model.n_head=2; nearest: model.n_embd",
    "max_steps=-1": "max_steps=-1 must be at least 1",
    "lr_scaling=no_such": "lr_scaling=no_such is not one of linear, sqrt, none",
    "batch.micro_size=3": "batch.global_size=8 is not divisible by batch.micro_size=3",
    "trainer=gpu": "no GPU",
    "precision=16-mixed": "precision=16-mixed needs a GPU",
    "model.block_size=10000000": "model.block_size=10000000",
    "run_dir=/proc/run": "No such file or directory: /proc/run; set another run_dir",
}


@pytest.mark.parametrize(("override", "line"), BAD_SETTINGS.items())
def test_a_bad_setting_fails_in_one_line_and_creates_nothing(command, override, line):
    result = command.train(override, status=2, CUDA_VISIBLE_DEVICES="")
    assert result.stdout == "" or result.stdout.startswith("prepared")
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(command.folder.iterdir())


def test_existing_run_directory_is_never_overwritten(finished):
    command, _ = finished
    before = (command.folder / "runs/first/config.yaml").read_bytes()
    line = command.train("run_dir=runs/first", status=2).stderr
    assert "run_dir=runs/first already exists" in line
    assert (command.folder / "runs/first/config.yaml").read_bytes() == before


def test_a_mistake_found_by_a_rank_leaves_no_run(command):
    result = command.train("+trainer.profilr=simple", "run_dir=runs/typo", status=2)
    assert "profilr" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (command.folder / "runs/typo").exists()


def test_rank_that_raises_is_shown_and_recorded(command):
    (command.folder / "broken.py").write_text(
        "import lightning\n"
        "class Broken(lightning.Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if trainer.global_step == 3: raise ZeroDivisionError('on purpose')\n"
    )
    result = command.train(
        "+callbacks.broken._target_=broken.Broken",
        "run_dir=runs/broken",
        status=1,
        PYTHONPATH=str(command.folder),
    )
    failed = json.loads((command.folder / "runs/broken/failed.json").read_text())
    assert failed["rank"] == 0
    assert failed["error"] == "ZeroDivisionError: on purpose"
    assert result.stderr.startswith("Traceback")
    assert command.summary("runs/broken")["status"] == "failed"


@pytest.mark.slow
def test_the_debug_preset_trains_five_steps_with_profile_and_anomaly_detection(command):
    words = ["train", "experiment=[smoke,debug]", f"data.root={command.data_root}", "run_dir=run"]
    stdout = command(*words).stdout
    summary = command.summary("run")
    assert (summary["status"], summary["step"], summary["world_size"]) == ("done", 5, 1)
    assert "Profiler Report" in stdout
    assert "detect_anomaly: true" in (command.folder / "run/config.yaml").read_text()
    assert not (command.folder / "run/wandb").exists()
