"""Two ranks with sharded weights, gradients, and optimizer state, compared with one process."""

import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.checkpoints.content import SavedShards
from lockstep.checkpoints.reading import (
    checkpoint_path,
    newest_valid,
    read_checkpoint,
)
from lockstep.checkpoints.room import size_of
from lockstep.checkpoints.sums import fault_of, files_of
from lockstep.strategies.sharded_states import share_of

SHARDED = ("trainer=cpu", "trainer.devices=2", "strategy=fsdp2")


def content(folder, step=20):
    return torch.load(folder / f"checkpoints/step={step:06d}.ckpt")


def outline(value):
    """Return nested containers with each tensor replaced by its shape and type."""
    if isinstance(value, dict):
        return {name: outline(each) for name, each in value.items()}
    if isinstance(value, list):
        return [outline(each) for each in value]
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


@pytest.fixture(scope="module")
def sharded(finished, tmp_path_factory, train_measured):
    """The finished run again, on two ranks with shards."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("sharded"))
    return command, train_measured(command, *SHARDED)


@pytest.mark.slow
def test_shards_give_the_losses_of_one_process(sharded, finished):
    ours, one = sharded[0].summary("run"), finished[0].summary("runs/first")
    assert ours["world_size"] == 2
    for name in ("train_loss", "val_loss"):
        assert ours[name] == pytest.approx(one[name], abs=1e-5)


def test_each_of_two_ranks_has_half_of_weights_and_optimizer_state(sharded, finished, held):
    whole = content(finished[0].folder / "runs/first")
    one = size_of([whole["state_dict"], whole["optimizer_states"]])
    for rank in (0, 1):
        size = held(sharded[0], rank)
        assert 0.45 * one < size <= 0.55 * one


def test_checkpoint_of_shards_is_one_device_s(sharded, finished):
    ours, one = content(sharded[0].folder / "run"), content(finished[0].folder / "runs/first")
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert outline(ours[name]) == outline(one[name])
    groups = [
        [each["params"] for each in of["optimizer_states"][0]["param_groups"]] for of in (ours, one)
    ]
    assert groups[0] == groups[1]
    for number, state in one["optimizer_states"][0]["state"].items():
        theirs = ours["optimizer_states"][0]["state"][number]["exp_avg"]
        torch.testing.assert_close(theirs, state["exp_avg"], atol=1e-5, rtol=1e-2)


def test_sample_of_shards_is_one_device_s(sharded, finished):
    def shown(screen):
        return screen.partition("\nsample\n")[2].partition("\n\n")[0]

    assert shown(sharded[1]) == shown(finished[1]) != ""


@pytest.fixture(scope="module")
def continued(finished, tmp_path_factory):
    """Losses of the finished run after ten more steps on one device, and its checkpoint."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("continued"))
    source = finished[0].folder / "runs/first"
    command.train(f"resume={source}", "max_steps=30", "run_dir=run")
    return source, command.summary("run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        ("trainer=cpu", "trainer.devices=2", "strategy=ddp"),
        ("trainer=cpu", "trainer.devices=1", "strategy=fsdp2"),
    ],
    ids=["ddp", "one"],
)
def test_a_run_of_shards_resumes_under_another_strategy(command, sharded, continued, place):
    source = sharded[0].folder / "run"
    command.train(f"resume={source}", "max_steps=30", *place, "run_dir=run")
    assert_same_losses(command.summary("run"), continued[1])


@pytest.mark.slow
def test_a_run_continues_in_its_folder_under_one_strategy_after_the_other(command, continued):
    source, expected = continued
    shutil.copytree(source, command.folder / "run")
    words = ("train", "run_dir=run", "resume=auto", "trainer=cpu", "trainer.devices=2")
    out = command(*words, "strategy=fsdp2", "max_steps=30").stdout
    assert ".strategies.placing.auto -> " in out
    assert "ShardedStrategy over gloo" in out
    assert_same_losses(command.summary("run"), expected)
    # From now on, it is the run's, also for a command that repeats the run's first choices.
    assert "is done" in command(*words, "experiment=smoke").stdout
    out = command(*words, "strategy=ddp", "max_steps=40").stdout
    assert "DDPStrategy over gloo" in out
    assert command.summary("run")["step"] == 40
    assert command.summary("run")["val_loss"] < expected["val_loss"]


def assert_same_losses(ours, theirs):
    for name in ("train_loss", "val_loss"):
        assert ours[name] == pytest.approx(theirs[name], abs=2e-5)


def test_what_the_strategy_lacks_is_refused_by_the_run_s_settings(finished, command):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    words = ("train", "run_dir=run", "resume=auto", "strategy=fsdp2", "precision=bf16-true")
    words = (*words, "trainer=cpu", "trainer.devices=2", "max_steps=30")
    line = command(*words, status=2).stderr
    assert "precision=bf16-true does not work with strategy=fsdp2" in line


@pytest.fixture(scope="module")
def in_parts(sharded, tmp_path_factory):
    """The sharded run again; each rank writes its own part of checkpoints."""
    command = sharded[0].elsewhere(tmp_path_factory.mktemp("parts"))
    copies = f"checkpoint.copy_to={command.folder / 'copies'}"
    keep = ("checkpoint.every=5", "checkpoint.keep_last=2", "checkpoint.keep_best=1")
    command.train(*SHARDED, "strategy.save_parts=true", *keep, copies, "run_dir=run")
    return command.folder


@pytest.mark.slow
def test_parts_join_to_the_checkpoint_of_whole_weights(in_parts, sharded):
    joined = read_checkpoint(checkpoint_path(in_parts / "run/checkpoints", 20))
    whole = content(sharded[0].folder / "run")
    assert outline(joined["optimizer_states"]) == outline(whole["optimizer_states"])
    for name, weight in whole["state_dict"].items():
        assert torch.equal(joined["state_dict"][name], weight)
    for number, state in whole["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            ours = joined["optimizer_states"][0]["state"][number][name]
            assert torch.equal(ours, value), (number, name)


@pytest.mark.parametrize("rows", [2, 3, 7, 8])
def test_each_rank_s_share_is_fsdp2_s_and_stays_in_the_file(on_ranks, rows):
    whole = torch.arange(rows * 2.0).reshape(rows, 2)
    saved = {"whole": whole, "parts": SavedShards((whole[:2], whole[2:5], whole[5:]))}

    def shares(_rank):
        mesh = init_device_mesh("cpu", (3,))
        place = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
        shares = {name: share_of(value, place).to_local() for name, value in saved.items()}
        expected = distribute_tensor(whole, mesh, [Shard(0)]).to_local()
        equal = [torch.equal(share, expected) for share in shares.values()]
        storage = shares["whole"].untyped_storage().data_ptr()
        return equal, storage == whole.untyped_storage().data_ptr()

    assert on_ranks(3, shares) == [([True, True], True)] * 3


def test_each_rank_writes_half(in_parts):
    path = checkpoint_path(in_parts / "run/checkpoints", 20)
    first, second = (each for each in files_of(path) if each.suffix == ".part")
    whole = size_of([read_checkpoint(path)[name] for name in ("state_dict", "optimizer_states")])
    held = [size_of(torch.load(part)) for part in (first, second)]
    assert all(0.45 * whole < each < 0.55 * whole for each in held)
    assert whole - sum(held) < 0.001 * whole  # step counts


def test_parts_go_with_their_checkpoint(in_parts):
    for folder in (in_parts / "run/checkpoints", in_parts / "copies/run"):
        kept = sorted(folder.glob("*.ckpt"))
        assert kept[-1].name == "step=000020.ckpt"
        assert 2 <= len(kept) <= 3
        assert all(fault_of(path) is None for path in kept)
        assert set(folder.iterdir()) == {each for path in kept for each in files_of(path)}


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_part_is_named_and_its_checkpoint_skipped(in_parts, tmp_path, caplog, damage):
    folder = shutil.copytree(in_parts / "run/checkpoints", tmp_path / "checkpoints")
    part = folder / "step=000020.00001-of-00002.part"
    if damage == "flip":
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    else:
        part.unlink()
    assert newest_valid(folder) == checkpoint_path(folder, 15)
    assert part.name in caplog.text


# Three ranks use steps of nine samples instead of eight, which changes the loss.
STRATEGY = {1: "ddp", 3: "fsdp2"}
BATCH = {1: "batch.global_size=8", 3: "batch.global_size=9"}
TOLERANCE = {1: 2e-5, 3: 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3])
def test_shards_of_two_ranks_resume_on_any_number(in_parts, command, continued, devices):
    place = ("trainer=cpu", f"trainer.devices={devices}", f"strategy={STRATEGY[devices]}")
    source = in_parts / "run"
    forced = ("resume_force=true", BATCH[devices])
    command.train(f"resume={source}", "max_steps=30", *place, *forced, "run_dir=run")
    for name in ("train_loss", "val_loss"):
        expected = continued[1][name]
        assert command.summary("run")[name] == pytest.approx(expected, abs=TOLERANCE[devices])


@pytest.mark.slow
def test_an_unwritable_shard_ends_the_run_without_a_checkpoint(command):
    (command.folder / "blocker.py").write_text(BLOCK)
    words = (*SHARDED, "strategy.save_parts=true", "run_dir=run", "checkpoint.every=10")
    block = "+callbacks.block._target_=blocker.Block"
    said = command.train(*words, block, status=1, PYTHONPATH=str(command.folder)).stderr
    assert "step=000020.00001-of-00002.part cannot be written: " in said
    folder = command.folder / "run/checkpoints"
    assert newest_valid(folder) == checkpoint_path(folder, 10)
    assert not checkpoint_path(folder, 20).exists()


BLOCK = """
import lightning, pathlib
class Block(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if (trainer.global_step, trainer.global_rank) == (12, 1):
            pathlib.Path("run/checkpoints/.step=000020.00001-of-00002.part.tmp").mkdir()
"""
KILL = """
import os, signal, lightning
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        place = (trainer.global_step, trainer.global_rank)
        if place == (13, 1) and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_rank_leaves_no_trace_in_shards(command):
    (command.folder / "killer.py").write_text(KILL)
    words = (*SHARDED, "model.dropout=0.1", "model.activation_checkpointing=true")
    words = (*words, "batch.micro_size=2", "checkpoint.background=true", "max_steps=15")
    command.train(*words, "run_dir=whole", "verbosity=quiet")
    kill = ("+callbacks.kill._target_=killer.Kill", "run_dir=hit")
    hit = command.train(*words, *kill, PYTHONPATH=str(command.folder))
    assert "rank 1 was killed by SIGKILL; restarting all ranks (1 of 3)" in hit.stderr
    whole, after = (content(command.folder / run, 15)["state_dict"] for run in ("whole", "hit"))
    assert all(torch.equal(whole[name], after[name]) for name in whole)


BREAK = """
import lightning
class Break(lightning.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if (trainer.global_step, trainer.global_rank) == (7, 1):
            module.model.final_norm.weight.grad.to_local().fill_(float("nan"))
"""


@pytest.mark.slow
def test_broken_gradient_in_one_share_skips_the_update_of_all(command):
    (command.folder / "breaker.py").write_text(BREAK)
    words = ("+callbacks.break._target_=breaker.Break", "max_skipped=1", "run_dir=run")
    command.train(*SHARDED, *words, PYTHONPATH=str(command.folder))
    saved = content(command.folder / "run")
    assert saved["callbacks"]["ClipAndSkip"]["skipped"] == 1
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())
    states = saved["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in states} == {19}


@pytest.mark.slow
def test_blocks_in_bfloat16_come_close(command, finished):
    types = ("strategy.param_dtype=bfloat16", "strategy.reduce_dtype=bfloat16")
    words = (*types, "precision=bf16-mixed", "strategy.reshard_after_forward=false")
    command.train(*SHARDED, *words, "run_dir=run")
    one = finished[0].summary("runs/first")["val_loss"]
    assert command.summary("run")["val_loss"] == pytest.approx(one, abs=0.02)
    assert {each.dtype for each in content(command.folder / "run")["state_dict"].values()} == {
        torch.float32
    }


@pytest.mark.slow
def test_two_ranks_in_bf16_mixed_round_as_under_ddp(command):
    modern = ("optim=muon", "model=modern_nano")
    words = (*modern, "precision=bf16-mixed", "trainer=cpu", "trainer.devices=2")
    for strategy in ("ddp", "fsdp2"):
        command.train(*words, f"strategy={strategy}", f"run_dir={strategy}")
    ours, theirs = (command.summary(strategy)["val_loss"] for strategy in ("fsdp2", "ddp"))
    assert ours == pytest.approx(theirs, rel=1e-6)


BAD = {
    "precision=bf16-true": "precision=bf16-true does not work with strategy=fsdp2; set 32",
    "precision=64-true": "does not support",  # Lightning says so
    "strategy.reduce_each=3": "strategy.reduce_each=3 must be true or false",
    "trainer.sync_batchnorm=true": "trainer.sync_batchnorm=true does not work with strategy=fsdp2",
    "strategy.param_dtype=bfloat16": "param_dtype=bfloat16 with precision=32-true; set",
    "strategy.reduce_dtype=int8": "reduce_dtype=int8 is not one of float32, bfloat16",
    "strategy.save_parts=true checkpoint.background=true": "background=true conflict",
}


@pytest.mark.parametrize(("override", "line"), BAD.items())
def test_settings_that_sharding_lacks_are_rejected_in_one_line(command, override, line):
    said = command.train(*SHARDED, *override.split(), status=2).stderr
    assert line in said
    assert said.count("\n") == 1
