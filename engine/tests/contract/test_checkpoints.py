"""Checkpoints alone in a plain Trainer, with Lightning's own files or with whole ones."""

import lightning
import pytest
import torch

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.content import WEIGHTS
from lockstep.checkpoints.reading import (
    checkpoint_path,
    checkpoints_in,
    newest_valid,
    step_of,
)
from lockstep.checkpoints.weights import load_weights
from lockstep.errors import RunError, UserError

slow = pytest.mark.slow
OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "RAdam": torch.optim.RAdam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


def steps_in(folder):
    return [*map(step_of, checkpoints_in(folder))]


class Score(lightning.Callback):
    """Logs a metric of the owner's after each validation."""

    def __init__(self, *values):
        self.values = iter(values)

    def on_validation_epoch_end(self, _trainer, pl_module):
        pl_module.log("accuracy", next(self.values), sync_dist=True)


def test_due_steps_the_end_and_the_best_by_any_metric_are_saved(foreign, tmp_path):
    """The newest and the best by a metric of the owner's stay; the others go."""
    checkpoints = Checkpoints(
        tmp_path, every=2, keep_last=2, keep_best=1, monitor="accuracy", mode="max"
    )
    score = Score(0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # the best after step 6
    foreign.train(foreign.module(), score, checkpoints, steps=11, validate_every=2)
    assert steps_in(tmp_path) == [6, 10, 11]
    summary = checkpoints.in_summary(11)
    assert summary["best_checkpoint"] == str(checkpoint_path(tmp_path, 6))


def test_a_metric_that_nobody_logs_is_refused_in_one_line(foreign, tmp_path):
    """The line names those that are logged."""
    checkpoints = Checkpoints(tmp_path, every=2, monitor="val/los")
    with pytest.raises(UserError, match=r"^monitor=val/los decides .*only val/loss is logged"):
        foreign.train(foreign.module(), checkpoints, validate_every=2)


@pytest.mark.parametrize(
    ("spread", "kind"),
    [((1, 1), "dict"), ((2, 2), "tuple"), pytest.param((3, 2), "tensor", marks=slow)],
)
def test_a_resumed_run_ends_with_equal_bits(foreign, on_each, tmp_path, spread, kind):
    """Weights of a run that is continued are those of one that was never stopped."""
    world_size, accumulation = spread

    def fit(folder, **settings):
        def on_rank(_rank):
            module = foreign.module(kind, dropout=0)
            checkpoints = Checkpoints(tmp_path / folder, every=3, keep_last=9, keep_best=0)
            spread = {"world_size": world_size, "accumulation": accumulation}
            foreign.train(module, checkpoints, **spread, **settings)
            return foreign.digest(module)

        return on_each(world_size, on_rank)

    whole = fit("whole", steps=7)
    assert steps_in(tmp_path / "whole") == [3, 6, 7]
    path = checkpoint_path(tmp_path / "whole", 3)
    assert fit("rest", steps=7, start=3, ckpt_path=path) == whole
    assert steps_in(tmp_path / "rest") == [6, 7]


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_run_continues_on_other_ranks_with_equal_bits(foreign, on_each, tmp_path, world_size):
    """Steps begin with their first micro-batch, of which a rank has another number than before."""
    path = checkpoint_path(tmp_path / "begun", 3)

    def fit(world_size, folder, **settings):
        def on_rank(_rank):
            module = foreign.module()
            checkpoints = Checkpoints(tmp_path / folder, every=3, keep_last=9, keep_best=0)
            spread = {"world_size": world_size, "accumulation": 4 // world_size}
            callbacks = [MicroBatchSeeds(7), checkpoints]
            foreign.train(module, *callbacks, exact=True, **spread, **settings)
            return foreign.digest(module)

        return on_each(world_size, on_rank)

    (whole,) = fit(1, "whole", steps=7)
    fit(2, "begun", steps=3)
    rest = fit(world_size, "rest", steps=7, start=3, ckpt_path=path)
    assert rest == [whole] * world_size
    assert steps_in(tmp_path / "rest") == [6, 7]


def test_the_newest_whole_file_of_any_project_is_found(foreign, tmp_path):
    """A damaged checkpoint is left out, and one that is read is verified."""
    checkpoints = Checkpoints(tmp_path, every=2, keep_last=9, keep_best=0)
    foreign.train(foreign.module(), checkpoints, steps=4)
    path = checkpoint_path(tmp_path, 4)
    assert newest_valid(tmp_path, WEIGHTS) == path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert newest_valid(tmp_path, WEIGHTS) == checkpoint_path(tmp_path, 2)
    with pytest.raises(UserError, match="does not match its SHA-256"):
        foreign.train(foreign.module(), Checkpoints(tmp_path), ckpt_path=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=slow)])
def test_weights_that_are_not_finite_are_never_saved(foreign, on_each, tmp_path, name, world_size):
    """After a NaN that nobody skips, the newest good checkpoint stays, and the error names it."""

    class Broken(foreign.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.global_step == 6 else loss

    def fit(_rank):
        module = foreign.module(of=Broken, make=OPTIMIZERS[name])
        checkpoints = Checkpoints(tmp_path, every=3, keep_last=1, keep_best=0)
        with pytest.raises(RunError) as error:
            foreign.train(module, checkpoints, steps=20, world_size=world_size)
        return str(error.value), str(checkpoints.newest())

    good = checkpoint_path(tmp_path, 6)
    for message, newest in on_each(world_size, fit):
        assert message.startswith("step 9: net.0.weight is not finite, so this state isn't kept; ")
        assert f"the newest good checkpoint is {good};" in message
        assert newest == str(good)
    assert steps_in(tmp_path) == [6]
    saved = torch.load(good, weights_only=True)["state_dict"]
    assert all(weight.isfinite().all() for weight in saved.values())


class Validated(lightning.Callback):
    """Notes the steps after which a validation has ended."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


def test_the_last_step_is_validated_below_the_trainer_s_least_epochs(foreign, tmp_path):
    validated = Validated()
    saving = Checkpoints(tmp_path, keep_best=0)
    foreign.train(foreign.module(), validated, saving, validate_every=3, steps=5, min_epochs=9)
    assert validated.steps[-1] == 5


def test_a_file_of_a_plain_trainer_gives_its_weights_and_is_replaced_not_damaged(foreign, tmp_path):
    """It has no configuration of a run, which neither needs."""

    def fit(steps):
        module = foreign.module()
        foreign.train(module, Checkpoints(tmp_path, every=2, keep_best=0), steps=steps)
        return module

    trained = fit(steps=4)
    loaded = foreign.module()
    load_weights(checkpoint_path(tmp_path, 4), loaded)
    assert foreign.digest(loaded) == foreign.digest(trained)
    fit(steps=4)  # from the beginning, as a script does that is started again
    assert steps_in(tmp_path) == [4]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"replaced"}
