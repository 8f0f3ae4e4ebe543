import pytest
import torch
from torch import nn

from lockstep_gpt.distributed.strategies import single_device
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.training import muon, optim
from lockstep_gpt.training.optim import build_optimizer, place_matrices
from lockstep_gpt.training.optim_settings import OptimConfig

CONFIG = OptimConfig(algorithm="adamw", weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(70, block_size=8, n_layer=2, n_head=2, n_embd=16)


def test_matrices_and_embeddings_decay_and_vectors_do_not() -> None:
    model = gpt()
    decayed, plain = build_optimizer(model, CONFIG, lr=1e-3).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert model.token_embedding.weight is decayed["params"][0]


def test_every_trainable_parameter_is_in_one_group_in_the_model_s_order() -> None:
    model = gpt()
    model.position_embedding.weight.requires_grad_(False)
    groups = build_optimizer(model, CONFIG, lr=1e-3).param_groups
    order = {parameter: place for place, parameter in enumerate(model.parameters())}
    places = [[order[parameter] for parameter in group["params"]] for group in groups]
    assert all(group == sorted(group) for group in places)
    assert sorted(places[0] + places[1]) == [place for place in order.values() if place != 1]


def test_settings_reach_the_optimizer_and_its_kernel_is_fused() -> None:
    defaults = build_optimizer(gpt(), CONFIG, lr=2e-3).defaults
    assert defaults["lr"] == 2e-3
    assert defaults["betas"] == (0.8, 0.9)
    assert defaults["eps"] == 1e-6
    assert defaults["fused"] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_those_of_the_plain_kernel(dtype: torch.dtype) -> None:
    model, reference = gpt().to(dtype), gpt().to(dtype)
    groups = [
        {"params": [p for p in reference.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=False)
    fused = build_optimizer(model, CONFIG, lr=1e-2)
    for step in range(3):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            ours.grad = torch.full_like(ours, 0.1 * (step + 1))
            theirs.grad = ours.grad.clone()
        fused.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4, bias=False),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
    ],
    ids=["matrices only", "vectors only", "convolution"],
)
def test_any_module_gets_both_groups_and_can_step(model: nn.Module) -> None:
    optimizer = build_optimizer(model, CONFIG, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    restored = build_optimizer(model, CONFIG, lr=1e-3)
    restored.load_state_dict(optimizer.state_dict())
    assert len(restored.param_groups) == 2


def test_devices_without_the_fused_kernel_use_the_plain_one() -> None:
    optimizer = build_optimizer(gpt().to("meta"), CONFIG, lr=1e-3)
    assert optimizer.defaults["fused"] is None


@pytest.mark.parametrize(
    ("accelerator", "compiled", "exact", "flags"),
    [
        ("cpu", False, None, (False, False)),
        ("cuda", True, None, (True, False)),
        ("cpu", True, 2, (False, False)),
        ("cuda", True, 2, (False, True)),
    ],
)
def test_with_exact_sums_muon_is_not_compiled_and_a_gpu_stacks_nothing(
    monkeypatch, accelerator, compiled, exact, flags
):
    monkeypatch.setattr(optim, "ReplicatedMatrices", lambda *flags: flags)
    config = OptimConfig(algorithm="muon")
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config, lr=1.0)
    place_matrices(optimizer, single_device(accelerator, exact), compiled)
    assert optimizer.placement == flags


def test_a_module_without_the_function_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.delattr(muon, "build_optimizer")
    message = r"muon\.py defines no build_optimizer; define it as training/muon\.py does$"
    with pytest.raises(UserError, match=message):
        build_optimizer(gpt(), OptimConfig(algorithm="muon"), lr=1e-3)
