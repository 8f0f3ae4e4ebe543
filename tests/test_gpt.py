"""The models: shapes, causality, the head, and what one that has learned nothing predicts."""

import importlib.util
import math

import pytest
import torch

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
VOCAB = 100
FILES = {"gpt": "GPT", "modern": "ModernGPT"}  # a file that you delete has no tests


def kinds():
    """Return the classes of the models that are still here."""
    found = []
    for file, name in FILES.items():
        if importlib.util.find_spec(f"lockstep_gpt.{file}"):
            kind = getattr(importlib.import_module(f"lockstep_gpt.{file}"), name, None)
            found += [kind] if kind else []
    return found


@pytest.fixture(params=kinds(), ids=lambda kind: kind.__name__)
def model(request):
    torch.manual_seed(0)
    return request.param(VOCAB, **SHAPE).eval()


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))


def drawn(model):
    """Draw all weights, also those that begin at zero, so that logits depend on tokens."""
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def test_there_are_logits_for_each_token_of_the_vocabulary(model, tokens):
    assert model(tokens).shape == (3, 16, VOCAB)
    assert model(tokens, tokens).shape == ()


def test_the_first_loss_is_that_of_guessing(model, tokens):
    loss = model(tokens, tokens.roll(-1, 1)).item()
    assert loss == pytest.approx(math.log(VOCAB), abs=0.1)


def test_no_token_sees_a_later_one(model, tokens):
    before = drawn(model)(tokens)
    tokens[:, 9] = (tokens[:, 9] + 1) % VOCAB
    after = model(tokens)
    assert torch.equal(after[:, :9], before[:, :9])
    assert not torch.equal(after[:, 9:], before[:, 9:])


def test_only_the_head_of_gpt_2_is_its_embedding(model):
    is_tied = model.head is model.token_embedding.weight
    assert is_tied == (type(model).__name__ == "GPT")


def test_a_text_goes_on_as_its_seed_and_its_temperature_say(model, tokens):
    drawn(model)

    def continued(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(tokens[:, :5], 20, generator=generator, **options)

    first = continued(1)
    assert first.shape == (3, 25)
    assert torch.equal(first[:, :5], tokens[:, :5])
    assert torch.equal(first, continued(1))
    assert not torch.equal(first, continued(2))
    assert torch.equal(continued(1, temperature=0), continued(2, temperature=0))
