"""No model sees what it predicts: a later token never changes an earlier prediction.

A model that does trains to a loss near 0, and then generates nonsense. Your own models are tested,
too, if a recipe in configs/model/ names their architecture.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import lockstep

RECIPES = sorted(path.stem for path in (Path(__file__).parents[3] / "configs/model").glob("*.yaml"))
VOCAB = 50
T = 16


def built(config):
    """Return a small model of this kind, whose weights all count: initial ones may be zero."""
    torch.manual_seed(0)
    heads = 2 if OmegaConf.is_missing(config, "n_head") else config.n_head
    shape = {"block_size": T, "n_layer": 2, "n_head": heads, "n_embd": 16 * heads, "dropout": 0.0}
    small = lockstep.build(OmegaConf.merge(config, shape), vocab_size=VOCAB).double().eval()
    for weight in small.parameters():
        weight.data.normal_(std=0.3)
    return small


def assert_causal(small):
    tokens = torch.randint(VOCAB, (1, T))
    expected = small(tokens)
    for place in range(1, T):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        actual = small(changed)
        torch.testing.assert_close(actual[:, :place], expected[:, :place], rtol=0, atol=1e-9)
        assert not torch.allclose(actual[:, place:], expected[:, place:])


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_each_recipe_a_later_token_never_changes_an_earlier_prediction(recipe, composed):
    assert_causal(built(composed(f"model={recipe}").model))
