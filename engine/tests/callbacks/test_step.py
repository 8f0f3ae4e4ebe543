import lightning
import pytest
import torch

from lockstep.callbacks.step import StepCallback, updates_after_batch


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


def test_a_resumed_run_continues_with_the_next_step(new_run, tmp_path):
    run = new_run(max_steps=3)
    run.fit(run.checkpoints(tmp_path))
    run, steps = new_run(max_steps=5), Steps()
    run.fit(steps, run.checkpoints(tmp_path), ckpt_path=tmp_path / "step=000003.ckpt")
    assert [step for step, _ in steps.steps] == [4, 5]


def fit(module, rows, **settings):
    quiet = ("checkpointing", "progress_bar", "model_summary")
    settings |= {f"enable_{name}": False for name in quiet}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, **settings)
    trainer.fit(module, torch.utils.data.DataLoader(rows))


class Plain(lightning.LightningModule):
    """One weight; notes after which micro-batches an update follows, and what Lightning says."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.updates, self.lightning = [], []

    def training_step(self, batch, _number):
        return (self.weight * batch).sum()

    def on_after_backward(self):
        self.updates.append(updates_after_batch(self.trainer))
        self.lightning.append(not self.trainer.fit_loop._should_accumulate())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
def test_an_update_follows_the_last_micro_batch_of_a_step_or_of_an_epoch():
    module = Plain()
    fit(module, torch.ones(5), max_epochs=2, accumulate_grad_batches=2)
    assert module.updates == module.lightning == [False, True, False, True, True] * 2


class Halving(Plain):
    """Halves the rate every three steps; notes the rate of each update."""

    def configure_optimizers(self):
        self.rates = []
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        config = {"scheduler": halving, "interval": "step", "frequency": 3}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_the_frequency_of_a_scheduler_counts_steps_with_any_accumulation(accumulation):
    module = Halving()
    settings = {"max_steps": 8, "max_epochs": -1, "callbacks": [Steps(), Steps()]}
    fit(module, torch.ones(32, 1), accumulate_grad_batches=accumulation, **settings)
    assert module.rates == [1.0] * 3 + [0.5] * 3 + [0.25] * 2
