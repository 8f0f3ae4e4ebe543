"""A sample of what the model has learned."""

import dataclasses
import logging

import pytest
from lightning import LightningDataModule

from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.prepare import prepare
from lockstep_gpt.tokens.sources.text import Text
from lockstep_gpt.tokens.tokenizer import ByteTokenizer
from lockstep_gpt.training.building import build_module
from lockstep_gpt.sample import Sample, prompt_from

SETTINGS = {
    "prompt": "def f",
    "length": 20,
    "temperature": 0.8,
    "tokenizer": ByteTokenizer(),
    "seed": 1337,
    "new_model": None,  # only ranks with shards need another one
}


def our_messages(caplog):
    package = "lockstep_gpt"
    return [record.message for record in caplog.records if record.name.startswith(package)]


@pytest.fixture
def sampled(new_run, caplog):
    """Fit a byte-level model and return its sample."""

    def fit(**changes):
        run = new_run(max_steps=2)
        run.module = build_module(run.config, run.schedule, ByteTokenizer())
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
    assert sampled() == sampled() != sampled(temperature=2.0)


class Numbers(ByteTokenizer):
    end_of_text = None


def test_a_model_trained_on_numbers_prints_no_sample(new_run, caplog):
    run = new_run(max_steps=2)
    caplog.set_level(logging.INFO, "lockstep_gpt")
    run.fit(Sample(**{**SETTINGS, "tokenizer": Numbers()}))
    assert our_messages(caplog) == []


def validation_text(folder, text):
    """Prepare a text, and return the data module that reads it."""
    (folder / "text.txt").write_text(text, "utf-8")
    prepared = prepare(Text(path=str(folder / "text.txt"), root=str(folder / "data")))
    return TokenDataModule(prepared, block_size=64, micro_size=2, seed=0)


def test_without_a_prompt_the_sample_continues_the_validation_text(new_run, caplog, tmp_path):
    run = new_run(max_steps=2, model={"block_size": 64})
    text = "One line has six words.\n" * 2000
    run = dataclasses.replace(run, data=validation_text(tmp_path, text))
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
