"""Each answer in a sentence, and what it takes to decide."""

from __future__ import annotations

import pytest

from lockstep.errors import UserError
from lockstep.evidence.budget import Budget
from lockstep.evidence.comparison import Comparison
from lockstep.evidence.measures import measure_of
from lockstep.evidence.page import page_of
from lockstep.evidence.sides import sides_of
from lockstep.evidence.verdicts import Judge

LOSSES = [2.10, 2.13, 2.08, 2.11, 2.12]


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


def test_a_side_is_called_by_what_it_changes():
    sides = sides_of(["optim=adamw", "optim=muon optim.lr=0.01", "'data.path=my text'"])
    assert [side.name for side in sides] == ["adamw", "muon lr=0.01", "path=my text"]
    assert [side.folder for side in sides] == ["adamw", "muon-lr-0.01", "path-my-text"]
    assert sides[1].words == ("optim=muon", "optim.lr=0.01")
    same = sides_of(["optim.lr=1", "other.lr=1"])
    assert [side.name for side in same] == ["optim.lr=1", "other.lr=1"]
    assert sides_of(["", "a=b"])[0].name == "base"
    with pytest.raises(UserError, match=r"^--variant a='b: No closing quotation"):
        sides_of(["", "a='b"])


def test_a_variant_with_an_answer_trains_no_more():
    clear = {seed: 1.0 + seed / 1000 for seed in range(4)}
    base = dict.fromkeys(range(6), 2.0)
    unclear = {seed: 2.0 + (-1) ** seed / 100 for seed in range(6)}
    judge = Judge(measure_of("val_loss"), 0.05, 2)
    comparison = Comparison(judge, sides_of(["", "a=1", "b=2"]), [base, clear, unclear])
    assert comparison.open_variants() == [2]
    assert comparison.missing_seeds([2], range(8)) == [6, 7]


def test_a_page_shows_each_pair_and_the_interval_and_escapes_names():
    judge = Judge(measure_of("val_loss"), 0.05, 1, margin=0.02)
    numbers = [dict(enumerate(LOSSES)), {seed: loss - 0.1 for seed, loss in enumerate(LOSSES)}]
    comparison = Comparison(judge, sides_of(["a=<b>", "a=c"]), numbers)
    page = page_of({"warnings": ["1 < 2"], "comparisons": [comparison.as_values()]})
    assert page.count("<circle") == page.count("<tr>") - 1 == 5
    assert page.count("<polygon") == 1
    assert page.count("stroke-dasharray") == 2
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "Unfair? 1 &lt; 2" in page
    assert "<script" not in page


def test_a_budget_ends_a_comparison():
    assert Budget().most_pairs(10) == 20
    assert Budget(pairs=7, tokens=50).most_pairs(10) == 5
    assert Budget(hours=1).most_pairs(10) > 1000
    assert Budget(hours=1).has_time(3, 2600)
    assert not Budget(hours=1).has_time(3, 2800)
    with pytest.raises(UserError, match="give at least 40"):
        Budget(tokens=39).refuse_too_small(4, 10)
    with pytest.raises(UserError, match=r"--hours=1 is too small .* take 1.1 hours"):
        Budget(hours=1).refuse_too_few_hours(4, 1, 1000)
