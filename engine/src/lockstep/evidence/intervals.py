"""A confidence interval of a mean that stays valid however often one looks at it.

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

PRIOR_VARIANCE = 10.0  # of the mean in standard deviations: effects of 1 to 10 are decided early
FIRST_LOOK = 4  # pairs: after three, differences of real runs, which are skewed, mislead more often
MOST_PAIRS = 1_000_000


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
