"""Faults on purpose: a callback that disturbs its own rank at chosen steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

SECONDS = {"hang": 3600, "pause": 2}
STARTS = "starts"  # one line for each start of the run: the time in seconds since 1970


class Faults(Callback):
    """Injects faults into ranks, each fault once, however often the run restarts.

    Args:
        folder: where empty files record, across restarts, which faults happened and when.
        plan: entries `step:rank:fault`; a fault is a signal's name, `nan`, `hang`, or `pause`.
    """

    def __init__(self, folder: str, plan: list[str]) -> None:
        self.folder = Path(folder)
        self.plan = plan
        self._began = False

    def on_train_batch_end(self, trainer: Trainer, *_arguments: Any) -> None:
        """Record the time when the first step after a start or restart ended."""
        if not self._began and trainer.is_global_zero:
            with (self.folder / STARTS).open("a", encoding="ascii") as file:
                file.write(f"{time.time()}\n")
        self._began = True

    def on_train_batch_start(self, trainer: Trainer, *_arguments: Any) -> None:
        """Send the signal to this process, pause, or hang."""
        for fault in self._due(trainer, *SECONDS, *signal.Signals.__members__):
            if fault in SECONDS:
                time.sleep(SECONDS[fault])
            else:
                os.kill(os.getpid(), signal.Signals[fault])

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Set a gradient to NaN, as broken arithmetic would."""
        for _ in self._due(trainer, "nan"):
            next(pl_module.parameters()).grad.fill_(float("nan"))

    def _due(self, trainer: Trainer, *kinds: str) -> list[str]:
        """Return the faults of `kinds` due now. Record them first, as some kill this process."""
        due = []
        for entry in self.plan:
            step, rank, fault = entry.split(":")
            is_due = (int(step), int(rank)) == (trainer.global_step, trainer.global_rank)
            note = self.folder / entry
            if is_due and fault in kinds and not note.exists():
                note.touch()
                due.append(fault)
        return due
