"""Which advice is printed before a run trains, and when."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch

from lockstep_gpt.config import Config
from lockstep_gpt.model.model_settings import ModelConfig, build_gpt
from lockstep_gpt.training import advice
from lockstep_gpt.training.advice import (
    advise,
    attention,
    warn_of_slow_attention,
    warn_of_sudden_rate,
)
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.schedule import plan_batch, plan_schedule

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
MODEL = ModelConfig(block_size=256, n_layer=1, n_head=2, n_embd=16)


@pytest.mark.parametrize(
    ("epochs", "said"), [(0.1, None), (1, None), (4, None), (4.0003, "4"), (207.8, "208")]
)
def test_more_than_four_epochs_warn(caplog, epochs, said):
    config = Config(max_steps=1, model=MODEL, trainer={"accelerator": "cpu"})
    advise(config, epochs)
    assert len(caplog.messages) == (said is not None)
    assert f"repeats the same data {said} times" in "".join(caplog.messages) or said is None


@pytest.mark.parametrize(
    ("installed", "compiled", "warns"),
    [
        ("2.11.0+cu130", True, True),
        ("2.11.0", False, False),
        ("2.12.0", True, False),
        ("2.13.1+cpu", True, False),
    ],
)
def test_an_old_torch_that_compiles_wrong_gradients_is_named(
    monkeypatch, caplog, installed, compiled, warns
):
    monkeypatch.setattr(torch, "__version__", installed)
    advice.warn_of_old_torch(Config(max_steps=1, model=MODEL, compile=compiled))
    assert (f"torch {installed} is older than 2.12" in caplog.text) == warns
    requirement = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["dependencies"][0]
    oldest = ".".join(map(str, advice.OLDEST_TORCH))
    assert requirement.startswith(f"torch>={oldest},")


@pytest.mark.parametrize(("bf16", "advised"), [(False, "16-mixed"), (True, "bf16-mixed")])
def test_half_precision_is_advised_as_the_gpu_has_it(monkeypatch, caplog, bf16, advised):
    monkeypatch.setattr(advice, "attention", lambda _: "math")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)
    config = Config(
        max_steps=1, precision="bf16-mixed", model=MODEL, trainer={"accelerator": "cuda"}
    )
    with caplog.at_level(logging.WARNING):
        warn_of_slow_attention(config)
    assert f"set precision={advised}, or make model.n_embd" in caplog.text


@pytest.fixture
def hopper(monkeypatch):
    """An H100 whose torch has cuDNN 9.10.2 and chooses FlashAttention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(advice, "attention", lambda _: "flash")
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    return Config(max_steps=1, precision="bf16-mixed", model=MODEL, trainer={"accelerator": "cuda"})


@pytest.mark.parametrize(
    ("capability", "kernel", "warns"),
    [
        ((9, 0), "flash", True),
        ((10, 0), "flash", True),
        ((10, 3), "flash", True),
        ((9, 0), "cudnn", False),
        ((8, 0), "flash", False),
        ((12, 0), "flash", False),
    ],
)
def test_a_gpu_that_lacks_cudnn_s_attention_is_told_how_to_get_it(
    monkeypatch, caplog, hopper, capability, kernel, warns
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(advice, "attention", lambda _: kernel)
    advise(hopper, None)
    assert len(caplog.messages) == warns
    text = "FlashAttention with cuDNN 9.10.2, which costs about a tenth of the speed"
    assert (text in caplog.text) == ("cuDNN above 9.15.0" in caplog.text) == warns


def test_who_turned_cudnn_s_attention_off_is_not_warned(monkeypatch, caplog, hopper):
    with monkeypatch.context() as changed:
        changed.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        warn_of_slow_attention(hopper)
    with monkeypatch.context() as changed:  # as with batch.exact_micro_size
        changed.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        warn_of_slow_attention(hopper)
    with monkeypatch.context() as changed:
        changed.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
        warn_of_slow_attention(hopper)
    assert not caplog.messages
    warn_of_slow_attention(hopper)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("number", "version"), [(None, ""), (8902, "8.9.2"), (90100, "9.1.0"), (91501, "9.15.1")]
)
def test_on_gpus_the_receipt_also_names_cudnn_s_version(monkeypatch, hopper, number, version):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert advice.cudnn_version() == version
    named = f", with cuDNN {version} installed" if version else ""
    assert advice.attention_line(hopper) == f"flash{named}"
    on_cpu = Config(max_steps=1, model=MODEL, trainer={"accelerator": "cpu"})
    assert advice.attention_line(on_cpu) == "flash"


@pytest.mark.parametrize(
    ("accelerator", "tokens", "kernel"),
    [("cpu", 64, "plain matrix products"), ("cpu", 256, "flash"), ("mps", 64, "math")],
)
def test_the_receipt_names_the_kernel_of_attention(accelerator, tokens, kernel):
    model = ModelConfig(block_size=tokens, n_layer=1, n_head=4, n_embd=128)
    config = Config(max_steps=1, model=model, trainer={"accelerator": accelerator})
    assert attention(config) == kernel


@pytest.mark.parametrize("architecture", ["gpt", "modern"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("tokens", "dropout", "kernels"),
    [(64, 0.0, []), (64, 0.1, []), (256, 0.0, ["flash"]), (256, 0.1, ["math"])],
)
def test_the_named_kernel_is_the_one_that_runs(
    architecture, precision, tokens, dropout, kernels, attention_operations
):
    shape = {"block_size": tokens, "n_layer": 1, "n_head": 2, "n_embd": 16, "dropout": dropout}
    model = ModelConfig(architecture=architecture, bias=architecture == "gpt", **shape)
    config = Config(max_steps=1, precision=precision, model=model, trainer={"accelerator": "cpu"})
    gpt = build_gpt(model, 50)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
        attention_operations() as ran,
    ):
        gpt.features(torch.zeros(2, tokens, dtype=torch.long))
    assert ran == kernels
    assert attention(config) == (kernels or ["plain matrix products"])[0]


def test_every_run_names_the_kernel_and_warns_of_repeated_data(command):
    (command.folder / "text").write_text("All work and no play. " * 60)
    words = ("data=text", "data.path=text", "data.val_fraction=0.3", "data.root=data")
    out = command.train(*words, "run_dir=run").stdout
    assert re.search(r"^  attention +plain matrix products$", out, re.MULTILINE)
    assert re.search(
        r"^the budget repeats the same data \d+(\.\d)? times; beyond 4", out, re.MULTILINE
    )
    log = (command.folder / "run/train.log").read_text()
    assert out.index("the budget repeats") < out.index("  run  ")  # seen before the receipt
    assert "the budget repeats" in log


def test_a_run_on_enough_data_warns_of_nothing(finished):
    _, screen = finished
    assert "  attention " in screen
    assert "the budget repeats" not in screen


@pytest.mark.parametrize(
    ("devices", "warmup", "rule", "times"),
    [
        (8, 0, "linear", "8"),
        (4, 0, "linear", "4"),
        (16, 0, "sqrt", "4"),
        (2, 0, "linear", ""),
        (8, 1, "linear", ""),
        (8, 0, "none", ""),
    ],
)
def test_a_rate_far_above_the_tuned_one_from_the_first_step_warns(
    caplog, devices, warmup, rule, times
):
    batch = BatchConfig(micro_size=2, reference_size=2)
    optim = OptimConfig(algorithm="adamw", warmup_steps=warmup, lr_scaling=rule)
    model = ModelConfig(block_size=8, n_layer=1, n_head=1, n_embd=8)
    config = Config(max_steps=9, batch=batch, optim=optim, model=model)
    warn_of_sudden_rate(plan_schedule(config, plan_batch(batch, 8, devices, 1)))
    warned = [line for line in caplog.messages if f"has {times} times the tuned" in line]
    assert (len(caplog.messages), len(warned)) == (bool(times), bool(times))
