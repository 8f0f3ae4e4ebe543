import copy
import gc
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import Callback, Trainer

from lockstep_gpt.data.shards import widen
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.training.module import (
    HOOKS,
    LeanLoop,
    StepCallback,
    TokenLoss,
    step_seed,
)


class Batches(Callback):
    """Keeps every micro-batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, _trainer, _module, batch, _batch_idx):
        self.batches.append(batch)


def uneven_batches():
    """Logits and targets of batches of different sizes, some targets of which do not count."""
    random = torch.Generator().manual_seed(0)
    for rows, ignored in [(5, 0), (1, 3), (3, 10)]:
        targets = torch.randint(11, (rows, 7), generator=random)
        targets.view(-1)[:ignored] = IGNORE
        yield torch.randn(rows, 7, 11, generator=random), targets


def test_the_loss_over_uneven_batches_is_the_mean_over_all_tokens_that_count():
    metric, losses = TokenLoss(), []
    for logits, targets in uneven_batches():
        metric.update(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets)
        each = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(each[targets.flatten() != IGNORE])
    expected = torch.cat(losses).mean()
    assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-6)
    assert metric.compute().dtype == torch.float64


def test_a_batch_of_padding_alone_changes_nothing():
    metric = TokenLoss()
    metric.update(torch.tensor(2.0), torch.zeros(3, 4, dtype=torch.int64))
    metric.update(torch.tensor(0.0), torch.full((3, 4), IGNORE))
    assert metric.compute().item() == 2.0


def test_a_reset_forgets():
    metric = TokenLoss()
    metric.update(torch.tensor(9.0), torch.zeros(1, 4, dtype=torch.int64))
    metric.reset()
    metric.update(torch.tensor(1.0), torch.zeros(1, 4, dtype=torch.int64))
    assert metric.compute().item() == 1.0


def test_the_validation_loss_is_the_mean_over_every_window(new_run):
    run = new_run(max_steps=3, val_every=3)
    trainer = run.fit()
    run.data.trainer = trainer
    losses = []
    for tokens, targets in map(widen, run.data.val_dataloader()):
        logits = run.module.model.eval()(tokens).double().flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
        losses.append(each[targets.flatten() != IGNORE])
    assert run.module.val_loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    assert len(torch.cat(losses)) == 24 * 8


def fitted_weights(run):
    run.fit()
    return torch.cat([parameter.flatten() for parameter in run.module.parameters()])


def test_dropout_is_a_function_of_seed_and_step(new_run):
    first, again, other = (new_run(model={"dropout": 0.5}) for _ in range(3))
    expected = fitted_weights(first)
    torch.manual_seed(99)  # the state that a process starts with must not matter
    assert torch.equal(fitted_weights(again), expected)
    other.module.config.seed += 1
    assert not torch.equal(fitted_weights(other), expected)


class Seeds(Callback):
    """Notes what torch was seeded with when each micro-batch began."""

    def __init__(self):
        self.seeds = []

    def on_train_batch_end(self, *_):
        self.seeds.append(torch.initial_seed())


def test_each_step_draws_its_own_dropout(new_run):
    seen = Seeds()
    new_run(max_steps=3).fit(seen)
    expected = [step_seed(1337, step, rank=0) for step in range(3)]
    assert seen.seeds == [seed for seed in expected for _ in range(2)]


def test_seeds_of_steps_and_ranks_are_never_confused():
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1), (2**40, 0, 0)]
    seeds = {step_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_update_is_the_optimizer_s_on_the_mean_gradient_clipped(new_run):
    run = new_run(max_steps=1, optim={"clip_norm": 0.1, "weight_decay": 0.0, "eps": 0.01})
    model, seen = copy.deepcopy(run.module.model), Batches()
    run.fit(seen)
    for batch in seen.batches:
        (model(*batch) / 2).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert norm > 0.1
    for parameter in model.parameters():
        update = parameter.grad * 0.1 / norm
        change = run.schedule.lr(0) * update / (update.abs() + 0.01)  # Adam's first step
        parameter.data -= change
    for ours, expected in zip(run.module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def test_the_loss_taken_is_the_mean_since_it_was_taken_last(new_run):
    module = new_run().module
    losses = [module.training_step(batch(seed), 0) for seed in range(3)]
    mean = sum(loss.item() for loss in losses) / 3
    assert module.take_loss().item() == pytest.approx(mean, rel=1e-6)
    last = module.training_step(batch(7), 0)
    assert module.take_loss().item() == last.item()


def test_a_loss_cannot_be_taken_before_there_is_one(new_run):
    with pytest.raises(AssertionError, match="before a training step"):
        new_run().module.take_loss()


def batch(seed):
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(("precision", "fused"), [("32-true", True), ("16-mixed", False)])
def test_the_optimizer_starts_at_the_schedule_s_rate(new_run, precision, fused):
    run = new_run(optim={"lr": 0.25, "warmup_steps": 4}, precision=precision)
    parts = run.module.configure_optimizers()
    assert parts["lr_scheduler"]["interval"] == "step"
    (rate,) = {group["lr"] for group in parts["optimizer"].param_groups}
    assert rate == run.schedule.lr(0) == 0.25 / 4
    assert parts["optimizer"].defaults["fused"] is fused


class Steps(StepCallback):
    def __init__(self):
        self.steps, self.micro_steps = [], 0

    def on_train_batch_end(self, *arguments):
        self.micro_steps += 1
        super().on_train_batch_end(*arguments)

    def on_step_end(self, _trainer, _module, step):
        self.steps.append((step, self.micro_steps))


def test_a_step_ends_once_for_all_its_micro_batches(new_run):
    steps = Steps()
    new_run(max_steps=4).fit(steps)
    assert steps.steps == [(1, 2), (2, 4), (3, 6), (4, 8)]


def test_a_resumed_run_goes_on_with_the_next_step(new_run, tmp_path):
    run = new_run(max_steps=3)
    run.fit(run.checkpoints(tmp_path))
    run, steps = new_run(max_steps=5), Steps()
    run.fit(steps, run.checkpoints(tmp_path), ckpt_path=tmp_path / "step=000003.ckpt")
    assert [step for step, _ in steps.steps] == [4, 5]


def broadcasts_of(run, *callbacks):
    """Return what counts the broadcasts of a fit on one of two ranks, copies of this process."""

    def count(_rank):
        Trainer.world_size = property(lambda _: 2)
        calls, broadcast = [], dist.broadcast
        dist.broadcast = lambda *args, **options: (calls.append(args), broadcast(*args, **options))
        run.fit(*callbacks)
        return len(calls)

    return count


def test_the_stock_loop_broadcasts_at_every_micro_batch_and_ours_never(new_run, on_ranks):
    # Should the first fail, Lightning needs our change to its loop no longer.
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3))) == [6, 6]
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3), LeanLoop())) == [0, 0]


class Idle(Callback):
    """Has nothing to do in a step."""


def test_the_stock_loop_calls_what_does_nothing_and_ours_never(new_run, monkeypatch):
    calls = []
    monkeypatch.setattr(Callback, "on_before_backward", lambda *_: calls.append(1))
    new_run(max_steps=3).fit(Idle())
    assert calls  # should this fail, Lightning needs our change to its hooks no longer
    calls.clear()
    idle, busy = Idle(), Batches()
    new_run(max_steps=3).fit(idle, busy, LeanLoop())
    assert not calls
    assert len(busy.batches) == 6
    idle.on_before_backward(None, None, None)
    assert len(calls) == 1


class Raises(Callback):
    """Ends a run in its third step, and keeps its Trainer."""

    def on_train_batch_end(self, trainer, *_):
        self.trainer = trainer
        if trainer.global_step == 3:
            raise ZeroDivisionError


def test_all_that_is_taken_out_of_the_loop_is_put_back_after_an_exception_too(new_run):
    raises, mine = Raises(), lambda *_: None
    raises.on_before_backward = mine  # of an instance, where a class has none
    with pytest.raises(ZeroDivisionError):
        new_run(max_steps=6).fit(raises, LeanLoop())
    trainer = raises.trainer
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    assert "profile" not in vars(trainer.profiler)
    hooked = {*HOOKS}
    assert hooked & {*vars(raises)} == {"on_before_backward"}
    assert raises.on_before_backward is mine
    assert not hooked & {*vars(trainer.lightning_module)}
    assert gc.isenabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch then seeds the GPU instead")
def test_no_step_formats_its_stack_for_a_device_that_is_missing(new_run, monkeypatch):
    run, calls = new_run(max_steps=3), []
    monkeypatch.setattr("traceback.format_stack", lambda *_: calls.append(1))
    run.fit()
    assert not calls
    torch.manual_seed(0)
    assert calls  # should this fail, torch needs our way around it no longer


class Collections(StepCallback):
    """Counts how often Python's collector has come, after each step."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, trainer, pl_module, step):  # noqa: ARG002
        garbage = []
        garbage.append(garbage)
        self.counts.append(sum(each["collections"] for each in gc.get_stats()))


def test_garbage_is_collected_at_the_steps_that_are_said_and_as_ever_afterwards(new_run):
    counter = Collections()
    new_run(max_steps=6).fit(counter, LeanLoop(every=2))
    counts = counter.counts
    assert [after - before for before, after in pairwise(counts)] == [0, 1, 0, 1, 0]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
