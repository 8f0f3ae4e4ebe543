"""What watches a script's Trainers during a check: callbacks that Lightning takes from outside."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.exits import Exit
from lockstep.testing.recording import Record
from lockstep.testing.results import STEP, TIMED, flat
from lockstep.testing.scripts import ASKED, FOLDER, OUTCOME, STEPS, TRAINED_ON

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def callbacks() -> list[Callback]:
    """Return what each Trainer of this process gets."""
    folder = os.environ[FOLDER]
    steps = os.environ.get(STEPS)
    ranks = AskedRanks(int(os.environ[ASKED]), Path(folder))
    watching: list[Callback] = [ranks, Record(folder), Outcome(Path(folder))]
    return [*watching, *([StopAfter(int(steps))] if steps else [])]


class AskedRanks(Callback):
    """Ends a process whose Trainer has another number of ranks than the check compares.

    torchrun starts copies of a script whose Trainer says `devices=1`: each trains alone, and all
    have the same bits.

    Args:
        asked: the number.
        folder: for the file that says how many there are.
    """

    def __init__(self, asked: int, folder: Path) -> None:
        self.asked = asked
        self.folder = folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End it before it trains."""
        if stage == "fit" and trainer.world_size != self.asked:
            (self.folder / TRAINED_ON).write_text(str(trainer.world_size), encoding="utf-8")
            raise SystemExit(Exit.MISTAKE)


class StopAfter(Callback):
    """Ends the training after a number of optimizer steps, on all ranks.

    Args:
        steps: the number.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop after the step's last micro-batch."""
        if trainer.global_step >= self.steps:
            trainer.should_stop = True


class Outcome(Callback):
    """Writes what a training must not leave otherwise on another number of ranks: `FOLDER/OUTCOME`.

    These are weights, states of optimizers and schedulers, and the last values that were logged.

    Args:
        folder: for the file; an existing one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect whole tensors on all ranks, and write them on the first one."""
        strategy = trainer.strategy
        content = {
            "state_dict": strategy.lightning_module_state_dict(),
            "optimizer_states": [strategy.optimizer_state(each) for each in trainer.optimizers],
            "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        }
        state = {name: plain(value) for name, value in flat(content)}
        logged = {
            name: repr(value.item())
            for name, value in trainer.callback_metrics.items()
            if value.numel() == 1 and not name.startswith(TIMED)
        }
        if trainer.is_global_zero:
            row = {STEP: str(trainer.global_step), **logged}
            torch.save({"row": row, "state": state}, self.folder / OUTCOME)


def plain(value: Any) -> Any:
    """Return a whole tensor on the host, or a plain value."""
    if isinstance(value, DTensor):  # of all ranks, which all call this
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, bool | int | float | str | None):
        return value
    return ADDRESS.sub("", repr(value))  # an object's place in memory is of no run
