"""What users log has the number of its own step; a time limit that ended a run is reported."""

import pytest
from lightning import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from lockstep_gpt.extras.compat.logged_steps import LoggedSteps


class Logs(Callback):
    """Logs in each micro-batch, and ends a run in its third step if asked to."""

    def __init__(self, fails=False):
        self.fails = fails

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.trainer = trainer
        pl_module.log("mine/step", float(trainer.global_step))
        if self.fails and trainer.global_step == 3:
            raise ZeroDivisionError


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


def test_what_is_logged_has_the_number_of_its_own_step(new_run):
    def steps(*callbacks):
        logger = Rows()
        new_run(max_steps=4).fit(Logs(), *callbacks, logger=logger, log_every_n_steps=2)
        return logger.rows

    # If the first fails, Lightning no longer needs our change to its axis.
    assert steps() == [(1, 2.0), (3, 4.0)]
    assert steps(LoggedSteps()) == [(2, 2.0), (4, 4.0)]


def test_the_axis_is_put_back_after_an_exception_too(new_run):
    logs = Logs(fails=True)
    with pytest.raises(ZeroDivisionError):
        new_run(max_steps=6).fit(logs, LoggedSteps())
    assert type(logs.trainer._logger_connector) is _LoggerConnector


def test_a_run_says_that_its_time_was_up(command):
    words = ["run_dir=run", "max_steps=1000", "val_every=1000", "callbacks.sample=null"]
    said = command.train(*words, "+trainer.max_time={seconds: 0.01}").stdout
    assert "the time limit was reached, after " in said
    assert "stopped early, after step " in said


def test_a_run_that_ends_before_its_limit_says_nothing(command):
    said = command.train("max_steps=6", "+trainer.max_time={hours: 1}", "run_dir=run").stdout
    assert "the time limit" not in said
