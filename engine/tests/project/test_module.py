import copy

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback, Trainer
from lockstep_gpt.module import count_targets

import lockstep
from lockstep.callbacks.seeds import leaf_seed
from lockstep.checkpoints.reading import checkpoint_path
from lockstep.functional import IGNORE


class Batches(Callback):
    """Keeps every micro-batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, _trainer, _module, batch, _batch_idx):
        self.batches.append(batch)


def test_the_validation_loss_is_the_mean_over_every_window(new_run):
    run = new_run(max_steps=3, val_every=3)
    trainer = run.fit()
    run.data.trainer = trainer
    losses = []
    widen = run.data.windows["val"].widen
    for tokens, targets in map(widen, run.data.val_dataloader()):
        logits = run.module.model.eval()(tokens).double().flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
        losses.append(each[targets.flatten() != IGNORE])
    assert run.val_loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    assert len(torch.cat(losses)) == 24 * 8


def fitted_weights(run):
    run.fit()
    return torch.cat([parameter.flatten() for parameter in run.module.parameters()])


def test_dropout_is_a_function_of_seed_and_step(new_run):
    first, again, other = (new_run(model={"dropout": 0.5}) for _ in range(3))
    expected = fitted_weights(first)
    torch.manual_seed(99)  # the state that a process starts with must not matter
    assert torch.equal(fitted_weights(again), expected)
    other.config.seed += 1
    assert not torch.equal(fitted_weights(other), expected)


class Seeds(Callback):
    """Records torch's seed at the start of each micro-batch."""

    def __init__(self):
        self.seeds = []

    def on_train_batch_end(self, *_):
        self.seeds.append(torch.initial_seed())


def test_each_micro_batch_draws_its_own_dropout(new_run):
    seen = Seeds()
    new_run(max_steps=3).fit(seen)
    assert seen.seeds == [leaf_seed(1337, step, leaf) for step in range(3) for leaf in range(2)]


def test_an_update_is_the_optimizer_s_on_the_mean_gradient_clipped(new_run):
    run = new_run(max_steps=1, clip_norm=0.1, optim={"weight_decay": 0.0, "eps": 0.01})
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


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_optimizer_is_fused_and_starts_at_the_schedule_s_rate(new_run, precision):
    run = new_run(optim={"lr": 0.25}, schedule={"warmup": 4}, precision=precision)
    run.module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    parts = run.module.configure_optimizers()
    assert parts["lr_scheduler"]["interval"] == "step"
    (rate,) = {group["lr"] for group in parts["optimizer"].param_groups}
    assert rate == run.schedule.lr(0) == 0.25 / 4
    assert parts["optimizer"].defaults["fused"] is True


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resume_follows_its_own_schedule(new_run, tmp_path):
    """`StepRate` has the rates of this run, where torch's `LambdaLR` would keep the saved peak."""
    first = new_run(max_steps=2, optim={"lr": 0.25})
    first.fit(first.checkpoints(tmp_path))
    again = new_run(max_steps=4, optim={"lr": 0.125})
    trainer = again.fit(ckpt_path=checkpoint_path(tmp_path, 2))
    (rate,) = {group["lr"] for group in trainer.optimizers[0].param_groups}
    assert rate == again.schedule.lr(4)


def test_a_model_of_the_same_kind_can_be_made(new_run):
    module = new_run().module
    other = module.new_model()
    assert type(other) is type(module.model)
    assert other is not module.model
    assert other.vocab_size == module.model.vocab_size


def test_the_module_knows_the_operations_of_its_model(new_run):
    module = new_run().module
    assert module.flops_per_token == module.model.flops_per_token > 0
    module.model = torch.nn.Linear(2, 2)  # a model of an owner's
    assert not hasattr(module, "flops_per_token")


def test_targets_that_count_are_counted():
    targets = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, 3]])
    assert count_targets((targets, targets)) == 3


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers")
def test_training_chooses_matrix_products_and_validating_alone_does_not(new_run, monkeypatch):
    chosen = []
    monkeypatch.setattr(lockstep, "choose_matrix_products", chosen.append)
    run = new_run(max_steps=1, val_every=1)
    trainer = run.fit()
    assert chosen == ["cpu"]
    trainer.validate(run.module, run.data, verbose=False)
    assert chosen == ["cpu"]
