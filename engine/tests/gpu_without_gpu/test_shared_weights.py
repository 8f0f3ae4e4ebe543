"""`strategy=fsdp2` as one rank of eight: what it gathers and scatters and when; its graphs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lightning import Callback
from lockstep_gpt.gpt import GPT
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.strategies import fsdp2
from lockstep.strategies import placing as strategies

# torch hides its own warning; only pytest's filters turn it into an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WORLD, ACCUMULATION, STEPS, LAYERS = 8, 2, 3, 2
SETTINGS = {
    "process_group_backend": None,
    "timeout_seconds": 60,
    "reshard_after_forward": True,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "save_parts": False,
}
SHAPE = {"n_layer": LAYERS, "n_embd": 32}
# Up to torch 2.12, the fake process group doesn't write the scattered gradients: they may be NaN.
ANY_GRADIENT = {"max_skipped": 100}


class Collectives(TorchDispatchMode):
    """Counts collectives and their bytes, by micro-batch."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.batch = Counter(), Counter(), None

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        if function.namespace == "c10d" and self.batch is not None:
            name = function._schema.name.removeprefix("c10d::").strip("_")
            self.calls[name, self.batch] += 1
            tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
            self.bytes[name, self.batch] += max(each.nbytes for each in tensors)
        return function(*arguments, **(settings or {}))


class Batches(Callback):
    def __init__(self, collectives):
        self.collectives = collectives

    def on_train_batch_start(self, *given):
        self.collectives.batch = given[3]

    def on_train_batch_end(self, *_):
        self.collectives.batch = None


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_scattered_once_a_step_unless_memory_is_short(new_run, each):
    run, sent = new_run(max_steps=STEPS, model=SHAPE, **ANY_GRADIENT), Collectives()
    with sent:
        strategy = strategies.fsdp2(**SETTINGS, reduce_each=each)
        run.fit(Batches(sent), strategy=strategy, devices=WORLD)
    batches = range(STEPS * ACCUMULATION)
    scattered = {batch: sent.calls["reduce_scatter_base", batch] for batch in batches}
    last = [batch for batch in batches if each or batch % ACCUMULATION == ACCUMULATION - 1]
    assert scattered == {batch: (LAYERS + 1) * (batch in last) for batch in batches}
    whole = sum(4 * weight.numel() for weight in run.module.model.parameters())
    for batch in last:  # padded to a multiple of the ranks
        assert whole <= sent.bytes["reduce_scatter_base", batch] < 1.2 * whole
    for batch in batches:  # blocks twice, the rest of the model twice
        assert sent.calls["allgather_base", batch] in (2 * LAYERS + 1, 2 * LAYERS + 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_zero_builds_the_whole_model(rank, monkeypatch):
    shape = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
    model = GPT(70, **shape)
    strategy = fsdp2.ShardedStrategy.__new__(fsdp2.ShardedStrategy)
    monkeypatch.setattr(fsdp2.ShardedStrategy, "global_rank", rank)
    built = []

    def build():
        built.append(1)
        return GPT(70, **shape)

    whole = strategy.whole_model(model, build)
    assert (whole is not None) == bool(built) == (rank == 0)
    if whole:
        assert torch.equal(whole.head, model.head)


@pytest.mark.slow
@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("recomputed", [False, True])
def test_blocks_share_one_graph_the_loss_has_another_and_nothing_is_compiled_again(
    new_run, graphs, tmp_path, recomputed
):
    shape = {**SHAPE, "activation_checkpointing": recomputed}
    strategy = {"strategy": strategies.fsdp2(**SETTINGS), "devices": WORLD}
    run = new_run(max_steps=6, model=shape, compile=True, **ANY_GRADIENT)
    run.fit(graphs, run.checkpoints(tmp_path), **strategy)
    once = [("train", 0)] * 2 + [("validate", 0)] * 2
    assert graphs.made == once
    counters.clear()
    strategy = {"strategy": strategies.fsdp2(**SETTINGS), "devices": WORLD}
    resumed = new_run(max_steps=9, model=shape, compile=True, **ANY_GRADIENT)
    saves = resumed.checkpoints(tmp_path)
    resumed.fit(graphs, saves, ckpt_path=next(tmp_path.glob("*006.ckpt")), **strategy)
    assert graphs.made in (once, once * 2)  # another model may have others, but not more
    assert not counters["graph_break"]
