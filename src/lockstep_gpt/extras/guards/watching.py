"""What ends a run that does harm: replicas that differ, steps that do not end."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from lightning import Trainer

from lockstep_gpt.config import Config, RunError
from lockstep_gpt.extras.guards.guards_settings import HarmGuard
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training.callbacks.step import StepCallback
from lockstep_gpt.training.ranks import backend_of

STALL_GRACE = 2  # seconds for the other ranks to show their stacks too
WATCHDOG_MARGIN = 120  # seconds between our end of a stalled run and that by NCCL's watchdog
TRACE = "nccl_trace_rank_"  # how files of the flight recorder begin, which end in the rank
RECORDED = 2000  # collectives that it remembers


@dataclass(eq=False)
class Guards(StepCallback):
    """Ends a run whose replicas differ, or that makes no step any more."""

    config: Config  # when to look, and how long a step may take
    directory: RunDirectory  # where the failure of a stalled run is recorded
    rank: int  # of this process
    terminal: TextIO  # where the stack of a stalled rank is shown
    _alive: float = field(default=0.0, init=False)  # clock of the last sign of progress
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _watcher: threading.Thread | None = field(default=None, init=False)

    @property
    def settings(self) -> HarmGuard:
        """The settings of this extra."""
        return cast(HarmGuard, self.config.guard)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Begin to watch the clock, from a thread that waits for nothing else."""
        super().on_train_start(trainer, pl_module)
        self._alive = time.monotonic()
        if self.settings.stall_after is not None:
            limits = [stall_limit(self.config, self.settings.stall_after)]
            self._watcher = threading.Thread(target=self._watch, args=limits, daemon=True)
            self._watcher.start()

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Note the progress."""
        self._alive = time.monotonic()
        super().on_train_batch_end(*arguments)

    def on_validation_batch_end(self, *_arguments: Any) -> None:
        """Note the progress."""
        self._alive = time.monotonic()

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:  # noqa: ARG002
        """Compare the replicas where it is due."""
        if self.settings.replicas_every and step % self.settings.replicas_every == 0:
            refuse_differing_replicas(pl_module.model, step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        """Compare the replicas before anything is written."""
        refuse_differing_replicas(pl_module.model, trainer.global_step)

    def on_train_end(self, *_arguments: Any) -> None:
        """Watch no longer."""
        self._over.set()
        if self._watcher:
            self._watcher.join()  # it may have to call faulthandler off

    on_exception = on_train_end  # type: ignore[assignment]

    def _watch(self, stall_after: float) -> None:
        """End the process after a stall; one of faulthandler's does if even this one is held up."""
        while not self._over.wait(min(1.0, stall_after / 10)):
            faulthandler.dump_traceback_later(stall_after + 10, exit=True, file=self.terminal)
            if time.monotonic() - self._alive > stall_after:
                self._end(stall_after)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, stall_after: float) -> None:
        line = f"no step for {stall_after:g} s (guard.stall_after)"
        print(f"rank {self.rank}: {line}; its stack:", file=self.terminal, flush=True)
        faulthandler.dump_traceback(self.terminal)
        self.directory.record_failure({"rank": self.rank, "status": 1, "error": line})
        with contextlib.suppress(OSError, RuntimeError):  # the run ends all the same
            if path := write_trace(self.config, self.directory, self.rank):
                said = f"its last collectives: {path} (torchfrtrace --prefix {TRACE} {path.parent})"
                print(f"rank {self.rank}: {said}", file=self.terminal, flush=True)
        time.sleep(STALL_GRACE)
        os._exit(1)


def stall_limit(config: Config, stall_after: float) -> float:
    """Return the seconds without a step after which a run ends.

    Under NCCL no host waits for a collective: steps seem to go on for a while after one hangs, and
    NCCL's watchdog, which shows nothing and whose abort looks like a kill, must not come first.
    """
    if backend_of(config) != "nccl":
        return stall_after
    timeout = float(config.strategy.get("timeout_seconds", 1800))
    return min(stall_after, max(timeout - WATCHDOG_MARGIN, timeout / 2))


def record_collectives(config: Config) -> None:
    """Turn NCCL's flight recorder on; what the user has set in the environment stays."""
    if backend_of(config) != "nccl":
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if config.run_dir:
        place = RunDirectory(Path(config.run_dir)).rank_log(0).with_name(TRACE)
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(place.resolve()))


def write_trace(config: Config, directory: RunDirectory, rank: int) -> Path | None:
    """Write what the flight recorder knows of this rank; return the file, None where it is off.

    It is the file that the watchdog would write, which is not alive any more by then.
    """
    kind = "_dump_nccl_trace" if backend_of(config) == "nccl" else "_dump_fr_trace"
    dump = getattr(importlib.import_module("torch._C._distributed_c10d"), kind, None)
    if dump is None or not os.environ.get("TORCH_FR_BUFFER_SIZE"):
        return None
    path = directory.rank_log(rank).with_name(f"{TRACE}{rank}")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(dump())
    return path


def refuse_differing_replicas(model: torch.nn.Module, step: int) -> None:
    """Compare a checksum of every parameter over all ranks: DDP never notices a flipped bit.

    A `RunError` on every rank names the first parameter that differs, and where.
    """
    named = list(model.named_parameters())
    shared = any(hasattr(parameter, "full_tensor") for _, parameter in named)  # no replicas
    if not dist.is_initialized() or shared:
        return
    sums = torch.stack([_checksum(parameter.detach()) for _, parameter in named])  # (P)
    gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums)
    table = torch.stack(gathered).cpu()  # (ranks, P)
    differs = table != table.mode(dim=0).values
    if not differs.any():
        return
    first = int(differs.any(dim=0).nonzero()[0])
    odd = differs[:, first].nonzero().flatten().tolist() if len(table) > 2 else [0, 1]
    raise RunError(
        f"step {step}: the weights of ranks differ, first in {named[first][0]}, on rank "
        f"{' and '.join(map(str, odd))}; check the memory of that device, then go on with "
        "resume=auto from the last checkpoint, which was still sound"
    )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up the bits of `tensor`, taken as whole numbers."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.contiguous().view(integers).sum(dtype=torch.int64)
