import copy
from functools import partial

import pytest
import torch
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.optim import muon
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from lockstep.muon import orthogonalization
from lockstep.muon.optimizer import Muon
from lockstep.muon.orthogonalization import orthogonalized
from lockstep.muon.placement import ReplicatedMatrices

SHAPE = {"block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(orthogonalization, "product_type", lambda _: torch.float32)


def model():
    torch.manual_seed(0)
    return ModernGPT(70, **SHAPE)


def optimizer_of(gpt, **settings):
    return muon(gpt.named_parameters(), lr=0.02, **{"weight_decay": 0.1, **settings})


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
    matrix = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(0))
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


def optimizer_of_matrices(shapes, compiled):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    group = {"params": weights, "lr": 0.02, "muon": True, "weight_decay": 0.1}
    optimizer = Muon([group], (0.9, 0.95), 1e-8)
    optimizer.placement = ReplicatedMatrices(compiled)
    return optimizer


def step_at_another_rate(optimizer, seed):
    torch.manual_seed(seed)
    for weight in optimizer.matrices:
        weight.grad = torch.randn_like(weight)
    optimizer.param_groups[0]["lr"] = 0.02 / (seed + 1)
    optimizer.found_inf = torch.tensor(float(seed == 5))  # an update that is skipped
    optimizer.step()


def test_matrices_orthogonalized_one_by_one_have_the_bits_of_stacks():
    shapes = [(20, 30), (30, 20), (20, 30), (17, 17)]
    stacked, alone = (optimizer_of_matrices(shapes, compiled=False) for _ in range(2))
    alone.placement = ReplicatedMatrices(one_by_one=True)
    for seed in range(3):
        step_at_another_rate(stacked, seed)
        step_at_another_rate(alone, seed)
    pairs = zip(stacked.matrices, alone.matrices, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
# Each further process imports torch, and vectors take the compiler twice as long.
@inductor.patch({"compile_threads": 1, "cpp.simdlen": 1})
def test_a_compiled_update_is_one_graph_per_shape_for_all_rates():
    shapes = [(6, 10), (10, 6), (6, 10)]
    optimizer, eager = (optimizer_of_matrices(shapes, compiled) for compiled in (True, False))
    torch._dynamo.reset()
    counters.clear()
    for seed in range(10):  # the momentum differs, too
        step_at_another_rate(optimizer, seed)
        step_at_another_rate(eager, seed)
        if seed == 5:
            resumed = optimizer_of_matrices(shapes, compiled=True)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for weight, now in zip(resumed.matrices, optimizer.matrices, strict=True):
                weight.data.copy_(now)
        if seed > 5:
            step_at_another_rate(resumed, seed)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for weight, other, again in zip(
        optimizer.matrices, eager.matrices, resumed.matrices, strict=True
    ):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)
        assert torch.equal(weight, again)


@pytest.mark.slow
def test_more_shapes_can_be_compiled_than_torch_s_limit(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    optimizer = optimizer_of_matrices([(5, size) for size in range(1, 12)], compiled=True)
    step_at_another_rate(optimizer, 0)  # with one graph per shape; otherwise, torch raises an error
    assert len(optimizer.matrices) == 11 > torch._dynamo.config.recompile_limit
