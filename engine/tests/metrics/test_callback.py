import ast
import contextlib
import copy
import csv
import gc
import math
import time
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from lockstep import processes
from lockstep.checkpoints.reading import checkpoint_path
from lockstep.loggers.step_rows import StepRows
from lockstep.metrics import callback as metrics_module
from lockstep.metrics.callback import Metrics, peak_memory
from lockstep.metrics.file import MetricsFile
from lockstep.metrics.rows import COLUMNS

FEW = ["trainer/step", "train/loss", "val/loss"]


class Recorder(Callback):
    """Records every micro-batch, its loss, and the validation losses."""

    def __init__(self):
        self.batches, self.losses, self.val_losses = [], [], {}

    def on_train_batch_end(self, trainer, _module, outputs, batch, _batch_idx):
        self.batches.append(batch)
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)

    def on_validation_end(self, trainer, pl_module):
        metrics = next(each for each in trainer.callbacks if isinstance(each, Metrics))
        self.val_losses[trainer.global_step] = metrics.row["val/loss"]


def measured(run, path, *callbacks):
    """Fit `run`; return its rows as numbers and what really happened."""
    recorder, file = Recorder(), MetricsFile(path, FEW)
    file.truncate_after(0)
    metrics = run.metrics(run.config.log_every)
    run.fit(metrics, recorder, *callbacks, logger=file)
    with path.open() as lines:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    return {int(row["trainer/step"]): row for row in rows}, recorder, metrics


@pytest.fixture
def rows(new_run, tmp_path):
    run = new_run(max_steps=7, val_every=3, log_every=2)
    return measured(run, tmp_path / "metrics.csv")


def test_only_logged_or_validated_steps_have_rows(rows):
    training = [step for step, row in rows[0].items() if "train/loss" in row]
    validation = [step for step, row in rows[0].items() if "val/loss" in row]
    assert (training, validation) == ([2, 4, 6, 7], [3, 6])
    assert list(rows[0]) == [2, 3, 4, 6, 7]


def test_the_training_loss_is_the_mean_of_all_micro_batches_since_the_last_row(rows):
    table, recorder, _ = rows
    for first, last in [(0, 2), (2, 4), (4, 6), (6, 7)]:
        losses = recorder.losses[2 * first : 2 * last]
        assert table[last]["train/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_the_validation_loss_is_written_exactly_and_its_exp_is_the_perplexity(rows):
    table, recorder, _ = rows
    for step, loss in recorder.val_losses.items():
        assert table[step]["val/loss"] == loss
        assert table[step]["val/perplexity"] == math.exp(loss)


def test_a_row_has_the_learning_rate_of_its_update_and_the_tokens_until_then(new_run, tmp_path):
    run = new_run(max_steps=4, log_every=1, schedule={"warmup": 2})
    table, _, _ = measured(run, tmp_path / "metrics.csv")
    assert [row["optim/lr"] for row in table.values()] == [run.schedule.lr(s) for s in range(4)]
    assert table[1]["optim/lr"] == 0.5 * 1e-2
    assert [row["trainer/tokens"] for row in table.values()] == [32, 64, 96, 128]


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_the_gradient_norm_is_that_of_the_whole_step_before_clipping(new_run, tmp_path, clip_norm):
    run = new_run(max_steps=1, log_every=1, clip_norm=clip_norm)
    model = copy.deepcopy(run.module.model)
    table, recorder, _ = measured(run, tmp_path / "metrics.csv")
    for batch in recorder.batches:
        (model(*batch) / len(recorder.batches)).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert table[1]["optim/grad_norm"] == pytest.approx(float(gradients.double().norm()), rel=1e-5)


def test_the_throughput_counts_only_training_time(rows):
    table, _, metrics = rows
    row = table[2]
    speed = row["throughput/tokens_per_second"]
    assert speed == pytest.approx(32 / row["throughput/step_seconds"])
    steps = {2: 2, 4: 2, 6: 2, 7: 1}  # since the row before
    seconds = sum(table[s]["throughput/step_seconds"] * count for s, count in steps.items())
    assert metrics.in_summary(7)["tokens_per_second"] == pytest.approx(7 * 32 / seconds)


class SlowValidation(Callback):
    """Makes each validation take an hour of a clock that the metrics read."""

    def __init__(self):
        self.added = 0.0

    def perf_counter(self):
        return time.monotonic() + self.added

    def on_validation_epoch_end(self, *_):
        self.added += 3600


def test_validation_does_not_count_as_training_time(new_run, tmp_path, monkeypatch):
    run, slow = new_run(max_steps=3, val_every=1, log_every=1), SlowValidation()
    monkeypatch.setattr(metrics_module, "time", slow)
    table, _, _ = measured(run, tmp_path / "metrics.csv", slow)
    assert len(table) == 3
    assert all(0 < row["throughput/step_seconds"] < 1800 for row in table.values())


def test_typical_and_slow_steps_are_around_the_mean(rows):
    logged = [row for row in rows[0].values() if "train/loss" in row]
    assert len(logged) == 4
    for row in logged:
        typical, slow = (row[f"throughput/step_seconds_p{percent}"] for percent in (50, 95))
        assert 0 < typical <= slow
        assert typical <= 2 * row["throughput/step_seconds"]


def test_utilisation_is_the_model_s_operations_over_the_devices_peak(new_run, tmp_path):
    run = new_run(max_steps=2, log_every=1)
    metrics = run.metrics(1, flops_per_token=3e6, peak_tflops=2.0)
    rows = MetricsFile(tmp_path / "metrics.csv", COLUMNS)
    rows.truncate_after(0)
    run.fit(metrics, logger=rows)
    speed = metrics.row["throughput/tokens_per_second"]
    assert metrics.row["throughput/mfu"] == pytest.approx(speed * 3e6 / 2e12)


def test_the_module_and_the_data_module_say_what_a_step_computes(new_run):
    """`flops_per_token` and `tokens_per_sample` are optional attributes of any module."""
    run = new_run(max_steps=2)
    metrics = run.metrics(2, peak_tflops=2.0)
    run.fit(metrics)
    assert metrics.tokens_per_step == run.batch.global_size * run.data.tokens_per_sample
    speed = metrics.row["throughput/tokens_per_second"]
    expected = speed * run.module.model.flops_per_token / 2e12
    assert metrics.row["throughput/mfu"] == pytest.approx(expected)
    assert metrics.in_summary(2)["tokens"] == 2 * metrics.tokens_per_step


class OnDevices:
    """Stands for a Trainer on four devices that this machine lacks."""

    world_size = 4

    def __init__(self, device, precision="32-true"):
        self.strategy = SimpleNamespace(root_device=torch.device(device))
        self.precision = precision


@pytest.mark.parametrize(
    ("device", "settings", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", {"precision": "bf16-mixed"}, 4 * 989.5),
        ("NVIDIA H100 80GB HBM3", {"precision": "32-true"}, 4 * 494.5),
        ("NVIDIA A100-SXM4-80GB", {"precision": "bf16-mixed"}, 4 * 312.0),
        ("NVIDIA A100-SXM4-80GB", {"precision": "bf16-true"}, None),  # not in our table
        ("NVIDIA A100-SXM4-80GB", {"peak_tflops": 100.0}, 4 * 100.0),
        ("A GPU of tomorrow", {"precision": "bf16-mixed"}, None),
        ("A GPU of tomorrow", {"peak_tflops": 100.0}, 4 * 100.0),
    ],
)
def test_the_peak_is_that_of_all_gpus_by_their_name_or_as_it_is_set(
    monkeypatch, device, settings, peak
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: device)
    metrics = Metrics(flops_per_token=1.0, peak_tflops=settings.pop("peak_tflops", None))
    metrics.setup(OnDevices("cuda:0", **settings), None, "fit")
    assert metrics.full_tflops == peak


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_have_a_peak_only_if_it_is_set(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: pytest.fail("there is no GPU"))
    for peak, full in ((None, None), (3.0, 12.0)):
        metrics = Metrics(flops_per_token=1.0, peak_tflops=peak)
        metrics.setup(OnDevices(device), None, "fit")
        assert metrics.full_tflops == full


def test_the_first_step_of_a_compiled_module_is_told(new_run, monkeypatch, caplog):
    run = new_run(max_steps=2)
    for told in (False, True):
        monkeypatch.setattr(metrics_module, "is_compiled", lambda _module, told=told: told)
        with caplog.at_level("INFO"):
            run.fit(run.metrics(2))
        assert ("compiled: the first step took" in caplog.text) == told


def test_the_summary_has_the_rate_the_batch_and_the_ranks(new_run):
    run = new_run(max_steps=2)
    metrics = run.metrics(2)
    run.fit(metrics)
    summary = metrics.in_summary(2)
    assert (summary["world_size"], summary["global_batch_size"]) == (1, run.batch.global_size)
    assert summary["lr"] == metrics.row["optim/lr"] > 0


class Logs(Callback):
    """Logs in each micro-batch, and ends a run in its third step if asked to."""

    def __init__(self, fails=False):
        self.fails = fails

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.trainer = trainer
        pl_module.log("mine/step", float(trainer.global_step))
        if self.fails and trainer.global_step == 3:
            raise ZeroDivisionError


class Rows(Logger):
    """A logger that isn't ours: keeps what it gets to log."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_):
        pass

    def of(self, name):
        """Return the steps and values of what has a name."""
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


class OurRows(StepRows, Rows):
    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, self.row_of(step))


def test_logged_values_are_in_our_rows_of_their_steps_and_others_count_from_zero(new_run):
    ours, others, alone = OurRows(), Rows(), Rows()
    new_run(max_steps=4).fit(Logs(), logger=alone, log_every_n_steps=2)
    metrics = Metrics(every=2)
    new_run(max_steps=4).fit(metrics, Logs(), logger=[ours, others], log_every_n_steps=2)
    assert ours.of("mine/step") == [(2, 2.0), (4, 4.0)]
    assert others.of("mine/step") == alone.of("mine/step") == [(1, 2.0), (3, 4.0)]
    # One chart has one axis.
    assert [step for step, _ in ours.of("optim/lr")] == [2, 4]
    assert [step for step, _ in others.of("optim/lr")] == [1, 3]
    assert [step for step, _ in ours.of("val/loss")] == [3]
    assert [step for step, _ in others.of("val/loss")] == [2]


class LogsValidations(Callback):
    """Logs in each validation, and in each of its batches."""

    def on_validation_batch_end(self, trainer, pl_module, *_):
        pl_module.log("mine/step", float(trainer.global_step))
        pl_module.log("mine/batch", float(trainer.global_step), on_step=True, on_epoch=False)


@pytest.mark.parametrize("start", [2, 3, 4, 5])
@pytest.mark.parametrize("val_every", [2, 3])
def test_after_a_resume_logged_values_have_their_own_step(new_run, tmp_path, start, val_every):
    def rows(max_steps, val_every, **resumed):
        settings = {"checkpoint": {"every": 1}, "val_every": val_every}
        run, ours, others = new_run(max_steps=max_steps, **settings), OurRows(), Rows()
        callbacks = (Metrics(every=1), Logs(), LogsValidations(), run.checkpoints(tmp_path))
        run.fit(*callbacks, logger=[ours, others], log_every_n_steps=2, **resumed)
        return ours.of("mine/step"), others.of("mine/step")

    rows(start, 2)
    ours, others = rows(8, val_every, ckpt_path=checkpoint_path(tmp_path, start))
    logged = {step for step in range(start + 1, 9) if step % 2 == 0 or step % val_every == 0}
    assert {step for step, _ in ours} == logged
    assert all(step == value for step, value in ours)
    assert others == [(step - 1, value) for step, value in ours]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_rows_of_validation_batches_and_of_lightning_s_monitors_are_of_their_steps(new_run):
    ours = OurRows()
    callbacks = (Metrics(every=2), LearningRateMonitor(), LogsValidations())
    run = new_run(max_steps=6, val_every=2)
    trainer = run.fit(*callbacks, logger=ours, log_every_n_steps=2)
    steps = [step for step, _ in ours.rows]
    assert steps == sorted(steps)
    batches = [step for step, _ in ours.of("mine/batch")]
    assert set(batches) == {2, 4, 6}
    rates = [step for step, row in ours.rows if any(name.startswith("lr-") for name in row)]
    assert set(rates) == {2, 4, 6}  # in each micro-batch
    trainer.validate(run.module, run.data, verbose=False)
    assert ours.rows[-1][0] == 6


def test_a_trainer_that_logs_nothing_by_itself_still_gets_our_rows(new_run):
    ours = OurRows()
    new_run(max_steps=4).fit(Metrics(every=2), Logs(), logger=ours, log_every_n_steps=0)
    assert [step for step, _ in ours.of("optim/lr")] == [2, 4]
    assert not ours.of("mine/step")


class Connectors(Callback):
    """Notes Lightning's own parts during a fit."""

    def on_train_batch_end(self, trainer, *_):
        self.kind = type(trainer._logger_connector)


@pytest.mark.parametrize("fails", [False, True])
def test_lightning_s_own_parts_stay_and_rows_are_numbered_only_in_training(new_run, fails):
    logs, ours, connectors = Logs(fails=fails), OurRows(), Connectors()
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        new_run(max_steps=6).fit(Metrics(every=2), connectors, logs, logger=ours)
    assert connectors.kind is _LoggerConnector
    ours.log_metrics({"later": 1.0}, 77)
    assert ours.of("later") == [(77, 1.0)]


@pytest.mark.parametrize(("system", "unit"), [("darwin", 1), ("linux", 1024)])
def test_peak_memory_is_in_bytes_on_each_system(monkeypatch, system, unit):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    before = getrusage(RUSAGE_SELF).ru_maxrss  # getrusage(2): in bytes on macOS, else in KiB
    assert before * unit <= peak_memory() <= getrusage(RUSAGE_SELF).ru_maxrss * unit


COUNTER = """
import gc, lightning
class Counter(lightning.Callback):
    def __init__(self):
        self.frozen = []
    def on_train_batch_start(self, trainer, *_):
        self.frozen.append((trainer.global_step, gc.get_freeze_count()))
    def on_train_end(self, trainer, *_):
        with open(f"frozen-{trainer.global_rank}", "w") as file:
            print(dict(self.frozen), file=file)
"""


def frozen_by_step(command, *words, devices=1):
    """Return how many objects collections leave alone before each step, by rank."""
    (command.folder / "counter.py").write_text(COUNTER)
    counter = "+callbacks.counter._target_=counter.Counter"
    command.train(*words, counter, "run_dir=run", PYTHONPATH=str(command.folder))
    files = [command.folder / f"frozen-{rank}" for rank in range(devices)]
    return [ast.literal_eval(file.read_text()) for file in files]


def test_after_the_first_step_each_rank_s_collector_leaves_alone_what_it_made(command):
    words = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
    for frozen in frozen_by_step(command, *words, devices=2):
        assert frozen[1] > frozen[0] + 1000  # the model, the optimizer, and the Trainer
        assert frozen[19] <= frozen[1]  # once


def test_the_memory_of_a_process_that_goes_on_is_not_frozen(command):
    (frozen,) = frozen_by_step(command, "trainer=cpu", "launch.inline=true")
    assert frozen[19] <= frozen[0]


def test_a_run_in_a_caller_s_process_freezes_nothing(new_run, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    before = gc.get_freeze_count()
    measured(new_run(max_steps=2), tmp_path / "metrics.csv")
    assert gc.get_freeze_count() <= before
    monkeypatch.setattr(processes, "_is_own", True)
    try:
        measured(new_run(max_steps=2), tmp_path / "own.csv")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
