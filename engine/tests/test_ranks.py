"""Several ranks: one run, the same experiment, and an orderly end."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
# 1,024 tokens of validation are 32 windows: 2 ranks of 6 pad the last batch, 3 ranks of 4 too
EXACT = ("precision=64-true", "max_steps=10", "val_every=10", "batch.global_size=12")
BROKEN = """
import builtins, os, time, lightning
class Broken(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            raise ZeroDivisionError("on purpose")
class Leaves(lightning.Callback):
    def __init__(self, kind):
        self.kind = kind
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            raise getattr(builtins, self.kind)("on purpose")
class Meets(lightning.Callback):
    def on_exception(self, trainer, *_):
        trainer.strategy.barrier()
"""
# Callbacks that wait for all ranks when one of them raises.
WAITING = {
    "none": [],
    "a barrier": ["+callbacks.a._target_=broken.Meets"],
    "a save": [
        "+callbacks.z._target_=lightning.pytorch.callbacks.OnExceptionCheckpoint",
        "+callbacks.z.dirpath=saved",
    ],
}


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"checkpoints/step={step:06d}.ckpt")["state_dict"]


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_two_ranks_give_the_losses_of_one(two):
    command, _ = two
    one, both = command.summary("runs/first"), command.summary("runs/two")
    assert both["world_size"] == 2
    assert both["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)
    assert both["train_loss"] == pytest.approx(one["train_loss"], abs=1e-5)


def test_two_ranks_leave_one_run_directory_like_one(two):
    command, _ = two
    one, both = (
        sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if "wandb/" not in str(path)
        )
        for folder in (command.folder / "runs/first", command.folder / "runs/two")
    )
    assert both == one


def test_only_rank_zero_speaks(two):
    _, screen = two
    assert len(re.findall("step 20/20  val_loss", screen)) == 1
    assert len(re.findall("DDPStrategy over gloo", screen)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_ranks_change_double_precision_weights_by_rounding_only(command):
    for ranks in (1, 2, 3):
        place = ("trainer=cpu", f"trainer.devices={ranks}", f"launch.inline={ranks == 1}")
        command.train(*EXACT, *place, f"run_dir={ranks}", "verbosity=quiet")
    one = weights(command.folder / "1", 10)
    for ranks in ("2", "3"):
        assert largest_difference(one, weights(command.folder / ranks, 10)) < 1e-10
        losses = [command.summary(run)["val_loss"] for run in ("1", ranks)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("waiting", WAITING.values(), ids=[*WAITING])
def test_rank_that_raises_ends_all_quickly_with_its_traceback_first(command, processes_of, waiting):
    (command.folder / "broken.py").write_text(BROKEN)
    broken = [*waiting, "+callbacks.broken._target_=broken.Broken"]
    words = command.smoke(*TWO, *broken, "max_steps=100000")
    run = command.folder / "broken"
    process = command.start(*words, f"run_dir={run}", PYTHONPATH=str(command.folder))
    _, err = process.communicate(timeout=240)
    ended = time.time()
    assert process.returncode == 1
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("rank 1 failed: ZeroDivisionError: on purpose; ")
    failed = json.loads((run / "failed.json").read_text())
    assert (failed["rank"], failed["status"]) == (1, 1)
    assert ended - (run / "failed.json").stat().st_mtime < 25  # torch waits 30
    assert "on purpose" in (run / "ranks/1.log").read_text()
    assert not processes_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "BaseException"])
def test_a_rank_that_leaves_by_another_exception_does_not_wait_for_the_others(command, kind):
    (command.folder / "broken.py").write_text(BROKEN)
    leaves = ["+callbacks.l._target_=broken.Leaves", f"+callbacks.l.kind={kind}"]
    words = command.smoke(*TWO, *WAITING["a barrier"], *leaves, "max_steps=100000")
    process = command.start(*words, "run_dir=left", PYTHONPATH=str(command.folder))
    try:
        _, err = process.communicate(timeout=120)  # a run that stalls waits for half an hour
    finally:
        process.terminate()
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith(f"rank 1 failed: {kind}: on purpose; ")


FAULTS = """
import os, signal, lightning
class Faults(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        for step, rank, name in ((13, 2, "SIGKILL"), (24, 1, "SIGTERM")):
            if (trainer.global_step, trainer.global_rank) == (step, rank):
                try:
                    os.close(os.open(name, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), getattr(signal, name))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_faults_of_single_ranks_leave_no_trace_in_the_weights(command):
    (command.folder / "faults.py").write_text(FAULTS)
    three = ("trainer=cpu", "trainer.devices=3", "strategy=ddp")
    model = ("model.n_layer=1", "model.dropout=0.1")  # random numbers must also continue
    sizes = ("batch.global_size=12", "batch.micro_size=2", "max_steps=30", "val_every=20")
    words = (*three, *model, *sizes)
    command.train(*words, "run_dir=whole", "verbosity=quiet")
    fault = "+callbacks.faults._target_=faults.Faults"
    hit = command.train(*words, fault, "run_dir=hit", PYTHONPATH=str(command.folder))
    assert "rank 2 was killed by SIGKILL; restarting all ranks (1 of 3)" in hit.stderr
    assert re.search(
        r"rank \d was stopped by SIGTERM.*; restarting all ranks \(2 of 3\)", hit.stderr
    )
    assert hit.stdout.count("done in") == 1
    assert hit.stdout.count("continues from step") == 2
    assert hit.stdout.count("  schedule  ") == 1  # the receipt
    undisturbed, after = weights(command.folder / "whole", 30), weights(command.folder / "hit", 30)
    assert all(torch.equal(undisturbed[name], after[name]) for name in undisturbed)
    rows = (command.folder / "hit/metrics.csv").read_text().splitlines()
    steps = [row.split(",")[0] for row in rows]
    assert steps[1:] == [str(step) for step in range(5, 31, 5)]


NORMED = """
import json, lightning, torch
class Norm(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)
class Normed(lightning.Callback):
    def setup(self, trainer, pl_module, stage):
        self.norm = Norm(pl_module.model.n_embd)
        pl_module.model.final_norm = torch.nn.Sequential(pl_module.model.final_norm, self.norm)
        self.seen = []
    def on_train_batch_start(self, trainer, *_):
        if trainer.is_global_zero:
            self.seen.append((int(self.norm.num_batches_tracked), float(self.norm.running_mean[0])))
    def on_train_end(self, trainer, *_):
        if trainer.is_global_zero:
            with open("seen.jsonl", "a") as file:
                file.write(json.dumps(self.seen) + "\\n")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("ranks", [1, 3])
def test_statistics_of_batchnorm_count_only_training_batches(command, ranks):
    (command.folder / "normed.py").write_text(NORMED)
    words = ("trainer=cpu", f"trainer.devices={ranks}", "+callbacks.normed._target_=normed.Normed")
    size = ("batch.global_size=6", "batch.micro_size=2", "val_every=100", "max_steps=6")
    environment = {"PYTHONPATH": str(command.folder)}
    ranks_start = f"launch.inline={ranks == 1}"
    out = command.train(*words, *size, ranks_start, "run_dir=run", **environment).stdout
    warned = out.count("the model has 1 BatchNorm layer, with the statistics of each rank's own")
    assert warned == (1 if ranks > 1 else 0)
    go_on = ("run_dir=run", "resume=auto", "max_steps=8")
    command(*["train", *go_on], **environment)
    first, then = map(json.loads, (command.folder / "seen.jsonl").read_text().splitlines())
    assert first[0] == [0, 0.0]
    assert [count for count, _ in first + then] == [*range(8 * 3 // ranks)]


@pytest.mark.slow
def test_signal_stops_all_ranks_at_one_step(command, wait_for_checkpoint, processes_of):
    run = command.folder / "long"
    process = command.start(*command.smoke(*TWO, "max_steps=100000", f"run_dir={run}"))
    wait_for_checkpoint(run)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGUSR1
    summary = command.summary("long")
    assert summary["status"] == "stopped"
    assert summary["last_checkpoint"].endswith(f"step={summary['step']:06d}.ckpt")
    assert not processes_of(run)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_multirun_starts_a_run_of_two_ranks_for_each_job(command, records):
    words = [
        "--multirun",
        "optim.lr=1e-3,-1,3e-3",
        *TWO,
        "run_dir=sweep",
        "max_steps=10",
        "logger=wandb",
    ]
    result = command.train(*words, status=2)
    assert sorted(path.name for path in (command.folder / "sweep").iterdir()) == [
        "0",
        "2",
        "multirun.yaml",
    ]
    losses = [command.summary(f"sweep/{job}")["val_loss"] for job in (0, 2)]
    assert [f"{loss:.4f}" in result.stdout for loss in losses] == [True, True]
    assert "optim.lr=-1 must be above 0" in result.stderr
    assert command.summary("sweep/0")["world_size"] == 2
    for job in (0, 2):  # together in wandb
        (path,) = (command.folder / f"sweep/{job}").glob("wandb/offline-run-*/*.wandb")
        groups = {record.run.run_group for record in records(path) if record.HasField("run")}
        assert groups == {"sweep"}


BAD = {
    "strategy.process_group_backend=nccl": "process_group_backend=nccl needs GPUs",
    "trainer.devices=3": "batch.global_size=8 is not divisible by 3 devices x 1 node = 3; "
    "nearest: batch.global_size=6 or 9",
    "strategy.comm_hook=no_such": "comm_hook=no_such is not one of none",
    "strategy.process_group_backend=no_such": "no_such is not in torch",
    "strategy.timeout_seconds=soon": "timeout_seconds=soon must be a number",
}


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(("override", "line"), BAD.items())
def test_bad_setting_of_ranks_gets_one_line(command, override, line):
    result = command.train(*TWO, override, status=2)
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (command.folder / "runs").is_dir() or not list((command.folder / "runs").iterdir())


def test_more_devices_than_available_are_rejected(command):
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    assert "no GPU" in command.train("trainer=gpu", "trainer.devices=9", status=2).stderr
