import copy

import pytest
import torch

from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.training import orthogonalization
from lockstep_gpt.training.muon import Muon, build_optimizer
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.orthogonalization import orthogonalized

SHAPE = {"block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, "bias": False}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(orthogonalization, "product_type", lambda _: torch.float32)


def model():
    torch.manual_seed(0)
    return build_gpt(ModelConfig(**SHAPE, architecture="modern"), 70)


def optimizer_of(gpt, **settings):
    return build_optimizer(gpt, OptimConfig(algorithm="muon", **settings), lr=0.02)


def step(gpt, optimizer, seed=1):
    torch.manual_seed(seed)
    tokens = torch.randint(70, (4, 8))
    optimizer.zero_grad()
    gpt(tokens, tokens).backward()
    optimizer.step()


def test_singular_values_end_near_1():
    matrices = torch.randn(5, 16, 40)
    values = torch.linalg.svdvals(orthogonalized(matrices, torch.float32))
    assert values.min() > 0.65
    assert values.max() < 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_but_tiny_singular_values_end_between_0_6_and_1_25(dtype):
    u, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    v, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    values = torch.logspace(-4, 0, 64)
    values = values / values.norm()
    update = orthogonalized((u @ values.diag() @ v)[None], dtype)[0].float()
    after = (u.mT @ update @ v.mT).diag()
    assert after[values > 0.005].min() > 0.6
    assert after[values > 0.005].max() < 1.25
    assert after[values < 0.0005].max() < 0.6


def test_the_directions_are_those_of_the_nearest_orthogonal_matrix():
    matrix = torch.randn(1, 12, 12)
    u, _, v = torch.linalg.svd(matrix)
    nearest = u @ v
    update = orthogonalized(matrix, torch.float32)
    cosine = (update * nearest).sum() / update.norm()
    assert cosine / nearest.norm() > 0.97


def test_matrices_updated_together_equal_separate_updates():
    torch.manual_seed(0)
    weights = [torch.randn(6, 10), torch.randn(10, 6), torch.randn(6, 10), torch.randn(6, 6)]
    together = [torch.nn.Parameter(each.clone()) for each in weights]
    alone = [torch.nn.Parameter(each.clone()) for each in weights]
    settings = {"lr": 0.1, "muon": True, "weight_decay": 0.1}
    groups = [[{"params": together, **settings}], *([{"params": [p], **settings}] for p in alone)]
    optimizers = [Muon(each, (0.9, 0.95), 1e-8) for each in groups]
    for _ in range(3):
        for ours, other in zip(together, alone, strict=True):
            ours.grad = torch.randn_like(ours)
            other.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for ours, other in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, other)


def test_matrices_of_blocks_go_to_muon_and_all_else_to_adamw():
    gpt = model()
    groups = optimizer_of(gpt).param_groups
    assert [len(group["params"]) for group in groups] == [12, 1, 2]
    assert [group["lr"] for group in groups] == pytest.approx([0.02, 0.004, 0.02])
    halved = optimizer_of(gpt, head_lr_fraction=0.1).param_groups
    assert [group["lr"] for group in halved] == pytest.approx([0.02, 0.002, 0.02])
    assert sum(len(group["params"]) for group in groups) == len([*gpt.parameters()])


def test_a_loss_falls():
    gpt = model()
    optimizer = optimizer_of(gpt)
    for _ in range(30):
        step(gpt, optimizer)
    torch.manual_seed(1)
    tokens = torch.randint(70, (4, 8))
    assert gpt(tokens, tokens).item() < 2.5  # ln 70 is 4.2


def test_an_update_that_is_not_finite_changes_nothing():
    gpt = model()
    optimizer = optimizer_of(gpt)
    step(gpt, optimizer)
    before = copy.deepcopy(gpt.state_dict())
    states = copy.deepcopy(optimizer.state_dict()["state"])
    for parameter in gpt.parameters():
        parameter.grad.fill_(float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in gpt.state_dict().items())
    moments = [name for state in states.values() for name in state if name != "step"]
    assert moments
    for number, state in optimizer.state_dict()["state"].items():
        for name in set(state) - {"step"}:
            assert torch.equal(state[name], states[number][name])


def test_the_switch_of_an_update_rounds_nothing_in_float64():
    plain = model().double()
    switched = copy.deepcopy(plain)
    optimizers = [optimizer_of(each, weight_decay=0.1) for each in (plain, switched)]
    optimizers[1].found_inf = torch.zeros(())  # float32, as a run has it in each step
    for seed in range(5):
        for each, optimizer in zip((plain, switched), optimizers, strict=True):
            step(each, optimizer, seed)
    for ours, expected in zip(switched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-15)


def test_a_saved_state_resumes_bit_for_bit():
    gpt = model()
    optimizer = optimizer_of(gpt)
    step(gpt, optimizer)
    other = copy.deepcopy(gpt)
    again = optimizer_of(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((gpt, optimizer), (other, again)):
        step(each, its, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), other.parameters(), strict=True))
