"""A callback that kills a rank after a step, and waits one step later for the command's death."""

import os
import signal
import time
from pathlib import Path

from lightning import Callback, LightningModule, Trainer

SECONDS = 120  # for whoever kills the command


class Kills(Callback):
    """Acts in the last micro-batch of a step: some of its gradients are lost.

    Args:
        folder: gets a note of each death, so that it happens once.
        after: the step after which the last rank dies.
    """

    def __init__(self, folder: str, after: int) -> None:
        self.folder = Path(folder)
        self.after = after

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Die, or wait to be killed."""
        is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not is_last:
            return
        last_rank = trainer.world_size - 1
        if trainer.global_step == self.after and trainer.global_rank == last_rank:
            self._die()
        elif trainer.global_step == self.after + 1 and trainer.global_rank == 0:
            self._await_death()

    def _die(self) -> None:
        if self._note("rank"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _await_death(self) -> None:
        if self._note("command"):
            time.sleep(SECONDS)
            raise TimeoutError("nobody killed the command")

    def _note(self, name: str) -> bool:
        """Leave a note; return whether it is the first."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
