"""What measurements add to real runs by `_target_`: Lightning callbacks, and a strategy."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KILLED_AT = 13  # optimizer step; the smoke experiment has 20, and saves at 10
# Spans that the profiler reports next to the kernels in them.
NO_KERNELS = ("## Call CompiledFxGraph", "Optimizer.", "Torch-Compiled Region", "ProfilerStep")


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
        self.on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities, acc_events=True)

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
            self._write()

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _write(self) -> None:
        device = DeviceType.CUDA if self.on_gpu else DeviceType.CPU
        kernels = [
            event
            for event in self.profile.events()
            if event.device_type == device
            and not event.is_user_annotation
            and not event.name.startswith(NO_KERNELS)
        ]
        spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
        busy = 0.0  # microseconds with at least one kernel
        end = spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        whole = end - spans[0][0]
        micros: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in kernels:
            micros[event.name] += event.time_range.end - event.time_range.start
            calls[event.name] += 1
        lines = [
            f"{whole / self.steps / 1e3:.2f} ms per step, device busy {busy / whole:.1%}, "
            f"{len(kernels) / self.steps:.0f} kernels per step"
        ]
        for name, total in micros.most_common():
            figures = f"{total / self.steps / 1e3:9.3f} ms  {total / busy:6.1%}"
            lines.append(f"{figures}  {calls[name] / self.steps:7.1f} x  {name[:120]}")
        self.file.write_text("\n".join(lines) + "\n")


def sharded_over_one_rank(*, accelerator: str, world_size: int, **settings: Any) -> Any:  # noqa: ARG001
    """Return the strategy `fsdp2` as it is with several ranks: for one, ours shards nothing."""
    from lockstep_gpt.distributed.fsdp2 import build_fsdp2

    return build_fsdp2(world_size, **settings)
