import logging

import pytest

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.training.callbacks.sample import Sample
from lockstep_gpt.training.module import GPTModule


@pytest.fixture
def sampled(new_run, caplog):
    """Fit a model of bytes and return the sample that it writes."""

    def fit(**changes):
        run = new_run(max_steps=2)
        run.module = GPTModule(run.config, run.schedule, ByteTokenizer())
        caplog.clear()
        caplog.set_level(logging.INFO, "lockstep_gpt")
        run.fit(Sample(**{"prompt": "def f", "length": 20, "temperature": 0.8, **changes}))
        (text,) = (each.message for each in caplog.records if each.name.startswith("lockstep_gpt"))
        return text

    return fit


def test_a_sample_continues_the_prompt_when_training_ends(sampled):
    text = sampled()
    assert text.startswith("\nsample\n  | def f")
    assert len(text) > 30


def test_a_sample_follows_from_the_weights_alone(sampled):
    assert sampled() == sampled() != sampled(temperature=2.0)


def test_a_model_of_mere_numbers_has_nothing_to_show(new_run, caplog):
    caplog.set_level(logging.INFO, "lockstep_gpt")
    new_run(max_steps=2).fit(Sample("def f", 20, 0.8))
    assert not [each for each in caplog.records if each.name.startswith("lockstep_gpt")]
