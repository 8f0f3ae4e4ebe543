"""Arguments of Lightning's Trainer reach it and have their effect, or are refused with a reason."""

import inspect
import json
from pathlib import Path

import lightning
import pytest

FOREIGN = Path(__file__).parent / "foreign"
PROBE = """
import json
import lightning
import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm

class Sync(TorchSyncBatchNorm):
    is_made = False

    def __init__(self):
        Sync.is_made = True

class Probe(lightning.Callback):
    def __init__(self):
        self.seen = {"samples": [], "validated": [], "val_batches": 0, "sanity": 0, "loaders": []}

    def on_train_batch_start(self, trainer, _module, batch, _index):
        (tensor, *_) = batch.values() if isinstance(batch, dict) else batch
        self.seen["samples"].append(tensor.double().sum().item())
        self.seen["loaders"].append(id(trainer.train_dataloader))

    def on_validation_batch_start(self, trainer, *_):
        self.seen["sanity" if trainer.sanity_checking else "val_batches"] += 1

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.seen["validated"].append(trainer.global_step)

    def on_train_end(self, trainer, *_):
        self.seen |= {
            "anomaly": torch.is_anomaly_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "inference": trainer.validate_loop.inference_mode,  # by the user, not within a fit
            "limits": [trainer.limit_test_batches, trainer.limit_predict_batches],
            "plugin": Sync.is_made,
            "step": trainer.global_step,
        }
        self.seen["loaders"] = len({*self.seen["loaders"]})
        with open("probe.json", "w") as file:
            json.dump(self.seen, file)

class Stop(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.should_stop or trainer.global_step == 2
"""
OWN = ("--config-dir", str(FOREIGN / "conf"), "module=classifier", "data=classifier")
# Each in its own run would take minutes.
TOGETHER = {
    "benchmark": "true",
    "check_val_every_n_epoch": "1",
    "detect_anomaly": "true",
    "enable_autolog_hparams": "false",
    "enable_checkpointing": "true",
    "gradient_clip_algorithm": "norm",
    "gradient_clip_val": "9.0",
    "use_distributed_sampler": "true",
    "enable_model_summary": "true",
    "enable_progress_bar": "true",
    "inference_mode": "true",
    "limit_predict_batches": "4",
    "limit_test_batches": "5",
    "limit_train_batches": "3",
    "limit_val_batches": "1",
    "max_epochs": "4",
    "min_epochs": "1",
    "model_registry": "null",
    "num_sanity_val_steps": "1",
    "plugins": "[{_target_: probe.Sync}]",
    "profiler": "simple",
    "reload_dataloaders_every_n_epochs": "1",
}
ALONE = {"deterministic", "fast_dev_run", "max_time", "min_steps", "overfit_batches"}
DEVICES = {"accelerator", "devices", "num_nodes", "sync_batchnorm"}
# Lists are joined with ours; docs/test_lightning_page.py tries those that are refused.
JOINED = {"callbacks"}
REFUSED = {
    *("accumulate_grad_batches", "barebones", "default_root_dir", "log_every_n_steps", "logger"),
    *("max_steps", "precision", "strategy", "val_check_interval"),
}


@pytest.fixture(params=["gpt", "own"])
def train(command, request):
    """Train the GPT, or a module of one's own; return what a probe saw, and the output."""
    (command.folder / "probe.py").write_text(PROBE)
    own = OWN if request.param == "own" else ()
    code = f"{command.folder}:{FOREIGN}"

    def run(*words):
        probe = "+callbacks.probe._target_=probe.Probe"
        short = ("run_dir=run", "trainer=cpu", "callbacks.sample=null", "batch.global_size=8")
        done = command.train(*own, *short, probe, *words, PYTHONPATH=code)
        seen = json.loads((command.folder / "probe.json").read_text())
        return seen, done.stdout + done.stderr

    run.summary = lambda: command.summary("run")
    run.checkpoints = command.folder / "run/checkpoints"
    return run


def test_each_argument_is_tried_or_refused():
    arguments = {*inspect.signature(lightning.Trainer).parameters}
    assert arguments == {*TOGETHER} | ALONE | DEVICES | JOINED | REFUSED


@pytest.mark.slow
def test_arguments_have_their_effect(train):
    words = [f"trainer.{name}={value}" for name, value in TOGETHER.items()]
    seen, output = train("val_every=null", "clip_norm=null", *words)
    assert seen["step"] == 3 * 4  # limit_train_batches, max_epochs
    assert seen["validated"] == [3, 6, 9, 12]  # check_val_every_n_epoch
    assert (seen["val_batches"], seen["sanity"]) == (4, 1)  # limit_val_batches
    assert "step  0/20" not in output  # num_sanity_val_steps has no result
    assert seen["loaders"] == 4  # reload_dataloaders_every_n_epochs
    assert (seen["anomaly"], seen["benchmark"], seen["inference"]) == (True, True, True)
    assert seen["limits"] == [5, 4]
    assert seen["plugin"]
    assert "Trainable params" in output
    assert "FIT Profiler Report" in output
    assert train.summary()["status"] == "done"
    assert (train.checkpoints / "step=000012.ckpt").is_file()


@pytest.mark.slow
def test_epochs_of_an_overfit_have_the_same_micro_batches(train):
    seen, _ = train("trainer.overfit_batches=2", "max_steps=6", "val_every=2")
    assert seen["samples"] == seen["samples"][:2] * 3
    assert seen["samples"][0] != seen["samples"][1]
    assert (seen["val_batches"], seen["validated"]) == (6, [2, 4, 6])


@pytest.mark.slow
def test_a_fast_development_run_trains_and_validates_a_few_batches_and_saves_nothing(train):
    seen, output = train("trainer.fast_dev_run=2")
    assert (seen["step"], seen["val_batches"]) == (2, 2)
    assert not train.checkpoints.exists()
    assert train.summary()["status"] == "done"
    assert "done in" in output


@pytest.mark.slow
def test_a_stop_waits_for_the_fewest_steps(train):
    words = ("+callbacks.stop._target_=probe.Stop", "max_steps=8", "val_every=8")
    seen, _ = train(*words, "trainer.min_steps=5")
    assert seen["step"] == 5
    assert train.summary()["status"] == "stopped early"


@pytest.mark.slow
def test_a_time_limit_and_deterministic_kernels_are_passed_on(train):
    words = ("trainer.max_time={seconds: 0.01}", "trainer.deterministic=true", "max_steps=1000")
    seen, _ = train(*words, "val_every=1000")
    assert seen["deterministic"]
    assert seen["step"] < 1000
    assert train.summary()["status"] == "stopped early"
