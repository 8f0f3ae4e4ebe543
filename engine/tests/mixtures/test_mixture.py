"""Each mistake is one line that names the setting, the rule, and the remedy."""

import pytest

from lockstep.errors import UserError


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"weights": {"code": 0.0, "prose": 1.0}},
            r"data.source.weights.code=0.0 must be a number above 0",
        ),
        (
            {"weights": {"code": -1.0, "prose": 1.0}},
            r"data.source.weights.code=-1.0 must be .* above 0",
        ),
        (
            {"weights": {"code": float("inf")}},
            r"data.source.weights.code=inf must be a number above 0",
        ),
        (
            {"weights": {"code": 1.0}},
            r"data.source.sources.prose has no share; set \+data.source.weights.prose",
        ),
        (
            {"weights": {"cod": 1.0}},
            r"data.source.weights: there is no source cod; there are code, prose",
        ),
        ({"epochs": {"code": 0.0}}, r"data.source.epochs.code=0.0 must be a number above 0"),
        (
            {"weights": {"code": 1.0, "prose": 1.0}, "epochs": {"code": 1.0}},
            r"data.source.epochs.code=1.0 and a weight are both set",
        ),
        ({"tokenizer_from": "cod"}, r"data.source.tokenizer_from: there is no source cod"),
        (
            {"val_fraction": 0.5},
            r"^val_fraction=0.5 has no effect in a mixture; set data.source.sources",
        ),
        (
            {"schedule": [3]},
            r"data.source.schedule\[0\]=3 must be of the form \{from: 0.8, weights",
        ),
        (
            {"schedule": [{"from": 0.5, "weights": {"code": 0}}]},
            r"data.source.schedule\[0\].weights.code=0 must be a number above 0",
        ),
        (
            {"schedule": [{"from": 0.5, "weights": {"cod": 1}}]},
            r"data.source.schedule\[0\].weights: there is no source cod",
        ),
        ({"schedule": [{"from": 0.5, "weights": {}}]}, r"must have a weight for a source"),
        (
            {"schedule": [{"from": at, "weights": {"code": 1}} for at in (0.5, 0.5)]},
            r"data.source.schedule\[1\].from=0.5 must be a fraction of the run, above 0.5 and "
            "below 1",
        ),
        ({"sources": {"more": 3}}, r"data.source.sources.more names no source: choose one, as in"),
        ({"sources": {"a b": {}}}, r"'a b' is not a name for a source; use letters"),
        ({"sources": {7: {}}}, r"7 is not a name for a source"),
        (
            {"sources": {"more": {"root": "x"}}},
            r"data.source.sources.more.root=x has no effect in a mixture; set data.root",
        ),
        (
            {"sources": {"more": {"fingerprint": "f"}}},
            r"data.source.sources.more.fingerprint=f has no effect in a mixture; set data.fing",
        ),
    ],
)
def test_a_mistake_is_one_line(changes, line, corpora):
    with pytest.raises(UserError, match=line) as caught:
        corpora("code prose", **changes)
    assert "\n" not in str(caught.value)


def test_a_mixture_without_sources_says_how_to_add_one(corpora):
    with pytest.raises(
        UserError, match=r"data=mixture has no sources; add some, such as \+source@data"
    ):
        corpora("")


def test_a_schedule_needs_weights_to_begin_with(corpora):
    later = [{"from": 0.5, "weights": {"prose": 1}}]
    with pytest.raises(
        UserError, match=r"data.source.schedule changes weights, and data.source.weights has none"
    ):
        corpora("code prose", epochs={"code": 1.0}, schedule=later)
