"""How many examples a measurement may use: arithmetic on tokens, so no clock changes a result."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Tokens that a model reads in the time in which it trains on one. Forward and backward take three
# times the operations of forward alone (Kaplan et al. 2020); padding takes some of that here.
FORWARD = 2.5
FEWEST = 4  # examples of a task; with fewer, it isn't measured


def tokens_to_read(share: float, trained: int) -> int:
    """Return how many tokens cost `share` of training on `trained` tokens."""
    return int(share * trained * FORWARD)


def affordable_counts(costs: Sequence[Sequence[int]], budget: int | None) -> list[int]:
    """Return how many examples of each task to use, from its first.

    The variance of a mean is inverse to the number of examples, so the sum of the variances is
    smallest if this number is proportional to 1 / sqrt(cost of an example) (Neyman 1934).

    Args:
        costs: tokens of each example of each task, which has at least one.
        budget: tokens for all tasks together; None: no limit.
    """
    counts = [*map(len, costs)]
    totals = [*map(sum, costs)]
    if budget is None or sum(totals) <= budget:
        return counts
    roots = [math.sqrt(total / count) for total, count in zip(totals, counts, strict=True)]
    chosen = [*counts]
    left = float(budget)
    limited = {*range(len(costs))}  # tasks that aren't affordable as a whole
    while limited:
        scale = left / sum(roots[task] for task in limited)
        complete = {task for task in limited if totals[task] <= scale * roots[task]}
        if not complete:
            break
        left -= sum(totals[task] for task in complete)
        limited -= complete
    for task in limited:
        count = _affordable_prefix(costs[task], scale * roots[task])
        too_few = count < min(FEWEST, counts[task])
        chosen[task] = 0 if too_few else count
    return chosen


def _affordable_prefix(costs: Sequence[int], budget: float) -> int:
    """Return how many of `costs`, from the first, add up to at most `budget`."""
    spent = 0
    for count, cost in enumerate(costs):
        spent += cost
        if spent > budget:
            return count
    return len(costs)
