"""A sample of what the model has learned."""

import logging

import pytest
from lightning import LightningDataModule
from lockstep_gpt.data import Tokens
from lockstep_gpt.sample import Sample, prompt_from

from lockstep.errors import UserError
from lockstep.tokens.sources.text import Text
from lockstep.tokens.tokenizer import ByteTokenizer

SETTINGS = {"prompt": "def f", "length": 20, "temperature": 0.8, "seed": 1337}


def our_messages(caplog):
    package = "lockstep_gpt"
    return [record.message for record in caplog.records if record.name.startswith(package)]


@pytest.fixture
def sampled(new_run, caplog):
    """Fit a byte-level model and return its sample."""

    def fit(**changes):
        run = new_run(max_steps=2)
        caplog.clear()
        caplog.set_level(logging.INFO, "lockstep_gpt")
        run.fit(Sample(**{**SETTINGS, **changes}))
        (text,) = our_messages(caplog)
        return text

    return fit


def test_a_sample_continues_the_prompt_when_training_ends(sampled):
    text = sampled()
    assert text.startswith("\nsample\n  | def f")
    assert len(text) > 30


def test_a_sample_depends_only_on_the_weights(sampled):
    assert sampled() == sampled() != sampled(temperature=0)


class Numbers(ByteTokenizer):
    end_of_text = None


def test_a_model_trained_on_numbers_prints_no_sample(new_run, caplog):
    run = new_run(max_steps=2)
    run.data.tokenizer = Numbers()
    caplog.set_level(logging.INFO, "lockstep_gpt")
    run.fit(Sample(**SETTINGS))
    assert our_messages(caplog) == []


def test_a_model_that_cannot_continue_a_text_prints_no_sample(new_run, caplog):
    run = new_run(max_steps=2)
    del run.module.new_model
    caplog.set_level(logging.INFO, "lockstep_gpt")
    run.fit(Sample(**SETTINGS))
    assert our_messages(caplog) == []


WRONG = {
    "temperature=-1 must be at least 0": {"temperature": -1},
    "length=many must be a whole number": {"length": "many"},
    "seed=-1 must be at least 0": {"seed": -1},
    "at_validation=1 must be true or false": {"at_validation": 1},
}


@pytest.mark.parametrize("line", WRONG)
def test_a_setting_out_of_range_is_one_line(line):
    with pytest.raises(UserError) as refused:
        Sample(**WRONG[line])
    assert str(refused.value) == line


def test_an_empty_prompt_is_refused_before_training(new_run):
    with pytest.raises(UserError, match="the prompt is empty"):
        new_run(max_steps=2).fit(Sample(prompt=""))


def validation_text(folder, text):
    """Return the data module that reads a text."""
    (folder / "text.txt").write_text(text, "utf-8")
    source = Text(path=str(folder / "text.txt"))
    return Tokens(source, block_size=64, batch=2, seed=0, root=str(folder / "data"))


def test_without_a_prompt_the_sample_continues_the_validation_text(new_run, caplog, tmp_path):
    run = new_run(max_steps=2, model={"block_size": 64})
    text = "One line has six words.\n" * 2000
    run.data = validation_text(tmp_path, text)
    caplog.set_level(logging.INFO, "lockstep_gpt")
    run.fit(Sample(**{**SETTINGS, "prompt": None}))
    assert our_messages(caplog)[0].startswith("\nsample\n  | One line has")


@pytest.mark.parametrize("ends", [" ", "\n"])
def test_the_prompt_is_three_readable_words_of_the_validation_text(tmp_path, ends):
    text = f"Wörter, die leicht folgen.{ends}" * 2000
    prompt = prompt_from(validation_text(tmp_path, text), ByteTokenizer())
    assert len(prompt.split()) == 3
    assert prompt in text


def test_the_prompt_begins_a_line_if_the_text_has_lines(tmp_path):
    data = validation_text(tmp_path, "One line has six words.\n" * 2000)
    assert prompt_from(data, ByteTokenizer()) == "One line has"


def test_data_of_the_user_s_own_has_no_prompt():
    assert prompt_from(LightningDataModule(), ByteTokenizer()) == ""
