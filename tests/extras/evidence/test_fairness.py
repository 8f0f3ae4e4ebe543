"""What makes a comparison unfair is said; what makes it meaningless is refused."""

from __future__ import annotations

import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.evidence import fairness
from lockstep_gpt.extras.evidence.fairness import Setting
from lockstep_gpt.extras.evidence.measures import measure_of

VALUES = {
    "seed": 1,
    "model": {"block_size": 64, "n_embd": 32},
    "data": {"_target_": "", "val_tokens": 1024, "val_fraction": 0.02, "fingerprint": "a"},
    "optim": {"algorithm": "adamw", "lr": 0.001},
}


def setting(name, tokens=100, typed=(), **changes):
    """Return a side's setting; changes are GROUP__NAME=VALUE."""
    values = {
        group: dict(node) if isinstance(node, dict) else node for group, node in VALUES.items()
    }
    for place, value in changes.items():
        group, _, key = place.partition("__")
        values[group][key] = value
    return Setting(name, values, tokens, None if typed is None else frozenset(typed))


MUON = {"optim__algorithm": "muon", "optim__lr": 0.03}


@pytest.mark.parametrize(
    ("base", "variant", "line"),
    [
        ({}, {"tokens": 200}, "new and old train with 200 and 100 tokens"),
        ({}, {"data__val_tokens": 9}, "new and old validate on other windows: data.val_tokens=9"),
        ({}, {"model__block_size": 32}, "new and old validate on other windows: model.block_size"),
        ({}, {**MUON, "typed": ["optim", "optim.lr"]}, "new sets optim.lr=0.03, while old has its"),
        ({"typed": ["optim.lr"]}, MUON, "old sets optim.lr=0.001, while new has its default, 0.03"),
        ({"typed": None}, {**MUON, "typed": None}, "new and old have optim.lr=0.03 and 0.001, and"),
    ],
)
def test_an_unfair_comparison_is_pointed_out(base, variant, line):
    (warning,) = fairness.warnings([setting("old", **base), setting("new", **variant)])
    assert warning.startswith(line)


@pytest.mark.parametrize(
    "variant",
    [
        {"typed": ["optim"], **MUON},  # a choice that brings its own rate
        {"typed": ["optim.lr"], "optim__lr": 0.002},  # the rate is what they compare
        {"typed": ["model.n_embd"], "model__n_embd": 64},
    ],
)
def test_a_fair_comparison_is_not(variant):
    assert fairness.warnings([setting("old"), setting("new", **variant)]) == []


def test_both_rates_given_are_fair():
    sides = [setting("old", typed=["optim.lr"]), setting("new", typed=["optim.lr"], **MUON)]
    assert fairness.warnings(sides) == []


def test_losses_of_other_data_are_refused_but_not_accuracies():
    sides = [setting("old"), setting("new", data__fingerprint="b")]
    with pytest.raises(UserError, match="old and new have other data, a and b, so their val_loss"):
        fairness.refuse_other_data(sides, measure_of("val_loss"))
    fairness.refuse_other_data(sides, measure_of("mine/add"))


def test_sides_that_differ_only_in_name_are_the_same():
    sides = [setting("old"), setting("new", optim__lr=0.002), setting("newer", optim__lr=0.002)]
    sides[1].values["run_name"] = "another"
    with pytest.raises(UserError, match="new and newer have the same settings"):
        fairness.refuse_equal(sides)
