"""Our GPT compared with GPT-2 of Hugging Face's transformers, on the same random weights."""

import pytest
import torch
from lockstep_gpt.gpt import GPT
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB = 101
OUTER = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
}
BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.expansion": "mlp.c_fc",
    "mlp.projection": "mlp.c_proj",
}
INNER = {
    f"blocks.{i}.{ours}": f"transformer.h.{i}.{theirs}"
    for i in range(3)
    for ours, theirs in BLOCK.items()
}


@torch.no_grad()
def copy_weights(ours: GPT, theirs: GPT2LMHeadModel, to_ours: bool) -> None:
    for name, parameter in ours.named_parameters():
        module, kind = name.rsplit(".", 1)
        other = theirs.get_parameter(f"{(OUTER | INNER)[module]}.{kind}")
        if module == "token_embedding":
            parameter = parameter[:VOCAB]
        elif kind == "weight" and module in INNER and parameter.ndim == 2:
            other = other.T  # transformers keeps (inputs, outputs)
        target, source = (parameter, other) if to_ours else (other, parameter)
        target.copy_(source)


def theirs(attention: str) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=48,
        n_layer=3,
        n_head=4,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("to_ours", [True, False], ids=["from them", "to them"])
def test_logits_and_loss_equal_those_of_transformers(attention: str, to_ours: bool) -> None:
    torch.manual_seed(0)
    reference = theirs(attention)
    model = GPT(VOCAB, block_size=24, n_layer=3, n_head=4, n_embd=48).eval()
    for parameter in (reference if to_ours else model).parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)  # biases and norms also matter
    copy_weights(model, reference, to_ours)
    tokens = torch.randint(VOCAB, (2, 24))
    expected = reference(tokens, labels=tokens)
    torch.testing.assert_close(model(tokens), expected.logits, rtol=1e-5, atol=1e-5)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert model.num_parameters == reference.num_parameters()
