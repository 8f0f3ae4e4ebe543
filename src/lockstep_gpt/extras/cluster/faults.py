"""Faults on purpose: a callback that hurts its own rank at chosen steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

STARTS = "starts"  # one line of seconds since 1970 for each start of the run


class Faults(Callback):
    """Does to ranks what happens to ranks, each thing once, however often the run restarts.

    Args:
        folder: remembers over restarts, by empty files, what was done and when.
        plan: `step:rank:fault`, the fault being a signal's name, `nan` or `hang`.
    """

    def __init__(self, folder: str, plan: list[str]) -> None:
        self.folder = Path(folder)
        self.plan = plan
        self._began = False

    def on_train_batch_end(self, trainer: Trainer, *_arguments: Any) -> None:
        """Note when this start of the run had finished its first step."""
        if not self._began and trainer.is_global_zero:
            with (self.folder / STARTS).open("a", encoding="ascii") as file:
                file.write(f"{time.time()}\n")
        self._began = True

    def on_train_batch_start(self, trainer: Trainer, *_arguments: Any) -> None:
        """Send the signal, or hang."""
        for fault in self._due(trainer, "hang", *signal.Signals.__members__):
            if fault == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), signal.Signals[fault])

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Spoil a gradient, as broken arithmetic would."""
        for _ in self._due(trainer, "nan"):
            next(pl_module.parameters()).grad.fill_(float("nan"))

    def _due(self, trainer: Trainer, *kinds: str) -> list[str]:
        """Return what of `kinds` is due here; it is noted first, for some of it kills us."""
        due = []
        for entry in self.plan:
            step, rank, fault = entry.split(":")
            here = (int(step), int(rank)) == (trainer.global_step, trainer.global_rank)
            note = self.folder / entry
            if here and fault in kinds and not note.exists():
                note.touch()
                due.append(fault)
        return due
