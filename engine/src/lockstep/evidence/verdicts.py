"""The answer of a comparison, as a sentence that one can quote.

It follows from a confidence interval of a mean that stays valid however often one looks at it.
The differences between paired runs are taken as independent and normal, with unknown mean and
variance. For each candidate mean m, a Bayes factor weighs "the mean is m" against "it is m plus
some standard deviations", with a normal prior on this number and the right Haar prior 1/sigma on
the scale. Where m is true, the factor is a nonnegative martingale, so by Ville's inequality it ever
exceeds 1/alpha with a probability of at most alpha. The interval contains all m whose factor does
not. Lai 1976, "On confidence sequences"; Wang and Ramdas 2023, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.evidence.runs import Measure
from lockstep.settings import counted

PRIOR_VARIANCE = 10.0  # of the mean in standard deviations: effects of 1 to 10 are decided early
FIRST_LOOK = 4  # pairs: after three, differences of real runs, which are skewed, mislead more often
MOST_PAIRS = 1_000_000

SMALL_LOSS = 0.01  # nats: a verdict says how many pairs this difference needs, without a margin
SMALL_SHARE = 0.01  # of the base's mean: the same for other measures

BETTER = "better"
WORSE = "worse"
SIMILAR = "similar"  # no difference as large as the margin
EQUAL = "equal"  # in each digit of each pair
OPEN = "open"


@dataclass(frozen=True)
class Interval:
    """A mean of paired differences, and what else it may be.

    Attributes:
        pairs: how many differences there are.
        mean: their mean.
        deviation: their standard deviation; NaN for one difference.
        low: lower end of the interval; -inf while there are too few pairs.
        high: upper end; inf while there are too few pairs.
    """

    pairs: int
    mean: float
    deviation: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the mean is certain."""
        return self.low > 0 or self.high < 0

    def is_within(self, margin: float) -> bool:
        """Return whether the mean is certainly less than `margin` away from zero."""
        return -margin < self.low and self.high < margin


def interval_of(differences: Sequence[float], alpha: float) -> Interval:
    """Return the interval that misses the true mean with a probability of at most `alpha`, ever.

    The probability is for all intervals together that one computes as pairs come in.
    """
    values = np.asarray(differences, dtype=np.float64)
    pairs = len(values)
    mean = float(values.mean())
    if pairs == 1:
        return Interval(pairs, mean, math.nan, -math.inf, math.inf)
    deviation = float(values.std(ddof=1))
    radius = half_width(pairs, alpha)
    if math.isfinite(radius):  # else 0 x inf, if all differences are equal
        radius *= deviation
    return Interval(pairs, mean, deviation, mean - radius, mean + radius)


def half_width(pairs: int, alpha: float) -> float:
    """Return half the interval's width in standard deviations of a difference.

    Infinite before the first look, and while no data could rule out any mean. With n pairs,
    r = 1 + n g, and Student's statistic t with n - 1 degrees of freedom, the Bayes factor is
    r^(-1/2) ((1 + t^2 / (n-1)) / (1 + t^2 / (r (n-1))))^(n/2); this solves it for 1/alpha.
    """
    if pairs < FIRST_LOOK:
        return math.inf
    ratio = 1 + pairs * PRIOR_VARIANCE
    limit = (ratio / alpha**2) ** (1 / pairs)
    if limit >= ratio:
        return math.inf
    return math.sqrt((pairs - 1) / pairs * (limit - 1) / (1 - limit / ratio))


def fewest_pairs(alpha: float) -> int:
    """Return the fewest pairs with a finite interval."""
    return next(pairs for pairs in range(1, MOST_PAIRS) if math.isfinite(half_width(pairs, alpha)))


def pairs_needed(difference: float, deviation: float, alpha: float) -> int:
    """Return how many pairs make the interval's half-width smaller than `difference`.

    Args:
        difference: above zero, in the unit of `deviation`.
        deviation: standard deviation of a pair's difference.
        alpha: the interval's probability of an error.
    """
    high = fewest_pairs(alpha)
    while half_width(high, alpha) * deviation >= difference and high < MOST_PAIRS:
        high *= 2
    low = high // 2  # half-widths fall with the pairs
    while low + 1 < high:
        middle = (low + high) // 2
        if half_width(middle, alpha) * deviation >= difference:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Verdict:
    """What the pairs so far say of one variant.

    Attributes:
        answer: BETTER, WORSE, SIMILAR, EQUAL, or OPEN.
        interval: of the difference, variant minus base.
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
        error: probability that any of its verdicts is ever wrong.
        variants: how many share this probability (Bonferroni's correction).
        margin: a difference below it doesn't matter; None: each does.
    """

    measure: Measure
    error: float
    variants: int
    margin: float | None = None

    @property
    def alpha(self) -> float:
        """The probability of a wrong interval that each variant may have."""
        return self.error / self.variants

    @property
    def fewest_pairs(self) -> int:
        """The fewest pairs with a verdict."""
        return fewest_pairs(self.alpha)

    def interval(self, base: Sequence[float], variant: Sequence[float]) -> Interval:
        """Return the interval of the difference, variant minus base."""
        pairs = zip(base, variant, strict=True)
        return interval_of([ours - theirs for theirs, ours in pairs], self.alpha)

    def verdict(
        self, base: str, variant: str, of_base: Sequence[float], of_variant: Sequence[float]
    ) -> Verdict:
        """Return the verdict on pairs of numbers, in the order of their seeds.

        Args:
            base: name of the base.
            variant: name of the variant.
            of_base: its numbers, at least one.
            of_variant: the variant's, with the same seeds.
        """
        interval = self.interval(of_base, of_variant)
        answer = self.answer(interval)
        small = self._small_difference(answer, interval, sum(of_base) / len(of_base))
        sentence = self._sentence(base, variant, answer, interval)
        pairs = counted(interval.pairs, "pair")
        return Verdict(answer, interval, f"{sentence}, {pairs}{self._outlook(interval, small)}")

    def answer(self, interval: Interval) -> str:
        """Return the answer that an interval gives."""
        if interval.pairs >= self.fewest_pairs and interval.mean == interval.deviation == 0:
            return EQUAL
        if interval.excludes_zero:
            is_better = (interval.mean < 0) == self.measure.lower_is_better
            return BETTER if is_better else WORSE
        if self.margin is not None and interval.is_within(self.margin):
            return SIMILAR
        return OPEN

    def _sentence(self, base: str, variant: str, answer: str, interval: Interval) -> str:
        measure = self.measure
        name = "" if measure.name == "val_loss" else f" in {measure.name}"
        if answer == EQUAL:
            return f"{variant} and {base} are equal{name} to the last digit: nothing has changed"
        if answer == SIMILAR:
            size = f"less than {self.margin:g}{measure.unit}"
            return f"{variant} and {base} differ{name} by {size} ({self._range(interval)})"
        if answer == OPEN:
            question = f"{variant} may be better or worse than {base}{name}"
            if not math.isfinite(interval.low):
                return f"{question}: an interval needs {self.fewest_pairs} pairs"
            mean = self._number(interval.mean, interval)
            return f"{question}: difference {mean}{measure.unit} ({self._range(interval)})"
        size = self._number(abs(interval.mean), interval)
        ends = self._range(interval)
        return f"{variant} is {answer} than {base}{name} by {size}{measure.unit} ({ends})"

    def _range(self, interval: Interval) -> str:
        """Return the interval; of a better or worse variant, the interval of the size."""
        ends = [interval.low, interval.high]
        if interval.high < 0:
            ends = [-interval.high, -interval.low]
        low, high = (self._number(end, interval) for end in ends)
        joint = "" if self.variants == 1 else "joint "
        return f"{joint}{100 * (1 - self.error):.4g}% CI {low} to {high}"

    def _number(self, value: float, interval: Interval) -> str:
        return rounded(value, interval.high - interval.low)

    def _small_difference(self, answer: str, interval: Interval, mean_of_base: float) -> float:
        """Return the difference for which a verdict says how many pairs it needs."""
        if self.margin is not None:
            return self.margin
        if answer == OPEN:
            return abs(interval.mean)
        if self.measure.unit == " nats":
            return SMALL_LOSS
        return SMALL_SHARE * abs(mean_of_base)

    def _outlook(self, interval: Interval, small: float) -> str:
        """Return how many pairs a small difference needs."""
        if interval.pairs < self.fewest_pairs or interval.deviation == 0 or small == 0:
            return ""
        needed = pairs_needed(small, interval.deviation, self.alpha)
        if needed >= MOST_PAIRS:
            return f"; at this noise {small:.2g} needs more than {MOST_PAIRS:,} pairs"
        return f"; at this noise {small:.2g} needs {counted(needed, 'pair')}"


def rounded(value: float, width: float) -> str:
    """Return a number with as many digits as an interval of this width supports."""
    digits = 4
    if 0 < width < math.inf:
        digits = max(0, 1 - math.floor(math.log10(width / 2)))
    return f"{value:,.{digits}f}"
