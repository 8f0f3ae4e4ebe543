import os
import signal

import pytest
import torch
from lightning import Callback

from lockstep_gpt.training.callbacks.graceful_stop import SIGNALS, GracefulStop, Stopped
from lockstep_gpt.training.checkpoint import checkpoints_in, newest_valid, step_of


@pytest.fixture(autouse=True)
def handlers():
    """Give the signals back to whom they belonged."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class SignalAt(Callback):
    """Sends this process a signal in the middle of optimizer step `step`."""

    def __init__(self, step, signum):
        self.step, self.signum = step, signum

    def on_train_batch_start(self, trainer, _module, _batch, batch_idx):
        if trainer.global_step == self.step - 1 and batch_idx % 2 == 1:
            os.kill(os.getpid(), self.signum)


class Validations(Callback):
    def __init__(self):
        self.losses = {}

    def on_validation_end(self, trainer, pl_module):
        self.losses[trainer.global_step] = pl_module.val_loss


def fit(run, folder, *callbacks, ckpt_path=None):
    checkpoints = run.checkpoints(folder)
    run.fit(*callbacks, GracefulStop(checkpoints), checkpoints, ckpt_path=ckpt_path)


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_a_signal_ends_the_run_after_its_step_is_done_and_saved(new_run, tmp_path, signum):
    run = new_run(max_steps=8, val_every=8)
    with pytest.raises(Stopped, match=f"stopped by {signum.name}") as stopped:
        fit(run, tmp_path, SignalAt(4, signum))
    assert stopped.value.signum == signum
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [4]


def test_a_stopped_run_goes_on_to_the_bits_of_one_that_was_left_alone(new_run, tmp_path):
    settings = {"max_steps": 6, "val_every": 2, "model": {"dropout": 0.5}}
    whole, first, rest = (new_run(**settings) for _ in range(3))
    fit(whole, tmp_path / "whole")
    with pytest.raises(Stopped):
        fit(first, tmp_path / "stopped", SignalAt(3, signal.SIGTERM))
    fit(rest, tmp_path / "stopped", ckpt_path=newest_valid(tmp_path / "stopped"))
    for name, weight in whole.module.state_dict().items():
        assert torch.equal(rest.module.state_dict()[name], weight), name


def test_a_stop_where_a_validation_is_due_does_not_lose_it(new_run, tmp_path):
    settings = {"max_steps": 6, "val_every": 3}
    alone, before, after = Validations(), Validations(), Validations()
    fit(new_run(**settings), tmp_path / "whole", alone)
    with pytest.raises(Stopped):
        fit(new_run(**settings), tmp_path / "run", SignalAt(3, signal.SIGTERM), before)
    path = newest_valid(tmp_path / "run")
    fit(new_run(**settings), tmp_path / "run", after, ckpt_path=path)
    assert {**before.losses, **after.losses} == alone.losses
    assert checkpoints_in(tmp_path / "run")[0].name == checkpoints_in(tmp_path / "whole")[0].name


def test_a_signal_in_the_last_step_lets_the_run_end(new_run, tmp_path):
    fit(new_run(max_steps=3, val_every=2), tmp_path, SignalAt(3, signal.SIGTERM))
    assert step_of(checkpoints_in(tmp_path)[-1]) == 3


def test_nothing_that_catches_exceptions_takes_a_stop_for_a_failure():
    assert not issubclass(Stopped, Exception)
