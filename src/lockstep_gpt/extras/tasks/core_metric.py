"""CORE (Li et al. 2024, DataComp-LM, section 3.5): centered accuracy, averaged over its tasks.

Accuracy is centered so that 0 is guessing and 1 is perfect. The folder has `core.yaml`, whose list
`icl_tasks` describes each task; `eval_meta_data.csv` with the accuracy of guessing, in percent; and
the tasks' JSON Lines in `eval_data/`. These are the names in DCLM's published bundle.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.examples import CHOICE, CLOZE, Example, Task

# Kind of task -> keys of a line, and the number that is its accuracy.
KINDS = {
    "multiple_choice": (("query", "choices", "gold"), "acc_tokens"),
    "schema": (("context_options", "continuation", "gold"), "acc_tokens"),
    "language_modeling": (("context", "continuation"), "acc"),
}
ORDER_SEED = 1337  # nanochat's, of the order of examples, which is that of a limited number
SHOTS_SEED = 1234  # nanochat's; the number of the example is added


@dataclass(frozen=True)
class CoreTask:
    """A task of CORE."""

    name: str
    kind: str
    shots: int  # solved examples before each question
    delimiter: str  # between question and answer
    file: Path
    guessing: float  # accuracy of guessing, from 0 to below 1

    @property
    def number(self) -> str:
        """The name of its accuracy."""
        return KINDS[self.kind][1]

    def centered(self, accuracy: float) -> float:
        """Return the accuracy on a scale on which guessing is 0 and perfection 1."""
        return (accuracy - self.guessing) / (1 - self.guessing)


def core_tasks(folder: Path) -> list[CoreTask]:
    """Read which tasks a folder has; raise a `UserError` if a file is missing or can't be used."""
    try:
        description = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))
        table = (folder / "eval_meta_data.csv").read_text(encoding="utf-8")
    except OSError as error:
        _refuse(Path(error.filename), f"cannot be read: {error.strerror}; --core needs it")
    except (UnicodeDecodeError, yaml.YAMLError):
        _refuse(folder / "core.yaml", "is not YAML; download it again")
    rows = {
        row.get("Eval Task"): row.get("Random baseline")
        for row in csv.DictReader(table.splitlines())
    }
    nodes = description.get("icl_tasks") if isinstance(description, dict) else None
    if not isinstance(nodes, list) or not nodes:
        _refuse(folder / "core.yaml", "has no list `icl_tasks`; download it again")
    return [_core_task(folder, node, rows) for node in nodes]


def _core_task(folder: Path, node: Any, guessing: Mapping[Any, Any]) -> CoreTask:
    where = folder / "core.yaml"
    try:
        label = node["label"]
        kind = node["icl_task_type"]
        uri = node["dataset_uri"]
        shots = node["num_fewshot"]
        delimiter = node.get("continuation_delimiter", " ")
        if isinstance(shots, list):
            shots = shots[0]
        shots = int(shots)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        _refuse(where, f"has a task without a usable {error}: {str(node)[:60]}; add it")
    if kind not in KINDS:
        _refuse(where, f"has {label} of type {kind}, which is not one of {', '.join(KINDS)}")
    try:
        share = float(guessing[label]) / 100
    except (KeyError, TypeError, ValueError):
        _refuse(folder / "eval_meta_data.csv", f"has no random baseline of {label}; add it")
    if not (math.isfinite(share) and 0 <= share < 1):
        _refuse(folder / "eval_meta_data.csv", f"has a baseline of {label} outside 0 to 100")
    return CoreTask(label, kind, shots, delimiter, folder / "eval_data" / uri, share)


def read_core_task(core: CoreTask, limit: int | None = None) -> Task:
    """Read one task's examples with their solved ones, in nanochat's order.

    Raises:
        UserError: the file is missing, empty, or has a line that can't be used.
    """
    try:
        lines = core.file.read_bytes().splitlines()
    except OSError as error:
        _refuse(core.file, f"cannot be read: {error.strerror}; --core needs it")
    items = [
        (f"{core.file}:{number}", _item(core, line, f"{core.file}:{number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if len(items) <= core.shots:
        rule = f"has {len(items)} examples, too few for {core.shots} solved ones before another"
        _refuse(core.file, f"{rule}; download it again")
    random.Random(ORDER_SEED).shuffle(items)
    items = items[: max(limit or len(items), core.shots + 1)]
    examples = tuple(
        _example(core, [item for _, item in items], at, where)
        for at, (where, _) in enumerate(items)
    )
    kind = CLOZE if core.kind == "language_modeling" else CHOICE
    cut_at = {"multiple_choice": "prefix", "schema": "suffix"}.get(core.kind, "document")
    return Task(core.name, kind, examples[:limit], cut_at)


def _item(core: CoreTask, line: bytes, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _refuse(where, f"is not JSON ({type(error).__name__}); download the file again")
    keys = KINDS[core.kind][0]
    if not isinstance(item, dict) or not {*keys} <= {*item}:
        _refuse(where, f"lacks one of {', '.join(keys)}, which {core.kind} needs")
    for key in {*keys} & {"query", "context", "continuation"}:
        if not isinstance(item[key], str):
            _refuse(where, f"{key}={item[key]} is not text; put it in quotes")
    if core.kind != "language_modeling":
        choices = item["context_options" if core.kind == "schema" else "choices"]
        gold = item["gold"]
        is_list = isinstance(choices, list) and len(choices) > 1
        if not is_list or not all(isinstance(choice, str) for choice in choices):
            _refuse(where, "has no list of at least 2 texts to choose from; add them")
        if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
            _refuse(where, f"gold={gold} is not the index of a choice; use 0 to {len(choices) - 1}")
    return item


def _example(core: CoreTask, items: list[dict[str, Any]], at: int, where: str) -> Example:
    """Return one example, after solved ones that are drawn from all others."""
    others = [place for place in range(len(items)) if place != at]
    drawn = random.Random(SHOTS_SEED + at).sample(others, core.shots)
    before = "".join(f"{_solved(core, items[place])}\n\n" for place in drawn)
    item = items[at]
    if core.kind == "multiple_choice":
        prompt = f"{before}{item['query']}{core.delimiter}"
        return Example(
            tuple((prompt, choice) for choice in item["choices"]), item["gold"], where=where
        )
    if core.kind == "schema":
        prompts = (
            (f"{before}{choice}{core.delimiter}", item["continuation"])
            for choice in item["context_options"]
        )
        return Example(tuple(prompts), item["gold"], where=where)
    prompt = f"{before}{item['context'].strip()}{core.delimiter}"
    return Example(((prompt, item["continuation"]),), where=where)


def _solved(core: CoreTask, item: dict[str, Any]) -> str:
    if core.kind == "multiple_choice":
        question = item["query"]
        answer = item["choices"][item["gold"]]
    elif core.kind == "schema":
        question = item["context_options"][item["gold"]]
        answer = item["continuation"]
    else:
        question = item["context"].strip()
        answer = item["continuation"]
    return f"{question}{core.delimiter}{answer}"


def _refuse(where: Path | str, rule: str) -> NoReturn:
    """Raise a `UserError` about a file, or about FILE:LINE."""
    colon = "" if isinstance(where, Path) else ":"
    raise UserError(f"{where}{colon} {rule}")
