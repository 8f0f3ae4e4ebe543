import pytest
import torch.distributed as dist
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from lockstep_gpt.training.loop_changes import LoopChanges


def broadcasts_of(run, *callbacks):
    """Return a function that counts the broadcasts of a fit on one of two forked ranks."""

    def count(_rank):
        Trainer.world_size = property(lambda _: 2)
        calls, broadcast = [], dist.broadcast
        dist.broadcast = lambda *args, **options: (calls.append(args), broadcast(*args, **options))
        run.fit(*callbacks)
        return len(calls)

    return count


def test_the_stock_loop_broadcasts_at_every_micro_batch_and_ours_never(new_run, on_ranks):
    # If the first fails, Lightning no longer needs our change to its loop.
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3))) == [6, 6]
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3), LoopChanges())) == [0, 0]


class Raises(Callback):
    """Ends a run in its third step and keeps its Trainer."""

    def on_train_batch_end(self, trainer, *_):
        self.trainer = trainer
        if trainer.global_step == 3:
            raise ZeroDivisionError


def test_all_that_is_changed_in_the_loop_is_put_back_after_an_exception_too(new_run):
    raises = Raises()
    with pytest.raises(ZeroDivisionError):
        new_run(max_steps=6).fit(raises, LoopChanges())
    trainer = raises.trainer
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    assert type(trainer._logger_connector) is _LoggerConnector


class Late(Callback):
    """Gets a hook after the run has started, and logs in each micro-batch."""

    def on_train_start(self, *_):
        self.calls = []
        self.on_before_backward = lambda *_: self.calls.append(1)

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.log("mine/step", float(trainer.global_step))


class Rows(Logger):
    """Keeps what it gets to log."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step):
        if "mine/step" in metrics:
            self.rows.append((step, metrics["mine/step"]))

    def log_hyperparams(self, *_):
        pass


def test_a_hook_that_a_callback_gets_late_is_called(new_run):
    late = Late()
    new_run(max_steps=3).fit(late, LoopChanges())
    assert len(late.calls) == 6


def test_what_is_logged_has_the_number_of_its_own_step(new_run):
    def steps(*callbacks):
        logger = Rows()
        new_run(max_steps=4).fit(Late(), *callbacks, logger=logger, log_every_n_steps=2)
        return logger.rows

    # If the first fails, Lightning no longer needs our change to its axis.
    assert steps() == [(1, 2.0), (3, 4.0)]
    assert steps(LoopChanges()) == [(2, 2.0), (4, 4.0)]
