"""Muon under FSDP2: the losses, memory, and checkpoints of real runs, compared with one device."""

import json

import pytest
import torch

from lockstep.checkpoints.reading import read_checkpoint

MUON = (
    "optim=muon",
    "optim.lr=3e-3",
    "trainer=cpu",
    "max_steps=20",
    "checkpoint.every=10",
    "checkpoint.keep_last=9",
)
CLIPPED = ("clip_norm=0.5", "optim.weight_decay=0.1")
MODERN = ("model=modern_nano",)
SHARDED = ("strategy=fsdp2", "batch.micro_size=1")  # 8 / ranks micro-batches in each step
MEASURE = """
import json, lightning, torch
class Measure(lightning.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step < 2:
            return
        weights = [*module.parameters()]
        held = [*weights, *(weight.grad for weight in weights), *(each for state
                in optimizer.state.values() for each in state.values())]
        storages = [getattr(each, "_local_tensor", each).untyped_storage() for each in held]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        with open(f"held-{trainer.world_size}-{trainer.global_rank}.json", "w") as file:
            json.dump(sum(sizes.values()), file)
"""
KILL = """
import os, signal, lightning
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if (trainer.global_step, trainer.global_rank) == (12, 1) and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
BREAK = """
import lightning
class Break(lightning.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if (trainer.global_step, trainer.global_rank) == (7, 1):
            optimizer.matrices[0].grad.to_local().fill_(float("nan"))
"""


def use(command, name, source):
    """Return the words that add a callback, the only class of a file, to a run."""
    (command.folder / f"{name}.py").write_text(source)
    return f"+callbacks.{name}._target_={name}.{name.capitalize()}"


def checkpoint(folder, step):
    return folder / f"checkpoints/step={step:06d}.ckpt"


@pytest.fixture(scope="module")
def place(finished, tmp_path_factory):
    return finished[0].elsewhere(tmp_path_factory.mktemp("muon"))


@pytest.fixture(scope="module")
def runs(place):
    """One run on one device, and the same with four shards, both measured."""
    words = (*MUON, *CLIPPED, *MODERN, use(place, "measure", MEASURE))
    environment = {"PYTHONPATH": str(place.folder)}
    place.train(*words, "trainer.devices=1", "batch.micro_size=1", "run_dir=one", **environment)
    place.train(*words, *SHARDED, "trainer.devices=4", "run_dir=shards", **environment)
    return place


def assert_same_losses(ours, theirs, tolerance=1e-5):
    for name in ("train_loss", "val_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance)


@pytest.mark.slow
def test_four_shards_give_the_losses_of_one_device(runs):
    assert runs.summary("shards")["world_size"] == 4
    assert_same_losses(runs.summary("shards"), runs.summary("one"))


@pytest.mark.slow
def test_each_of_four_ranks_has_a_quarter_of_weights_gradients_and_optimizer_state(runs):
    (one, *_), shards = (
        [json.loads((runs.folder / f"held-{size}-{rank}.json").read_text()) for rank in range(size)]
        for size in (1, 4)
    )
    for held in shards:
        assert 0.2 * one < held <= (1 / 4 + 0.1) * one


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_one_device_s(runs):
    ours, one = (read_checkpoint(checkpoint(runs.folder / run, 10)) for run in ("shards", "one"))
    (ours_state,), (one_state,) = ours["optimizer_states"], one["optimizer_states"]
    assert ours_state["param_groups"] == one_state["param_groups"]
    assert ours_state["state"].keys() == one_state["state"].keys()
    pairs = [(ours["state_dict"], one["state_dict"])]
    pairs += [
        (ours_state["state"][number], one_state["state"][number]) for number in one_state["state"]
    ]
    for our_tensors, tensors in pairs:
        assert our_tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert our_tensors[name].dtype == tensor.dtype
            assert our_tensors[name].shape == tensor.shape
            difference = our_tensors[name] - tensor  # products in bfloat16 amplify rounding
            assert difference.norm() <= 0.05 * tensor.norm(), name


RESUMES = {
    "shards under ddp": ("shards", "strategy=ddp", "trainer.devices=2"),
    "shards on one device": ("shards", "strategy=auto", "trainer.devices=1"),
    "shards on two ranks": ("shards", "strategy=fsdp2", "trainer.devices=2"),
    "one device's in shards": ("one", "strategy=fsdp2", "trainer.devices=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMES)
def test_a_run_resumes_under_another_strategy_and_on_other_ranks(runs, command, name):
    source, *words = RESUMES[name]
    resume = f"resume={checkpoint(runs.folder / source, 10)}"
    command.train(*MUON, *CLIPPED, *MODERN, *words, resume, "run_dir=run")
    assert_same_losses(command.summary("run"), runs.summary("one"), 3e-5)


@pytest.mark.slow
def test_a_run_in_parts_with_a_killed_rank_ends_with_the_bits_of_whole_checkpoints(runs, command):
    words = (*MUON, *CLIPPED, *MODERN, *SHARDED, "trainer.devices=4", "strategy.save_parts=true")
    kill = use(command, "kill", KILL)
    said = command.train(*words, kill, "run_dir=run", PYTHONPATH=str(command.folder)).stderr
    assert "rank 1 was killed by SIGKILL; restarting all ranks (1 of 3)" in said
    ours, whole = (
        read_checkpoint(checkpoint(folder, 20))
        for folder in (command.folder / "run", runs.folder / "shards")
    )
    assert len([*(command.folder / "run/checkpoints").glob("step=000020.*.part")]) == 4
    for (name, tensor), (_, expected) in zip(tensors_of(ours), tensors_of(whole), strict=True):
        assert torch.equal(tensor, expected), name


def tensors_of(content):
    """Return all weights and the optimizer state of a checkpoint, by name."""
    (states,) = content["optimizer_states"]
    values = [
        (f"{number}.{name}", value)
        for number, state in states["state"].items()
        for name, value in state.items()
    ]
    return [*content["state_dict"].items(), *values]


@pytest.mark.slow
def test_gpt2_in_bf16_mixed_gives_the_losses_of_one_device(command):
    words = (*MUON, "precision=bf16-mixed", "model.dropout=0")
    command.train(*words, "trainer.devices=1", "batch.micro_size=4", "run_dir=one")
    shards = ("strategy=fsdp2", "strategy.reduce_each=true", "batch.micro_size=2")
    command.train(*words, *shards, "trainer.devices=2", "run_dir=shards")
    assert_same_losses(command.summary("shards"), command.summary("one"), 3e-4)


@pytest.mark.slow
def test_a_broken_gradient_in_one_shard_skips_the_update_of_all(command):
    words = (*MUON, *MODERN, "strategy=fsdp2", "trainer.devices=2")
    skip = (use(command, "break", BREAK), "max_skipped=1", "run_dir=run")
    command.train(*words, *skip, "checkpoint.every=20", PYTHONPATH=str(command.folder))
    saved = read_checkpoint(checkpoint(command.folder / "run", 20))
    assert saved["callbacks"]["ClipAndSkip"]["skipped"] == 1
    assert all(tensor.isfinite().all() for _, tensor in tensors_of(saved))
