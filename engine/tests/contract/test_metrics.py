"""Metrics with `Mean`s in a foreign module; it needs no other part. Lightning's own `log` works."""

import csv
import math

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lockstep.batch import Batch
from lockstep.metrics.callback import Metrics
from lockstep.metrics.mean import Mean

slow = pytest.mark.slow
STEPS = 8
EVERY = 4  # steps between rows
SPREADS = [(1, 2), (2, 1), pytest.param((3, 2), marks=slow), pytest.param((4, 2), marks=slow)]


class Head(nn.Module):
    """A submodule with a metric of its own."""

    def __init__(self):
        super().__init__()
        self.size = Mean("train/size")

    def forward(self, x):
        self.size.update(x.detach().norm())
        return x


@pytest.mark.parametrize(("world_size", "micro_size"), [(1, 8), (2, 4), (2, 8), (1, 4)])
def test_samples_are_counted_as_the_loader_makes_them(
    foreign, on_each, caplog, world_size, micro_size
):
    """A plain `DataLoader(batch_size=4)`, whatever the batch says; a difference is said once."""
    batch = Batch(world_size * micro_size, micro_size).spread_over(world_size)
    rows = [{"x": torch.ones(8), "y": torch.tensor(1)}] * 64

    def fit(_rank):
        metrics = Metrics(batch, every=1)
        loaders = (torch.utils.data.DataLoader(rows, batch_size=4), None)
        foreign.train(foreign.module(), metrics, world_size=world_size, steps=2, loaders=loaders)
        speed = metrics.row["throughput/samples_per_second"]
        return metrics.in_summary(2), speed * metrics.row["throughput/step_seconds"], caplog.text

    results = on_each(world_size, fit)
    for summary, samples, _ in results:
        assert summary["global_batch_size"] == 4 * world_size
        assert summary["samples"] == 2 * 4 * world_size
        assert samples == pytest.approx(4 * world_size)
    line = f"makes batches of 4 samples, so a step has {4 * world_size}, but the batch says 8"
    said = [text.count(line) for *_, text in results]
    assert said == [int(micro_size == 8), *[0] * (world_size - 1)]


def rows_of(folder):
    """Return the rows of Lightning's CSV file: column -> step, counted from 1 -> value."""
    (path,) = folder.rglob("metrics.csv")
    table = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name != "step":
                    table.setdefault(name, {})[int(row["step"]) + 1] = float(value)
    return table


@pytest.fixture
def measured(foreign):
    """A module with several means: of the loss, of another value, and in a submodule."""

    class Measured(foreign.Module):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.train_loss = Mean("train/loss", also={"train/perplexity": math.exp})
            self.high = Mean("train/high")
            self.val_loss = Mean("val/loss")
            self.net.append(Head())
            self.seen = []  # what this rank has added: (step, loss, size, weight)

        def training_step(self, batch, batch_idx):
            sizes = []
            handle = self.net[-1].register_forward_hook(
                lambda _module, inputs, _output: sizes.append(inputs[0].detach().norm().item())
            )
            loss = self.loss_of(batch)
            handle.remove()
            weight = float(batch["y"].sum())
            self.train_loss.update(loss, weight=weight)
            self.high.update(loss * 3)
            self.seen.append((self.global_step + 1, loss.item(), *sizes, weight))
            return loss

        def validation_step(self, batch, batch_idx):
            self.val_loss.update(self.loss_of(batch), weight=len(batch["y"]))

    def make(**settings):
        return foreign.module(of=Measured, **{"dropout": 0, **settings})

    return make


def exact(pairs):
    """Return the weighted mean, rounded once."""
    pairs = [*pairs]
    return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)


def expected_rows(ranks, every=EVERY):
    """Return column -> step -> value, by hand, from what all ranks have added."""
    table = {}
    for last in range(every, STEPS + 1, every):
        window = [each for seen in ranks for each in seen if last - every < each[0] <= last]
        mean = exact((loss, weight) for _, loss, _, weight in window)
        values = {
            "train/loss": mean,
            "train/perplexity": math.exp(mean),
            "train/high": exact((torch.tensor(loss).mul(3).item(), 1) for _, loss, *_ in window),
            "train/size": exact((size, 1) for _, _, size, _ in window),
        }
        for name, value in values.items():
            table.setdefault(name, {})[last] = value
    return table


@pytest.mark.parametrize("spread", SPREADS)
def test_means_are_exact_on_any_ranks_and_micro_batches(
    foreign, on_each, measured, tmp_path, spread
):
    """Each mean has the bits of `math.fsum` over all ranks and micro-batches since the last row."""
    world_size, accumulation = spread

    def fit(_rank):
        module, logger = measured(), CSVLogger(tmp_path)
        spread = {"world_size": world_size, "accumulation": accumulation}
        foreign.train(module, Metrics(every=EVERY), logger=logger, steps=STEPS, **spread)
        return module.seen

    ranks = on_each(world_size, fit)
    found = rows_of(tmp_path)
    for name, values in expected_rows(ranks).items():
        assert found[name] == values


@pytest.mark.parametrize("world_size", [1, 2])
def test_callbacks_of_lightning_monitor_a_mean(foreign, on_each, measured, tmp_path, world_size):
    """EarlyStopping and ModelCheckpoint find the exact mean of a validation."""

    def fit(_rank):
        stops = EarlyStopping("val/loss", mode="max", patience=2)  # the loss only falls
        saves = ModelCheckpoint(tmp_path / "saved", monitor="val/loss", save_top_k=1)
        callbacks = [Metrics(every=EVERY), stops, saves]
        settings = {"world_size": world_size, "validate_every": 2}
        trainer = foreign.train(measured(), *callbacks, steps=20, **settings)
        return trainer.global_step, saves.best_model_score.item(), saves.best_model_path

    results = on_each(world_size, fit)
    step, score, path = results[0]
    assert all(result[:2] == (step, score) for result in results)
    assert step == 6  # the first value, and two that are no better
    assert torch.load(path, weights_only=True)["global_step"] == 6
    module = measured()
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    module.eval()
    held_out = foreign.Rows("dict", foreign.SAMPLES, foreign.STEP)
    losses = []
    with torch.no_grad():
        for rank in range(world_size):
            mine = [held_out[i] for i in range(rank, foreign.STEP, world_size)]
            for first in range(0, len(mine), 4):
                batch = torch.utils.data.default_collate(mine[first : first + 4])
                losses.append((module.loss_of(batch).item(), 4))
    assert score == torch.tensor(exact(losses), dtype=torch.float32).item()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=slow)])
def test_a_resume_within_a_window_continues_the_mean(
    foreign, on_each, measured, tmp_path, world_size
):
    """A row has what was measured before the checkpoint, too."""

    def fit(folder, **settings):
        def on_rank(_rank):
            saves = ModelCheckpoint(tmp_path / folder, "fifth", every_n_train_steps=5)
            callbacks, logger = (
                [Metrics(every=EVERY), saves],
                CSVLogger(tmp_path / f"{folder}-rows"),
            )
            settings["world_size"] = world_size
            foreign.train(measured(), *callbacks, logger=logger, accumulation=2, **settings)

        on_each(world_size, on_rank)
        return rows_of(tmp_path / f"{folder}-rows")

    whole = fit("whole", steps=STEPS)
    rest = fit("rest", steps=STEPS, start=5, ckpt_path=tmp_path / "whole" / "fifth.ckpt")
    assert rest["train/loss"] == {8: whole["train/loss"][8]}


@pytest.mark.parametrize(
    "spread", [(1, 1), (1, 2), (2, 2), (4, 1), pytest.param((4, 2), marks=slow)]
)
def test_own_values_are_logged_as_lightning_does(foreign, on_each, tmp_path, spread):
    """`self.log(on_step=True)` and `self.log(sync_dist=True)` have the values of real batches."""
    world_size, accumulation = spread

    class Logging(foreign.Module):
        def __init__(self):
            super().__init__(dropout=0)
            self.seen = {}

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            z = self.net(batch["x"]).logsumexp(1).square().mean().detach()
            self.log("train/aux", loss.detach() * 2, on_step=True)
            self.log("train/z_loss", z, sync_dist=True)
            self.seen.setdefault(self.global_step + 1, []).append((loss.item(), z.item()))
            return loss

    def fit(_rank):
        module, logger = foreign.module(of=Logging), CSVLogger(tmp_path)
        spread = {"world_size": world_size, "accumulation": accumulation}
        foreign.train(module, Metrics(every=1), logger=logger, log_every_n_steps=1, **spread)
        return module.seen

    ranks = on_each(world_size, fit)
    found = rows_of(tmp_path)
    # Lightning logs the last micro-batch of a step; `sync_dist` takes the mean over ranks.
    for step in range(1, STEPS + 1):
        assert found["train/aux"][step] == pytest.approx(2 * ranks[0][step][-1][0], rel=1e-6)
        z = [seen[step][-1][1] for seen in ranks]
        assert found["train/z_loss"][step] == pytest.approx(sum(z) / len(z), rel=1e-6)
    assert len(found["train/z_loss"]) == STEPS


class SetRate(lightning.Callback):
    """Sets the rate, as an owner's callback does; it knows nothing of schedulers."""

    def on_train_batch_start(self, trainer, *_):
        for group in trainer.optimizers[0].param_groups:
            if trainer.global_step in (2, 5):
                group["lr"] /= 10


class Rates(lightning.Callback):
    """Notes the rate that the optimizer uses."""

    def __init__(self):
        self.used = {}

    def on_before_optimizer_step(self, trainer, _module, optimizer):
        self.used[trainer.global_step + 1] = optimizer.param_groups[0]["lr"]


class OnPlateau:
    """Configures torch's ReduceLROnPlateau, which soon finds a plateau."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
        )
        plateau = {"monitor": "val/loss", "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **plateau}}


@pytest.mark.parametrize("way", ["ReduceLROnPlateau", "callback"])
def test_the_log_has_the_rate_that_the_optimizer_uses(foreign, tmp_path, way):
    """It is the actual rate, whoever sets it, also after a resume, which continues with it."""

    class Plateau(OnPlateau, foreign.Module):
        pass

    def fit(folder, **settings):
        module = foreign.module(of=Plateau if way == "ReduceLROnPlateau" else foreign.Module)
        rates, logger = Rates(), CSVLogger(tmp_path / f"{folder}-rows")
        saves = ModelCheckpoint(tmp_path / folder, "fifth", every_n_train_steps=5)
        callbacks = [*([SetRate()] if way == "callback" else []), Metrics(every=1), rates, saves]
        foreign.train(module, *callbacks, validate_every=2, logger=logger, **settings)
        assert rows_of(tmp_path / f"{folder}-rows")["optim/lr"] == pytest.approx(rates.used)
        return rates.used

    whole = fit("whole")
    assert len({*whole.values()}) >= 3  # the rate changes
    rest = fit("rest", start=5, ckpt_path=tmp_path / "whole" / "fifth.ckpt")
    assert rest == {step: rate for step, rate in whole.items() if step > 5}
