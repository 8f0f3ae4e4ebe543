import math
import random

import pytest
import torch

from lockstep.pages.noise import Measurement, NoiseScale, advice, steps_left
from lockstep.pages.sync_panel import SyncPanel


def gradient_norms(scale, size, small_batch, parts):
    """Measure `parts` gradients drawn around one of norm 1; a sample's has the noise `scale`."""
    true = torch.full((size,), size**-0.5)
    noise = torch.randn(parts, size) * math.sqrt(scale / size / small_batch)
    gradients = true + noise
    small = float(gradients.square().sum(1).mean())
    big = float(gradients.mean(0).square().sum())
    return Measurement(small_batch, small_batch * parts, small, big)


@pytest.mark.parametrize(("parts", "small_batch"), [(2, 1), (2, 8), (8, 4)])
@pytest.mark.parametrize("scale", [2.0, 50.0])
def test_a_known_noise_scale_is_found_to_5_percent(parts, small_batch, scale):
    torch.manual_seed(1)
    noise = NoiseScale(smoothing=0.995)
    for _ in range(300):
        noise.add(gradient_norms(scale, 20_000, small_batch, parts))
    assert noise.scale == pytest.approx(scale, rel=0.05)


def test_exact_expectations_give_the_exact_scale():
    def square(batch):  # E|G_B|^2 = |G|^2 + tr(Sigma) / B
        return 3 + 12 / batch

    measured = Measurement(2, 8, square(2), square(8))
    assert (measured.signal, measured.noise) == (pytest.approx(3), pytest.approx(12))


def test_signal_and_noise_are_averaged_before_they_are_divided():
    noise = NoiseScale(smoothing=0.5)
    for signal, trace in [(1, 8), (3, 8)]:
        noise.add(Measurement(1, 2, signal + trace, signal + trace / 2))
    assert noise.scale == pytest.approx(8 / ((1 * 0.25 + 3 * 0.5) / 0.75))


def test_one_measurement_counts_fully_at_any_smoothing():
    noise = NoiseScale(smoothing=0.999)
    noise.add(Measurement(1, 2, 9, 5))
    assert noise.scale == pytest.approx(8)


def test_the_average_forgets():
    noise = NoiseScale(smoothing=0.5)
    for trace in [1000] + 30 * [8]:
        noise.add(Measurement(1, 2, 1 + trace, 1 + trace / 2))
    assert noise.scale == pytest.approx(8, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_do_not_change_the_average(bad):
    noise = NoiseScale(smoothing=0.5)
    noise.add(Measurement(1, 2, 9, 5))
    noise.add(Measurement(1, 2, bad, 5))
    assert noise.scale == pytest.approx(8)


def test_a_signal_hidden_by_noise_gives_no_scale():
    noise = NoiseScale(smoothing=0.5)
    assert noise.scale is None
    noise.add(Measurement(1, 2, 9, 4))
    assert noise.scale is None


def test_averages_continue_after_a_save():
    one, other = NoiseScale(0.9), NoiseScale(0.9)
    draw = random.Random(1)
    measurements = [Measurement(1, 2, 9 + draw.random(), 5 + draw.random()) for _ in range(6)]
    for measurement in measurements[:3]:
        one.add(measurement)
    other.load_state_dict(one.state_dict())
    for measurement in measurements[3:]:
        one.add(measurement)
        other.add(measurement)
    assert other.scale == one.scale


@pytest.mark.parametrize(("scale", "batch", "share"), [(1e12, 1, 0.5), (1e-9, 1, 1), (8, 8, 0.75)])
def test_twice_the_batch_saves_half_the_steps_only_if_noise_dominates(scale, batch, share):
    assert steps_left(scale, batch) == pytest.approx(share)


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [(1234.5, "More devices still pay"), (10, "near the best trade-off"), (2, "hardly pay")],
)
def test_the_advice_follows_from_noise_scale_and_batch(scale, sentence):
    text = advice(scale, 12, 64)
    assert sentence in text
    assert "a step has 12" in text


def test_the_advice_has_as_many_digits_as_an_estimate_carries():
    assert "about 1,200 samples (77,000 tokens)" in advice(1234.5, 12, 64)
    assert "about 1 sample (64 tokens)" in advice(0.37, 12, 64)
    assert "not measurable" in advice(None, 12, 64)


class Scattered(torch.nn.Module):
    """Its gradient over B samples is the mean of B draws around a vector of norm 1."""

    def __init__(self, scale, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.sigma = math.sqrt(scale / size)

    def forward(self, tokens, _targets):
        size = len(self.weight)
        draws = size**-0.5 + self.sigma * torch.randn(len(tokens), size)
        return self.weight @ draws.mean(0)


@pytest.mark.slow
def test_a_run_of_a_model_with_a_known_noise_scale_finds_it_to_5_percent(fitted):
    panel = SyncPanel(every=1, smoothing=0.99, files=1)
    fitted(panel, model=Scattered(scale=6, size=2000), max_steps=150, val_every=150)
    assert panel.noise.scale == pytest.approx(6, rel=0.05)
