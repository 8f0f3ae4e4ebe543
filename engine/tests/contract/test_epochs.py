"""A run that is killed anywhere in its epochs leaves no trace in what they measure and schedule."""

import csv
import warnings

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import checkpoint_path, checkpoints_in
from lockstep.loading.loaders import eval_loader, train_loader
from lockstep.metrics.callback import Metrics

slow = pytest.mark.slow
SAMPLES = 5 * 48  # an epoch has five steps
EPOCHS = 4


class Data(lightning.LightningDataModule):
    def __init__(self, foreign, spread):
        super().__init__()
        self.train = foreign.Rows("dict", 0, SAMPLES)
        self.val = foreign.Rows("dict", foreign.SAMPLES, 96)
        self.micro_size = foreign.STEP // (spread[0] * spread[1])

    def train_dataloader(self):
        return train_loader(self.train, self.micro_size, self.trainer, seed=2)

    def val_dataloader(self):
        return eval_loader(self.val, self.micro_size, self.trainer)


class Log(lightning.Callback):
    """Notes what each epoch has measured, after all other hooks of its end, and the rates."""

    def __init__(self):
        self.epochs, self.rates = {}, {}

    def on_train_epoch_end(self, trainer, _module):
        names = [name for name in trainer.callback_metrics if name.startswith(("train/", "val/"))]
        names.remove("train/both_step")  # of the last micro-batch
        values = {name: trainer.callback_metrics[name].item() for name in names}
        self.epochs[trainer.global_step] = values

    def on_before_optimizer_step(self, trainer, _module, optimizer):
        self.rates[trainer.global_step] = optimizer.param_groups[0]["lr"]


def measured(foreign):
    """Return a class that measures epochs in many ways, and has an epoch's scheduler."""

    class Measured(foreign.Module):
        def __init__(self):
            super().__init__("dict", dropout=0.2)
            self.accuracy = MulticlassAccuracy(2, average="micro")
            self.mean = MeanMetric()
            self.held_out = MulticlassAccuracy(2, average="micro")

        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])
            loss = torch.nn.functional.cross_entropy(logits, batch["y"])
            self.accuracy(logits, batch["y"])
            self.mean.update(loss)
            everywhere = {"on_step": False, "on_epoch": True}
            self.log("train/accuracy", self.accuracy, **everywhere)
            self.log("train/mean", self.mean, **everywhere)
            self.log("train/loss", loss, **everywhere, sync_dist=True)
            self.log("train/most", loss, **everywhere, reduce_fx="max", sync_dist=True)
            self.log("train/both", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.held_out(self.net(batch["x"]), batch["y"])
            self.log("val/accuracy", self.held_out, on_step=False, on_epoch=True)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
            )
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val/loss"}

    return Measured


def fit(foreign, spread, folder, ckpt_path=None, max_epochs=EPOCHS, steps=-1, **settings):
    """Train for some epochs, and save after each step; return what was noted and the weights."""
    module, log = foreign.module(of=measured(foreign)), Log()
    saves = Checkpoints(folder, every=1, keep_last=99, keep_best=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        foreign.train(
            module,
            MicroBatchSeeds(5),
            Metrics(every=1),
            log,
            saves,
            world_size=spread[0],
            accumulation=spread[1],
            loaders=(Data(foreign, spread),),
            steps=steps,
            max_epochs=max_epochs,
            limit_val_batches=1.0,
            plugins=[AtomicCheckpointIO()],
            ckpt_path=ckpt_path,
            **{"val_check_interval": 1.0, "check_val_every_n_epoch": 1, **settings},
        )
    return log, foreign.digest(module)


@pytest.mark.parametrize("step", [3, 5, 8, 10, 20])
def test_a_run_continues_anywhere_in_its_epochs(foreign, tmp_path, step):
    """5 and 10 end epochs, 20 the run: it has the values, rates, and weights of a whole one."""
    spread = (1, 2)
    whole, digest = fit(foreign, spread, tmp_path / "whole")
    assert [*whole.epochs] == [5, 10, 15, 20]
    assert len({*whole.rates.values()}) > 2
    assert len(checkpoints_in(tmp_path / "whole")) == 20
    path = checkpoint_path(tmp_path / "whole", step)
    rest, other = fit(foreign, spread, tmp_path / "rest", path)
    assert rest.epochs == {at: values for at, values in whole.epochs.items() if at > step}
    assert rest.rates == {at: rate for at, rate in whole.rates.items() if at >= step}
    assert other == digest


def test_a_number_of_steps_ends_a_run_as_a_number_of_epochs_does(foreign, tmp_path):
    """Also what is validated, and how rates change, are the same: Lightning tells them apart."""
    by_epochs, digest = fit(foreign, (1, 2), tmp_path / "epochs")
    by_steps, other = fit(foreign, (1, 2), tmp_path / "steps", max_epochs=-1, steps=20)
    assert by_steps.epochs == by_epochs.epochs
    assert by_steps.rates == by_epochs.rates
    assert other == digest


@pytest.mark.parametrize("step", [3, 5, 8, 10])
def test_a_run_that_a_number_of_steps_ends_continues_anywhere(foreign, tmp_path, step):
    whole, digest = fit(foreign, (1, 2), tmp_path / "whole", max_epochs=-1, steps=20)
    path = checkpoint_path(tmp_path / "whole", step)
    rest, other = fit(foreign, (1, 2), tmp_path / "rest", path, max_epochs=-1, steps=20)
    assert rest.epochs == {at: values for at, values in whole.epochs.items() if at > step}
    assert rest.rates == {at: rate for at, rate in whole.rates.items() if at >= step}
    assert other == digest


@pytest.mark.parametrize("ends", [{}, {"max_epochs": -1, "steps": 20}])
@pytest.mark.parametrize(("first", "second"), [(5, 7), (5, 10), (7, 8), (7, 10), (10, 11)])
def test_a_run_continues_from_a_state_that_a_resumed_run_has_saved(
    foreign, tmp_path, first, second, ends
):
    whole, digest = fit(foreign, (1, 2), tmp_path / "whole", **ends)
    fit(foreign, (1, 2), tmp_path / "part", checkpoint_path(tmp_path / "whole", first), **ends)
    path = checkpoint_path(tmp_path / "part", second)
    rest, other = fit(foreign, (1, 2), tmp_path / "rest", path, **ends)
    assert rest.epochs == {at: values for at, values in whole.epochs.items() if at > second}
    assert rest.rates == {at: rate for at, rate in whole.rates.items() if at >= second}
    assert other == digest


def test_a_validation_counts_its_own_samples_after_a_resume(foreign, tmp_path):
    """The state after a validation in mid-epoch has metrics that the next one must not add to."""
    settings = {"val_check_interval": 4, "check_val_every_n_epoch": None}  # micro-batches
    whole, digest = fit(foreign, (1, 2), tmp_path / "whole", **settings)
    path = checkpoint_path(tmp_path / "whole", 2)
    rest, other = fit(foreign, (1, 2), tmp_path / "rest", path, **settings)
    assert rest.epochs == whole.epochs
    assert other == digest


def test_a_finished_run_goes_on_with_more_epochs(foreign, tmp_path):
    whole, digest = fit(foreign, (1, 2), tmp_path / "whole")
    fit(foreign, (1, 2), tmp_path / "part", max_epochs=2)
    path = checkpoints_in(tmp_path / "part")[-1]
    rest, other = fit(foreign, (1, 2), tmp_path / "rest", path)
    assert rest.epochs == {at: values for at, values in whole.epochs.items() if at > 10}
    assert other == digest


@pytest.mark.parametrize("step", [3, 4, 5, 8, 10])
def test_what_a_step_logs_is_in_the_same_rows_after_a_resume(foreign, tmp_path, step):
    """Lightning logs `self.log` every second step: of the run, not of the part since a resume."""

    def rows(name, ckpt_path=None):
        logger = CSVLogger(tmp_path, name=f"{name}-rows", version=0)
        fit(foreign, (1, 2), tmp_path / name, ckpt_path, logger=logger, log_every_n_steps=2)
        with (tmp_path / f"{name}-rows" / "version_0" / "metrics.csv").open(newline="") as file:
            table = [*csv.DictReader(file)]
        return {int(row["step"]): row["train/both_step"] for row in table if row["train/both_step"]}

    whole = rows("whole")
    assert [*whole] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    rest = rows("rest", checkpoint_path(tmp_path / "whole", step))
    assert rest == {at: value for at, value in whole.items() if at >= step}


@slow
@pytest.mark.parametrize("step", [3, 5])
@pytest.mark.parametrize(
    ("first", "second"), [((2, 2), (2, 2)), ((1, 4), (2, 2)), ((4, 1), (1, 4))]
)
def test_epochs_have_the_same_values_on_other_ranks(
    foreign, on_each, tmp_path, first, second, step
):
    """They are equal to the bit on as many ranks, else to rounding."""

    def on_rank(spread, name, ckpt_path=None):
        log, digest = fit(foreign, spread, tmp_path / name, ckpt_path)
        return log.epochs, log.rates, digest

    for name in ("whole", "rest"):
        (tmp_path / name).mkdir()
    whole = on_each(first[0], lambda _rank: on_rank(first, "whole"))[0]
    path = checkpoint_path(tmp_path / "whole", step)
    rest = on_each(second[0], lambda _rank: on_rank(second, "rest", path))[0]
    for at, values in rest[0].items():
        if first == second:
            assert values == whole[0][at]
        assert values == pytest.approx(whole[0][at], rel=1e-5)
    assert [*rest[0]] == [at for at in whole[0] if at > step]
    assert rest[1] == {at: rate for at, rate in whole[1].items() if at >= step}
    if first == second:
        assert rest[2] == whole[2]
