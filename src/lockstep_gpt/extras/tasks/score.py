"""`lockstep-gpt score RUN|CHECKPOINT`: a trained model's numbers on tasks."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep_gpt.config import Config
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.builtin import builtin_tasks
from lockstep_gpt.extras.tasks.core_metric import (
    CoreTask,
    core_tasks,
    read_core_task,
)
from lockstep_gpt.extras.tasks.examples import (
    BUILTIN,
    Task,
    read_tasks,
    refuse_repeated,
)
from lockstep_gpt.extras.tasks.results import Number, mean, numbers_of
from lockstep_gpt.extras.tasks.rows import Tokenized, cut_line, tokenize_task
from lockstep_gpt.extras.tasks.tables import header, lines_of
from lockstep_gpt.run.trained_model import load_for_inference, parser_of

Numbers = dict[str, Number]
Tokenize = Callable[[Task], Tokenized]
Score = Callable[[Tokenized], Numbers]
CORE = "CORE"  # its line in the table


def main(arguments: list[str]) -> int:
    """Print each task's numbers with standard errors, and CORE if its files are given."""
    options = _parser().parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit={options.limit} must be at least 1")
    names = options.tasks or []
    if not names and not options.core:
        names = [BUILTIN]
    tasks = read_tasks(names)  # now, so that mistakes are answered before torch is imported
    of_core = core_tasks(options.core) if options.core else []
    for core_task in of_core:
        read_core_task(core_task, options.limit)  # for mistakes; it is read again when it is scored
    checkpoint, model, config, tokenizer = load_for_inference(options.source)
    if BUILTIN in names:
        tasks = [*builtin_tasks(config), *tasks]
    labels = [*(task.name for task in tasks), *(core_task.name for core_task in of_core)]
    refuse_repeated(labels)
    tokenize, score = _scorer(model, config, tokenizer)
    ready = [tokenize(task.first(options.limit)) for task in tasks]
    width = max(map(len, labels))
    report: Callable[..., None] = _print_nothing if options.json else print
    report(checkpoint)
    report(header(width))
    values = {}
    for task in ready:
        name = task.task.name
        numbers = score(task)
        values[name] = as_values(len(task.rows), numbers)
        report(lines_of(name, width, len(task.rows), numbers))
    result: dict[str, Any] = {"checkpoint": str(checkpoint), "tasks": values}
    if of_core:
        measurements = _measure_core(of_core, options.limit, tokenize, score)
        result["core"] = _core(measurements, values, width, report)
    if options.json:
        print(json.dumps(result, allow_nan=False))
    return 0


def _print_nothing(*_: object) -> None:
    """Take the place of `print` if only JSON is wanted."""


def _measure_core(
    core_tasks: list[CoreTask], limit: int | None, tokenize: Tokenize, score: Score
) -> Iterator[tuple[CoreTask, int, Numbers]]:
    """Yield each task of CORE, how many examples it has, and its numbers."""
    for core_task in core_tasks:
        task = tokenize(read_core_task(core_task, limit))
        yield core_task, len(task.rows), score(task)


def _core(
    measurements: Iterable[tuple[CoreTask, int, Numbers]],
    values: dict[str, Any],
    width: int,
    report: Callable[..., None],
) -> float | None:
    """Add the tasks of CORE to `found`; return their mean centered accuracy."""
    centered = []
    for task, count, numbers in measurements:
        accuracy = numbers[task.number]
        error = accuracy.error and accuracy.error / (1 - task.guessing)
        centered.append(task.centered(accuracy.value))
        both = {"acc": accuracy, "centered": Number(centered[-1], error)}
        values[task.name] = as_values(count, both)
        report(lines_of(task.name, width, count, both))
    core = mean(centered).value
    report(lines_of(CORE, width, len(centered), {"centered": Number(core, None)}))
    return core if math.isfinite(core) else None


def _scorer(model: Any, config: Config, tokenizer: Tokenizer) -> tuple[Tokenize, Score]:
    """Return what tokenizes a task, and what measures the model on it."""
    from lockstep_gpt.extras.tasks.scoring import evaluating, score_rows

    size = config.model.block_size

    def tokenize(task: Task) -> Tokenized:
        ready = tokenize_task(task, tokenizer, size)
        line = cut_line(ready, size)
        if line:
            print(line, file=sys.stderr)
        return ready

    def score(task: Tokenized) -> Numbers:
        rows = [row for example in task.rows for row in example]
        with evaluating(model):
            return numbers_of(task, len(task.rows), score_rows(model, rows, tokenizer))

    return tokenize, score


def as_values(count: int, numbers: Numbers) -> dict[str, Any]:
    """Return plain values: examples, each number, and its error as `NAME_stderr`."""
    values: dict[str, Any] = {"examples": count}
    for name, number in numbers.items():
        values[name] = number.value if math.isfinite(number.value) else None
        values[f"{name}_stderr"] = number.error
    return values


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("score", "Measure a model on tasks.")
    add = parser.add_argument
    files = f"JSON Lines files, or {BUILTIN} for the shipped tasks (default: {BUILTIN})"
    add("--tasks", nargs="+", metavar="FILE", help=files)
    add("--core", type=Path, metavar="FOLDER", help="a folder with the tasks of the CORE metric")
    add("--limit", type=int, metavar="N", help="only the first N examples of each task")
    add("--json", action="store_true", help="print one line of JSON")
    return parser
