"""`strategy.tensor_parallel=2` as one rank of eight: what its ranks add, and its graphs."""

from __future__ import annotations

import pytest
from lightning import Callback
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.strategies import placing as strategies

# torch hides its own warning; only pytest's filters turn it into an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd"),
]
WORLD, TENSOR, LAYERS = 8, 2, 3
SETTINGS = {
    "process_group_backend": None,
    "timeout_seconds": 60,
    "reshard_after_forward": True,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "save_parts": False,
    "tensor_parallel": TENSOR,
}
PLAIN = {"n_layer": LAYERS, "n_embd": 32}
MODERN = {**PLAIN, "architecture": "modern", "n_kv_head": 2, "ngram_rows": 16}
SHAPES = {
    "gpt": PLAIN,
    "modern": MODERN,
    "recomputed": {**MODERN, "activation_checkpointing": True},
}
# Up to torch 2.12, the fake process group doesn't write the scattered gradients: they may be NaN.
ANY_GRADIENT = {"max_skipped": 100}


class Sums(TorchDispatchMode):
    """Counts the all-reduces of activations, by micro-batch."""

    def __init__(self):
        super().__init__()
        self.calls, self.batch = {}, None

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        if "functional.all_reduce" in str(function) and self.batch is not None:
            self.calls[self.batch] = self.calls.get(self.batch, 0) + 1
        return function(*arguments, **(settings or {}))


class Batches(Callback):
    def __init__(self, sums):
        self.sums = sums

    def on_train_batch_start(self, *given):
        self.sums.batch = given[3]

    def on_train_batch_end(self, *_):
        self.sums.batch = None


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("shape", "tables"), [(PLAIN, 0), (MODERN, 2)], ids=["gpt", "modern"])
def test_a_block_adds_activations_four_times_per_micro_batch(new_run, shape, tables):
    run, sums = new_run(max_steps=2, model=shape, **ANY_GRADIENT), Sums()
    with sums:
        run.fit(Batches(sums), strategy=strategies.fsdp2(**SETTINGS), devices=WORLD)
    # Each table of embeddings that the plan splits is added up in forward, too.
    assert sums.calls == dict.fromkeys(range(4), 4 * LAYERS + tables)


@pytest.mark.slow
@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_share_one_graph_and_nothing_is_compiled_again(new_run, graphs, shape):
    counters.clear()
    strategy = {"strategy": strategies.fsdp2(**SETTINGS), "devices": WORLD}
    run = new_run(max_steps=6, model=shape, compile=True, **ANY_GRADIENT)
    run.fit(graphs, **strategy)
    assert graphs.made == [("train", 0)] * 2 + [("validate", 0)] * 2
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_compiled_ranks_have_the_losses_of_eager_ones(new_run, losses_on_two, shape):
    def losses(compiled):
        return losses_on_two(
            lambda: new_run(max_steps=4, model=shape, compile=compiled),
            lambda: strategies.fsdp2(**SETTINGS),
        )

    (eager, _), (compiled, made) = losses(False), losses(True)
    assert made == ([("train", 0)] * 2 + [("validate", 0)] * 2,) * 2
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
