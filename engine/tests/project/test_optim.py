import pytest
import torch
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.optim import adamw, muon
from omegaconf import OmegaConf
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep.building import partial_of
from lockstep.errors import UserError
from lockstep.muon import optimizer as muon_module
from lockstep.strategies.exact_sums import SingleDeviceStrategy

SETTINGS = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
SHAPE = {"block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(70, **SHAPE)


def test_matrices_and_embeddings_decay_and_vectors_do_not() -> None:
    model = gpt()
    decayed, plain = adamw(model.named_parameters(), lr=1e-3, **SETTINGS).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert model.token_embedding.weight is decayed["params"][0]


def test_every_trainable_parameter_is_in_one_group_in_the_model_s_order() -> None:
    model = gpt()
    model.position_embedding.weight.requires_grad_(False)
    groups = adamw(model.named_parameters(), lr=1e-3, **SETTINGS).param_groups
    order = {parameter: place for place, parameter in enumerate(model.parameters())}
    places = [[order[parameter] for parameter in group["params"]] for group in groups]
    assert all(group == sorted(group) for group in places)
    assert sorted(places[0] + places[1]) == [place for place in order.values() if place != 1]


def test_settings_reach_the_optimizer_and_its_kernel_is_fused() -> None:
    defaults = adamw(gpt().named_parameters(), lr=2e-3, **SETTINGS).defaults
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
    fused = adamw(model.named_parameters(), lr=1e-2, **SETTINGS)
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
    optimizer = adamw(model.named_parameters(), lr=1e-3, **SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    restored = adamw(model.named_parameters(), lr=1e-3, **SETTINGS)
    restored.load_state_dict(optimizer.state_dict())
    assert len(restored.param_groups) == 2


def test_devices_without_the_fused_kernel_use_the_plain_one() -> None:
    optimizer = adamw(gpt().to("meta").named_parameters(), lr=1e-3)
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
    monkeypatch.setattr(muon_module, "ReplicatedMatrices", lambda *flags: flags)
    optimizer = muon(nn.Linear(2, 2).named_parameters(), lr=1.0)
    optimizer.share_work(SingleDeviceStrategy(torch.device(accelerator), exact), compiled)
    assert optimizer.placement == flags


WRONG = {
    "optim.weight_decay=-0.1 must be at least 0": {"weight_decay": -0.1},
    "optim.beta1=1 must be below 1": {"beta1": 1},
    "optim.beta2=-0.5 must be at least 0": {"beta2": -0.5},
    "optim.eps=0 must be above 0": {"eps": 0},
    "optim.eps=tiny must be a number": {"eps": "tiny"},
}


@pytest.mark.parametrize("line", WRONG)
@pytest.mark.parametrize("make", [adamw, muon])
def test_a_setting_out_of_range_is_one_line(make, line):
    with pytest.raises(UserError) as refused:
        make(gpt().named_parameters(), lr=1e-3, **WRONG[line])
    assert str(refused.value) == line


def test_the_head_s_rate_is_a_fraction_above_zero():
    line = r"^optim\.head_lr_fraction=0 must be above 0$"
    with pytest.raises(UserError, match=line):
        muon(gpt().named_parameters(), lr=1e-3, head_lr_fraction=0)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("kind", [GPT, ModernGPT])
def test_muon_tells_matrices_and_head_by_name_and_shape(kind, prefix):
    """The groups, and the order in each, are those of the explicit lists of layers."""
    model = kind(70, **SHAPE)
    optimizer = muon(model.named_parameters(prefix.rstrip(".")), lr=0.02, weight_decay=0.1)
    layers = [layer for block in model.blocks for layer in block.modules()]
    matrices = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    head = [] if kind is GPT else [model.output.weight]
    known = {id(weight) for weight in [*matrices, *head]}
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    found = [group["params"] for group in optimizer.param_groups]
    for group, expected in zip(found, (matrices, head, rest), strict=True):
        assert [id(weight) for weight in group] == [id(weight) for weight in expected]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.2 * 0.02, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]


@pytest.mark.parametrize("make", [adamw, muon])
def test_what_does_not_train_is_in_no_group(make):
    model = gpt()
    model.blocks.requires_grad_(False)
    groups = make(model.named_parameters(), lr=1e-3).param_groups
    ours = {id(weight) for group in groups for weight in group["params"]}
    assert ours == {id(weight) for weight in model.parameters() if weight.requires_grad}


@pytest.mark.parametrize("make", [adamw, muon])
def test_a_resume_keeps_the_settings_of_this_command(make):
    model = gpt()
    saved = make(model.named_parameters(), lr=1e-3, beta2=0.9).state_dict()
    resumed = make(model.named_parameters(), lr=2e-3, beta2=0.8)
    resumed.load_state_dict(saved)
    assert {group["lr"] for group in resumed.param_groups} <= {2e-3, 0.2 * 2e-3}
    assert all(group.get("betas", (0.9, 0.8)) == (0.9, 0.8) for group in resumed.param_groups)


@pytest.mark.parametrize("make", [adamw, muon])
def test_a_resumed_rate_is_the_one_that_a_scheduler_of_torch_had_reached(make):
    def begun():
        optimizer = make(gpt().named_parameters(), lr=1e-3)
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer, scheduler = begun()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict(), scheduler.state_dict()
    resumed, its_scheduler = begun()
    for part, state in zip((resumed, its_scheduler), saved, strict=True):
        part.load_state_dict(state)
    rates = [[group["lr"] for group in each.param_groups] for each in (optimizer, resumed)]
    assert rates[0] == rates[1]
    assert rates[0][0] == 1e-3 / 4


@pytest.mark.parametrize(("function", "kind"), [(adamw, "AdamW"), (muon, "Muon")])
def test_a_choice_makes_the_optimizer_that_arguments_make(composed, function, kind):
    choice = f"optim={function.__name__}"
    words = [choice, "optim.lr=5.0", *(f"optim.{n}={v}" for n, v in SETTINGS.items())]
    model = gpt()
    make = partial_of(OmegaConf.to_container(composed(*words).optim, resolve=True))
    made = make(model.named_parameters(), lr=1e-3)
    expected = function(model.named_parameters(), lr=1e-3, **SETTINGS)
    assert type(made).__name__ == kind
    assert made.state_dict() == expected.state_dict()
