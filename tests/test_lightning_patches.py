"""What Lightning doesn't offer in public.

A test of changed behavior fails once Lightning no longer needs the change.
A test of a private name fails once Lightning has something else under it.
"""

from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy

from lockstep_gpt import lightning_patches


class Noting(DummyLogger):
    """Notes the steps at which values arrive."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            self.steps.append(step)


class Module(lightning.LightningModule):
    """One weight; logs its loss, and notes whether more micro-batches follow."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.accumulating = []

    def training_step(self, batch, _number):
        loss = (self.weight * batch).sum()
        self.log("loss", loss)
        return loss

    def on_after_backward(self):
        self.accumulating.append(lightning_patches.is_accumulating(self.trainer))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FromOne(lightning.Callback):
    """Uses our axis while a Trainer fits."""

    def on_train_start(self, trainer, _module):
        self.original = lightning_patches.count_logged_steps_from_one(trainer)

    def on_train_end(self, trainer, _module):
        lightning_patches.restore_axis(trainer, self.original)


@pytest.fixture
def fit():
    """Train four steps, with callbacks; return the steps of logged values, and the module."""

    def run(*callbacks, accumulation=1):
        logger, module = Noting(), Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=logger,
            callbacks=list(callbacks),
            max_steps=4,
            log_every_n_steps=2,
            accumulate_grad_batches=accumulation,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8), batch_size=1))
        return logger.steps, module, trainer

    return run


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def test_logged_steps_count_from_one_with_our_axis_and_from_zero_without(fit):
    assert fit()[0] == [1, 3]
    steps, _, trainer = fit(FromOne())
    assert steps == [2, 4]
    assert not isinstance(trainer._logger_connector, lightning_patches.StepAxis)


def test_micro_batches_before_the_last_accumulate(fit):
    assert fit(accumulation=2)[1].accumulating == [True, False] * 4


def test_lightning_registers_no_communication_hook_on_cpus():
    strategy = DDPStrategy(ddp_comm_hook=print, ddp_comm_state="state")
    registered = []
    strategy.model = SimpleNamespace(register_comm_hook=lambda *pair: registered.append(pair))
    strategy.parallel_devices = [torch.device("cpu")]
    strategy._register_ddp_hooks()
    assert registered == []
    lightning_patches.register_communication_hook(strategy)
    assert registered == [("state", print)]


def test_a_skipped_teardown_copies_nothing_and_gives_signals_their_handlers_again():
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    steps = []
    trainer.strategy.teardown = lambda: steps.append("strategy")
    trainer._signal_connector.teardown = lambda: steps.append("signals")
    trainer._teardown()
    assert steps == ["strategy", "signals"]
    steps.clear()
    lightning_patches.skip_teardown(trainer)
    trainer._teardown()
    assert steps == ["signals"]
