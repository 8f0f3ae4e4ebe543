"""What the runs so far say: which variants need more pairs, and what the page shows."""

from __future__ import annotations

from lockstep.evidence.report import Comparison, page_of
from lockstep.evidence.runs import measure_of, sides_of
from lockstep.evidence.verdicts import Judge

LOSSES = [2.10, 2.13, 2.08, 2.11, 2.12]


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
