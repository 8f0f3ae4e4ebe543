"""The optimizers: which weights decay, and which Muon moves."""

import pytest
import torch
from torch import nn

optim = pytest.importorskip("lockstep_gpt.optim", reason="your own optimizers")
MAKERS = [name for name in ("adamw", "muon") if hasattr(optim, name)]


class Network(nn.Module):
    """The parts that our models have: an embedding, blocks, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.output = nn.Linear(4, 10, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.output(x)


@pytest.fixture
def network():
    return Network()


def made(name, network, **settings):
    """Return an optimizer of the network's weights."""
    return getattr(optim, name)(network.named_parameters(), lr=0.01, **settings)


@pytest.mark.parametrize("name", MAKERS)
def test_each_weight_is_in_one_group(name, network):
    groups = made(name, network).param_groups
    weights = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(weights) == sorted(map(id, network.parameters()))


@pytest.mark.parametrize("name", MAKERS)
def test_vectors_do_not_decay(name, network):
    groups = made(name, network, weight_decay=0.1).param_groups
    decayed = [weight for group in groups if group["weight_decay"] for weight in group["params"]]
    assert decayed
    assert all(weight.ndim == 2 for weight in decayed)


@pytest.mark.skipif("muon" not in MAKERS, reason="your own optimizers")
def test_muon_moves_the_matrices_of_blocks(network):
    by_muon, head, rest = (group["params"] for group in made("muon", network).param_groups)
    assert by_muon == [block.weight for block in network.blocks]
    assert head == [network.output.weight]
    assert len(rest) == 3


@pytest.mark.parametrize("name", MAKERS)
def test_steps_lower_the_loss(name, network):
    optimizer = made(name, network)
    tokens = torch.arange(10)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(network(tokens), tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_state_keeps_the_settings_of_now(name, network):
    saved = made(name, network, weight_decay=0.1).state_dict()
    now = made(name, network, weight_decay=0.3)
    now.load_state_dict(saved)
    assert now.param_groups[0]["weight_decay"] == 0.3
