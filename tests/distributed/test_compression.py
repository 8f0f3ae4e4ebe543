"""Compressed gradients: how to ask for them, and where they are rejected."""

import pytest
from lightning.pytorch.strategies import DDPStrategy as LightningsDDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.ddp import DDPStrategy
from lockstep_gpt.distributed.strategies import ddp
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import devices
from lockstep_gpt.launch.devices import Placement, place

SETTINGS = {"process_group_backend": None, "timeout_seconds": 90, "comm_hook": "none"}


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("fp16", default_hooks.fp16_compress_hook),
        ("bf16", default_hooks.bf16_compress_hook),
        ("powersgd", powerSGD_hook.powerSGD_hook),
    ],
)
def test_gradients_are_compressed_as_the_comm_hook_says(name, hook):
    strategy = ddp(**{**SETTINGS, "comm_hook": name})
    state, chosen = strategy.comm_hook
    assert chosen is hook
    assert (state is not None) == strategy.loses_error == (name == "powersgd")


def test_a_hook_is_called_on_cpus_too(on_ranks, new_run):
    def calls(strategy_with):
        count = 0

        def hook(state, bucket):
            nonlocal count
            count += 1
            return default_hooks.fp16_compress_hook(state, bucket)

        new_run(max_steps=2).fit(strategy=strategy_with(hook), devices=2)
        return count

    def fit(_rank):
        stock = calls(lambda hook: LightningsDDP(ddp_comm_hook=hook, process_group_backend="gloo"))
        ours = calls(lambda hook: DDPStrategy(comm_hook=(None, hook), process_group_backend="gloo"))
        return stock, ours > 0

    # If the first is another number, Lightning no longer needs our class.
    assert on_ranks(2, fit) == [(0, True)] * 2


@pytest.fixture
def of_two_ranks(monkeypatch, tmp_path, composed):
    """Place two CPU ranks with compressed gradients."""
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi

    def placed(hook, *words):
        ranks = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
        return place(composed(*ranks, f"strategy.comm_hook={hook}", *words))

    return placed


def test_restarts_with_an_error_memory_are_rejected(of_two_ranks):
    with pytest.raises(UserError) as refused:
        of_two_ranks("powersgd")
    assert str(refused.value) == (
        "strategy.comm_hook=powersgd accumulates an error that no checkpoint contains; "
        "set launch.max_restarts=0"
    )
    assert of_two_ranks("powersgd", "launch.max_restarts=0") == Placement("cpu", 2, 1)


def test_bf16_compression_is_rejected_on_a_cpu(of_two_ranks):
    with pytest.raises(UserError, match=r"comm_hook=bf16 needs GPUs and NCCL; set .*=fp16 or none"):
        of_two_ranks("bf16")
    assert of_two_ranks("fp16") == Placement("cpu", 2, 1)


def test_an_unknown_compression_is_rejected_with_the_known_ones():
    line = "comm_hook=no_such is not one of none, fp16, bf16, powersgd"
    with pytest.raises(UserError, match=line):
        Config(max_steps=1, strategy={"comm_hook": "no_such"})


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_run_with_an_error_memory_resumes_only_if_forced(command):
    words = ("trainer=cpu", "trainer.devices=2", "strategy.comm_hook=powersgd", "run_dir=run")
    command.train(*words, "max_steps=6", "launch.max_restarts=0")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    go_on = ("train", "run_dir=run", "resume=auto", "max_steps=8")
    assert command(*go_on, status=2).stderr == (
        "lockstep-gpt train: run/checkpoints/step=000006.ckpt lacks powersgd's "
        "accumulated error; resume_force=true resets it\n"
    )
    assert (command.folder / "run/config.yaml").read_bytes() == frozen
    command(*go_on, "resume_force=true")
    assert command.summary("run")["step"] == 8
