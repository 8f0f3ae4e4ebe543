"""The module's step on the batches of data.py: a plain Trainer logs its loss, which falls."""

import math
from functools import partial

import lockstep
import pytest
import torch
from lightning import Trainer
from lockstep.errors import UserError
from lockstep.tokens import Text

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints
GPTModule = pytest.importorskip(
    "lockstep_gpt.module",
    reason="your own module",
).GPTModule
Tokens = pytest.importorskip("lockstep_gpt.data", reason="your own data").Tokens
GPT = pytest.importorskip("lockstep_gpt.gpt", reason="your own model").GPT
STEPS, T = 40, 8


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text").write_text("abcdefgh" * 200)
    source = Text(path=str(tmp_path / "text"), val_fraction=0.2)
    return Tokens(source, block_size=T, batch=4, seed=1, root=str(tmp_path / "data"))


@pytest.fixture
def module(data):
    torch.manual_seed(0)
    shape = {"block_size": T, "n_layer": 1, "n_head": 2, "n_embd": 16}
    optimizer = lambda weights, lr: torch.optim.AdamW([each for _, each in weights], lr)  # noqa: E731
    schedule = lockstep.Schedule(steps=STEPS, peak=0.01)
    return GPTModule(partial(GPT, **shape), optimizer, schedule, data.vocab_size)


class Logged(lockstep.Metrics):
    """Keeps the training loss of each step."""

    def __init__(self):
        super().__init__(every=1)
        self.losses = []

    def on_train_batch_end(self, trainer, *others):
        super().on_train_batch_end(trainer, *others)
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


@pytest.fixture
def trainer():
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[lockstep.ValidateEvery(STEPS), Logged()],
    )


def test_a_vocabulary_of_another_size_than_the_data_s_is_refused(module):
    with pytest.raises(UserError, match=r"^model.vocab_size=7 must be the data's 9; leave it out$"):
        GPTModule(
            partial(module.new_model, vocab_size=7), module.make_optimizer, module.schedule, 9
        )


def test_a_step_returns_a_loss_that_the_weights_can_follow(module):
    tokens = torch.arange(2 * T).view(2, T)
    loss = module.training_step((tokens, tokens + 1), 0)
    assert loss.isfinite()
    loss.backward()
    assert any(weight.grad is not None for weight in module.parameters())


def test_the_loss_falls_and_is_logged(module, data, trainer):
    trainer.fit(module, data)
    (logged,) = [each for each in trainer.callbacks if isinstance(each, Logged)]
    assert len(logged.losses) == STEPS
    assert logged.losses[-1] < logged.losses[0] / 2
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values["val/loss"] < logged.losses[0] / 2
    assert values["val/perplexity"] == pytest.approx(math.exp(values["val/loss"]), rel=1e-5)
