import pytest
import torch
from lockstep_gpt.modern import ModernGPT, norm, rotate, rotations

from lockstep.errors import UserError
from lockstep.functional import causal_attention

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
VOCAB = 70


def modern(**changes):
    torch.manual_seed(0)
    model = ModernGPT(VOCAB, **{**SHAPE, **changes})
    with torch.no_grad():
        for parameter in model.parameters():  # an initial zero would hide its effect
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_new_model_predicts_all_tokens_equally():
    model = ModernGPT(VOCAB, **SHAPE)
    tokens = torch.randint(VOCAB, (2, 16))
    logits = model(tokens)
    assert logits.shape == (2, 16, VOCAB)
    assert not logits.any()


def test_no_token_sees_a_later_one():
    model = modern()
    tokens = torch.randint(VOCAB, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-4


def test_rotated_products_depend_only_on_the_distance():
    cos, sin = rotations(12, 8)
    q, k = (torch.randn(8).expand(1, 12, 1, 8) for _ in range(2))
    products = (rotate(q, cos, sin) * rotate(k, cos, sin).roll(-3, dims=1)).sum(-1)[0, :9, 0]
    torch.testing.assert_close(products, products[:1].expand(9), rtol=1e-4, atol=1e-5)


def test_a_rotation_keeps_lengths():
    x = torch.randn(2, 12, 3, 8)
    turned = rotate(x, *rotations(12, 8))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0])  # the first position isn't rotated


def test_a_norm_leaves_mean_0_and_variance_1():
    x = norm(3 + 5 * torch.randn(4, 32))
    torch.testing.assert_close(x.mean(-1), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.var(-1, correction=0), torch.ones(4), atol=1e-4, rtol=0)


def test_shared_keys_equal_repeated_keys():
    attention = modern(n_kv_head=2).blocks[0].attention
    x = torch.randn(2, 16, 32)
    cos, sin = rotations(16, 8)
    q = rotate(norm(attention.query(x).view(2, 16, 4, 8)), cos, sin).transpose(1, 2)
    k = rotate(norm(attention.key(x).view(2, 16, 2, 8)), cos, sin).transpose(1, 2)
    v = attention.value(x).view(2, 16, 2, 8).transpose(1, 2)
    scale = 0.25 * 8**0.5
    heads = [causal_attention(scale * q[:, h], k[:, h // 2], v[:, h // 2], 0.0) for h in range(4)]
    expected = attention.projection(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x, cos, sin), expected)


def rows_of(tokens, longest, rows):
    """Return where the n-grams that end at each of `tokens`, (B, T), are: (longest - 1, B, T)."""
    model, found = modern(ngram_rows=rows, longest_ngram=longest), []
    model.ngram_embedding.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    model.features(tokens)
    return torch.stack(found)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ngrams_that_differ_in_one_token_have_different_rows(place):
    tokens = torch.tensor([[3, 5, 8]]).repeat(64, 1)
    tokens[:, place] = torch.arange(64)
    rows = rows_of(tokens, longest=3, rows=64)[-1, :, -1]
    assert sorted(rows.tolist()) == list(range(64, 128))  # after the table of bigrams


def test_the_row_of_an_ngram_depends_only_on_its_tokens():
    tokens = torch.randint(VOCAB, (2, 12))
    for n, rows in enumerate(rows_of(tokens, longest=4, rows=32), start=2):
        for end in range(n - 1, 12):
            alone = rows_of(tokens[:, end - n + 1 : end + 1], longest=n, rows=32)[-1]
            assert torch.equal(alone[:, -1], rows[:, end])


def test_rows_of_ngrams_are_added_to_the_embedding():
    model = modern(ngram_rows=64, longest_ngram=3)
    tokens = torch.tensor([[5, 9, 5]])
    rows = rows_of(tokens, longest=3, rows=64)[:, 0]  # (2, T)
    with torch.no_grad():
        table = model.ngram_embedding.weight.normal_()
        plain = modern()
        plain.load_state_dict(model.state_dict(), strict=False)
        plain.token_embedding = torch.nn.Embedding(3, 32)
        embedded = model.token_embedding(tokens[0]) + table[rows].sum(0)
        plain.token_embedding.weight.copy_(embedded)
    torch.testing.assert_close(model.features(tokens), plain.features(torch.tensor([[0, 1, 2]])))


def test_in_bf16_mixed_all_between_the_layers_is_bfloat16_and_close_to_float32():
    model, tokens = modern(), torch.randint(VOCAB, (2, 16))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.projection.weight.normal_(std=0.1)
            block.mlp.projection.weight.normal_(std=0.1)
    expected = model.features(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.features(tokens)
    assert features.dtype == torch.bfloat16
    assert (features - expected).abs().max() < 0.05 * expected.abs().max()
    features.float().sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in model.blocks.parameters())


def test_generation_goes_beyond_the_context():
    assert modern().generate(torch.tensor([[1, 2]]), 20, temperature=0).shape == (1, 22)


def test_parameters_are_counted_without_padding():
    per_block, vocabulary = 4 * 32 * 32 + 2 * 4 * 32 * 32, 2 * VOCAB * 32
    assert modern().num_parameters == 2 * per_block + vocabulary + 32


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"n_embd": 20}, r"gives heads of 5; .* to make them even"),
        ({"n_kv_head": 3}, r"model\.n_kv_head=3 does not divide model\.n_head=4"),
    ],
)
def test_unsupported_settings_are_rejected(change, line):
    with pytest.raises(UserError, match=line):
        modern(**change)
