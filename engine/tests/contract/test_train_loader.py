"""`train_loader` and `eval_loader`: any map-style dataset, on any ranks, in a plain Trainer."""

import warnings

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric

from lockstep.batch import Batch
from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import checkpoints_in, step_of
from lockstep.errors import UserError
from lockstep.loading.loaders import TrainLoader, eval_loader, train_loader
from lockstep.loading.order import Shuffled

slow = pytest.mark.slow
SPREADS = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]  # ranks, accumulation
HELD_OUT = 47  # samples to validate on: no number of ranks divides it


class Numbered:
    """Samples with their number, in one of three shapes, and noise of their own."""

    def __init__(self, foreign, kind="dict", first=0, count=None):
        self.rows = foreign.Rows(kind, first, count or foreign.SAMPLES)
        self.kind = kind

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        item = self.rows[number]
        noise = torch.rand(8) * 0.1
        if self.kind == "dict":
            return {**item, "x": item["x"] + noise, "number": number}
        if self.kind == "tuple":
            return item[0] + noise, *item[1:], number
        return torch.cat([item + noise, torch.tensor([float(number)])])


def numbers_of(batch):
    """Return the numbers of a batch's samples."""
    if isinstance(batch, dict):
        return batch["number"].tolist()
    if isinstance(batch, (tuple, list)):
        return batch[-1].tolist()
    return batch[:, -1].int().tolist()


class Data(lightning.LightningDataModule):
    """A data module as an owner writes it."""

    def __init__(self, foreign, micro_size, kind="dict", samples=None, **settings):
        super().__init__()
        self.train = Numbered(foreign, kind, count=samples)
        self.val = Numbered(foreign, kind, foreign.SAMPLES, HELD_OUT)
        self.micro_size, self.settings = micro_size, settings

    def train_dataloader(self):
        return train_loader(self.train, self.micro_size, self.trainer, seed=3, **self.settings)

    def val_dataloader(self):
        workers = self.settings.get("workers", 0)
        return eval_loader(self.val, self.micro_size, self.trainer, workers=workers)


def noting(foreign):
    """Return a foreign module's class that notes the samples of each step."""

    class Noting(foreign.Module):
        def __init__(self, kind="dict", **settings):
            super().__init__(kind, dropout=0.1, **settings)
            self.seen, self.validated, self.losses = {}, [], []
            self.mean = MeanMetric()

        def _shaped(self, batch):
            if self.kind == "tuple":
                return batch[:-1]
            return batch[:, :8] if self.kind == "tensor" else batch

        def training_step(self, batch, batch_idx):
            self.seen.setdefault(self.global_step, []).extend(numbers_of(batch))
            loss = self.loss_of(self._shaped(batch))
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            self.validated += numbers_of(batch)
            loss = self.loss_of(self._shaped(batch))
            self.mean.update(loss, weight=len(numbers_of(batch)))
            self.log("val/mean", self.mean)
            self.log("val/loss", loss, batch_size=len(numbers_of(batch)), sync_dist=True)

    return Noting


def fit(foreign, spread, *callbacks, kind="dict", samples=None, data=None, double=True, **settings):
    """Train on an owner's data; return the module and the Trainer."""
    world_size, accumulation = spread
    micro_size = foreign.STEP // (world_size * accumulation)
    module = foreign.module(kind, of=noting(foreign))
    if double:
        settings["precision"] = "64-true"
        module.double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        trainer = foreign.train(
            module,
            MicroBatchSeeds(5),
            *callbacks,
            world_size=world_size,
            accumulation=accumulation,
            loaders=(Data(foreign, micro_size, kind, samples, **(data or {})),),
            **{"use_distributed_sampler": True, **settings},
        )
    return module, trainer


def steps_of(results):
    """Return the samples of each step over all ranks, in the order of micro-batches."""
    return {step: [n for seen in results for n in seen[step]] for step in results[0]}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_step_has_the_same_samples_on_any_ranks(foreign, on_each, spread):
    results = on_each(spread[0], lambda _rank: fit(foreign, spread, steps=45)[0].seen)
    steps = steps_of(results)
    order = Shuffled(foreign.SAMPLES, 3)
    expected = order(np.arange(45 * foreign.STEP)).reshape(45, foreign.STEP)
    assert [steps[step] for step in range(45)] == expected.tolist()


@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor"])
@pytest.mark.parametrize("spread", [(2, 2), (3, 1), pytest.param((4, 1), marks=slow)])
def test_results_are_equal_on_any_ranks(foreign, on_each, kind, spread):
    """Weights and validation losses are, to rounding, with dropout and noise in samples."""

    def on_rank(spread):
        module, trainer = fit(
            foreign, spread, kind=kind, validate_every=4 * spread[1], limit_val_batches=1.0
        )
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return foreign.weights(module), metrics

    # Dropout depends on the micro-batch: as many of them.
    weights, metrics = on_rank((1, spread[0] * spread[1]))
    for other, values in on_each(spread[0], lambda _rank: on_rank(spread)):
        for ours, theirs in zip(other, weights, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)
        assert values["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-12)
        assert values["val/mean"] == pytest.approx(metrics["val/mean"], rel=1e-6)  # a float32


def test_exact_sums_give_equal_bits(foreign, on_each):
    def on_rank(spread):
        return foreign.digest(fit(foreign, spread, double=False, exact=True, steps=6)[0])

    expected = on_rank((1, 4))
    assert on_each(2, lambda _rank: on_rank((2, 2))) == [expected] * 2
    assert on_each(4, lambda _rank: on_rank((4, 1))) == [expected] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_each_sample_is_validated_once(foreign, on_each, world_size, exact):
    if exact and world_size == 3:
        pytest.skip("three ranks have no sum of two halves")
    spread = (world_size, 1)
    settings = {"validate_every": 2, "limit_val_batches": 1.0, "steps": 2, "exact": exact}
    results = on_each(world_size, lambda _r: fit(foreign, spread, **settings)[0].validated)
    assert sorted(number for seen in results for number in seen) == [*range(HELD_OUT)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("validates", [False, True])
def test_a_run_continues_in_mid_epoch(foreign, tmp_path, workers, validates):
    """It does with the same bits; 20 steps are an epoch, of which the third save is at the end."""
    settings = {"data": {"workers": workers}, "steps": 26, "plugins": [AtomicCheckpointIO()]}
    if validates:  # 10 steps, two micro-batches of each
        settings |= {"validate_every": 20, "limit_val_batches": 1.0}

    def run(ckpt_path=None):
        saves = Checkpoints(tmp_path, every=5, keep_last=9, keep_best=0)
        module, _ = fit(foreign, (1, 2), saves, ckpt_path=ckpt_path, **settings)
        return module

    whole = run()
    for path in checkpoints_in(tmp_path)[:4]:
        rest = run(path)
        step = step_of(path)
        assert rest.seen == {at: numbers for at, numbers in whole.seen.items() if at >= step}
        assert rest.losses == whole.losses[2 * step :]
        assert foreign.digest(rest) == foreign.digest(whole)


@slow
@pytest.mark.parametrize(
    ("first", "second"), [((1, 4), (2, 2)), ((4, 1), (1, 4)), ((2, 2), (4, 1))]
)
def test_a_run_continues_on_other_ranks(foreign, on_each, tmp_path, first, second):
    """The same samples follow, and equal weights to rounding."""

    def on_rank(spread, steps, ckpt_path=None):
        saves = Checkpoints(tmp_path / "saves", every=10, keep_last=9, keep_best=0)
        settings = {"plugins": [AtomicCheckpointIO()], "ckpt_path": ckpt_path}
        module, _ = fit(foreign, spread, saves, steps=steps, **settings)
        return module.seen, foreign.weights(module)

    (tmp_path / "saves").mkdir()
    whole, weights = on_rank((1, 4), 50)
    on_each(first[0], lambda _rank: on_rank(first, 30))
    path = tmp_path / "saves" / "step=000030.ckpt"
    results = on_each(second[0], lambda _rank: on_rank(second, 50, path))
    steps = steps_of([seen for seen, _ in results])
    assert steps == {step: numbers for step, numbers in whole.items() if step >= 30}
    for ours, theirs in zip(results[0][1], weights, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("workers", [2, "thread"])
def test_reading_ahead_changes_nothing_but_a_thread_does_not_seed(foreign, workers):
    class Plain(Numbered):
        def __getitem__(self, number):
            return {**self.rows[number], "number": number}

    def run(workers):
        module = foreign.module(of=noting(foreign))
        data = Data(foreign, 48, workers=workers)
        data.train = Plain(foreign)
        trainer = foreign.train(module, MicroBatchSeeds(5), steps=30, loaders=(data,))
        assert isinstance(trainer.train_dataloader, TrainLoader)
        assert trainer.train_dataloader.waited > 0
        return module.seen, foreign.digest(module)

    assert run(workers) == run(0)


class Epochs(lightning.Callback):
    """Notes the steps after which epochs end, and validations."""

    def __init__(self):
        self.ends, self.validations = [], []

    def on_train_epoch_end(self, trainer, _module):
        self.ends.append(trainer.global_step)

    def on_validation_start(self, trainer, _module):
        self.validations.append(trainer.global_step)


@pytest.mark.parametrize("spread", [(1, 1), (1, 3), pytest.param((2, 2), marks=slow)])
def test_an_epoch_has_whole_steps_and_what_is_left_begins_the_next(foreign, on_each, spread):
    """Lightning counts epochs, validates after each, and estimates the steps of a run."""
    samples = 3 * 48 + 20

    def on_rank(_rank):
        epochs = Epochs()
        settings = {"max_epochs": 4, "limit_val_batches": 1.0, "check_val_every_n_epoch": 1}
        settings |= {"val_check_interval": 1.0, "steps": -1, "samples": samples}
        module, trainer = fit(foreign, spread, epochs, **settings)
        return module.seen, epochs.ends, epochs.validations, trainer.estimated_stepping_batches

    results = on_each(spread[0], on_rank)
    steps = steps_of([result[0] for result in results])
    expected = Shuffled(samples, 3)(np.arange(12 * 48)).reshape(12, 48).tolist()
    assert [steps[step] for step in range(12)] == expected
    for _, ends, validations, estimated in results:
        assert ends == validations == [3, 6, 9, 12]
        assert estimated == 12


def test_a_dataset_smaller_than_a_step_is_an_epoch_of_one_step(foreign):
    module, trainer = fit(foreign, (1, 1), samples=20, steps=-1, max_epochs=5)
    assert trainer.global_step == 5
    assert [n for step in range(5) for n in module.seen[step]] == [
        *Shuffled(20, 3)(np.arange(5 * 48))
    ]


def test_an_epoch_that_is_cut_short_goes_on_with_the_next_sample(foreign):
    module, _ = fit(foreign, (1, 1), steps=-1, max_epochs=3, limit_train_batches=4)
    seen = [n for step in range(12) for n in module.seen[step]]
    assert seen == Shuffled(foreign.SAMPLES, 3)(np.arange(12 * 48)).tolist()


def test_another_order_and_collation_are_the_owner_s(foreign):
    data = {
        "order": lambda positions: positions % 7,
        "collate": lambda items: torch.utils.data.default_collate(items[::-1]),
        "endless": True,
    }
    module, trainer = fit(foreign, (1, 1), data=data, steps=2)
    assert module.seen[0] == [number % 7 for number in range(48)][::-1]
    with pytest.raises(TypeError, match="without epochs"):
        len(trainer.train_dataloader)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"limit_train_batches": 0.2}, "limit_train_batches=0.2 is a part of an epoch, but"),
        ({"overfit_batches": 0.2}, "overfit_batches=0.2 is a part of an epoch, but this data"),
        (
            {"max_epochs": 20},
            "max_epochs=20 counts epochs, but this data has no end; set max_steps",
        ),
        ({"min_epochs": 3}, "min_epochs=3 counts epochs, but this data has no end; set max_steps"),
        ({"max_epochs": 2, "limit_train_batches": 3}, None),  # an epoch of three micro-batches
        ({"min_epochs": 1}, None),  # as Lightning sets it by itself
    ],
)
def test_epochs_of_data_without_an_end_are_refused(foreign, settings, line):
    """Lightning would count none in silence, or reject a part of one with a traceback."""
    if line is None:
        _, trainer = fit(foreign, (1, 1), data={"endless": True}, steps=2, **settings)
        assert trainer.global_step == 2
        return
    with pytest.raises(UserError) as refusal:
        fit(foreign, (1, 1), data={"endless": True}, steps=2, **settings)
    assert str(refusal.value).startswith(f"trainer.{line}")


class Stream(IterableDataset):
    """Samples without numbers."""

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "batch", "workers", "line"),
    [
        (Stream(), 4, 0, r"^Stream has no numbered samples; give"),
        ([], 4, 0, r"^list has no samples; give it at least one"),
        ([1, 2], 0, 0, r"^a micro-batch of 0 samples is too small; use at least 1"),
        ([1, 2], 2, -1, r"^workers=-1 must be thread, or at least 0"),
    ],
)
def test_what_cannot_be_loaded_is_named(dataset, batch, workers, line):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match=line):
        train_loader(dataset, batch, trainer, seed=0, workers=workers)


def test_too_few_samples_to_evaluate_are_named(foreign, on_each):
    def on_rank(_rank):
        with pytest.raises(UserError, match=r"^2 samples to evaluate, in batches of 16, are too f"):
            fit(foreign, (3, 1), Shrink(), validate_every=1, limit_val_batches=1.0)
        return True

    class Shrink(lightning.Callback):
        def setup(self, trainer, _module, stage):
            trainer.datamodule.val = torch.utils.data.Subset(trainer.datamodule.val, [0, 1])

    assert on_each(3, on_rank) == [True] * 3


def test_an_error_in_a_sample_is_the_owner_s_with_its_traceback(foreign):
    class Broken(Numbered):
        def __getitem__(self, number):
            raise KeyError(f"no image {number}")

    for workers in (0, 1, "thread"):
        module = foreign.module(of=noting(foreign))
        data = Data(foreign, 48, workers=workers)
        data.train = Broken(foreign)
        with pytest.raises(KeyError, match="no image"):
            foreign.train(module, loaders=(data,))


def test_a_strategy_that_adds_in_another_order_is_refused(foreign):
    """With a batch of exact micro-batches, equal bits need the engine's strategy."""
    batch = Batch(global_size=8, exact_micro_size=2).spread_over(1)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    line = r"^batch.exact_micro_size is set, and SingleDeviceStrategy adds gradients in an order of"
    with pytest.raises(UserError, match=line):
        train_loader(foreign.Rows("dict"), batch, trainer, seed=1)
    strategy = {"strategy": foreign.strategy(1, exact=True)}
    trainer = lightning.Trainer(accelerator="cpu", logger=False, **strategy)
    train_loader(foreign.Rows("dict"), batch, trainer, seed=1)


class Accumulating(lightning.Callback):
    """Changes during training how many micro-batches a step has."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.accumulate_grad_batches = 4


def test_a_callback_that_changes_what_a_step_is_is_named(foreign):
    line = r"^accumulate_grad_batches=4 was 2 when this epoch began; a step has the same samples"
    with pytest.raises(UserError, match=line):
        fit(foreign, (1, 2), Accumulating())
