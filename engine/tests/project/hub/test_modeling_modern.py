"""The modeling file of modern exports: padding changes nothing, and training works."""

import pytest
import torch
from lockstep_gpt.modern import ModernGPT
from transformers import AutoModelForCausalLM

from lockstep.tokens.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def theirs(shaped, folder_of):
    folder = folder_of(shaped(kind=ModernGPT), ByteTokenizer())
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.parametrize("left", [True, False], ids=["before", "behind"])
def test_padding_changes_no_logits(theirs, left):
    tokens = torch.randint(256, (2, 9))
    padding = torch.randint(256, (2, 4))
    padded = torch.cat([padding, tokens] if left else [tokens, padding], dim=1)
    place = slice(4, 13) if left else slice(9)
    mask = torch.zeros_like(padded)
    mask[:, place] = 1
    logits = theirs(padded, attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, place], theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_more_than_the_context_is_rejected(theirs):
    with pytest.raises(ValueError, match="33 tokens are more than block_size=32"):
        theirs(torch.zeros(1, 33, dtype=torch.int64))


def test_the_head_makes_the_logits_of_the_last_hidden_state(theirs):
    """As trl does, which looks for it in the output of `base_model`."""
    found = theirs.base_model(torch.randint(256, (2, 9)))
    logits = theirs.get_output_embeddings()(found.last_hidden_state)
    assert torch.equal(logits, found.logits)


def test_every_weight_learns(theirs):
    tokens = torch.randint(256, (2, 9))
    theirs(tokens, labels=tokens).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in theirs.parameters())
    assert all(weight.grad.any() for weight in theirs.parameters())
    theirs.zero_grad()
