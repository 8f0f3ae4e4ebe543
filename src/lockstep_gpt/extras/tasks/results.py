"""From what the model says about each row to a task's numbers, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep_gpt.extras.tasks.examples import CHOICE, CLOZE, Example
from lockstep_gpt.extras.tasks.rows import Row, Tokenized

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Number:
    """A mean over examples, and its standard error; None for a single example."""

    value: float
    error: float | None


def numbers_of(tokenized: Tokenized, count: int, table: Tensor) -> dict[str, Number]:
    """Return a task's numbers under lm-eval's names; the first is the one that is plotted.

    Args:
        tokenized: the task.
        count: how many of its examples were measured, from the first.
        table: of their rows, (rows, 2), as `scored` returns it.

    For multiple choice, `acc` is the share of examples whose right choice has the highest
    log-likelihood; `acc_norm` divides it by characters, `acc_bytes` by bytes, `acc_tokens` (for
    CORE) by tokens. For cloze tasks, `acc` is the share of targets that are the greedy
    continuation, and `perplexity` is exp of the mean negative log-likelihood of a target.
    """
    task = tokenized.task
    values = table.tolist()
    at = 0
    values_of: dict[str, list[float]] = {}
    for example, rows in zip(task.examples[:count], tokenized.rows[:count], strict=True):
        of_rows = values[at : at + len(rows)]
        at += len(rows)
        if task.kind == CHOICE:
            answers = _right_choices(example, rows, [scores[0] for scores in of_rows])
        elif task.kind == CLOZE:
            answers = {"acc": of_rows[0][1], "log_likelihood": of_rows[0][0]}
        else:
            answers = {"exact_match": of_rows[0][1]}
        for name, answer in answers.items():
            values_of.setdefault(name, []).append(answer)
    if task.cut_at == "pair":
        values_of.pop("acc_tokens", None)  # CORE's
    numbers = {name: mean(scores) for name, scores in values_of.items()}
    if "log_likelihood" in numbers:
        numbers["perplexity"] = _perplexity(numbers.pop("log_likelihood"))
    return numbers


def _right_choices(
    example: Example, rows: Sequence[Row], likelihoods: Sequence[float]
) -> dict[str, float]:
    """Return 1 for each way to normalize that ranks the right choice first, else 0."""
    texts = [text for _, text in example.prompts]
    sizes = {
        "acc": [1] * len(texts),
        "acc_norm": [len(text) for text in texts],
        "acc_bytes": [len(text.encode()) for text in texts],
        "acc_tokens": [len(row.ids) - row.start for row in rows],
    }
    scores = {
        name: [score / length for score, length in zip(likelihoods, lengths, strict=True)]
        for name, lengths in sizes.items()
    }
    return {name: float(_best(score) == example.answer) for name, score in scores.items()}


def _perplexity(likelihood: Number) -> Number:
    """Return exp of minus the mean, and its error to first order: the product with the mean's."""
    value = math.exp(min(-likelihood.value, 709.0))  # near the largest float
    if likelihood.error is None:
        return Number(value, None)
    return Number(value, value * likelihood.error)


def mean(values: Sequence[float]) -> Number:
    """Return the mean and the standard error of the mean, as lm-eval computes it.

    The sums are exact (`math.fsum`), so the order of the values doesn't matter.
    """
    count = len(values)
    if not all(map(math.isfinite, values)):
        return Number(math.nan, None)
    average = math.fsum(values) / count
    if count < 2:
        return Number(average, None)
    squares = math.fsum((value - average) ** 2 for value in values)
    return Number(average, math.sqrt(squares / (count - 1)) / math.sqrt(count))


def _best(scores: Sequence[float]) -> int:
    """Return the index of the first highest score; -1, no choice, if one isn't a number."""
    if any(map(math.isnan, scores)):
        return -1
    return scores.index(max(scores))
