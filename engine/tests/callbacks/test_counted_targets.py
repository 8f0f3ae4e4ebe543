"""The gradient of a step is that of one mean over all its targets, however they are spread."""

import lightning
import pytest
import torch
from lockstep_gpt.data import Tokens
from lockstep_gpt.module import count_targets
from lockstep_gpt.train import build

from lockstep.batch import Batch
from lockstep.callbacks.counted_targets import CountTargets
from lockstep.checkpoints.reading import write_checkpoint
from lockstep.functional import IGNORE
from lockstep.metrics.callback import Metrics
from lockstep.run.run import Run
from lockstep.strategies import placing as strategies
from lockstep.tokens.windows import StreamWindows

STEPS = 3


class SomeTargets(Tokens):
    """Batches of which some targets are `IGNORE`: a share that differs from sample to sample."""

    none = False
    may_ignore = True

    def on_after_batch_transfer(self, batch, *arguments):
        tokens, targets = super().on_after_batch_transfer(batch, *arguments)
        place = torch.arange(targets.shape[1])
        targets = targets.masked_fill(place < tokens[:, :1] % targets.shape[1], IGNORE)
        targets[tokens[:, 0] % 3 == 0] = IGNORE  # some samples, and so some micro-batches, none
        return tokens, targets.fill_(IGNORE) if self.none else targets


class Gradients(lightning.Callback):
    """Keeps the gradients of each step, as the optimizer gets them, and the loss."""

    def __init__(self):
        self.steps, self.losses = [], []

    def setup(self, trainer, *_, **_stage):
        self.metrics = next(each for each in trainer.callbacks if isinstance(each, Metrics))

    def on_before_optimizer_step(self, _trainer, pl_module, _optimizer):
        self.steps.append([each.grad.clone() for each in pl_module.model.parameters()])

    def on_train_batch_end(self, trainer, _pl_module, _outputs, _batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses.append(self.metrics.row["train/loss"])


class Expected(Gradients):
    """Keeps the gradients of the mean over all targets of each step; needs the whole step."""

    def on_train_batch_start(self, _trainer, pl_module, batch, _batch_idx):
        model = pl_module.model
        loss = model(*batch)
        self.steps.append(torch.autograd.grad(loss, [*model.parameters()]))
        self.losses.append(loss.item())

    def on_before_optimizer_step(self, *_):
        pass

    def on_train_batch_end(self, *_):
        pass


def run_of(new_run, micro_size, world_size=1, **settings):
    """Return one rank's run of a few steps; those of all ranks have 12 samples."""
    batch = {"micro_size": micro_size, "global_size": 12 // world_size}
    batch = {**batch, "reference_size": 12 // world_size, **settings.pop("batch", {})}
    run = new_run(**{"batch": batch, "max_steps": STEPS, "val_every": 100, **settings})
    run.data.__class__ = SomeTargets
    return run


def fitted(run, *callbacks, **settings):
    counts = CountTargets(count_targets, typical=96)
    found = Gradients()
    torch.manual_seed(0)
    run.fit(Metrics(every=1), *callbacks, counts, found, **settings)
    return found


@pytest.fixture
def expected(new_run):
    """Return the gradients and losses of whole batches."""
    whole = Expected()
    fitted(run_of(new_run, 12), whole)
    return whole


def assert_same(found, expected, **close):
    assert len(found.steps) == len(expected.steps) == STEPS
    for step, wanted in zip(found.steps, expected.steps, strict=True):
        for each, gradient in zip(step, wanted, strict=True):
            torch.testing.assert_close(each, gradient, **close)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-5)


CLOSE = {"rtol": 1e-3, "atol": 1e-5}


@pytest.mark.parametrize("micro_size", [12, 6, 4, 1])
def test_accumulation_normalizes_by_the_targets_of_the_step(new_run, expected, micro_size):
    assert_same(fitted(run_of(new_run, micro_size)), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "micro_size"), [(2, 6), (2, 3), (3, 4), (3, 1)])
def test_ranks_normalize_by_the_targets_of_all_ranks(
    new_run, expected, on_ranks, world_size, micro_size
):
    def train(_rank):
        run = run_of(new_run, micro_size, world_size)
        found = fitted(run, strategy="ddp", devices=world_size, num_nodes=1)
        steps = [[each.tolist() for each in step] for step in found.steps]
        return steps, found.losses

    results = on_ranks(world_size, train)
    assert all(isinstance(each, tuple) for each in results), results
    assert results[0] == results[-1]
    found = Gradients()
    steps, found.losses = results[0]
    found.steps = [[*map(torch.tensor, step)] for step in steps]
    assert_same(found, expected, **CLOSE)


def test_without_the_callback_micro_batches_weigh_differently(new_run, expected):
    found, run = Gradients(), run_of(new_run, 1)
    run.fit(Metrics(every=1), found)
    with pytest.raises(AssertionError):
        assert_same(found, expected, **CLOSE)


def test_half_precision_normalizes_too(new_run, expected):
    found = fitted(run_of(new_run, 4, precision="16-mixed"))
    assert_same_direction(found, expected)


@pytest.mark.parametrize("micro_size", [12, 4, 1])
def test_counts_round_nothing_in_float64(new_run, micro_size):
    whole = Expected()
    double = {"precision": "64-true"}
    fitted(run_of(new_run, 12, **double), whole, **double)
    found = fitted(run_of(new_run, micro_size, **double), **double)
    for step, wanted in zip(found.steps, whole.steps, strict=True):
        for each, gradient in zip(step, wanted, strict=True):
            torch.testing.assert_close(each, gradient, rtol=1e-11, atol=1e-14)
    assert found.losses == pytest.approx(whole.losses, rel=1e-14)


def assert_same_direction(found, expected):
    for step, wanted in zip(found.steps, expected.steps, strict=True):
        one, other = (torch.cat([each.flatten() for each in all_]) for all_ in (step, wanted))
        torch.testing.assert_close(one.norm(), other.norm(), rtol=2e-2, atol=0)
        assert torch.cosine_similarity(one, other, dim=0) > 0.99


def test_a_step_without_any_target_has_a_gradient_of_zero(new_run):
    run = run_of(new_run, 4)
    run.data.none = True
    found = fitted(run)
    assert not any(each.any() for step in found.steps for each in step)
    assert found.losses == [0.0] * STEPS


def counting_of(composed, monkeypatch, path, *, may_ignore):
    """Return the callbacks that count targets in a run of `train.py`."""
    settings = ("experiment=smoke", "data=synthetic", "logger=none", "callbacks=[]")
    config = composed(*settings, "trainer=cpu", "trainer.devices=1", f"data.root={path / 'data'}")
    monkeypatch.setattr(StreamWindows, "has_padding", may_ignore)
    _, _, trainer = build(config, Run.alone(path / "run", config))
    return [callback for callback in trainer.callbacks if isinstance(callback, CountTargets)]


def test_runs_in_which_every_target_counts_have_no_callback(composed, monkeypatch, tmp_path):
    assert counting_of(composed, monkeypatch, tmp_path, may_ignore=False) == []


def test_runs_with_padding_have_the_callback(composed, monkeypatch, tmp_path):
    assert len(counting_of(composed, monkeypatch, tmp_path, may_ignore=True)) == 1


@pytest.mark.slow
def test_sums_in_one_order_have_equal_bits_however_micro_batches_are_spread(new_run, on_ranks):
    settings = {"exact_micro_size": 2, "micro_size": 2}

    def train(world_size, **strategy):
        run = run_of(new_run, 2, world_size, batch=settings)
        found = fitted(run, **strategy)
        return [[each.tolist() for each in step] for step in found.steps], found.losses

    alone = train(1)

    def on_rank(_rank):
        exact = Batch(global_size=12, exact_micro_size=2)
        ddp = strategies.ddp(exact, process_group_backend="gloo", timeout_seconds=60)
        return train(3, strategy=ddp, devices=3, num_nodes=1)

    results = on_ranks(3, on_rank)
    assert all(each == alone for each in results), results


class Rows(lightning.Callback):
    """Keeps the loss of each row, the mean over `every` steps."""

    def __init__(self, every):
        self.metrics = Metrics(every=every)
        self.rows = {}

    def on_train_batch_end(self, trainer, *_):
        if "train/loss" in self.metrics.row:
            self.rows.setdefault(trainer.global_step, self.metrics.row["train/loss"])


def resumed_rows(new_run, tmp_path, micro_size, change=None):
    """Train 8 steps, from step 5 on again; return the rows of the first time and of the second."""
    every = {"max_steps": 8, "checkpoint": {"every": 5, "keep_last": 9}}
    whole, again = Rows(3), Rows(3)
    run = run_of(new_run, 3, **every)
    counts = CountTargets(count_targets)
    run.fit(whole.metrics, counts, whole, run.checkpoints(tmp_path))
    path = tmp_path / "step=000005.ckpt"
    if change:
        content = torch.load(path, weights_only=True)
        change(content)
        write_checkpoint(content, path)
    run = run_of(new_run, micro_size, **every)
    saves = run.checkpoints(tmp_path / "again")
    counts = CountTargets(count_targets)
    run.fit(again.metrics, counts, again, saves, ckpt_path=path)
    return whole.rows[6], again.rows[6]


def test_a_resumed_run_logs_the_same_loss(new_run, tmp_path):
    whole, again = resumed_rows(new_run, tmp_path, 3)
    assert again == whole


def test_other_micro_batches_log_the_same_loss_after_a_resume(new_run, tmp_path):
    whole, again = resumed_rows(new_run, tmp_path, 4)
    assert again == pytest.approx(whole, rel=1e-5)


def test_a_checkpoint_of_another_trainer_has_no_losses_and_resumes(new_run, tmp_path):
    whole, again = resumed_rows(new_run, tmp_path, 3, lambda saved: saved.pop("means"))
    assert again != whole  # a mean of the last step only
    assert again == pytest.approx(whole, rel=0.2)
