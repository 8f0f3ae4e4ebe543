"""Faults on purpose: a callback that disturbs its own rank at chosen steps."""

from __future__ import annotations

import math
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
        self._broken: Any = None  # the hook of a gradient

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

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        """Let a gradient be NaN, as broken arithmetic would, before a strategy adds it."""
        del loss
        for _ in self._due(trainer, "nan"):
            trained = [weight for weight in pl_module.parameters() if weight.requires_grad]
            self._broken = trained[0].register_hook(lambda gradient: gradient * math.nan)

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Let later gradients be sound."""
        if self._broken is not None:
            self._broken.remove()
            self._broken = None

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
