"""What makes a comparison unfair is said; what makes it meaningless is refused."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.evidence import fairness
from lockstep.evidence.fairness import Setting
from lockstep.evidence.runs import measure_of
from lockstep.run.directory import RunDirectory
from lockstep.tokens.prepare import DECIDED

SIDES = ("old", "new")

VALUES = {
    "seed": 1,
    "model": {"block_size": 64, "n_embd": 32},
    "data": {"val_tokens": 1024, "source": {"_target_": "a", "num_proc": 1}},
    "optim": {"_target_": "adamw", "lr": 0.001},
}


def setting(name, tokens=100, typed=(), **changes):
    """Return a side's setting; changes are GROUP__NAME=VALUE."""
    values = copy.deepcopy(VALUES)
    for place, value in changes.items():
        *groups, key = place.split("__")
        functools.reduce(dict.__getitem__, groups, values)[key] = value
    return Setting(name, values, tokens, None if typed is None else frozenset(typed))


MUON = {"optim___target_": "muon", "optim__lr": 0.03}


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
    sides = [setting("old"), setting("new", data__source___target_="b")]
    line = "new and old have other data, data.source._target_=b instead of a, so their val_loss"
    with pytest.raises(UserError, match=line):
        fairness.refuse_other_data(sides, measure_of("val_loss"))
    fairness.refuse_other_data(sides, measure_of("mine/add"))


def test_the_way_to_the_same_data_is_no_difference_of_data():
    sides = [setting("old"), setting("new", data__source__num_proc=4, data__val_tokens=9)]
    fairness.refuse_other_data(sides, measure_of("val_loss"))


@pytest.mark.parametrize(
    ("tokens", "measure", "line"),
    [
        ("aaab", "val_loss", "old/0 and new/1 have other data, a and b, so their val_loss"),
        ("aabb", "mine/add", None),
        ("aabc", "mine/add", "new/0 and new/1 have other data, b and c, so their mine/add"),
    ],
)
def test_runs_with_other_tokens_than_their_settings_promise_are_refused(
    tokens, measure, line, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    groups = [{seed: RunDirectory(Path(side, str(seed))) for seed in (0, 1)} for side in SIDES]
    for run, fingerprint in zip([*groups[0].values(), *groups[1].values()], tokens, strict=True):
        run.path.mkdir(parents=True)
        run.note(DECIDED, {"source": "", "fingerprint": fingerprint})
    with pytest.raises(UserError, match=line) if line else nullcontext():
        fairness.refuse_other_tokens(groups, measure_of(measure))


def test_sides_that_differ_only_in_name_are_the_same():
    sides = [setting("old"), setting("new", optim__lr=0.002), setting("newer", optim__lr=0.002)]
    sides[1].values["run_name"] = "another"
    with pytest.raises(UserError, match="new and newer have the same settings"):
        fairness.refuse_equal(sides)
