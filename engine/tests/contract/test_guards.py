"""Guards alone or of a run, and Replays, which needs MicroBatchSeeds with its seed."""

import csv
import json

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from lockstep.callbacks.guards import Guards
from lockstep.callbacks.replays import Replays
from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.errors import RunError, UserError
from lockstep.metrics.callback import Metrics
from lockstep.metrics.mean import Mean

slow = pytest.mark.slow
SEED = 7


@pytest.fixture
def own(foreign):
    """A module as owners write it: an auxiliary term, own logged values, and own attributes."""

    class Own(foreign.Module):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.train_loss = Mean("train/loss")
            self.steps = 0
            self.calls = []

        def training_step(self, batch, batch_idx):
            self.steps += 1
            self.calls.append(batch_idx)
            loss = self.loss_of(batch)
            size = sum(weight.square().sum() for weight in self.net.parameters())
            self.train_loss.update(loss)
            self.log("train/size", size.detach(), on_step=True)
            self.log("train/both", loss.detach() + size.detach(), sync_dist=True)
            return {"loss": loss + 1e-2 * size, "extra": size.detach()}

    return lambda kind: foreign.module(kind, of=Own)


def rows_of(folder):
    """Return the rows of Lightning's CSV file without the times that it took."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [
            {name: value for name, value in row.items() if name.startswith(("train/", "step"))}
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(
    ("spread", "kind"),
    [
        ((1, 2), "dict"),
        ((2, 2), "tuple"),
        pytest.param((3, 1), "tensor", marks=slow),
        pytest.param((2, 1), "dict", marks=slow),
    ],
)
def test_a_healthy_run_is_the_same_with_and_without_guards(
    foreign, on_each, own, tmp_path, spread, kind
):
    """Micro-batches that are computed again leave no trace: weights, rows, and attributes."""
    world_size, accumulation = spread

    def fit(name, *guards):
        def on_rank(_rank):
            module = own(kind)
            callbacks = [MicroBatchSeeds(SEED), Metrics(every=1), *(make() for make in guards)]
            foreign.train(
                module,
                *callbacks,
                world_size=world_size,
                accumulation=accumulation,
                logger=CSVLogger(tmp_path / name),
                log_every_n_steps=1,
            )
            return foreign.digest(module), module.steps, len(module.calls)

        return on_each(world_size, on_rank), rows_of(tmp_path / name)

    plain = fit("plain")
    guarded = fit(
        "guarded",
        lambda: Replays(1, SEED),
        lambda: Guards(stall_after=60, replicas_every=1),
    )
    assert guarded == plain
    assert len(plain[1]) > 8


def flip(tensor):
    """Flip a bit of a number, as failing memory does."""
    tensor.view(-1).view(torch.int32)[0] ^= 1 << 12


class FlipGradient(lightning.Callback):
    """Flips a bit of a gradient on one rank, once, in the last micro-batch of a step."""

    name = "net.3.weight"

    def __init__(self, rank, step):
        self.place = rank, step
        self.is_due = False

    def on_train_start(self, _trainer, pl_module):
        pl_module.net[3].weight.register_hook(self.changed)

    def on_train_batch_start(self, trainer, _module, _batch, batch_idx):
        last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self.is_due = last and (trainer.global_rank, trainer.global_step) == self.place

    def changed(self, gradient):
        if not self.is_due:
            return gradient
        self.is_due = False
        wrong = gradient.clone()
        flip(wrong)
        return wrong


class FlipWeight(lightning.Callback):
    """Flips a bit of a weight on one rank before a step."""

    def __init__(self, rank, step):
        self.place = rank, step

    def on_train_batch_start(self, trainer, pl_module, _batch, batch_idx):
        first = batch_idx % trainer.accumulate_grad_batches == 0
        if first and (trainer.global_rank, trainer.global_step) == self.place:
            flip(pl_module.net[3].weight.data)


@pytest.mark.parametrize(
    ("world_size", "rank", "named"), [(2, 1, "0 and 1"), pytest.param(3, 2, "2", marks=slow)]
)
def test_a_flipped_bit_in_a_replica_is_found(foreign, on_each, world_size, rank, named):
    """Guards alone end the run on all ranks, and name the weight and the rank."""

    def fit(_rank):
        module = foreign.module()
        callbacks = [FlipWeight(rank, 4), Guards(stall_after=None, replicas_every=3)]
        spread = {"world_size": world_size, "accumulation": 2}
        with pytest.raises(RunError) as error:
            foreign.train(module, *callbacks, **spread)
        return str(error.value)

    for message in on_each(world_size, fit):
        assert message.startswith("step 6: the weights of ranks differ, first in net.")
        assert f"on rank {named};" in message


@pytest.mark.parametrize("spread", [(1, 2), (2, 2), pytest.param((3, 2), marks=slow)])
def test_a_flipped_bit_in_a_gradient_is_found(foreign, on_each, own, spread):
    """A micro-batch that is computed again has other bits: the step and the place are named."""
    world_size, accumulation = spread
    rank = world_size - 1

    def fit(_rank):
        wrong = FlipGradient(rank, step=3)
        callbacks = [wrong, MicroBatchSeeds(SEED), Replays(1, SEED)]
        spread = {"world_size": world_size, "accumulation": accumulation}
        with pytest.raises(RunError) as error:
            foreign.train(own("dict"), *callbacks, **spread)
        return str(error.value)

    for message in on_each(world_size, fit):
        beginning = f"step 4: micro-batch {accumulation} of rank {rank} has other bits when "
        assert message.startswith(beginning)
        assert f"the gradient of {FlipGradient.name}" in message


STALLED = """
import sys, time, warnings
warnings.simplefilter("ignore")
import lightning, torch
import lockstep
from lockstep.callbacks.guards import Guards

class Own(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            time.sleep(600)
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

run = lockstep.Run.alone(sys.argv[1])
rows = torch.utils.data.DataLoader([{"x": row} for row in torch.ones(40, 3)], batch_size=2)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(
    callbacks=[Guards(run, stall_after=1)], accelerator="cpu", enable_checkpointing=False, **quiet
)
trainer.fit(Own(), rows)
"""


@slow
def test_a_stalled_run_records_its_failure(command, tmp_path):
    """The directory, the terminal, and the longest wait are those of the run."""
    process = command.start_python("-c", STALLED, str(tmp_path / "run"))
    _, output = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "rank 0: no step for 1 s (guard.stall_after); its stack:" in output
    assert "in training_step" in output
    failed = json.loads((tmp_path / "run/failed.json").read_text())
    assert failed["error"] == "no step for 1 s (guard.stall_after)"
    assert "in training_step" in (tmp_path / "run/train.log").read_text()


def test_guards_say_what_a_run_can_not_promise(foreign, on_each, caplog):
    """For a BatchNorm on several ranks, and for loaders that aren't the engine's."""

    class Normed(foreign.Module):
        def __init__(self):
            super().__init__()
            self.net.append(torch.nn.BatchNorm1d(2))

    def fit(_rank):
        with caplog.at_level("INFO"):
            foreign.train(foreign.module(of=Normed), Guards(), world_size=2, steps=1)
        return caplog.text

    told, nothing = on_each(2, fit)
    assert told.count("the model has 1 BatchNorm layer, with the statistics of each rank's") == 1
    assert told.count("loaders  train_dataloader returns a DataLoader, not a train_loader") == 1
    assert "BatchNorm" not in nothing
    assert "loaders" not in nothing


OPTIM = torch.optim
SCHEDULERS = OPTIM.lr_scheduler
WAITS = "waits for the end of an epoch, and this loader is endless"


def both_kinds(module):
    """Return an optimizer with two rates, and a schedule of the step."""
    first, *rest = module.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": rest}]
    optimizer = OPTIM.SGD(groups, lr=0.02)
    scheduler = SCHEDULERS.StepLR(optimizer, step_size=5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def plateau(module, **when):
    optimizer = OPTIM.Adam(module.parameters(), lr=3e-3)
    config = {"scheduler": SCHEDULERS.ReduceLROnPlateau(optimizer), "monitor": "loss", **when}
    return {"optimizer": optimizer, "lr_scheduler": config}


def plateau_of_steps(module):
    return plateau(module, interval="step", frequency=2)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield {"x": torch.ones(8), "y": torch.tensor(1)}


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize(
    ("configured", "endless", "said", "waits"),
    [
        (both_kinds, True, "SGD begins with lr 0.1, 0.02, set by StepLR", False),
        (plateau, True, "Adam begins with lr 0.003, set by ReduceLROnPlateau", True),
        (plateau, False, "Adam begins with lr 0.003, set by ReduceLROnPlateau", False),
        (plateau_of_steps, True, "Adam begins with lr 0.003, set by ReduceLROnPlateau", False),
        (lambda _module: None, True, None, False),
    ],
)
def test_guards_say_which_optimizers_train_and_which_scheduler_never_acts(
    foreign, caplog, configured, endless, said, waits
):
    """What Lightning has built, whatever settings say; `configure_optimizers` may return None."""

    class Own(foreign.Module):
        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            self.log("loss", loss, on_step=True)
            return loss

        def configure_optimizers(self):
            return configured(self)

    rows = Endless() if endless else [{"x": torch.ones(8), "y": torch.tensor(1)}] * 12
    loaders = (torch.utils.data.DataLoader(rows, batch_size=4), None)
    settings = {"max_epochs": 1, "limit_train_batches": 3} if said is None else {}
    with caplog.at_level("INFO"):
        module = foreign.module(of=Own)
        foreign.train(module, Metrics(every=1), Guards(), steps=4, loaders=loaders, **settings)
    lines = [line.partition("  optimizer  ")[2] for line in caplog.messages]
    assert [line for line in lines if line] == ([] if said is None else [said])
    assert caplog.text.count(WAITS) == int(waits)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"stall_after": 0}, "stall_after=0 must be above 0"),
        ({"replicas_every": 0}, "replicas_every=0 must be at least 1"),
        ({"replicas_every": 1.5}, "replicas_every=1.5 must be a whole number"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(wrong, line):
    """The value and the rule."""
    with pytest.raises(UserError, match=f"^{line}$"):
        Guards(**wrong)


@pytest.mark.parametrize(("validate_every", "warns"), [(None, True), (4, False)])
def test_an_early_stopping_that_never_acts_is_told(foreign, caplog, validate_every, warns):
    stopping = EarlyStopping("val/loss", check_on_train_epoch_end=False)
    callbacks = [stopping, Guards(replicas_every=None, stall_after=None)]
    foreign.train(foreign.module(), *callbacks, steps=4, validate_every=validate_every)
    assert ("EarlyStopping waits for val/loss" in caplog.text) == warns
