"""Lightning users' own code works in our runs."""

import csv
import functools
import json
import re

import lightning
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lockstep_gpt.module import GPTModule
from lockstep_gpt.trained_model import load_model

from lockstep.errors import UserError
from lockstep.metrics.callback import Metrics
from lockstep.schedule import Schedule

CALLBACKS = "lightning.pytorch.callbacks"
OF_USERS = """
import lightning

class Logs(lightning.Callback):
    "Logs the number of the step in each micro-batch, and the loss that it can see."

    def on_train_batch_end(self, trainer, pl_module, *batch):
        pl_module.log("mine/step", float(trainer.global_step))

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("mine/validated", float(trainer.global_step))

class Stops(lightning.Callback):
    "Stops in the first micro-batch after a step."

    def on_train_batch_start(self, trainer, *batch):
        trainer.should_stop = trainer.global_step == 7
"""


@pytest.fixture
def users_code(tmp_path, monkeypatch):
    """Callbacks in a module `users`, which this process and its ranks can import."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/users.py").write_text(OF_USERS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    return {"PYTHONPATH": str(tmp_path / "code")}


def rows_of(command, run="run"):
    with (command.folder / run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_stop_by_a_metric_ends_two_ranks_and_can_be_resumed(command, users_code):
    stop = f"+callbacks.stop._target_={CALLBACKS}.EarlyStopping"
    monitor = ["+callbacks.stop.monitor=val/loss", "+callbacks.stop.stopping_threshold=5.2"]
    logs = ["+callbacks.logs._target_=users.Logs", f"+callbacks.lr._target_={CALLBACKS}.{LR}"]
    words = ["run_dir=run", "val_every=4", "log_every=2", "trainer=cpu", "trainer.devices=2"]
    stdout = command.train(*words, "batch.micro_size=2", stop, *monitor, *logs, **users_code).stdout
    summary = command.summary("run")
    step = summary["step"]
    assert (summary["status"], step % 4, step < 20) == ("stopped early", 0, True)
    assert re.search(rf"stopped early in \d+ s: step {step}, val/loss", stdout)
    assert "  reason       Stopping threshold reached: val/loss = " in stdout
    assert summary["last_checkpoint"].endswith(f"step={step:06d}.ckpt")
    rows = rows_of(command)
    assert [int(row["trainer/step"]) for row in rows] == list(range(2, step + 1, 2))
    assert [float(row["mine/step"]) for row in rows] == list(range(2, step + 1, 2))
    assert [row["mine/validated"] for row in rows if row["val/loss"]] == [
        str(float(number)) for number in range(4, step + 1, 4)
    ]
    (rate,) = {name for name in rows[0] if name.startswith("lr-") and name.endswith("pg1")}
    assert [float(row[rate]) for row in rows] == [float(row["optim/lr"]) for row in rows]
    go_on = ["callbacks.stop.stopping_threshold=0", "trust_run_dir=true", "trainer.devices=1"]
    command("train", "run_dir=run", "resume=auto", *go_on, "launch.inline=true")
    summary = command.summary("run")
    assert (summary["status"], summary["step"]) == ("done", 20)


LR = "LearningRateMonitor"


def test_a_stop_within_a_step_lets_it_end(command, users_code):
    stops = "+callbacks.stops._target_=users.Stops"
    command.train("run_dir=run", "batch.micro_size=2", stops, **users_code)
    summary = command.summary("run")
    assert (summary["status"], summary["step"]) == ("stopped early", 8)
    assert summary["last_checkpoint"].endswith("step=000008.ckpt")


@pytest.mark.slow
def test_a_time_limit_saves_and_a_resume_beyond_it_ends_at_once(command):
    words = ["run_dir=run", "+trainer.max_time={seconds: 0.01}"]
    stdout = command.train(*words, "val_every=1000", "max_steps=1000").stdout
    first = command.summary("run")
    assert "stopped early" in stdout
    assert first["last_checkpoint"].endswith(f"step={first['step']:06d}.ckpt")
    stdout = command("train", "run_dir=run", "resume=auto", "launch.inline=true").stdout
    assert "stopped early" in stdout
    assert command.summary("run")["step"] == first["step"]


def test_without_validation_checkpoints_are_saved_without_a_loss(command):
    words = ["checkpoint.keep_last=9", "checkpoint.every=5", "+trainer.limit_val_batches=0"]
    stdout = command.train("run_dir=run", *words).stdout
    checkpoints = sorted(path.name for path in (command.folder / "run/checkpoints").glob("*.ckpt"))
    assert checkpoints == [f"step={step:06d}.ckpt" for step in (5, 10, 15, 20)]
    assert re.search(r"done in \d+ s: step 20\n", stdout)
    assert command.summary("run")["val_loss"] is None


def test_a_profiler_reports_on_the_screen_and_in_the_run_directory(command):
    stdout = command.train("run_dir=run", "+trainer.profiler=simple", "max_steps=6").stdout
    for text in (stdout, (command.folder / "run/train.log").read_text()):
        assert "FIT Profiler Report" in text
        assert "[LightningModule]GPTModule.optimizer_step" in text


@pytest.mark.slow
def test_pytorch_s_profiler_leaves_a_trace(command):
    command.train("run_dir=run", "+trainer.profiler=pytorch", "max_steps=6")
    traces = [*(command.folder / "run").glob("*.pt.trace.json")]
    assert traces
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in traces)


def test_user_plugins_are_added_to_ours(command, monkeypatch):
    made, make = [], lightning.Trainer.__init__

    @functools.wraps(make)  # `build` reads the signature
    def noted(self, **words):
        made.append(words)
        make(self, **words)

    monkeypatch.setattr(lightning.Trainer, "__init__", noted)
    target = f"{LightningEnvironment.__module__}.{LightningEnvironment.__name__}"
    command.train("run_dir=run", f"+trainer.plugins=[{{_target_: {target}}}]", "max_steps=6")
    kinds = [type(plugin).__name__ for plugin in made[0]["plugins"]]
    assert kinds[1:] == ["LightningEnvironment"]
    assert len(kinds) == 2


def test_callbacks_set_to_null_are_dropped(command):
    command.train("callbacks.sample=null", "logger=wandb", "logger.wandb=null", "run_dir=run")
    assert "\nsample\n" not in (command.folder / "run/train.log").read_text()
    assert not (command.folder / "run/wandb").exists()


def test_a_foreign_logger_has_the_configuration_and_our_rows(command):
    target = "+logger.csv._target_=lightning.pytorch.loggers.CSVLogger"
    words = [target, "+logger.csv.save_dir=out", "+logger.csv.name=x", "+logger.csv.version=y"]
    command.train("run_dir=run", *words, "trust_run_dir=true")
    folder = command.folder / "out/x/y"
    with (folder / "metrics.csv").open(newline="") as file:
        theirs = [*csv.DictReader(file)]
    for name in ("train/loss", "val/loss"):
        shown = [(int(row["step"]), row[name]) for row in theirs if row[name]]
        # Lightning counts steps from 0.
        ours = [(int(row["trainer/step"]) - 1, row[name]) for row in rows_of(command)]
        assert shown == [row for row in ours if row[1]] != []
    assert "global_batch_size: 8\n" in (folder / "hparams.yaml").read_text()


@pytest.fixture
def trained(finished):
    """The checkpoint of a finished run."""
    command, _ = finished
    return command.folder / "runs/first/checkpoints/step=000020.ckpt"


def batches(config, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (8, config.model.block_size + 1), generator=generator)
    pairs = list(zip(tokens[:, :-1], tokens[:, 1:], strict=True))
    return torch.utils.data.DataLoader(pairs, batch_size=2)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_trained_model_trains_saves_and_logs_under_any_trainer(trained, tmp_path):
    def module():
        model, config, tokenizer = load_model(trained)
        parts = GPTModule(
            lambda **_: model.train(),
            lambda weights, lr: torch.optim.AdamW([weight for _, weight in weights], lr),
            Schedule(steps=6, peak=1e-3, decay="constant"),
            tokenizer.vocab_size,
        )
        return parts, [batches(config, tokenizer.vocab_size, seed) for seed in (1, 2)]

    def trainer(**settings):
        settings = {"accelerator": "cpu", "enable_progress_bar": False, **settings}
        return lightning.Trainer(callbacks=[Metrics(every=1)], log_every_n_steps=1, **settings)

    first, loaders = module()
    saved = torch.load(trained)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in first.state_dict().items())
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    one = trainer(max_steps=4, default_root_dir=tmp_path, logger=logger)
    one.fit(first, *loaders)
    logged = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    rows = [*csv.DictReader(logged.splitlines())]
    assert sum(bool(row["train/loss"]) for row in rows) == 4
    assert [float(row["val/loss"]) for row in rows if row["val/loss"]] == [
        pytest.approx(one.callback_metrics["val/loss"].item())
    ]
    (path,) = tmp_path.rglob("*.ckpt")
    again, loaders = module()
    other = trainer(max_steps=6, logger=False, enable_checkpointing=False)
    other.fit(again, *loaders, ckpt_path=path)
    assert other.global_step == 6
    assert not torch.equal(again.model.head, first.model.head)


def test_a_foreign_checkpoint_fails_in_one_line(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"no")
    with pytest.raises(UserError, match=r"x\.ckpt"):
        load_model(tmp_path / "x.ckpt")
