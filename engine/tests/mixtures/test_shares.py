"""From weights and epochs to shares."""

from fractions import Fraction

import pytest

from lockstep.errors import UserError
from lockstep.mixtures.shares import exact, phases

SIZES = {"code": 1000, "prose": 100}


def phases_of(data, sizes=SIZES, planned=1000):
    return phases(data.weights, data.epochs, data.schedule, sizes, planned)


def shares(data, planned=1000):
    return [(phase.start, [*map(str, phase.shares)]) for phase in phases_of(data, planned=planned)]


def test_weights_are_relative(corpora):
    data = corpora("code prose", weights={"code": 3.0, "prose": 1.0})
    assert shares(data) == [(0, ["3/4", "1/4"])]


def test_a_number_is_what_was_typed():
    assert exact(0.7) == Fraction(7, 10)
    assert exact(1e-3) == Fraction(1, 1000)


def test_epochs_come_before_weights_which_share_the_rest(corpora):
    data = corpora("code prose", weights={"code": 5.0}, epochs={"prose": 2.0})
    assert shares(data) == [(0, ["4/5", "1/5"])]


def test_epochs_of_all_sources_are_relative(corpora):
    data = corpora("code prose", epochs={"prose": 10.0, "code": 1.0})
    assert shares(data, planned=77) == [(0, ["1/2", "1/2"])]


def test_a_phase_divides_what_epochs_leave(corpora):
    later = [{"from": 0.75, "weights": {"poems": 1}}]
    data = corpora(weights={"code": 1.0}, epochs={"prose": 2.0}, schedule=later)
    sizes = {"code": 1000, "poems": 50, "prose": 100}
    first, second = phases_of(data, sizes)
    assert (first.start, *map(float, first.shares)) == (0, 0.8, 0, 0.2)
    assert (second.start, *map(float, second.shares)) == (750, 0, 0.8, 0.2)


def test_epochs_longer_than_the_run_are_rejected(corpora):
    data = corpora("code prose", weights={"code": 1.0}, epochs={"prose": 10.0})
    with pytest.raises(UserError, match="takes 1,000 windows, and the run has 1,000"):
        phases_of(data)
