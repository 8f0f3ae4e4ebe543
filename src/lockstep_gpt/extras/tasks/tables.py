"""A task's numbers as columns of metrics.csv, and as lines of a table."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep_gpt.extras.tasks.results import Number

# The task's first number has its name as column; these have a column of their own after it.
PLOTTED = ("acc_norm", "perplexity")


def columns_of(name: str, numbers: Mapping[str, Number]) -> dict[str, float]:
    """Return column -> value: `tasks/NAME`, and `tasks/NAME_perplexity` and the like."""
    first, *others = numbers
    more = {
        f"tasks/{name}_{number}": numbers[number].value for number in others if number in PLOTTED
    }
    return {f"tasks/{name}": numbers[first].value, **more}


def header(width: int) -> str:
    """Return the first line of a table, for names of at most `width` characters."""
    return f"{'task':<{width}}  {'examples':>8}  {'number':<11}  {'value':>10}"


def lines_of(name: str, width: int, count: int, numbers: Mapping[str, Number]) -> str:
    """Return a line for each of a task's numbers, with its standard error."""
    lines = []
    for place, (number, value) in enumerate(numbers.items()):
        if place == 0:
            task = f"{name:<{width}}  {count:>8,}"
        else:
            task = " " * (width + 10)
        error = "" if value.error is None else f" ± {format_value(value.error)}"
        lines.append(f"{task}  {number:<11}  {format_value(value.value):>10}{error}")
    return "\n".join(lines)


def format_value(value: float) -> str:
    """Return four decimals, or five digits of a large number."""
    if abs(value) >= 1000:
        return f"{value:.4g}"
    return f"{value:.4f}"
