"""When a comparison ends without an answer: after some pairs, tokens, or hours."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UserError

PAIRS = 20  # without another limit
HOUR = 3600.0  # seconds


@dataclass(frozen=True)
class Budget:
    """The limits of a comparison; None where there is none.

    Attributes:
        pairs: of runs.
        tokens: that all runs together train with.
        hours: of the comparison, all its parts together.
    """

    pairs: int | None = None
    tokens: float | None = None
    hours: float | None = None

    def refuse_too_small(self, fewest: int, tokens_of_pair: int) -> None:
        """Raise a `UserError` if the budget ends before `fewest` pairs, which have a verdict."""
        if self.pairs is not None and self.pairs < fewest:
            raise UserError(
                f"--pairs={self.pairs} are too few for any answer; give at least {fewest}"
            )
        if self.tokens is not None and not tokens_of_pair:
            raise UserError("--tokens needs data with tokens, in data.block_size; set --pairs")
        needed = fewest * tokens_of_pair
        if self.tokens is not None and self.tokens < needed:
            raise UserError(
                f"--tokens={self.tokens:.4g} is too small for any answer: {fewest} pairs of "
                f"{tokens_of_pair:,} tokens are the fewest; give at least {needed}"
            )

    def refuse_too_few_hours(self, fewest: int, pairs: int, seconds: float) -> None:
        """Raise a `UserError` if `fewest` pairs take too long, as `pairs` of them have shown."""
        if self.hours is None or pairs == 0 or pairs >= fewest:
            return
        needed = fewest * seconds / pairs / HOUR
        if needed > self.hours:
            raise UserError(
                f"--hours={self.hours:g} is too small for any answer: {fewest} pairs, the fewest, "
                f"take {needed:.2g} hours here; give more, and the same command continues"
            )

    def most_pairs(self, tokens_of_pair: int) -> int:
        """Return how many pairs may be trained; `tokens_of_pair` is for all sides."""
        limits = [PAIRS] if self.tokens is None and self.hours is None else []
        if self.pairs is not None:
            limits = [self.pairs]
        if self.tokens is not None:
            limits.append(int(self.tokens // tokens_of_pair))
        return min(limits, default=10**6)

    def has_time(self, pairs: int, seconds: float) -> bool:
        """Return whether another pair fits into the hours, after `pairs` of them in `seconds`."""
        if self.hours is None or pairs == 0:
            return True
        return seconds + seconds / pairs <= self.hours * HOUR
