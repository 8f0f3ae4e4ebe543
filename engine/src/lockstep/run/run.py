"""One run of an experiment, as each of its ranks sees it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, cast

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from omegaconf import OmegaConf
from torch import nn

from lockstep import stop_signals, variables
from lockstep.batch import Batch
from lockstep.callbacks.arithmetic import Arithmetic
from lockstep.callbacks.step import InReceipt, InSummary
from lockstep.callbacks.weight_hashes import WeightHashes
from lockstep.checkpoints.copies import copies_of, fetch
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.sums import VerifiedCheckpoint
from lockstep.checkpoints.writing import checkpoint_io
from lockstep.errors import RunError, UserError
from lockstep.loggers.chosen import chosen_loggers
from lockstep.loggers.tracking import WANDB_ID, read_id, tracked_runs
from lockstep.memory.files import KeptState
from lockstep.memory.writer import KeepsStates
from lockstep.metrics.callback import Metrics
from lockstep.metrics.file import MetricsFile
from lockstep.metrics.rows import STEP
from lockstep.processes import typed
from lockstep.ranks.cluster_environment import RanksEnvironment
from lockstep.ranks.flight_recorder import record_collectives
from lockstep.ranks.ranks import (
    LONGEST_WAIT,
    Ranks,
    backend_of,
    is_restart,
    join,
    leave,
    lost_peers,
    meeting_store,
)
from lockstep.ranks.waiting import MeetingError
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory
from lockstep.run.failures import HandlingLimit, ReportFirst, report_failure
from lockstep.run.kept import refuse_other_experiment
from lockstep.run.receipt import facts_of, random_lines
from lockstep.run.resuming import (
    CompareSettings,
    RefuseUnfit,
    refuse_other_directory,
    refuse_small_disk,
    state_to_resume,
)
from lockstep.settings import check, counted

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)


class Saves(Protocol):
    """What saves a run: its `Checkpoints`."""

    background: bool  # a thread writes
    copy_to: str | None  # a folder or URL that gets copies


_current: Run | None = None  # of this process


class Run:
    """A run's directory, ranks, frozen configuration, and what it resumes from.

    `lockstep.main` makes it in each rank and passes it to the function that it decorates, which
    gives its parts to Lightning:

        trainer = Trainer(
            callbacks=[lockstep.Checkpoints(run, every=500)],
            logger=[run.metrics_csv],
            plugins=run.plugins,
        )
        trainer.fit(module, data, ckpt_path=run.checkpoint(trainer))
        return run.finish(trainer, metric="val/loss")

        >>> run = lockstep.Run.alone()
        >>> trainer = Trainer(logger=[run.metrics_csv], plugins=run.plugins)

    Args:
        path: the run's directory, in which the configuration is frozen.
        config: the frozen configuration, as plain values; it is part of each checkpoint.
        resume: `none`; `auto`: the newest state of this run, if it has any; or the path of a
            checkpoint, or of another run, for a run that has none of its own.
        kept: names of settings and groups, such as `seed` and `model`, that a checkpoint to resume
            from must have in common with `config`.
        force: whether it may have others.
        ranks: this process among all.
        timeout: the longest wait for another rank in seconds.
    """

    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        resume: str = "none",
        kept: Collection[str] = (),
        force: bool = False,
        ranks: Ranks | None = None,
        timeout: float = LONGEST_WAIT,
    ) -> None:
        global _current
        self.directory = RunDirectory(Path(path))
        self.config = dict(config)
        self.resume = str(resume)
        self.kept = tuple(kept)
        self.force = force
        self.ranks = ranks or Ranks.from_environment()
        self.timeout = timeout
        self.metrics_csv = MetricsFile(self.directory.metrics, [STEP])
        self.hashes = WeightHashes()
        self.arithmetic = Arithmetic(force)
        self.resumed: VerifiedCheckpoint | KeptState | None = None  # what the run continues from
        self.trainer: Trainer | None = None  # that trains, once it is known
        self.facts: dict[str, Any] = {}  # derived values, for `summary.json`
        self.next_commands: list[str] = []  # what the user may do with a finished run
        self.terminal: TextIO = sys.stderr  # shows failures, also those of other ranks than 0
        self._checkpoints: Saves | None = None
        self._disk: AtomicCheckpointIO | None = None
        self._trackers: list[Logger] = []
        # This rank's exception, once it is reported, and its exit status.
        self.failure: tuple[BaseException, int] | None = None
        self._handling: HandlingLimit | None = None
        self._is_passing = False  # whether code needs a run that `lockstep.main` hasn't started
        self._started = time.perf_counter()
        _current = self

    @classmethod
    def current(cls) -> Run:
        """Return the run of this process, for code that doesn't get it as an argument.

        A process that `lockstep.main` hasn't started, such as a test or a notebook, gets a run
        alone, in a temporary directory.
        """
        if _current is None:
            return cls._passing()
        return _current

    @classmethod
    def _passing(cls) -> Run:
        """Return a run alone that nobody has asked for."""
        run = cls.alone()
        run._is_passing = True
        logger.warning("lockstep.main hasn't started this: %s will be removed at its end", run.path)
        return run

    def untaken(self) -> Run:
        """Return a run that has no `Checkpoints` yet: this one, or the next in a test's process."""
        if self._checkpoints is not None and self._is_passing:
            return self._passing()
        return self

    @classmethod
    def alone(cls, path: str | Path | None = None, config: Any = None) -> Self:
        """Return a new run in this process alone, such as in a notebook or a debugger.

        Args:
            path: its directory; None: a temporary one, which is removed when the process ends.
            config: its configuration, for its checkpoints.

        Raises:
            UserError: the directory is used by another run.
        """
        count = Ranks.from_environment().world_size
        check("WORLD_SIZE", count, count == 1, "makes no run alone; use lockstep.main, or unset it")
        if path is None:
            path = tempfile.mkdtemp(prefix="run-")
            atexit.register(shutil.rmtree, path, ignore_errors=True)
        directory = RunDirectory(Path(path))
        values = OmegaConf.to_container(OmegaConf.create(config or {}))
        directory.create(cast(dict[str, Any], values))
        return cls(path, cast(dict[str, Any], values), ranks=Ranks())

    def suggest(self, *commands: str) -> None:
        """Name the project's commands that a person may give the finished run, at its end."""
        run = shlex.quote(str(self.path))
        self.next_commands = [f"{typed(name)} {run}" for name in commands]

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.directory.path

    @property
    def has_begun(self) -> bool:
        """Whether the run has trained before: it then has weights of its own."""
        return self.directory.has_begun()

    def forget_first_step(self) -> None:
        """Let rank 0's first step count as not begun, unless it has ended."""
        is_first = self.trainer is not None and self.trainer.global_step == 0
        if self.ranks.rank == 0 and is_first and self.resumed is None:
            self.directory.metrics.unlink(missing_ok=True)

    def check_peers(self) -> None:
        """Raise a `MeetingError` if one of the ranks has failed since this start."""
        if self.directory.failed.exists():
            raise MeetingError("another rank has failed")

    def recall(self, name: str) -> Any:
        """Return what the run has decided under this name at an earlier start; None: nothing yet.

        All ranks know the same as long as all of them ask before one of them remembers.
        """
        return self.directory.notes().get(name)

    def remember(self, name: str, value: Any) -> None:
        """Keep, on rank 0, a small value that is decided once in a run, for its later starts."""
        if self.ranks.rank == 0 and self.recall(name) != value:
            self.directory.note(name, value)

    def loggers(self, nodes: Mapping[str, Any] | None, **facts: Any) -> list[Logger]:
        """Return what Lightning's Trainer logs to: `metrics.csv`, and the chosen trackers.

        Only rank 0 has trackers. One that fails, or doesn't answer in time, is dropped: it can't
        end the run.

        Args:
            nodes: a name -> what names a logger's class by `_target_`; null: none.
            facts: derived values, such as the rate, for trackers and `summary.json`.

        Raises:
            UserError: a setting of a tracker is wrong.
        """
        facts = {"world_size": self.ranks.world_size, **facts}
        self.facts.update(facts)
        if self.ranks.rank > 0:
            return [self.metrics_csv]
        trackers = chosen_loggers(self.directory, nodes, self.config, facts)
        self._trackers = trackers
        if trackers:
            self.metrics_csv.tracker = trackers[0]
        return [self.metrics_csv, *trackers]

    def join(
        self, accelerator: str = "cpu", backend: str | None = None, store: Store | None = None
    ) -> None:
        """Connect to the other ranks, so that they can agree before Lightning connects them.

        Args:
            accelerator: cpu, cuda, or mps.
            backend: of the process group; None: nccl on GPUs, gloo elsewhere.
            store: where the ranks have met; None: they meet now.

        Raises:
            UserError: the ranks don't see the same run directory.
        """
        record_collectives(backend_of(accelerator, backend), self.directory.rank_logs)
        wait = self.timeout
        join(self.ranks, store, accelerator=accelerator, backend=backend, timeout=wait)
        refuse_other_directory(self.directory)

    @property
    def plugins(self) -> list[Any]:
        """What Lightning's Trainer needs: what reads and writes checkpoints, and who this rank is.

        Make `Checkpoints(run)` before.
        """
        if self._disk is None:
            self._disk = self._make_disk()
        if self.ranks.world_size == 1:
            return [self._disk]
        return [self._disk, RanksEnvironment(self.ranks)]

    def _make_disk(self) -> AtomicCheckpointIO:
        saving = self._checkpoints
        copy_to = saving.copy_to if saving else None
        return checkpoint_io(
            self.directory,
            self.hashes,
            background=saving is not None and saving.background,
            copy_to=copies_of(self.path, copy_to) if copy_to else None,
            continues=self.resume == "auto",
        )

    def take(self, checkpoints: Saves) -> None:
        """Note what saves this run, which calls it.

        Raises:
            UserError: another one does, or `plugins` came first.
        """
        if self._checkpoints is not None:
            raise UserError("a run has one Checkpoints; keep one of them")
        if self._disk is not None:
            raise UserError("Checkpoints(run) comes after run.plugins; make it before")
        self._checkpoints = checkpoints

    def expect(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse, when training begins, a disk that is too small, and unfit checkpoints later."""
        disk = trainer.strategy.checkpoint_io
        if not isinstance(disk, AtomicCheckpointIO):
            raise UserError("Checkpoints(run) needs Trainer(plugins=run.plugins); add them")
        if self.ranks.rank == 0:
            saves_parts = getattr(trainer.strategy, "saves_parts", False)
            refuse_small_disk(self.path, module, saves_parts)
        if trainer.precision == "64-true":
            module.double()  # the Trainer would only do so after loading a checkpoint's weights
        disk.refuse_unfit = RefuseUnfit(self._compare, module)

    @property
    def _compare(self) -> CompareSettings | None:
        """What refuses a checkpoint of another experiment; None if `force` permits it."""
        if self.force:
            return None
        return partial(refuse_other_experiment, ours=self.config, kept=self.kept)

    def checkpoint(self, trainer: Trainer) -> str | None:
        """Return what `trainer.fit` resumes from; None: step 0. Every rank must call this.

        It is the run's own newest state, else what `resume` names.

        Raises:
            UserError: that is damaged, of another experiment, or later than the run's last step.
        """
        self.trainer = trainer
        self._report_first(trainer)
        copy_to = self._checkpoints.copy_to if self._checkpoints else None
        loses_error = getattr(trainer.strategy, "loses_error", False)
        restarts = (self.config.get("launch") or {}).get("max_restarts", 0)
        rule = "accumulates an error that no checkpoint contains; set launch.max_restarts=0"
        check("strategy.comm_hook", "powersgd", not (loses_error and restarts), rule)
        memories = [part for part in _callbacks_of(trainer) if isinstance(part, KeepsStates)]
        memory = next((part for part in memories if part.keeps_states(trainer)), None)
        self.resumed = state_to_resume(
            self.directory,
            self.resume,
            compare=self._compare,
            in_memory=memory is not None,
            writer=memory.writer_for(trainer) if memory else None,
            fetch_copy=partial(self._fetch_copy, copy_to),
            loses_error=loses_error and not self.force,
            timeout=self.timeout,
        )
        if self._disk is not None:
            self._disk.verified = self.resumed
        if self.resumed is not None:
            self._refuse_later(self.resumed, trainer.max_steps)
        self._begin_metrics(trainer)
        return str(self.resumed.path) if self.resumed else None

    def _fetch_copy(self, copy_to: str | None) -> VerifiedCheckpoint | None:
        if copy_to is None:
            return None
        return fetch(self.directory, self.path, copy_to, self._compare)

    def _refuse_later(self, resumed: VerifiedCheckpoint | KeptState, steps: int) -> None:
        """Raise a `UserError` if nothing is left to train after a checkpoint."""
        is_own = resumed.path.parent == self.directory.checkpoints
        if steps < 0 or resumed.step < steps or (is_own and resumed.step == steps):
            return
        is_kept = isinstance(resumed, KeptState)
        place = f"{self.path}'s state in memory" if is_kept else resumed.path
        raise UserError(
            f"{place} is after step {resumed.step}, but this run ends after "
            f"{counted(steps, 'step')}; raise max_steps, or train less in a new run"
        )

    def announce(self, trainer: Trainer, *parts: Any, **lines: str) -> None:
        """Print, on rank 0, what the run will do: the lines of its parts, and yours.

        Args:
            trainer: is about to train.
            parts: the module, and what may have `receipt_lines`, such as a `Batch` and a
                `Schedule`.
            lines: more of them, by their labels, such as `batch="8 samples per step"`.
        """
        self.trainer = trainer
        self._report_first(trainer)
        if self.ranks.rank > 0 or (is_restart() and self.directory.has_begun()):
            return
        module = next((part for part in parts if isinstance(part, nn.Module)), None)
        receipt = {"run": str(self.path), **facts_of(trainer, module), **lines}
        for part in [*parts, *_callbacks_of(trainer)]:
            if isinstance(part, InReceipt):
                receipt |= part.receipt_lines()
            if isinstance(part, Batch) and module is not None:
                receipt |= random_lines(module, part)
        if shown := variables.shown():
            receipt["variables"] = " ".join(f"{name}={value}" for name, value in shown.items())
        width = max(map(len, receipt))
        text = "\n".join(f"  {label:<{width}}  {line}" for label, line in receipt.items())
        logger.info("%s", text)

    def _report_first(self, trainer: Trainer) -> None:
        """Let this run report a rank's exception before other callbacks handle it."""
        self.handled()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, ReportFirst) for callback in callbacks):
            callbacks.insert(0, ReportFirst(self.report))

    def report(self, error: BaseException) -> None:
        """Report the exception of this rank, which is being handled, unless it only stops the run.

        From now on, its other handlers have some seconds, unless all ranks have failed.
        """
        if self.failure is not None or self._is_stop(error):
            return
        status = report_failure(self.directory, self.ranks, error, self.terminal)
        self.failure = (error, status)
        store = meeting_store()
        if store is not None:
            self._handling = HandlingLimit(
                self.ranks,
                store,
                is_busy=lambda: self._disk is not None and self._disk.is_writing,
                end=lambda: self._end_failed(status),
            )

    def _is_stop(self, error: BaseException) -> bool:
        """Return whether an exception is how a signal or a Ctrl-C stops the run."""
        if isinstance(error, stop_signals.Stopped | stop_signals.Interrupted):
            return True
        if isinstance(error, KeyboardInterrupt):  # as in a notebook; ranks of others get none
            return self.ranks.world_size == 1
        has_signal = stop_signals.received.first is not None
        return has_signal and (lost_peers(error) or stop_signals.ended_by_signal(error))

    def _end_failed(self, status: int) -> None:
        """End this process: a handler of its exception waits for other ranks."""
        last_line.show_end_of_rank(self.directory, self.ranks.rank, status, self.terminal)
        os._exit(status)

    def status_of(self, error: BaseException) -> int:
        """Report an exception that ends this rank, if it isn't yet; return the exit status."""
        cause: BaseException | None = error
        while cause is not None and self.failure is not None:
            if cause is self.failure[0]:  # or what its handlers have raised
                return self.failure[1]
            cause = cause.__context__
        return report_failure(self.directory, self.ranks, error, self.terminal)

    def returned(self) -> None:
        """Lift the limit on the handlers of an exception: they have returned."""
        if self._handling is not None:
            self._handling.lift()

    def handled(self) -> None:
        """Forget a failure that the program has handled: it goes on."""
        self.returned()
        if self.failure is not None:
            self.failure = None
            self.directory.forget_failure(self.ranks.rank)

    def _begin_metrics(self, trainer: Trainer) -> None:
        """Keep, on rank 0, the rows of `metrics.csv` up to where training begins."""
        if self.ranks.rank > 0:
            return
        earlier = self.metrics_csv.truncate_after(self.resumed.step if self.resumed else 0)
        for callback in _callbacks_of(trainer):
            if isinstance(callback, Metrics):
                callback.continue_from(earlier)

    def finish(self, trainer: Trainer, metric: str) -> float:
        """Return the newest value of a logged metric, which a sweep compares; nan without one."""
        self.trainer = trainer
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for callback in _callbacks_of(trainer):
            if isinstance(callback, Metrics):
                values |= callback.row  # with all digits
        return values.get(metric, math.nan)

    def conclude(self, status: str, value: Any = None, *, saved: bool = True) -> None:
        """Write `summary.json` on rank 0, end the runs of trackers, and print what is next.

        Args:
            status: `done`, `stopped`, or `failed`.
            value: what the function returned, for a sweep.
            saved: whether the run's last state is saved.
        """
        trainer = self.trainer
        # After a failure, such as the loss of a peer, an unusable disk is no second one.
        is_failed = status == "failed"
        faults = (OSError, RunError, UserError) if is_failed else ()
        if self._disk is not None:
            with contextlib.suppress(*faults):
                self._disk.wait()  # for all writes
        if self.ranks.rank > 0:
            return
        if status == "done" and trainer is not None and _has_stopped_early(trainer):
            status = "stopped early"
        summary: dict[str, Any] = {
            "status": status,
            "step": trainer.global_step if trainer else 0,
            "wandb_run_id": read_id(self.directory.wandb_id, WANDB_ID),
            "world_size": self.ranks.world_size,
            **self.facts,
            "value": value,
            "saved": saved,
            "wall_seconds": time.perf_counter() - self._started,
        }
        for callback in _callbacks_of(trainer):
            if isinstance(callback, InSummary):
                with contextlib.suppress(*faults):
                    summary |= callback.in_summary(summary["step"])
        with contextlib.suppress(*faults), self.directory.writing():
            self.directory.write_summary(summary)
        # Without a Trainer, its assembly has failed.
        for tracked in tracked_runs(trainer.loggers if trainer else self._trackers):
            tracked.close(status)
        if status in ("done", "stopped early"):
            leave()
            logger.info("%s", self._last_lines(status))

    def _last_lines(self, status: str) -> str:
        """Return how the run ended, and where its files are."""
        trainer = self.trainer
        seconds = time.perf_counter() - self._started
        results = "" if trainer is None else f": {_results_of(trainer)}"
        lines = [f"{status} in {seconds:.0f} s{results}"]
        if trainer is not None and is_out_of_time(trainer):
            lines.append("  reason       trainer.max_time is used up; give it more to go on")
        for callback in _callbacks_of(trainer):  # such as Lightning's EarlyStopping
            reason = getattr(callback, "stopping_reason_message", None)
            lines += [f"  reason       {reason}"] if reason else []
        if self.directory.metrics.exists():
            lines.append(f"  metrics      {self.directory.metrics}")
        elif self.directory.path.is_dir():
            lines.append(f"  files        {self.directory.path}")
        if self._checkpoints is not None and self.directory.checkpoints.exists():
            lines.append(f"  checkpoints  {self.directory.checkpoints}")
        commands = [*self.next_commands]
        for tracked in tracked_runs(trainer.loggers if trainer else []):
            commands += tracked.next_commands() or []  # None from a tracker that failed
        if commands:
            lines += ["next", *(f"  {command}" for command in commands)]
        return "\n".join(["", *lines])


def _callbacks_of(trainer: Trainer | None) -> list[Any]:
    return [] if trainer is None else [*trainer.callbacks]  # type: ignore[attr-defined]


def is_out_of_time(trainer: Trainer) -> bool:
    """Return whether Lightning's Timer, which `max_time` makes, has ended training."""
    timers = [each for each in _callbacks_of(trainer) if isinstance(each, Timer)]
    left = [timer.time_remaining() for timer in timers]
    return any(seconds is not None and seconds <= 0 for seconds in left)


def _has_stopped_early(trainer: Trainer) -> bool:
    """Return whether training ended before the steps and epochs that were planned."""
    if trainer.max_steps >= 0 and trainer.global_step >= trainer.max_steps:
        return False
    epochs = trainer.max_epochs
    return epochs in (None, -1) or trainer.current_epoch < epochs


def _results_of(trainer: Trainer) -> str:
    """Return the step, and what a validation has measured last."""
    values: dict[str, Any] = {}  # of an earlier part of the run, if this one has validated nothing
    for callback in _callbacks_of(trainer):
        if isinstance(callback, Metrics):
            values |= callback.row
    values |= trainer.callback_metrics
    metrics = {
        name: float(value)
        for name, value in values.items()
        if name.partition("/")[0] in ("val", "test")
    }
    texts = [f"{name} {value:.4f}" for name, value in metrics.items()]
    return ", ".join([f"step {trainer.global_step:,}", *texts])
