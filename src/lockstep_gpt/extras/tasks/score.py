"""`lockstep-gpt score RUN|CHECKPOINT`: a trained model's numbers on tasks."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
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
from lockstep_gpt.extras.tasks.rows import Tokenized, cut_line, tokenized
from lockstep_gpt.extras.tasks.tables import header, lines_of
from lockstep_gpt.run.checkpoint import find_checkpoint
from lockstep_gpt.run.trained_model import load_model, parser_of

Numbers = dict[str, Number]
CORE = "CORE"  # its line in the table


def main(arguments: list[str]) -> int:
    """Print each task's numbers with standard errors, and CORE if its files are given."""
    options = _parser().parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit={options.limit} must be at least 1")
    names = options.tasks or ([] if options.core else [BUILTIN])
    tasks = read_tasks(names)  # now, so that mistakes are answered before torch is imported
    listed = core_tasks(options.core) if options.core else []
    for about in listed:
        read_core_task(about, options.limit)  # for mistakes; each is read again when it is scored
    checkpoint = find_checkpoint(options.source)
    model, config, tokenizer = load_model(checkpoint)
    if BUILTIN in names:
        tasks = [*builtin_tasks(config), *tasks]
    labels = [*(each.name for each in tasks), *(each.name for each in listed)]
    refuse_repeated(labels)
    tokenize, score = _scorer(model, config, tokenizer)
    ready = [tokenize(task.first(options.limit)) for task in tasks]
    width = max(map(len, labels))
    report: Callable[..., None] = print if not options.json else lambda *_: None
    report(checkpoint)
    report(header(width))
    found = {}
    for task, each in zip(tasks, ready, strict=True):
        numbers = score(each)
        found[task.name] = as_values(len(each.rows), numbers)
        report(lines_of(task.name, width, len(each.rows), numbers))
    result: dict[str, Any] = {"checkpoint": str(checkpoint), "tasks": found}
    if listed:
        scores = ((each, tokenize(read_core_task(each, options.limit))) for each in listed)
        told = ((each, len(task.rows), score(task)) for each, task in scores)
        result["core"] = _core(told, found, width, report)
    if options.json:
        print(json.dumps(result, allow_nan=False))
    return 0


def _core(
    told: Iterable[tuple[CoreTask, int, Numbers]],
    found: dict[str, Any],
    width: int,
    report: Callable[..., None],
) -> float | None:
    """Add the tasks of CORE to `found`; return their mean centered accuracy."""
    centered = []
    for task, count, numbers in told:
        accuracy = numbers[task.number]
        error = accuracy.error and accuracy.error / (1 - task.guessing)
        centered.append(task.centered(accuracy.value))
        both = {"acc": accuracy, "centered": Number(centered[-1], error)}
        found[task.name] = as_values(count, both)
        report(lines_of(task.name, width, count, both))
    core = mean(centered).value
    report(lines_of(CORE, width, len(centered), {"centered": Number(core, None)}))
    return core if math.isfinite(core) else None


def _scorer(
    model: Any, config: Config, tokenizer: Tokenizer
) -> tuple[Callable[[Task], Tokenized], Callable[[Tokenized], Numbers]]:
    """Return what tokenizes a task, and what measures the model on it."""
    import torch

    from lockstep_gpt.extras.tasks.scoring import evaluating, scored

    model.to("cuda" if torch.cuda.is_available() else "cpu")
    size = config.model.block_size

    def tokenize(task: Task) -> Tokenized:
        ready = tokenized(task, tokenizer, size)
        if line := cut_line(ready, size):
            print(line, file=sys.stderr)
        return ready

    def score(task: Tokenized) -> Numbers:
        rows = [row for each in task.rows for row in each]
        with evaluating(model):
            return numbers_of(task, len(task.rows), scored(model, rows, tokenizer))

    return tokenize, score


def as_values(count: int, numbers: Numbers) -> dict[str, Any]:
    """Return plain values: examples, each number, and its error as `NAME_stderr`."""
    values: dict[str, Any] = {"examples": count}
    for name, each in numbers.items():
        values[name] = each.value if math.isfinite(each.value) else None
        values[f"{name}_stderr"] = each.error
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
