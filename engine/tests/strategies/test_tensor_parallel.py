"""Ranks that split a model's matrices, compared with one process that has all of it."""

import copy
import csv
import shutil

import pytest
import torch
import torch.distributed as dist
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT

from lockstep.batch import Batch
from lockstep.checkpoints.room import size_of
from lockstep.errors import UserError
from lockstep.functional import IGNORE, SHORT
from lockstep.strategies.tensor_parallel import refuse_unsplittable, split_model
from lockstep.strategies.tensor_splits import SPLITS, Split, TensorRanks, split_of

SPLIT = ("trainer=cpu", "strategy=fsdp2", "strategy.tensor_parallel=2", "verbosity=quiet")
TWO = (*SPLIT, "trainer.devices=2")
FOUR = (*SPLIT, "trainer.devices=4")
ONE = ("trainer=cpu", "trainer.devices=1", "launch.inline=true", "verbosity=quiet")
SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16}
MODERN = {**SHAPE, "of": ModernGPT}
SHAPES = {
    "gpt": SHAPE,
    "gpt-without-bias": {**SHAPE, "bias": False, "activation_checkpointing": True},
    "gpt-dropout": {**SHAPE, "dropout": 0.2},
    "long-dropout": {**SHAPE, "dropout": 0.2, "block_size": SHORT + 2},
    "modern": {**MODERN, "n_head": 8, "n_kv_head": 4, "ngram_rows": 32, "longest_ngram": 3},
    "modern-dropout": {**MODERN, "dropout": 0.2},
}
VOCABULARY = 70  # padded to 128: of four ranks, one has only padding


def build_gpt(of=GPT, **shape):
    return of(VOCABULARY, **shape)


def here():
    return TensorRanks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def gradients(model, tokens, targets):
    """Return the loss, the gradients by name, and the random number that follows."""
    torch.manual_seed(7)
    loss = model(tokens, targets)
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return loss.detach(), grads, torch.rand(1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_a_split_model_is_the_whole_one_in_float64(on_ranks, name, size):
    def compare(_rank):
        torch.manual_seed(1)
        whole = build_gpt(**SHAPES[name]).double()
        for weight in whole.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        tokens = torch.randint(VOCABULARY, (3, whole.block_size))
        targets = torch.randint(VOCABULARY, tokens.shape)
        targets[0, :5] = IGNORE
        part = copy.deepcopy(whole)
        split_model(part, here())
        loss, expected, after = gradients(whole, tokens, targets)
        ours, grads, ours_after = gradients(part, tokens, targets)
        torch.testing.assert_close(ours, loss, atol=1e-10, rtol=0)
        assert torch.equal(ours_after, after)
        assert grads.keys() == expected.keys()
        for weight, grad in grads.items():
            split = split_of(weight)
            if split is None:  # the bits that each rank has
                assert all(torch.equal(grad, other) for other in here().each(grad))
            else:
                assert grad.numel() * size == expected[weight].numel()
                grad = split.whole(grad, here())
            torch.testing.assert_close(grad, expected[weight], atol=1e-10, rtol=0)
        with torch.no_grad():
            whole.eval()
            part.eval()
            torch.testing.assert_close(part(tokens), whole(tokens), atol=1e-10, rtol=0)
            torch.testing.assert_close(part(tokens, targets), whole(tokens, targets))
        return "equal"

    assert on_ranks(size, compare) == ["equal"] * size


def test_each_rank_has_its_heads_of_queries_keys_and_values():
    qkv = torch.arange(3 * 4)[:, None]  # four heads of one row each, three times
    parts = [Split(0, groups=3).part(qkv, TensorRanks(rank, 2, None)) for rank in (0, 1)]
    assert parts[0].flatten().tolist() == [0, 1, 4, 5, 8, 9]
    assert parts[1].flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_every_matrix_of_both_models_is_split_except_positions():
    for shape in SHAPES.values():
        names = dict(build_gpt(**shape).named_parameters())
        matrices = {name for name, weight in names.items() if weight.ndim == 2}
        assert {name for name in matrices if not split_of(name)} <= {"position_embedding.weight"}
    assert split_of("model.blocks.0.mlp.projection.bias") is None
    assert split_of("model.blocks.0.mlp.expansion.bias") == SPLITS["expansion"]
    assert split_of("previous") is None


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


def test_each_rank_has_half_of_the_weights_and_moments(split, finished, held):
    whole = content(finished[0].folder / "runs/first")
    one = size_of([whole["state_dict"], whole["optimizer_states"]])
    for rank in (0, 1):
        size = held(split[0], rank)
        assert 0.45 * one < size <= 0.55 * one


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
ALL = ("max_steps=10", "val_every=5", "batch.micro_size=2", "model.dropout=0.1", "model.n_head=4")
ALL = (*ALL, "clip_norm=0.5", "callbacks.sample=null")
MUON = ("optim=muon", "optim.lr=3e-3", "optim.weight_decay=0.1")
MODELS = {
    "gpt": ("model.activation_checkpointing=true",),
    "modern": ("model=modern_1b", "model.block_size=32", "model.n_layer=2", "model.n_embd=32",
               "model.n_kv_head=2", "model.ngram_rows=64"),
    "modern-muon": ("model=modern_nano", *MUON),
    "gpt-muon": MUON,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_data_and_tensor_parallel_ranks_have_one_device_s_losses(command, model):
    words = (*ALL, *MODELS[model])
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
    words = (*MODELS["modern-muon"], "checkpoint.every=10", "checkpoint.keep_last=3")
    command.train(*words, *TWO, "run_dir=two")
    resume = f"resume={command.folder / 'two/checkpoints/step=000010.ckpt'}"
    command.train(*words, resume, *ONE, "run_dir=one")
    command.train(*words, resume, *FOUR, "run_dir=four")
    for run in ("one", "four"):
        assert losses(command, run) == pytest.approx(losses(command, "two"), abs=2e-5)


@pytest.mark.slow
def test_bfloat16_comes_close(command):
    words = (*ALL, *MODELS["modern"], "precision=bf16-mixed")
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
    "model.n_head=1": "strategy.tensor_parallel=2 does not divide model.n_head=1; use 1",
}


@pytest.mark.parametrize(("override", "line"), BAD.items())
def test_what_cannot_be_split_is_refused_in_one_line(command, override, line):
    said = command.train(*TWO, *override.split(), status=2).stderr
    assert said.count(line) == 1
    assert said.count("\n") == 1


class Foreign(torch.nn.Module):
    """A model of somebody else."""


class Extended(GPT):
    """A GPT with a layer of its own."""

    def __init__(self, *arguments, **shape):
        super().__init__(*arguments, **shape)
        self.blocks[0].gate = torch.nn.Linear(16, 16)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("model", "parts", "device", "line"),
    [
        (build_gpt(**{**SHAPE, "n_head": 12, "n_embd": 48}), 5, CPU, "=5 does not divide "
         "model.n_head=12; use 1, 2, or 4"),
        (build_gpt(**{**SHAPE, "n_head": 3, "n_embd": 48}), 3, CPU, "=3 does not divide a "
         "vocabulary of 128; use 1"),
        (build_gpt(**MODERN, n_kv_head=1), 2, CPU, "=2 does not divide model.n_kv_head=1; use 1"),
        (build_gpt(**MODERN, ngram_rows=9), 2, CPU, "=2 does not divide model.ngram_rows=9; use 1"),
        (Foreign(), 2, CPU, "=2 splits this project's GPTs, and no Foreign; set it to 1"),
        (build_gpt(**SHAPE, of=Extended), 2, CPU, "=2 can't split 0.gate, a layer that only "
         "Extended has; set it to 1"),
        (build_gpt(**SHAPES["gpt-dropout"]), 2, GPU, "model.dropout=0.2 differs from one device's "
         "on GPUs with strategy.tensor_parallel=2; set it to 0"),
    ],
)  # fmt: skip
def test_a_model_that_can_not_be_split_evenly_is_refused(model, parts, device, line):
    with pytest.raises(UserError) as refusal:
        refuse_unsplittable(model, parts, device)
    assert str(refusal.value).endswith(line)


def test_models_that_can_be_split_pass():
    for shape in SHAPES.values():
        refuse_unsplittable(build_gpt(**shape), 2, CPU)
