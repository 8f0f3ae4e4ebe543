"""How often a run will validate and save, counted without running it."""

import math


def validations_after(step: int, val_every: int, total_steps: int) -> int:
    """Return how many validations follow optimizer step `step`; the last step has one, too."""
    return _multiples_after(step, val_every, total_steps)


def saves_after(
    step: int, every: int | None, val_every: int, total_steps: int, *, keeps_best: bool
) -> int:
    """Return how many saves follow optimizer step `step`, if each validation is the best so far.

    A step that is saved for two reasons counts once. Those for their loss are at least
    `every` steps apart: see `Checkpoints.is_best`.
    """
    if every is None:
        return _multiples_after(step, val_every if keeps_best else total_steps, total_steps)
    if not keeps_best:
        return _multiples_after(step, every, total_steps)
    # Both counts start anew where a periodic save falls on a validation.
    cycle = math.lcm(every, val_every)
    apart = val_every * math.ceil(every / val_every)  # steps between saves for their loss

    def saves_until(last: int) -> int:
        cycles, rest = divmod(last, cycle)
        for_loss = cycles * (math.ceil(cycle / apart) - 1) + rest // apart
        return last // every + for_loss

    is_counted = total_steps % every == 0 or total_steps % cycle % apart == 0
    return saves_until(total_steps) - saves_until(step) + (not is_counted)


def _multiples_after(step: int, every: int, total_steps: int) -> int:
    """Return how many steps after `step` are multiples of `every`, or the last."""
    multiples = total_steps // every - step // every
    return multiples + (total_steps % every > 0)
