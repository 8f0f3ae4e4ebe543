"""The interval is the one of the paper, and holds however often one looks."""

import math

import numpy as np
import pytest

from lockstep.evidence.intervals import (
    FIRST_LOOK,
    PRIOR_VARIANCE,
    fewest_pairs,
    half_width,
    interval_of,
    pairs_needed,
)


def bayes_factor(values: np.ndarray) -> float:
    """Integrate both likelihoods numerically: mean = d sigma with d ~ N(0, g), prior 1/sigma."""
    sigmas = np.exp(np.linspace(-6, 6, 2001))  # even in log(sigma): the Haar prior is flat
    effects = np.linspace(-6, 6, 801) * math.sqrt(PRIOR_VARIANCE)
    prior = np.exp(-(effects**2) / (2 * PRIOR_VARIANCE))
    prior /= prior.sum()

    def likelihood(effect):
        scaled = values[None] / sigmas[:, None] - effect
        return (np.exp(-(scaled**2).sum(1) / 2) * sigmas ** -len(values)).sum()

    alternative = sum(
        weight * likelihood(effect) for weight, effect in zip(prior, effects, strict=True)
    )
    return alternative / likelihood(0.0)


def test_at_the_ends_of_the_interval_the_bayes_factor_is_one_in_alpha():
    values = np.array([0.9, 1.4, 0.7, 1.1, 1.6])
    interval = interval_of(values, 0.05)
    assert interval.low < 1.14 < interval.high
    for end in (interval.low, interval.high):
        assert bayes_factor(values - end) == pytest.approx(20, rel=1e-3)
    assert bayes_factor(values - interval.mean) < 1


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_of_many_sequences_of_pairs_few_ever_exclude_the_truth(alpha):
    values = np.random.default_rng(0).normal(0.3, 2.0, (2000, 60))
    wrong = np.zeros(2000, dtype=bool)
    for pairs in range(FIRST_LOOK, 61):
        means = values[:, :pairs].mean(1)
        deviations = values[:, :pairs].std(1, ddof=1)
        wrong |= np.abs(means - 0.3) > half_width(pairs, alpha) * deviations
    assert alpha / 8 < wrong.mean() < alpha


def test_too_few_pairs_can_not_say_anything():
    assert fewest_pairs(0.05) == 4
    assert fewest_pairs(0.001) == 5
    assert interval_of([1.0, 1.1, 1.0], 0.05).low == -math.inf
    assert not interval_of([1.0], 0.05).excludes_zero


def test_pairs_needed_are_the_first_whose_interval_is_narrow_enough():
    needed = pairs_needed(0.5, 1.0, 0.05)
    assert half_width(needed, 0.05) < 0.5 <= half_width(needed - 1, 0.05)
    assert pairs_needed(100.0, 1.0, 0.05) == fewest_pairs(0.05)
