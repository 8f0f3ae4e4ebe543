"""Compressed gradients: how to ask for them, and where they are rejected."""

import pytest
from lightning.pytorch.strategies import DDPStrategy as LightningsDDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.placing import ddp


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("fp16", default_hooks.fp16_compress_hook),
        ("bf16", default_hooks.bf16_compress_hook),
        ("powersgd", powerSGD_hook.powerSGD_hook),
    ],
)
def test_gradients_are_compressed_as_the_comm_hook_says(name, hook):
    strategy = ddp(comm_hook=name)
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


TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")


def test_restarts_with_an_error_memory_are_rejected(command):
    said = command.train(*TWO, "strategy.comm_hook=powersgd", status=2).stderr
    line = "strategy.comm_hook=powersgd accumulates an error that no checkpoint contains; set "
    assert said.count(f"{line}launch.max_restarts=0") == 1


def test_bf16_compression_is_rejected_on_a_cpu(command):
    said = command.train(*TWO, "strategy.comm_hook=bf16", status=2).stderr
    assert "comm_hook=bf16 needs GPUs and NCCL; set strategy.comm_hook=fp16 or none" in said


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
