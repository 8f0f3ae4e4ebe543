"""Ranks that split a model's layers by its plan, compared with one process that has all of it."""

import csv
import shutil

import pytest
import torch
import torch.distributed as dist
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.optim import adamw, muon
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lockstep.batch import Batch
from lockstep.checkpoints.room import size_of
from lockstep.errors import UserError
from lockstep.functional import IGNORE
from lockstep.muon.sharded import ShardedMatrices
from lockstep.strategies.sharded_states import gathered, share_of
from lockstep.strategies.tensor_parallel import split_by_plan, whole_of

SPLIT = ("trainer=cpu", "strategy=fsdp2", "strategy.tensor_parallel=2", "verbosity=quiet")
TWO = (*SPLIT, "trainer.devices=2")
FOUR = (*SPLIT, "trainer.devices=4")
ONE = ("trainer=cpu", "trainer.devices=1", "launch.inline=true", "verbosity=quiet")
SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16}
VOCABULARY, SAMPLES, STEPS = 70, 4, 4


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(12, 22)  # 11 rows of each tensor rank: 6 and 5 on two shards
        self.down = torch.nn.Linear(22, 12)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Foreign(torch.nn.Module):
    """A model of somebody else."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 12)
        self.blocks = torch.nn.Sequential(Part(), Part())
        self.last = torch.nn.Linear(12, VOCABULARY)

    def forward(self, tokens, targets):
        x = self.last(self.blocks(self.table(tokens)))
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten())

    def tensor_plan(self, ranks):
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def modern(**shape):
    return ModernGPT(VOCABULARY, **SHAPE, **shape)


MODELS = {
    "foreign": Foreign,
    "gpt": lambda: GPT(VOCABULARY, **SHAPE, bias=False, activation_checkpointing=True),
    "gpt-dropout": lambda: GPT(VOCABULARY, **SHAPE, dropout=0.2),
    "modern": lambda: modern(n_kv_head=2, ngram_rows=32, longest_ngram=3),
    "modern-recomputed": lambda: modern(activation_checkpointing=True),
}


def built(name):
    torch.manual_seed(1)
    model = MODELS[name]().double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def trained(model, optimizer, rank, ranks):
    """Train on this rank's share of all samples; return its losses."""
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens, targets = torch.randint(VOCABULARY, (2, SAMPLES, 16))
        targets[:, :5] = IGNORE
        total = 0.0
        for sample in range(rank, SAMPLES, ranks):
            torch.manual_seed(sample)
            place = slice(sample, sample + 1)
            loss = model(tokens[place], targets[place]) * ranks / SAMPLES
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", [adamw, muon])
@pytest.mark.parametrize("name", MODELS)
def test_split_layers_train_as_whole_ones_in_float64(on_ranks, name, size, optimizer):
    def compare(_rank):
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        data = mesh["data"]
        whole, part = built(name), built(name)
        split_by_plan(part, mesh["tensor"])
        for block in part.blocks:
            fully_shard(block, mesh=data)
        fully_shard(part, mesh=data)
        alone = optimizer(whole.named_parameters(), lr=1e-2)
        ours = optimizer(part.named_parameters(), lr=1e-2)
        ours.placement = ShardedMatrices()
        expected = trained(whole, alone, 0, 1)
        losses = trained(part, ours, data.get_local_rank(), data.size())
        dist.all_reduce(losses, group=data.get_group())
        close(losses / data.size(), expected)
        states = gathered(part.state_dict())
        moments = gathered(ours.state_dict()["state"])
        assert states.keys() == whole.state_dict().keys()
        for key, weight in whole.state_dict().items():
            place = part.state_dict()[key]
            close(whole_of(place), weight)
            close(whole_of(share_of(weight, place)), weight)
            if dist.get_rank() == 0:
                close(states[key], weight)
        if dist.get_rank() == 0:
            for number, state in alone.state_dict()["state"].items():
                for key, value in state.items():
                    close(moments[number][key], value)
        return "equal"

    assert on_ranks(size, compare) == ["equal"] * size


def test_groups_of_ranks_share_the_samples_of_one():
    batch = Batch(16, 2).spread_over(devices=4, nodes=2, tensor_parallel=2)
    assert (batch.world_size, batch.data_parallel, batch.accumulation) == (8, 4, 2)
    assert batch.global_size == 16
    assert Batch(micro_size=2).spread_over(4, 2, tensor_parallel=4).global_size == 4
    with pytest.raises(UserError, match="2 devices x 1 node / 2 tensor-parallel = 3; nearest"):
        Batch(8, 3).spread_over(2, tensor_parallel=2)


def content(folder, step=20):
    return torch.load(folder / f"checkpoints/step={step:06d}.ckpt")


def losses(command, run):
    summary = command.summary(run)
    return {name: summary[name] for name in ("train_loss", "val_loss")}


def norms(folder):
    """Return the norms of the gradients in a run's log."""
    with (folder / "metrics.csv").open() as file:
        return [float(row["optim/grad_norm"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def split(finished, tmp_path_factory, train_measured):
    """The finished run again, on two ranks that split the model."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("split"))
    return command, train_measured(command, *TWO, "verbosity=normal")


@pytest.mark.slow
def test_two_ranks_that_split_a_model_have_the_losses_of_one(split, finished):
    assert losses(split[0], "run") == pytest.approx(losses(finished[0], "runs/first"), abs=1e-5)
    assert "ShardedStrategy over gloo, 1 data x 2 tensor parallel" in split[1]
    assert "2 devices x 1 node / 2 tensor-parallel x 8 samples x 1 accumulation = 8" in split[1]


def test_the_sample_is_one_device_s(split, finished):
    def shown(screen):
        return screen.partition("\nsample\n")[2].partition("\n\n")[0]

    assert shown(split[1]) == shown(finished[1]) != ""


def test_each_rank_has_half_of_the_split_weights_and_moments(split, finished, held):
    whole = content(finished[0].folder / "runs/first")
    tables = ("token_embedding", "position_embedding")  # each rank has all of them
    kept = [name for name in whole["state_dict"] if any(table in name for table in tables)]
    size = sum(whole["state_dict"][name].nbytes for name in kept)
    one = size_of([whole["state_dict"], whole["optimizer_states"]])
    for rank in (0, 1):
        ours = held(split[0], rank) - 3 * size
        assert 0.45 * (one - 3 * size) < ours <= 0.6 * (one - 3 * size)


def test_checkpoint_of_split_weights_is_one_device_s(split, finished):
    ours, one = content(split[0].folder / "run"), content(finished[0].folder / "runs/first")
    assert ours["state_dict"].keys() == one["state_dict"].keys()
    for name, weight in one["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], weight, atol=1e-3, rtol=1e-2)
    for number, state in one["optimizer_states"][0]["state"].items():
        theirs = ours["optimizer_states"][0]["state"][number]
        assert theirs["step"] == state["step"]
        torch.testing.assert_close(theirs["exp_avg"], state["exp_avg"], atol=1e-5, rtol=1e-2)


@pytest.fixture(scope="module")
def continued(finished, tmp_path_factory):
    """Losses of the finished run after ten more steps on one device."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("continued"))
    command.train(f"resume={finished[0].folder / 'runs/first'}", "max_steps=30", "run_dir=run")
    return losses(command, "run")


@pytest.mark.slow
@pytest.mark.parametrize("place", [ONE, FOUR], ids=["one", "four"])
def test_a_split_run_resumes_on_one_device_and_on_more_groups(command, split, continued, place):
    words = (f"resume={split[0].folder / 'run'}", "max_steps=30", *place, "run_dir=run")
    command.train(*words)
    assert losses(command, "run") == pytest.approx(continued, abs=2e-5)


@pytest.mark.slow
def test_a_run_of_one_device_continues_in_its_folder_on_split_ranks(command, finished, continued):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    command("train", "run_dir=run", "resume=auto", *TWO, "max_steps=30")
    assert losses(command, "run") == pytest.approx(continued, abs=2e-5)


@pytest.mark.slow
def test_a_checkpoint_in_parts_of_shards_resumes_on_split_ranks(command, continued):
    shards = ("trainer=cpu", "trainer.devices=2", "strategy=fsdp2", "strategy.save_parts=true")
    command.train(*shards, "run_dir=parts")
    command.train(f"resume={command.folder / 'parts'}", "max_steps=30", *TWO, "run_dir=run")
    assert losses(command, "run") == pytest.approx(continued, abs=2e-5)


# Everything at once: both models, dropout, accumulation, clipping, recomputed blocks.
ALL = ("max_steps=10", "val_every=5", "batch.micro_size=2", "model.n_head=4")
ALL = (*ALL, "clip_norm=0.5", "callbacks.sample=null")
MUON = ("optim=muon", "optim.lr=3e-3", "optim.weight_decay=0.1")
RUNS = {
    "gpt": ("model.dropout=0.1", "model.activation_checkpointing=true",),
    "modern": ("model=modern_1b", "model.block_size=32", "model.n_layer=2", "model.n_embd=32",
               "model.n_kv_head=2", "model.ngram_rows=64"),
    "modern-muon": ("model=modern_nano", *MUON),
    "gpt-muon": (*MUON, "model.dropout=0.1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", RUNS)
def test_data_and_tensor_parallel_ranks_have_one_device_s_losses(command, model):
    words = (*ALL, *RUNS[model])
    command.train(*words, *ONE, "run_dir=one")
    command.train(*words, *FOUR, "run_dir=four")
    # Muon orthogonalizes: it amplifies the rounding of gradients in small directions.
    tolerance = 1e-4 if "optim=muon" in words else 1e-5
    assert losses(command, "four") == pytest.approx(losses(command, "one"), abs=tolerance)
    one, four = (norms(command.folder / run) for run in ("one", "four"))
    assert max(one) > 0.5  # clipped
    assert four == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
def test_a_split_run_with_muon_resumes_as_one_device_s(command):
    words = (*RUNS["modern-muon"], "checkpoint.every=10", "checkpoint.keep_last=3")
    command.train(*words, *TWO, "run_dir=two")
    resume = f"resume={command.folder / 'two/checkpoints/step=000010.ckpt'}"
    command.train(*words, resume, *ONE, "run_dir=one")
    command.train(*words, resume, *FOUR, "run_dir=four")
    for run in ("one", "four"):
        assert losses(command, run) == pytest.approx(losses(command, "two"), abs=2e-5)


@pytest.mark.slow
def test_bfloat16_comes_close(command):
    words = (*ALL, *RUNS["modern"], "precision=bf16-mixed")
    command.train(*words, *ONE, "run_dir=one")
    types = ("strategy.param_dtype=bfloat16", "strategy.reduce_each=true")
    command.train(*words, *TWO, *types, "run_dir=two")
    assert losses(command, "two") == pytest.approx(losses(command, "one"), abs=0.01)


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
def test_a_killed_rank_leaves_no_trace(command):
    (command.folder / "killer.py").write_text(KILL)
    words = (*TWO, "model.dropout=0.1", "batch.micro_size=4", "max_steps=15")
    command.train(*words, "run_dir=whole")
    kill = ("+callbacks.kill._target_=killer.Kill", "run_dir=hit")
    hit = command.train(*words, *kill, PYTHONPATH=str(command.folder))
    assert "rank 1 was killed by SIGKILL; restarting all ranks (1 of 3)" in hit.stderr
    whole, after = (content(command.folder / run, 15)["state_dict"] for run in ("whole", "hit"))
    assert all(torch.equal(whole[name], after[name]) for name in whole)


BAD = {
    "trainer.devices=1": "tensor_parallel=2 does not divide 1 device x 1 node; use trainer.dev",
    "strategy.tensor_parallel=0": "strategy.tensor_parallel=0 must be at least 1",
    "strategy.save_parts=true": "save_parts=true does not work with tensor_parallel=2; set one",
    "batch.exact_micro_size=2": "strategy=ddp",
}


@pytest.mark.parametrize(("override", "line"), BAD.items())
def test_what_cannot_be_split_is_refused_in_one_line(command, override, line):
    said = command.train(*TWO, *override.split(), status=2).stderr
    assert said.count(line) == 1
    assert said.count("\n") == 1


class Planned(torch.nn.Linear):
    def __init__(self, outputs, plan):
        super().__init__(4, outputs)
        self.plan = plan

    def tensor_plan(self, ranks):
        return {"": ColwiseParallel()} if self.plan else {}


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (modern(n_kv_head=1), "model.n_kv_head=1 is not divisible by strategy.tensor_parallel=2; "
         "set a multiple of it"),
        (modern(dropout=0.1), "model.dropout=0.1 does not work with strategy.tensor_parallel=2; "
         "set it to 0"),
        (torch.nn.Linear(4, 4), "strategy.tensor_parallel=2 splits layers by a plan, and Linear "
         "has no method tensor_plan; add it, or set 1"),
        (Planned(4, plan=False), "strategy.tensor_parallel=2 splits no weight by the plan of "
         "Planned.tensor_plan; name its layers, or set 1"),
        (Planned(5, plan=True), "strategy.tensor_parallel=2 does not divide the 5 of weight; "
         "set 1"),
    ],
)  # fmt: skip
def test_a_model_that_can_not_be_split_evenly_is_refused(on_ranks, model, line):
    def refused(_rank):
        with pytest.raises(UserError) as refusal:
            split_by_plan(model, init_device_mesh("cpu", (2,)))
        return str(refusal.value)

    assert on_ranks(2, refused) == [line] * 2
