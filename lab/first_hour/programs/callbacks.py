"""What measurements add to real runs by `_target_`: Lightning callbacks, and a strategy."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernel_times import KernelTimes, new_profile
from lightning import Callback, Trainer

KILLED_AT = 13  # optimizer step; the smoke experiment has 20, and saves at 10


class Backend(Callback):
    """Prints the backend of the process group that ranks really use."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Print it once."""
        if trainer.is_global_zero:
            ranks = trainer.world_size
            print(f"backend {dist.get_backend()}, world size {ranks}", flush=True)


class Killer(Callback):
    """Kills the last rank in the middle of a run, once."""

    def __init__(self, hit: str) -> None:
        self.hit = Path(hit)  # exists once it has killed

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Kill this process, if it is the last rank."""
        is_last = trainer.global_rank == trainer.world_size - 1
        if trainer.global_step == KILLED_AT and is_last and not self.hit.exists():
            self.hit.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Profiled(Callback):
    """Profiles some steps: the time and the calls of each kernel, and how busy the device was.

    Args:
        file: gets one line with the figures of a step, then one line for each kernel.
        first: the first profiled step, after the compilation.
        steps: how many.
    """

    def __init__(self, file: str, first: int, steps: int) -> None:
        self.file = Path(file)
        self.first = first
        self.steps = steps
        self.profile = new_profile()

    def on_train_batch_start(self, trainer: Trainer, _: Any, __: Any, index: int) -> None:
        """Start or stop at the first micro-batch of a step."""
        if index % trainer.accumulate_grad_batches:
            return
        if trainer.global_step == self.first:
            self._synchronize()
            self.profile.start()
        if trainer.global_step == self.first + self.steps:
            self._synchronize()
            self.profile.stop()
            times = KernelTimes(self.profile, self.steps)
            lines = [f"{times.figures('step')}: {times.kinds()}", *times.lines()]
            self.file.write_text("\n".join(lines) + "\n")

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def sharded_over_one_rank(*, batch: Any, **settings: Any) -> Any:  # noqa: ARG001
    """Return the strategy `fsdp2` as it is with several ranks: for one, ours shards nothing."""
    from lockstep.strategies.fsdp2 import build_fsdp2

    return build_fsdp2(1, **settings)
