"""Where a resumed run stores its state: parameters on `meta` represent those on a GPU."""

import copy

import pytest
import torch
from lockstep_gpt import optim
from lockstep_gpt.gpt import GPT
from torch.utils._pytree import tree_leaves

SHAPE = {"block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}


def optimizer_on(device, algorithm, monkeypatch, fused=True):
    model = GPT(70, **SHAPE).to(device)
    # torch can't create a fused AdamW on `meta`, so the test marks it as fused afterward.
    monkeypatch.setattr(optim, "FUSED_DEVICES", {"cpu"} if fused else {})
    optimizer = getattr(optim, algorithm)(model.named_parameters(), lr=0.01)
    monkeypatch.setattr(optim, "FUSED_DEVICES", {"cpu", "cuda", "meta"})
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
        if algorithm == "adamw" and fused:
            group["fused"] = True
    return model, optimizer


def saved_state(algorithm, monkeypatch, fused=True):
    """Return an optimizer's part of a checkpoint after a step on a CPU."""
    model, optimizer = optimizer_on("cpu", algorithm, monkeypatch, fused)
    tokens = torch.randint(70, (2, 8))
    model(tokens, tokens).backward()
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def restored(saved, optimizer):
    optimizer.load_state_dict(saved)
    return optimizer


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "of an earlier version"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_optimizer_state_is_on_the_device_of_its_kernel(algorithm, earlier, monkeypatch):
    saved = saved_state(algorithm, monkeypatch)
    if earlier:  # with Muon, such groups had no `fused`
        for group in saved["param_groups"]:
            group.pop("fused")
    _, optimizer = optimizer_on("meta", algorithm, monkeypatch)
    restored(saved, optimizer)
    seen = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state[parameter].items():
                # Muon itself reads its step count on the host, so the host doesn't wait.
                on_host = name == "step" and group.get("muon", False)
                assert value.device.type == ("cpu" if on_host else "meta"), name
                assert value.dtype == torch.float32
                assert value.shape == (() if name == "step" else parameter.shape)
                seen += 1
    assert seen >= 2 * sum(len(group["params"]) for group in optimizer.param_groups)


def test_without_the_fused_kernel_the_step_count_is_on_the_host(monkeypatch):
    _, optimizer = optimizer_on("meta", "adamw", monkeypatch, fused=False)
    restored(saved_state("adamw", monkeypatch), optimizer)
    steps = {state["step"].device.type for state in optimizer.state.values()}
    assert steps == {"cpu"}


def test_without_the_fused_kernel_one_per_operation_is_for_all_tensors(monkeypatch):
    _, optimizer = optimizer_on("meta", "adamw", monkeypatch, fused=False)
    # Both None: torch then uses `foreach` on a GPU; False would mean tensor by tensor.
    kernels = [(each["fused"], each["foreach"]) for each in optimizer.param_groups]
    assert set(kernels) == {(None, None)}


def test_muon_s_new_states_are_on_the_device_of_restored_ones(monkeypatch):
    _, began = optimizer_on("meta", "muon", monkeypatch)
    _, resumed = optimizer_on("meta", "muon", monkeypatch)
    restored(saved_state("muon", monkeypatch), resumed)
    for group, other in zip(began.param_groups, resumed.param_groups, strict=True):
        names = ("momentum",) if group["muon"] else ("exp_avg", "exp_avg_sq")
        for parameter, its in zip(group["params"], other["params"], strict=True):
            new, old = began._state(parameter, names), resumed.state[its]
            assert {name: each.device for name, each in new.items()} == {
                name: each.device for name, each in old.items()
            }


def test_a_scaler_restores_its_scale_on_the_device_of_the_loss():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    saved = scaler.state_dict()
    assert not any(isinstance(value, torch.Tensor) for value in saved.values())
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(saved)
    assert again.scale(torch.ones(())).item() == 8.0


def test_callbacks_and_the_module_save_numbers_that_no_device_has(new_run, tmp_path):
    run = new_run(max_steps=2, max_skipped=1)
    trainer = run.fit(run.checkpoints(tmp_path))
    saved = torch.load(next(tmp_path.glob("*.ckpt")), weights_only=True)
    states = [saved[name] for name in ("callbacks", "means", "loops", "lr_schedulers")]
    assert all(states[0].values())
    assert not any(isinstance(each, torch.Tensor) for each in tree_leaves(states))
    assert trainer.global_step == 2
