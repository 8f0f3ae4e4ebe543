"""Values that Hydra's grammar can't read without quotes."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.launch.quoting import quote_texts, quote_value


def parsed(word):
    return OverridesParser.create().parse_override(word).value()


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="$")))
def test_a_quoted_value_is_the_text_itself(value):
    assert parsed(quote_value(f"run_name={value}")) == value


@pytest.mark.parametrize("name", ["größe", "a#b", "a[1]", "a{1}", "it's", 'a"b', "step=5.ckpt"])
@pytest.mark.parametrize("setting", ["run_dir", "resume", "data.source.path"])
def test_a_path_needs_no_quotes_for_hydra(name, setting):
    (word,) = quote_texts([f"{setting}={name}"])
    assert parsed(word) == name


@pytest.mark.parametrize("name", ["1e3", "12e4567", "1.10", "1_000", "007", "7", "-3", ".5"])
@pytest.mark.parametrize("setting", ["run_name", "run_dir"])
def test_a_name_that_looks_like_a_number_is_not_rounded(name, setting):
    (word,) = quote_texts([f"{setting}={name}"])
    assert parsed(word) == name


@pytest.mark.parametrize("word", ["run_name=null", "run_name=a-1", "run_name=1,2", "optim.lr=1e-3"])
def test_other_values_keep_hydra_s_meaning(word):
    assert quote_texts([word]) == [word]


@pytest.mark.parametrize(
    "word", ["run_dir=runs/1", "run_dir=a,b", "run_dir='a=b'", "run_dir=${run_name}/1", "seed=1"]
)
def test_other_words_stay_as_typed(word):
    assert quote_texts([word]) == [word]


def test_a_run_can_have_any_name_of_a_folder(command):
    name = "größe [1] #{it's}"
    command.train(f"run_dir={name}", "max_steps=2", "schedule.warmup=0")
    assert command.summary(name)["status"] == "done"
    again = ["train", f"run_dir={name}", "resume=auto"]
    assert "is done" in command(*again).stdout
    assert "is done" in command("train", quote_value(again[1]), "resume=auto").stdout
