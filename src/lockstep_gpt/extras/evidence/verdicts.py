"""The answer of a comparison, as a sentence that one can quote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_gpt.extras.evidence.intervals import Interval, interval_of
from lockstep_gpt.extras.evidence.measures import Measure

SMALLEST = 0.01  # nats: the difference for which a verdict says how many pairs it needs
BETTER = "better"
WORSE = "worse"
NO_LARGER = "no larger difference"
OPEN = "open"


@dataclass(frozen=True)
class Verdict:
    """What the pairs so far say of one variant.

    Attributes:
        answer: BETTER or WORSE than the base, NO_LARGER than the margin, or OPEN.
        interval: of the difference variant minus base.
        text: the answer as a sentence.
    """

    answer: str
    interval: Interval
    text: str


@dataclass(frozen=True)
class Judge:
    """How a comparison decides.

    Attributes:
        measure: what it compares.
        alpha: probability of any wrong verdict.
        variants: how many share this probability (Bonferroni's correction).
        margin: a difference that does not matter, above zero; None: each does.
    """

    measure: Measure
    error: float
    variants: int
    margin: float | None = None

    @property
    def alpha(self) -> float:
        """The probability of a wrong interval that each variant may have."""
        return self.error / self.variants

    def verdict(
        self, base: str, variant: str, of_base: Sequence[float], of_variant: Sequence[float]
    ) -> Verdict:
        """Return the verdict on pairs of numbers, in the order of their seeds."""
        differences = [ours - theirs for ours, theirs in zip(of_variant, of_base, strict=True)]
        interval = interval_of(differences, self.alpha)
        answer = self._answer(interval)
        return Verdict(answer, interval, f"{variant} {answer} {base}")

    def _answer(self, interval: Interval) -> str:
        if interval.excludes_zero:
            is_better = (interval.mean < 0) == self.measure.lower_is_better
            return BETTER if is_better else WORSE
        if self.margin is not None and interval.is_within(self.margin):
            return NO_LARGER
        return OPEN
