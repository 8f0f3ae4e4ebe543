"""Rules for a size: shapes close to it, and lower rates where features add up."""

import pytest
import torch

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.cluster.rules import parsed, rules, shape, weights
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.training.optim import build_optimizer
from lockstep_gpt.training.optim_settings import OptimConfig

SIZES = [10**4 * 2 ** (step / 4) for step in range(66)]  # to a billion


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("300k", 3e5),
        ("1M", 1e6),
        ("1.5b", 1.5e9),
        ("1000000", 1e6),
        ("2_000_000", 2e6),
        ("1e6", 1e6),
    ],
)
def test_a_size_is_read_as_people_write_it(text, size):
    assert parsed(text) == size


@pytest.mark.parametrize("text", ["", "M", "1X", "-1M", "9k", "2000B", "1M,2M", "nan", "1.2.3"])
def test_other_sizes_are_rejected_in_one_line(text):
    with pytest.raises(UserError, match=r"is not a number of weights from 10k to 1000B; write"):
        parsed(text)


@pytest.mark.parametrize("size", SIZES)
def test_shapes_are_near_their_size_and_about_as_deep_as_wide_in_heads(size):
    dimensions = shape(size)
    layers, heads, width = (dimensions[name] for name in ("n_layer", "n_head", "n_embd"))
    assert layers == heads
    assert width % (2 * heads) == 0
    if size > 5e4:
        assert weights(layers, width) == pytest.approx(size, rel=0.2)
        assert 20 <= width / layers <= 44


def test_the_size_counts_the_matrices_of_the_blocks():
    dimensions = shape(1e5)
    config = ModelConfig(block_size=8, bias=False, architecture="modern", **dimensions)
    blocks = build_gpt(config, 256).blocks
    counted = sum(weight.numel() for weight in blocks.parameters())
    assert counted == weights(dimensions["n_layer"], dimensions["n_embd"])


def test_larger_sizes_take_more_tokens_in_larger_steps():
    values = [rules(str(int(size)), 64) for size in SIZES]
    for smaller, larger in zip(values, values[8:], strict=False):  # four times as large
        assert larger["max_tokens"] > smaller["max_tokens"]
        assert larger["batch.global_size"] >= smaller["batch.global_size"]
        assert larger["optim.head_lr_fraction"] < smaller["optim.head_lr_fraction"]
        assert larger["optim.lr"] == smaller["optim.lr"]
    assert all(settings["batch.global_size"] % 8 == 0 for settings in values)


def test_longer_windows_keep_the_tokens_per_step():
    short, long = rules("10M", 64), rules("10M", 256)
    ratio = short["batch.global_size"] / long["batch.global_size"]
    assert ratio == pytest.approx(4, rel=0.2)
    assert short["max_tokens"] == long["max_tokens"]


def change_of_logits(width, fraction):
    """Return how far one step of the head moves one token's logits, with the same features."""
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": width // 16, "n_embd": width}
    gpt = build_gpt(ModelConfig(block_size=16, bias=False, architecture="modern", **shape), 64)
    settings = OptimConfig(algorithm="muon", head_lr_fraction=fraction)
    optimizer = build_optimizer(gpt, settings, lr=0.01)
    tokens = torch.randint(64, (1, 17))
    features = gpt.features(tokens[:, :-1]).detach()
    gpt(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    return (features @ gpt.head.T).abs().mean().item()


def test_a_step_of_the_head_moves_logits_equally_at_any_width():
    ruled = [change_of_logits(width, 0.2 * 128 / width) for width in (64, 256)]
    fixed = [change_of_logits(width, 0.2) for width in (64, 256)]
    assert ruled[1] / ruled[0] == pytest.approx(1, abs=0.35)
    assert fixed[1] / fixed[0] > 2.5
