"""The law: a fit that finds known values, and an expected loss only where the law is valid."""

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.cluster import law
from lockstep_gpt.extras.cluster.law import (
    Law,
    departures,
    expected,
    fitted,
    left_out,
)
from lockstep_gpt.extras.cluster.size_lines import SizeLines, callbacks
from lockstep_gpt.launch import compose
from lockstep_gpt.run.callbacks.step import InReceipt

COUNTS = [98_304, 185_856, 331_776, 602_112, 995_328]


def config_of(*words):
    configs = []
    compose.run(list(words), lambda composed: configs.append(compose.resolve_config(composed)[1]))
    return configs[0]


def lines_of(config):
    """Return what the receipt says of a run's size."""
    lines = {}
    for callback in callbacks(config, None, 0, None):
        assert isinstance(callback, SizeLines)
        assert isinstance(callback, InReceipt)  # else the receipt would not ask it
        lines |= callback.receipt_lines()
    return lines


@pytest.mark.parametrize("known", [Law(0.7, 8.0, 0.22), Law(0.0, 5.0, 0.1), Law(1.0, 90.0, 0.5)])
def test_the_fit_finds_the_law_that_losses_follow(known):
    losses = [*map(known.loss, COUNTS)]
    fit = fitted(COUNTS, losses)
    assert fit.exponent == pytest.approx(known.exponent, abs=1e-9)
    assert fit.floor == pytest.approx(known.floor, abs=1e-6)
    assert left_out(COUNTS, losses) == pytest.approx(losses[-1], rel=1e-6)


def test_a_noise_of_half_a_percent_changes_a_twofold_prediction_by_less_than_three():
    known, generator = Law(0.6, 8.0, 0.2), np.random.default_rng(0)
    for _ in range(20):
        losses = [known.loss(count) * (1 + generator.normal(0, 0.005)) for count in COUNTS]
        assert fitted(COUNTS, losses).loss(2e6) == pytest.approx(known.loss(2e6), rel=0.03)


def test_no_floor_is_below_zero():
    losses = [3.0, 2.8, 2.5, 2.0, 1.2]  # faster than any power
    assert fitted(COUNTS, losses).floor == 0


@pytest.mark.parametrize(
    ("size", "outside"), [("300k", False), ("1M", False), ("50k", True), ("2M", True), ("1B", True)]
)
def test_a_size_beyond_those_that_were_run_is_extrapolated(size, outside):
    loss = expected(config_of("model=auto", f"size.weights={size}"))
    assert loss["basis"].startswith("extrapolated") == outside
    assert loss["basis"].endswith("from 5 runs of 98,304 to 995,328 weights")


def test_the_built_in_law_is_the_fit_of_its_runs():
    content = json.loads(law.OURS.read_text("utf-8"))
    counts, losses = ([run[name] for run in content["runs"]] for name in ("weights", "val_loss"))
    fit = fitted(counts, losses)
    assert content["is_valid"]
    for count, loss in zip(counts, losses, strict=True):
        stored = Law(content["floor"], content["factor"], content["exponent"])
        assert stored.loss(count) == pytest.approx(fit.loss(count), rel=1e-6)
        assert stored.loss(count) == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=quickstart"],
        ["model=auto", "optim.lr=0.01"],
        ["model=auto", "data=text", "data.path=somewhere"],
    ],
)
def test_of_another_run_no_loss_is_expected(words):
    config = config_of(*words)
    assert expected(config) is None
    assert "expected" not in lines_of(config)


def test_the_receipt_has_the_size_and_the_expected_loss():
    config = config_of("model=auto", "size.weights=300k")
    loss = expected(config)
    assert lines_of(config) == {
        "size": f"300k: {law.block_weights(config):,} weights in blocks of width "
        f"{config.model.n_embd}",
        "expected": f"validation loss {loss['val_loss']:.4f} nats per token, {loss['basis']}",
    }


def test_without_a_size_the_receipt_has_no_line_of_it():
    assert callbacks(config_of("experiment=quickstart"), None, 0, None) == []


def test_the_receipt_names_settings_outside_the_rules():
    config = config_of("model=auto", "optim.lr=0.01", "max_steps=100")
    assert departures(config) == ["max_tokens=null", "max_steps=100", "optim.lr=0.01"]
    assert lines_of(config)["size"] == (
        "1M: 995,328 weights in blocks of width 144; not set by its rules: max_tokens=null, "
        "max_steps=100, optim.lr=0.01"
    )


def test_a_law_of_one_s_own_is_read(tmp_path):
    file = tmp_path / "law.json"
    runs = [{"weights": 100}, {"weights": 10**9}]
    values = {"source": "text", "floor": 1.0, "factor": 0.0, "exponent": 0.5, "is_valid": True}
    file.write_text(json.dumps({**values, "runs": runs}))
    words = ["model=auto", "data=text", "data.path=there", f"size.law={file}"]
    basis = "interpolated from 2 runs of 100 to 1,000,000,000 weights"
    loss = {"val_loss": 1.0, "basis": basis}
    assert expected(config_of(*words)) == loss
    file.write_text(json.dumps({**values, "is_valid": False, "runs": runs}))
    assert expected(config_of(*words)) is None


def test_an_unreadable_law_is_rejected(tmp_path):
    (tmp_path / "law.json").write_text("no law")
    line = r"cannot be read .*; use a file that size_law has written"
    for file in (tmp_path / "law.json", Path("nowhere")):
        with pytest.raises(UserError, match=line):
            expected(config_of("model=auto", f"size.law={file}"))
