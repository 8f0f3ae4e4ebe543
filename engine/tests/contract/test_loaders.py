"""Plain loaders and data modules: what the engine does with epochs that end within a step.

ValidateEvery needs no other part; the rows of metrics.csv are of Metrics and MetricsFile.
"""

import csv

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.callbacks.validation import ValidateEvery
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import checkpoints_in, step_of
from lockstep.errors import UserError
from lockstep.metrics.callback import Metrics
from lockstep.metrics.file import MetricsFile
from lockstep.metrics.mean import Mean
from lockstep.metrics.rows import STEP

slow = pytest.mark.slow
EVERY = 10


class OwnData(lightning.LightningDataModule):
    """An owner's data module, whose epochs have so many micro-batches."""

    def __init__(self, foreign, micro_batches, world_size=1):
        super().__init__()
        self.foreign, self.world_size = foreign, world_size
        self.rows = Subset(foreign.Rows("dict"), range(4 * micro_batches * world_size))

    def _loader(self, rows):
        place = {"num_replicas": self.world_size, "rank": self.foreign.rank()}
        return DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, **place, seed=3))

    def train_dataloader(self):
        return self._loader(self.rows)

    def val_dataloader(self):
        return self._loader(self.foreign.Rows("dict", self.foreign.SAMPLES, 24))


class Validations(lightning.Callback):
    """Notes the steps after which validations come, and the accumulated micro-batches then."""

    def __init__(self):
        self.steps = []

    def on_validation_start(self, trainer, _module):
        self.steps.append(trainer.global_step)

    def on_train_batch_end(self, trainer, *_):
        self.last = trainer.global_step


def fit(foreign, folder, spread, micro_batches, *callbacks, of=None, ckpt_path=None, **settings):
    """Train on an own data module; return the steps of validations, and the module."""
    world_size, accumulation = spread
    module, validations = foreign.module(of=of or foreign.Module), Validations()
    rows = MetricsFile(folder / "metrics.csv", [STEP])
    if foreign.rank() == 0:
        folder.mkdir(exist_ok=True)
        step = torch.load(ckpt_path, weights_only=True)["global_step"] if ckpt_path else 0
        rows.truncate_after(step)
    checkpoints = Checkpoints(folder / "checkpoints", every=EVERY, keep_last=99, keep_best=0)
    foreign.train(
        module,
        ValidateEvery(EVERY),
        MicroBatchSeeds(7),
        Metrics(every=EVERY),
        *callbacks,
        validations,
        checkpoints,
        loaders=(OwnData(foreign, micro_batches, world_size),),
        world_size=world_size,
        accumulation=accumulation,
        logger=rows,
        plugins=[AtomicCheckpointIO()],
        ckpt_path=ckpt_path,
        **{"steps": 45, "limit_val_batches": 1.0, "log_every_n_steps": 5, **settings},
    )
    return validations.steps, module


def rows_in(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize(
    ("spread", "micro_batches"),
    [
        ((1, 3), 31),  # the last step of an epoch has one micro-batch
        ((2, 4), 10),
        pytest.param((1, 2), 200, marks=slow),  # longer than the run
        pytest.param((1, 1), 7, marks=slow),
        pytest.param((3, 2), 9, marks=slow),
    ],
)
def test_validations_come_after_multiples_of_optimizer_steps(
    foreign, on_each, tmp_path, spread, micro_batches
):
    """They do at any length of an epoch; rows go forward, and none is damaged."""
    folder = tmp_path / "run"
    results = on_each(spread[0], lambda _rank: fit(foreign, folder, spread, micro_batches)[0])
    # Checkpoints let the last step have a validation.
    assert results == [[10, 20, 30, 40, 45]] * spread[0]
    rows = rows_in(folder)
    steps = [int(row[STEP]) for row in rows]
    assert steps == sorted({*steps})
    validated = [int(row[STEP]) for row in rows if row["val/loss"]]
    assert validated == [10, 20, 30, 40, 45]
    assert not [*folder.glob("*.damaged")]
    assert [*map(step_of, checkpoints_in(folder / "checkpoints"))] == [10, 20, 30, 40, 45]


def test_a_resumed_run_validates_after_the_same_steps(foreign, tmp_path):
    """It repeats no validation, leaves none out, and its rows have the same numbers."""
    settings = {"spread": (1, 3), "micro_batches": 200, "log_every_n_steps": 1}
    whole, _ = fit(foreign, tmp_path / "whole", **settings)
    path = tmp_path / "whole" / "checkpoints" / "step=000020.ckpt"
    first, _ = fit(foreign, tmp_path / "rest", **{**settings, "steps": 20})
    rest, _ = fit(foreign, tmp_path / "rest", ckpt_path=path, **settings)
    assert (first, rest) == (whole[:2], whole[2:])
    numbers = [[row[STEP] for row in rows_in(tmp_path / name)] for name in ("whole", "rest")]
    assert numbers[0] == numbers[1]


class Early(lightning.Callback):
    """Logs a value that gets worse after each validation."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("worse", float(trainer.global_step))


def test_callbacks_of_lightning_act_after_these_validations(foreign, tmp_path):
    """EarlyStopping stops after its patience, and ModelCheckpoint saves, at multiples of steps."""
    stop = EarlyStopping("worse", patience=1)
    saves = ModelCheckpoint(tmp_path / "theirs", "{step}", monitor="worse", save_top_k=-1)
    steps, _ = fit(foreign, tmp_path / "run", (1, 3), 31, Early(), stop, saves)
    assert steps == [10, 20]
    assert {path.stem for path in (tmp_path / "theirs").glob("*.ckpt")} == {"step=10", "step=20"}


@pytest.mark.parametrize("ends", [20, 25])
def test_reduce_on_plateau_continues_after_a_resume(foreign, tmp_path, ends):
    """The rate is that of a run that was never stopped, also if it stopped after a validation."""

    class Plateau(foreign.Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
            )
            plateau = {"monitor": "val/loss", "interval": "step", "frequency": EVERY}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **plateau}}

    class SaveAt(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == ends and ends % EVERY:
                trainer.save_checkpoint(tmp_path / "whole" / "checkpoints" / "step=000025.ckpt")

    spread, micro_batches = (1, 1), 200
    fit(foreign, tmp_path / "whole", spread, micro_batches, SaveAt(), of=Plateau)
    path = tmp_path / "whole" / "checkpoints" / f"step=0000{ends}.ckpt"
    fit(foreign, tmp_path / "rest", spread, micro_batches, of=Plateau, ckpt_path=path)

    def rates(name):
        return {row[STEP]: row["optim/lr"] for row in rows_in(tmp_path / name) if row["optim/lr"]}

    whole, rest = rates("whole"), rates("rest")
    assert rest == {step: rate for step, rate in whole.items() if int(step) > ends}
    assert len({*whole.values()}) > 2


def test_two_ways_to_validate_are_refused(foreign, tmp_path):
    """The Trainer's own interval would silently be another one."""
    with pytest.raises(UserError, match=r"^val_check_interval=7 of the Trainer counts micro-"):
        fit(foreign, tmp_path, (1, 2), 31, val_check_interval=7)
    with pytest.raises(UserError, match=r"^check_val_every_n_epoch=2 of the Trainer counts epochs"):
        fit(foreign, tmp_path, (1, 2), 31, check_val_every_n_epoch=2)


def test_means_are_of_whole_steps_when_an_epoch_ends_within_one(foreign, tmp_path):
    """A row has the mean over the micro-batches of its steps, though the last one has fewer."""

    class Measured(foreign.Module):
        def __init__(self):
            super().__init__()
            self.loss, self.seen = Mean("train/loss"), []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.loss.update(loss)
            self.seen.append((self.global_step + 1, loss.item()))
            return loss

    _, module = fit(foreign, tmp_path / "run", (1, 3), 31, of=Measured)
    assert sum(step == 11 for step, _ in module.seen) == 1  # the last one of the first epoch
    for row in rows_in(tmp_path / "run"):
        if row["train/loss"]:
            last = int(row[STEP])
            first = last - (last % EVERY or EVERY)
            window = [loss for step, loss in module.seen if first < step <= last]
            assert float(row["train/loss"]) == pytest.approx(sum(window) / len(window), rel=1e-12)
