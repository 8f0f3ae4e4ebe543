"""A run in this process leaves Python, torch, and Lightning unchanged, however it ends."""

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler

from lockstep import commands as cli

LIBRARIES = ("", "lightning", "lightning.pytorch", "lightning.fabric", "torch", "fsspec")
ENDS = """
import os, signal, time, lightning
class Raises(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise ZeroDivisionError("on purpose")
class Stops(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
class Late(lightning.Callback):
    def on_train_start(self, *_):
        raise ZeroDivisionError("before any other")
"""


def state():
    """Return the state that a run changes while it lasts."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    return {
        "environment": dict(os.environ),
        "signals": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "collector": (gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()),
        "loggers": [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers],
        "warnings": (warnings.showwarning, warnings.formatwarning, warnings.filters[:]),
        "products": torch.get_float32_matmul_precision(),
        "threads": (torch.get_num_threads(), {thread.name for thread in threading.enumerate()}),
        "interpreter": (sys.argv[:], sys.path[:], Path.cwd(), sys.excepthook),
        "hooks": (vars(Callback).copy(), vars(PassThroughProfiler).copy()),
    }


@pytest.fixture(scope="module")
def imported(finished, tmp_path_factory):
    """Import what a run imports, before garbage collection sees all of it."""
    finished[0].elsewhere(tmp_path_factory.mktemp("imported")).train("max_steps=6", "run_dir=run")


@pytest.mark.slow
@pytest.mark.usefixtures("imported", "thawed")
@pytest.mark.parametrize(
    ("end", "status"), [(None, 0), ("Raises", 1), ("Stops", 128 + signal.SIGTERM), ("Late", 1)]
)
def test_an_inline_run_leaves_the_process_unchanged(command, monkeypatch, capfd, end, status):
    (command.folder / "ends.py").write_text(ENDS)
    monkeypatch.chdir(command.folder)
    monkeypatch.syspath_prepend(command.folder)
    ends = [f"+callbacks.ends._target_=ends.{end}"] if end else []
    before = state()
    assert cli.main(command.smoke("launch.inline=true", "run_dir=run", *ends)) == status
    after = state()
    assert {
        name: (before[name], after[name]) for name in before if after[name] != before[name]
    } == {}
    capfd.readouterr()
