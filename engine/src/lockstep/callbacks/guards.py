"""Ends a run that does harm: its replicas differ, or its steps don't end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from lightning import Trainer

from lockstep.callbacks.limits import tell_limits
from lockstep.callbacks.step import StepCallback
from lockstep.errors import RunError
from lockstep.exits import Exit
from lockstep.ranks.flight_recorder import TRACE, write_trace
from lockstep.ranks.ranks import LONGEST_WAIT, backend_here
from lockstep.run import last_line
from lockstep.run.run import Run
from lockstep.settings import check_number, check_whole, not_a_config
from lockstep.strategies.bit_sums import bit_sum
from lockstep.strategies.placing import layout_of

STALL_GRACE = 2  # seconds for the other ranks to show their stacks too
WATCHDOG_MARGIN = 120  # seconds by which we end a stalled run before NCCL's watchdog does


@not_a_config
@dataclass(eq=False)
class Guards(StepCallback):
    """Ends a run whose replicas differ, or that stopped making steps.

    When training begins, it also says what the run can't promise, such as for a BatchNorm.

        >>> trainer = Trainer(callbacks=[lockstep.Guards(stall_after=600, replicas_every=100)])

    Args:
        run: where the failure of a stalled run is recorded; None: nowhere.
        stall_after: seconds without a step, after which ranks show their stacks and the run ends;
            None: there is no limit.
        replicas_every: steps between comparisons of the ranks' weights; None: only at saves.
    """

    run: Run | None = None
    stall_after: float | None = 1800.0
    replicas_every: int | None = 500
    compares_saved: bool = field(default=True, init=False)  # whether it compares what is saved
    _rank: int = field(default=0, init=False)  # of this process
    _last_progress: float = field(default=0.0, init=False)  # clock
    _ended: threading.Event = field(default_factory=threading.Event, init=False)
    _watcher: threading.Thread | None = field(default=None, init=False)
    _on_pause_before: Any = field(default=signal.SIG_DFL, init=False)  # handler of SIGTSTP

    def __post_init__(self) -> None:
        if self.stall_after is not None:
            check_number("stall_after", self.stall_after, above=0)
        if self.replicas_every is not None:
            check_whole("replicas_every", self.replicas_every, at_least=1)

    @property
    def terminal(self) -> TextIO:
        """What shows a stalled rank's stack."""
        return self.run.terminal if self.run else sys.stderr

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start a thread that only watches the clock."""
        super().on_train_start(trainer, pl_module)
        self._rank = trainer.global_rank
        if self._rank == 0:
            tell_limits(trainer, pl_module)
        self._last_progress = time.monotonic()
        if self.stall_after is not None:
            timeout = self.run.timeout if self.run else LONGEST_WAIT
            limit = stall_limit(self.stall_after, backend_joined(), timeout)
            self._on_pause_before = signal.signal(signal.SIGTSTP, self._pause)
            self._watcher = threading.Thread(target=self._watch, args=[limit], daemon=True)
            self._watcher.start()

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Note the progress."""
        self._last_progress = time.monotonic()
        super().on_train_batch_end(*arguments)

    def on_validation_batch_end(self, *_arguments: Any) -> None:
        """Note the progress."""
        self._last_progress = time.monotonic()

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Compare the replicas if that is due."""
        if self.replicas_every and step % self.replicas_every == 0:
            self._compare_replicas(trainer, pl_module, step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Compare the replicas before anything is written."""
        if self.compares_saved:
            self._compare_replicas(trainer, pl_module, trainer.global_step)

    def _compare_replicas(self, trainer: Trainer, model: torch.nn.Module, step: int) -> None:
        if layout_of(trainer.strategy).has_replicas:
            refuse_differing_replicas(model, step)

    def on_train_end(self, *_arguments: Any) -> None:
        """Stop watching."""
        self._ended.set()
        if self._watcher:
            self._watcher.join()  # it may need to cancel faulthandler
            self._watcher = None
            signal.signal(signal.SIGTSTP, self._on_pause_before)

    on_exception = on_train_end  # type: ignore[assignment]

    def _pause(self, _signum: int, _frame: FrameType | None) -> None:
        """Pause as Ctrl-Z does, but without faulthandler, whose clock would go on.

        Only `launch.inline=true` has a rank in the terminal's session.
        """
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._pause)

    def _watch(self, stall_after: float) -> None:
        """End the process after a stall; if this thread hangs too, faulthandler's thread does.

        Its clock, unlike that of faulthandler, stands still while the process is paused.
        """
        interval = min(1.0, stall_after / 10)
        last_look = time.monotonic()
        file = with_number(self.terminal)
        while not self._ended.is_set():
            faulthandler.dump_traceback_later(stall_after + 10, exit=True, file=file)
            self._ended.wait(interval)
            now = time.monotonic()
            self._last_progress += max(0.0, now - last_look - interval)
            last_look = now
            if now - self._last_progress > stall_after:
                self._end_process(stall_after)
        faulthandler.cancel_dump_traceback_later()

    def _end_process(self, stall_after: float) -> None:
        """Show this rank's stack, record the failure, and end the process."""
        error = f"no step for {stall_after:g} s (guard.stall_after)"
        line = f"rank {self._rank}: {error}"
        text = f"{line}; its stack:\n{stacks()}"
        # In one piece: all ranks print at the same time.
        print(text, file=self.terminal, flush=True)
        directory = self.run.directory if self.run else None
        if directory is not None:
            last_line.append(directory.log_of(self._rank), text)
            last_line.record(directory, self._rank, Exit.FAILED, error, line)
            self._write_collectives(directory.rank_logs)
        time.sleep(STALL_GRACE)
        if directory is not None:
            last_line.show_end_of_rank(directory, self._rank, Exit.FAILED, self.terminal)
        os._exit(Exit.FAILED)

    def _write_collectives(self, folder: Path) -> None:
        """Write this rank's last collectives to `folder`, if they were recorded, and say so."""
        with contextlib.suppress(OSError, RuntimeError):  # the run ends anyway
            path = write_trace(backend_joined(), folder, self._rank)
            if path:
                text = f"its last collectives: {path} (torchfrtrace --prefix {TRACE} {folder})"
                print(f"rank {self._rank}: {text}", file=self.terminal, flush=True)


@contextlib.contextmanager
def without_comparison(trainer: Any) -> Iterator[None]:
    """Take a state that isn't saved to the disk: comparing each would cost more than a copy."""
    guards = [callback for callback in trainer.callbacks if isinstance(callback, Guards)]
    for guard in guards:
        guard.compares_saved = False
    try:
        yield
    finally:
        for guard in guards:
            guard.compares_saved = True


def with_number(stream: TextIO) -> TextIO:
    """Return a stream to which faulthandler can write: a notebook's isn't a file of the system."""
    try:
        stream.fileno()
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return sys.__stderr__ or stream
    return stream


def stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def backend_joined() -> str:
    """Return the backend of the process group; "" if there is none."""
    return backend_here() if dist.is_initialized() else ""


def stall_limit(stall_after: float, backend: str, timeout: float) -> float:
    """Return the seconds without a step after which a run ends.

    With NCCL, hosts don't wait for collectives: steps seem to continue for a while after one hangs.
    NCCL's watchdog, which shows nothing and whose abort looks like a kill, must not come first.

    Args:
        stall_after: the seconds that the user allows.
        backend: of the process group.
        timeout: seconds that ranks wait for another one.
    """
    if backend != "nccl":
        return stall_after
    return min(stall_after, max(timeout - WATCHDOG_MARGIN, timeout / 2))


def refuse_differing_replicas(model: torch.nn.Module, step: int) -> None:
    """Compare a checksum of every parameter across all ranks: DDP never notices a flipped bit.

    Raises:
        RunError: on every rank; it names the first parameter that differs, and the ranks.
    """
    named = list(model.named_parameters())  # P of them
    if not dist.is_initialized():
        return
    sums = torch.stack([bit_sum(parameter) for _, parameter in named])  # (P)
    gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums)
    table = torch.stack(gathered).cpu()  # (ranks, P)
    differs = table != table.mode(dim=0).values  # (ranks, P)
    if not differs.any():
        return
    first = int(differs.any(dim=0).nonzero()[0])
    ranks = [0, 1]  # of two ranks, either may be wrong
    if len(table) > 2:
        ranks = differs[:, first].nonzero().flatten().tolist()
    raise RunError(
        f"step {step}: the weights of ranks differ, first in {named[first][0]}, on rank "
        f"{' and '.join(map(str, ranks))}; check that device's memory"
    )
