import math

import pytest
import torch
from lockstep_gpt.gpt import GPT

import lockstep
from lockstep.errors import UserError
from lockstep.functional import IGNORE

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
VOCAB = 100


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCAB, **SHAPE)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))


def preset(composed, name: str, vocab_size: int = 50257) -> GPT:
    with torch.device("meta"):
        return lockstep.build(composed(f"model={name}").model, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_number_of_parameters(composed, name, published):
    assert preset(composed, name).num_parameters == published


def test_nano_stays_below_a_million_parameters_at_a_byte_vocabulary(composed) -> None:
    assert preset(composed, "nano", 256).num_parameters < 1_000_000


def test_flops_per_token_of_gpt2_are_the_known_798_million(composed) -> None:
    assert preset(composed, "gpt2").flops_per_token == pytest.approx(798e6, rel=1e-3)


def test_palms_formula_counts_all_of_attention_and_so_7_percent_more(composed) -> None:
    gpt2 = preset(composed, "gpt2")
    C, T = gpt2.n_embd, gpt2.block_size
    palm = 6 * (gpt2.num_parameters - T * C) + 12 * gpt2.n_layer * C * T  # nanoGPT's estimate_mfu
    assert palm == pytest.approx(855.2e6, rel=1e-4)
    assert gpt2.flops_per_token == pytest.approx(797.8e6, rel=1e-4)
    assert 1 - gpt2.flops_per_token / palm == pytest.approx(0.067, abs=5e-4)


def test_logits_cover_the_vocabulary_without_its_padding(model: GPT, tokens: torch.Tensor) -> None:
    assert model.token_embedding.weight.shape == (model.padded_vocab_size, 32) == (128, 32)
    assert model(tokens).shape == (3, 16, VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_features_of_any_type_have_logits_outside_of_autocast(
    model: GPT, tokens: torch.Tensor, dtype: torch.dtype
) -> None:
    features = model.features(tokens)
    torch.testing.assert_close(
        model.logits(features.to(dtype)), model.logits(features), rtol=0.02, atol=0.02
    )


def test_loss_at_the_start_is_that_of_uniform_guessing(model: GPT, tokens: torch.Tensor) -> None:
    assert model(tokens, tokens.roll(-1, 1)).item() == pytest.approx(math.log(VOCAB), abs=0.1)


def test_padding_rows_are_zero_and_receive_no_gradient(model: GPT, tokens: torch.Tensor) -> None:
    model(tokens, tokens.roll(-1, 1)).backward()
    weight = model.token_embedding.weight
    assert weight[VOCAB:].abs().max() == weight.grad[VOCAB:].abs().max() == 0
    assert (weight.grad[:VOCAB].abs().sum(dim=1) > 0).all()


def test_every_parameter_affects_the_loss(model: GPT, tokens: torch.Tensor) -> None:
    model(tokens, tokens.roll(-1, 1)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_any_integer_type_of_tokens_gives_the_same_loss(
    model: GPT, tokens: torch.Tensor, dtype: torch.dtype
) -> None:
    narrow = tokens.to(dtype)
    assert model(narrow, narrow).item() == model(tokens, tokens).item()


def test_loss_is_float64_for_a_float64_model_and_float32_under_autocast(
    model: GPT, tokens: torch.Tensor
) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens, tokens).dtype == torch.float32
    assert model.double()(tokens, tokens).dtype == torch.float64


def test_ignored_targets_do_not_count(model: GPT, tokens: torch.Tensor) -> None:
    targets = tokens.roll(-1, 1)
    targets[1:] = IGNORE
    expected = model(tokens[:1], targets[:1])
    torch.testing.assert_close(model(tokens, targets), expected)


def test_more_tokens_than_the_block_size_are_rejected(model: GPT) -> None:
    with pytest.raises(UserError, match=r"17 tokens are more than model\.block_size=16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_initial_weights_follow_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(256, block_size=64, n_layer=8, n_head=2, n_embd=128)
    block = model.blocks[3]
    for weight in (model.token_embedding.weight, block.attention.qkv.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.projection.weight, block.mlp.projection.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.expansion.bias.abs().max() == 0
    assert (block.mlp_norm.weight == 1).all()


def test_without_biases_no_linear_layer_and_no_norm_has_one() -> None:
    model = GPT(VOCAB, block_size=8, n_layer=1, n_head=1, n_embd=8, bias=False)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_dropout_changes_training_but_not_evaluation(tokens: torch.Tensor) -> None:
    model = GPT(VOCAB, **SHAPE, dropout=0.5)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_forward_is_one_graph_for_torch_compile(model: GPT, tokens: torch.Tensor) -> None:
    expected = model(tokens, tokens)
    model.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert "token_embedding.weight" in model.state_dict()


def test_activation_checkpointing_changes_neither_gradients_nor_names(tokens):
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = GPT(VOCAB, **SHAPE, dropout=0.1, activation_checkpointing=recompute)
        model(tokens, tokens).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize(("residual_dtype", "under_autocast"), [("float32", 4), ("bfloat16", 2)])
def test_the_residual_stream_has_the_type_that_is_set(tokens, residual_dtype, under_autocast):
    torch.manual_seed(0)
    model = GPT(VOCAB, **SHAPE, residual_dtype=residual_dtype)
    sizes = []
    for module in (*model.blocks, model.final_norm):
        module.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].itemsize))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(tokens, tokens)
    assert sizes == [under_autocast] * 3
    assert narrow.dtype == torch.float32
    sizes.clear()
    assert model(tokens, tokens).item() == pytest.approx(narrow.item(), abs=1e-2)
    assert sizes == [4] * 3


def test_the_setting_of_the_residual_stream_changes_no_float32_bit(tokens):
    losses = []
    for residual_dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = GPT(VOCAB, **SHAPE, residual_dtype=residual_dtype)
        model(tokens, tokens).backward()
        losses.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
