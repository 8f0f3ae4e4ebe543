"""Tasks and their examples; reads them from JSON Lines files, and rejects bad ones by line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lockstep_gpt.data.permutation import permute
from lockstep_gpt.errors import UserError

CHOICE = "multiple choice"
CLOZE = "cloze"
EXACT = "exact match"
# The keys that a line of each kind must have; any line may also have an `id`.
KEYS = {
    CHOICE: ("context", "choices", "answer"),
    EXACT: ("context", "target", "until"),
    CLOZE: ("context", "target"),
}
ORDER_SEED = 0
BUILTIN = "builtin"  # the name that stands for the shipped tasks instead of a file


@dataclass(frozen=True)
class Example:
    """One question: each prompt is a context and the text to score or expect after it."""

    prompts: tuple[tuple[str, str], ...]  # one for each choice
    answer: int = 0  # index of the right one
    until: tuple[str, ...] = ()  # exact match: the answer ends before the first of these
    where: str = ""  # file and line, for messages


@dataclass(frozen=True)
class Task:
    """Examples of one kind.

    Attributes:
        name: the column is `tasks/NAME`.
        kind: `CHOICE`, `CLOZE`, or `EXACT`.
        examples: all of the same kind.
        cut_at: what is scored: `pair`, the text after the context; `document`, the same, with the
            end of a text before the context; `prefix`, then, what follows the beginning that all
            prompts of an example share; `suffix`, the end that they share.
        reports_cuts: whether to report contexts that are longer than the model's.
    """

    name: str
    kind: str
    examples: tuple[Example, ...]
    cut_at: str = "pair"
    reports_cuts: bool = True

    def first(self, count: int | None) -> Task:
        """Return the task with its first `count` examples; None: all."""
        if count is None:
            return self
        return replace(self, examples=self.examples[:count])

    def in_fixed_order(self) -> Task:
        """Return the task with its examples in a random order that is always the same.

        A file may be sorted, so its first examples may be of one sort.
        """
        count = len(self.examples)
        places = permute(np.arange(count), count, ORDER_SEED, 0).tolist()
        return replace(self, examples=tuple(self.examples[place] for place in places))


def read_tasks(names: Iterable[str]) -> list[Task]:
    """Read files of tasks, except `builtin`; raise a `UserError` for a bad or repeated one."""
    tasks = [read_task(Path(name)) for name in names if name != BUILTIN]
    refuse_repeated([task.name for task in tasks])
    return tasks


def refuse_repeated(names: list[str]) -> None:
    """Raise a `UserError` if two tasks have the same name, which is their column's."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two tasks are named {name}; rename one of the files")


def read_task(path: Path) -> Task:
    """Read the task in one file: one JSON object per line, all of the same kind.

    Raises:
        UserError: the file or one of its lines can't be used; names the line, rule, and remedy.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name a task file") from None
    examples = []
    first = ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        kind, example = _example(_values(line, where), where)
        first = first or kind
        if kind != first:
            _refuse(where, f"is {kind}, but the lines before are {first}; use a file for each")
        examples.append(example)
    if not examples:
        raise UserError(f"{path} has no examples; write one JSON object per line")
    return Task(path.stem, first, tuple(examples))


def _values(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        _refuse(where, "is not UTF-8; save the file as UTF-8")
    except RecursionError:
        _refuse(where, "is nested too deeply; write one flat object per line")
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.colno}"
        _refuse(where, f"is not JSON ({reason}); write one object per line")
    except ValueError:
        _refuse(where, "has a number with too many digits; write a shorter one")
    if not isinstance(values, dict):
        _refuse(where, f"is {_excerpt(values)}, not an object; write {{...}} on each line")
    return values


def _example(values: dict[str, Any], where: str) -> tuple[str, Example]:
    """Return the kind of a line, which its keys tell, and its example."""
    keys = {*values} - {"id"}
    kind = next((kind for kind, needed in KEYS.items() if keys == {*needed}), "")
    if not kind:
        sets = "; or ".join(", ".join(needed) for needed in KEYS.values())
        _refuse(where, f"has the keys {', '.join(sorted(keys)) or 'of nothing'}; give {sets}")
    if not isinstance(values["context"], str):
        _refuse(where, f"context={_excerpt(values['context'])} is not text; put it in quotes")
    if kind == CHOICE:
        return kind, _choice(values, where)
    _check_text("target", values["target"], where)
    until = values.get("until", ())
    if isinstance(until, str):
        until = (until,)
    if kind == EXACT and not (isinstance(until, list | tuple) and until):
        rule = 'is not a stop; give a text such as "\\n", or several'
        _refuse(where, f"until={_excerpt(until)} {rule}")
    for stop in until:
        _check_text("until", stop, where)
        if stop in values["target"]:
            _refuse(where, f"until={_excerpt(stop)} is in the target; remove it from one of them")
    return kind, Example(((values["context"], values["target"]),), 0, tuple(until), where)


def _choice(values: dict[str, Any], where: str) -> Example:
    choices = values["choices"]
    answer = values["answer"]
    if not isinstance(choices, list) or len(choices) < 2:
        _refuse(where, f"choices={_excerpt(choices)} must be a list of at least 2 texts; add them")
    for number, choice in enumerate(choices):
        _check_text(f"choices[{number}]", choice, where)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        last = len(choices) - 1
        _refuse(where, f"answer={_excerpt(answer)} is not the index of a choice; use 0 to {last}")
    return Example(tuple((values["context"], choice) for choice in choices), answer, where=where)


def _check_text(name: str, value: Any, where: str) -> None:
    if not isinstance(value, str) or not value:
        _refuse(where, f"{name}={_excerpt(value)} must be a text that is not empty; write one")
    if re.search(r"[\ud800-\udfff]", value):
        _refuse(where, f"{name} has half of a surrogate pair, which is no text; remove it")


def _excerpt(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."


def _refuse(where: str, rule: str) -> NoReturn:
    raise UserError(f"{where}: {rule}")
