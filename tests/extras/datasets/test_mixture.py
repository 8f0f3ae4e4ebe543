"""Each mistake is one line that names the setting, the rule, and the remedy."""

import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.datasets.mixture import Mixture, with_sources
from lockstep_gpt.tokens.sources.text import Text

TEXT, MIXTURE = (
    f"{source_class.__module__}.{source_class.__name__}" for source_class in (Text, Mixture)
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"weights": {"code": 0.0, "prose": 1.0}},
            r"data.weights.code=0.0 must be a number above 0",
        ),
        ({"weights": {"code": -1.0, "prose": 1.0}}, r"data.weights.code=-1.0 must be .* above 0"),
        ({"weights": {"code": float("inf")}}, r"data.weights.code=inf must be a number above 0"),
        ({"weights": {"code": 1.0}}, r"data.sources.prose has no share; set data.weights.prose or"),
        ({"weights": {"cod": 1.0}}, r"data.weights: there is no source cod; there are code, prose"),
        ({"epochs": {"code": 0.0}}, r"data.epochs.code=0.0 must be a number above 0"),
        (
            {"weights": {"code": 1.0, "prose": 1.0}, "epochs": {"code": 1.0}},
            r"data.epochs.code=1.0 and a weight are both set",
        ),
        ({"tokenizer_from": "cod"}, r"data.tokenizer_from: there is no source cod"),
        (
            {"val_fraction": 0.5},
            r"data.val_fraction=0.5 has no effect in a mixture; set data.sources",
        ),
        ({"schedule": [3]}, r"data.schedule\[0\]=3 must be of the form \{from: 0.8, weights"),
        (
            {"schedule": [{"from": 0.5, "weights": {"code": 0}}]},
            r"data.schedule\[0\].weights.code=0 must be a number above 0",
        ),
        (
            {"schedule": [{"from": 0.5, "weights": {"cod": 1}}]},
            r"data.schedule\[0\].weights: there is no source cod",
        ),
        ({"schedule": [{"from": 0.5, "weights": {}}]}, r"must have a weight for a source"),
        (
            {"schedule": [{"from": at, "weights": {"code": 1}} for at in (0.5, 0.5)]},
            r"data.schedule\[1\].from=0.5 must be a fraction of the run, above 0.5 and below 1",
        ),
        (
            {"sources": {"more": {"_target_": MIXTURE}}},
            r"data.sources.more names no source: choose",
        ),
        ({"sources": {"more": {}}}, r"data.sources.more names no source: choose one of .*stdlib"),
        (
            {"sources": {"a b": {"_target_": TEXT}}},
            r"'a b' is not a name for a source; use letters",
        ),
        ({"sources": {7: {"_target_": TEXT}}}, r"7 is not a name for a source"),
        (
            {"sources": {"more": {"_target_": TEXT, "val_tokens": 5}}},
            r"data.sources.more.val_tokens=5 has no effect in a mixture; set data.val_tokens",
        ),
        (
            {"sources": {"more": {"_target_": TEXT, "root": "x"}}},
            r"data.sources.more.root=x has no effect in a mixture; set data.root",
        ),
        (
            {"sources": {"more": {"_target_": TEXT, "val_fraction": 2}}},
            r"data.sources.more.val_fraction=2.0 must be below 1",
        ),
        (
            {"sources": {"more": {"_target_": TEXT, "pth": "x"}}},
            r"^data.sources.more.pth: Key 'pth' not in",
        ),
    ],
)
def test_a_mistake_is_one_line(changes, line, corpora):
    with pytest.raises(UserError, match=line) as caught:
        corpora("code prose", **changes)
    assert "\n" not in str(caught.value)


def test_a_mixture_without_sources_says_how_to_add_one(corpora):
    with pytest.raises(
        UserError, match=r"data=mixture has no sources; add some, such as data.sour"
    ):
        corpora("")


def test_a_schedule_needs_weights_to_begin_with(corpora):
    later = [{"from": 0.5, "weights": {"prose": 1}}]
    with pytest.raises(
        UserError, match=r"data.schedule changes weights, and data.weights has none"
    ):
        corpora("code prose", epochs={"code": 1.0}, schedule=later)


def test_short_forms_become_hydra_s():
    words = ["data=mixture", "data.sources.code=stdlib", "data.weights.code=0.7", "data.epochs.a=2"]
    assert with_sources(words) == [
        "data=mixture",
        "+data@data.sources.code=stdlib",
        "++data.weights.code=0.7",
        "++data.epochs.a=2",
    ]


@pytest.mark.parametrize(
    "word", ["data.sources.code.path=x", "data.sources={code: 1}", "data.path=x", "data=text"]
)
def test_other_words_stay(word):
    assert with_sources([word]) == [word]


def test_a_name_has_one_choice():
    with pytest.raises(UserError, match=r"data.sources.a=text: data.sources.a is stdlib already"):
        with_sources(["data.sources.a=stdlib", "data.sources.a=text"])
