"""The interval holds however often one looks, and each answer is a sentence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.evidence.runs import measure_of
from lockstep.evidence.verdicts import (
    FIRST_LOOK,
    PRIOR_VARIANCE,
    Judge,
    fewest_pairs,
    half_width,
    interval_of,
    pairs_needed,
)

LOSSES = [2.10, 2.13, 2.08, 2.11, 2.12]


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


def verdict(differences, measure="val_loss", variants=1, margin=None):
    """Return the sentence on a variant with these differences from the base."""
    judge = Judge(measure_of(measure), 0.05, variants, margin)
    base = LOSSES[: len(differences)]
    ours = [loss + difference for loss, difference in zip(base, differences, strict=True)]
    return judge.verdict("adamw", "muon", base, ours).text


@pytest.mark.parametrize(
    ("differences", "options", "sentence"),
    [
        (
            [-0.14, -0.143, -0.142, -0.145],
            {},
            "muon is better than adamw by 0.1425 nats (95% CI 0.1357 to 0.1493), 4 pairs; at this "
            "noise 0.01 needs 4 pairs",
        ),
        (
            [0.14, 0.143, 0.142, 0.145],
            {"variants": 3},
            "muon is worse than adamw by 0.142 nats (joint 95% CI 0.132 to 0.153), 4 pairs; at "
            "this noise 0.01 needs 5 pairs",
        ),
        (
            [0.14, 0.143, 0.142, 0.145],
            {"measure": "mine/add"},
            "muon is better than adamw in mine/add by 0.1425 (95% CI 0.1357 to 0.1493), 4 pairs; "
            "at this noise 0.021 needs 4 pairs",
        ),
        (
            [0.001, -0.001, 0.0, 0.0005, -0.0005],
            {"margin": 0.01},
            "muon and adamw differ by less than 0.01 nats (95% CI -0.0019 to 0.0019), 5 pairs; at "
            "this noise 0.01 needs 4 pairs",
        ),
        (
            [0.03, -0.01, 0.02, 0.01],
            {},
            "muon may be better or worse than adamw: difference 0.012 nats (95% CI -0.043 to "
            "0.068), 4 pairs; at this noise 0.012 needs 27 pairs",
        ),
        (
            [0.03, -0.01],
            {},
            "muon may be better or worse than adamw: an interval needs 4 pairs, 2 pairs",
        ),
        (
            [0.0] * 4,
            {},
            "muon and adamw are equal to the last digit: nothing has changed, 4 pairs",
        ),
    ],
)
def test_each_answer_is_a_sentence(differences, options, sentence):
    assert verdict(differences, **options) == sentence
