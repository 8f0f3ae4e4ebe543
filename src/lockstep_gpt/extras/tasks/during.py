"""The callback that measures tasks during training and at its end."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor

from lockstep_gpt.distributed.ranks import tensors_of_ranks
from lockstep_gpt.distributed.strategies import layout_of
from lockstep_gpt.extras.tasks.budget import affordable_counts, tokens_to_read
from lockstep_gpt.extras.tasks.builtin import builtin_tasks
from lockstep_gpt.extras.tasks.examples import BUILTIN, read_tasks, refuse_repeated
from lockstep_gpt.extras.tasks.results import numbers_of
from lockstep_gpt.extras.tasks.rows import Tokenized, batches, cut_line, tokenize_task
from lockstep_gpt.extras.tasks.scoring import evaluating, score_rows
from lockstep_gpt.extras.tasks.tables import columns_of, header, lines_of
from lockstep_gpt.extras.tasks.task_settings import check_settings
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.run.callbacks.step import StepCallback
from lockstep_gpt.settings import as_typed, counted

logger = logging.getLogger(__name__)

AT_END = 0.5  # part of the share that the last measurement may use


class Tasks(StepCallback):
    """Measures tasks every `every` steps and at the end, in the precision of training.

    Which examples a measurement uses depends only on files and settings, never on the clock: the
    first ones in a fixed order, as many as `share` affords. The run's weights are the same bits
    with and without this callback.

    Args:
        every: optimizer steps between measurements.
        share: largest part of the training time, from the number of tokens that the model reads;
            half of it is for the end. None: every measurement uses all examples.
        files: JSON Lines files, or `builtin` for the shipped tasks, which are the default.
    """

    def __init__(
        self, every: int = 250, share: float | None = 0.02, files: list[str] | None = None
    ) -> None:
        self.every = every
        self.share = share
        self.files = [BUILTIN] if files is None else files
        check_settings("callbacks.tasks", every, share, self.files)
        self.seconds = 0.0  # that this process spent on measurements
        self.row: dict[str, float] = {}  # newest value of each column
        self._tasks: list[Tokenized] = []
        self._ended = False  # whether the last measurement was made

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Read and tokenize the tasks; a `UserError` rejects them before training."""
        tasks = read_tasks(self.files)
        if BUILTIN in self.files:
            tasks = [*builtin_tasks(pl_module.config), *tasks]
        refuse_repeated([task.name for task in tasks])
        size = pl_module.config.model.block_size
        self._tasks = [
            tokenize_task(task.in_fixed_order(), pl_module.tokenizer, size) for task in tasks
        ]
        for line in (cut_line(task, size) for task in self._tasks):
            if line and trainer.is_global_zero:
                logger.warning("%s", line)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Find the callback that times training; say what will be measured."""
        super().on_train_start(trainer, pl_module)
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        self._timer = next(callback for callback in callbacks if isinstance(callback, Metrics))
        self._started = time.perf_counter()
        during = sum(self._counts(0, False))
        end = sum(self._counts(trainer.max_steps, True))
        if trainer.is_global_zero:
            self._announce(during, end)

    def _announce(self, during: int, end: int) -> None:
        total = sum(len(task.rows) for task in self._tasks)
        tasks = counted(len(self._tasks), "task")
        steps = counted(self.every, "step")
        plan = f"{tasks} with {counted(total, 'example')}, of which {during:,} every {steps}"
        logger.info("  %-9s  %s, %s at the end", "tasks", plan, f"{end:,}")  # as in the receipt
        if not end:
            share = as_typed(self.share)
            raise_it = "raise it, or set it to null for all"
            logger.warning("callbacks.tasks.share=%s affords no example; %s", share, raise_it)

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Measure if that is due."""
        if step % self.every == 0 or step == trainer.max_steps:
            row = self._measure(trainer, pl_module, step, step == trainer.max_steps)
            pl_module.log_dict(row, logger=False)  # for callbacks that monitor a column

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Measure a run that a callback stops early; reports are written later."""
        if trainer.should_stop and not self._ended:
            self._measure(trainer, pl_module, trainer.global_step, True)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Say how much of the time the tasks took."""
        total = time.perf_counter() - self._started
        if self.row and trainer.is_global_zero:
            logger.info("tasks took %.1f s of %.0f s", self.seconds, total)

    def in_summary(self, step: int) -> dict[str, Any]:
        """Return `summary.json`'s entries: the newest values, and what they cost."""
        return {**self.row, "tasks_seconds": self.seconds}

    def state_dict(self) -> dict[str, Any]:
        """Return the newest values: after a resume, a last measurement may afford fewer tasks."""
        return {"row": dict(self.row)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the newest values, for the summary."""
        self.row = dict(state_dict["row"])

    def _counts(self, step: int, is_end: bool) -> list[int]:
        """Return how many examples of each task to use after `step`."""
        costs = [[sum(row.cost for row in rows) for rows in task.rows] for task in self._tasks]
        if self.share is None:
            return affordable_counts(costs, None)
        if is_end:
            share = AT_END * self.share
            steps = step
        else:
            share = (1 - AT_END) * self.share
            steps = self.every
        trained = steps * self._timer.tokens_per_step
        return affordable_counts(costs, tokens_to_read(share, trained))

    def _measure(self, trainer: Any, pl_module: Any, step: int, is_end: bool) -> dict[str, float]:
        """Measure, log a row, and return it."""
        began = time.perf_counter()
        self._ended = is_end
        counts = self._counts(step, is_end)
        if not any(counts):
            return {}
        tables = measure_tasks(trainer, pl_module, self._tasks, counts)
        row: dict[str, float] = {}
        lines = []
        width = max(len(task.task.name) for task in self._tasks)
        for task, count, table in zip(self._tasks, counts, tables, strict=True):
            if count:
                numbers = numbers_of(task, count, table)
                row.update(columns_of(task.task.name, numbers))
                lines.append(lines_of(task.task.name, width, count, numbers))
        for file in trainer.loggers:
            file.log_metrics(row, step)
        if is_end and trainer.is_global_zero:
            logger.info("%s", "\n".join(["", header(width), *lines]))
        self.row.update(row)
        pause = time.perf_counter() - began
        self.seconds += pause
        self._timer.leave_out(pause)  # as with validation
        return row


def measure_tasks(
    trainer: Any, pl_module: Any, tasks: list[Tokenized], counts: list[int]
) -> list[Tensor]:
    """Return each task's table, (rows, 2), of its first `counts` examples, on every rank.

    Ranks take turns with the batches. A row is nonzero on one rank at most, so the sum of the
    ranks' tables rounds nothing. If the strategy shards the model, rank 0 measures a whole copy.
    """
    layout = layout_of(trainer.strategy)
    model = layout.whole_model(pl_module.model)  # every rank takes part
    rows = [
        [row for example in task_rows.rows[:count] for row in example]
        for task_rows, count in zip(tasks, counts, strict=True)
    ]
    if model is None:
        tables = [torch.zeros(len(task_rows), 2, dtype=torch.float64) for task_rows in rows]
    else:
        tables = []
        number = 0
        ranks = trainer.world_size if layout.has_replicas else 1
        with evaluating(model), trainer.precision_plugin.forward_context():
            for task_rows in rows:
                size = sum(1 for _ in batches(task_rows))
                mine = [at for at in range(size) if (number + at) % ranks == trainer.global_rank]
                tables.append(score_rows(model, task_rows, pl_module.tokenizer, mine))
                number += size
    if trainer.world_size > 1:  # without ranks, it stays on the host: Apple's GPUs lack float64
        together = tensors_of_ranks(torch.cat(tables).to(pl_module.device)).sum(dim=0).cpu()
        tables = [*torch.split(together, [*map(len, rows)])]
    return tables
