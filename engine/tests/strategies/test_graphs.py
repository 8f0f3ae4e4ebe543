"""How many graphs a compiled model under DDP has, and that their number changes no loss."""

import os

import lightning
import pytest
import torch
import torch.distributed as dist
from lockstep_gpt.gpt import GPT
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.strategies import placing as strategies
from lockstep.strategies.ddp import DDPStrategy

SETTINGS = {"process_group_backend": "gloo", "timeout_seconds": 60, "comm_hook": "none"}


class Graphs(lightning.Callback):
    """Compiles the model with a backend that counts graphs; records the losses."""

    def __init__(self):
        self.graphs = 0
        self.losses = []

    def setup(self, trainer, pl_module, stage):
        pl_module.model.compile(backend=self._count, dynamic=False)

    def _count(self, graph, _inputs):
        self.graphs += 1
        return graph.forward

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.losses.append(outputs["loss"].item())


def fit_on_two(on_ranks, new_run, split_graph, **settings):
    """Return the number of graphs of a training on two ranks, and its losses."""

    def fit(_rank):
        torch._dynamo.reset()
        graphs = Graphs()
        # The smallest that torch allows; the weights have 3 MiB.
        ddp = strategies.ddp(**SETTINGS, bucket_cap_mb=1, split_graph=split_graph)
        new_run(**settings).fit(graphs, strategy=ddp, devices=2)
        assert torch._dynamo.config.optimize_ddp is True
        return graphs.graphs, graphs.losses

    found = on_ranks(2, fit)[0]
    assert not isinstance(found, str), found
    return found


@pytest.mark.slow
def test_a_model_under_ddp_is_one_graph_with_the_same_losses(on_ranks, new_run):
    model = {"n_layer": 4, "n_head": 4, "n_embd": 128}
    settings = {"max_steps": 4, "val_every": 4, "model": model}
    cut, losses_of_cut = fit_on_two(on_ranks, new_run, True, **settings)
    whole, losses_of_whole = fit_on_two(on_ranks, new_run, "auto", **settings)
    graphs_of_validation = 1
    assert whole - graphs_of_validation == 1
    assert cut - graphs_of_validation > 1
    assert losses_of_whole == losses_of_cut  # two ranks: the order of buckets changes no sum


class Fails(lightning.Callback):
    def on_train_batch_end(self, *_):
        raise ZeroDivisionError


def test_a_failed_fit_leaves_torch_s_setting_as_it_was(on_ranks, new_run):
    def fit(_rank):
        ddp = strategies.ddp(**SETTINGS, split_graph=False)
        with pytest.raises(ZeroDivisionError):
            new_run(max_steps=2).fit(Fails(), strategy=ddp, devices=2)
        return torch._dynamo.config.optimize_ddp

    assert on_ranks(2, fit) == [True, True]


@pytest.mark.parametrize(
    ("setting", "nodes", "micro_batches", "splits"),
    [
        ("auto", 1, 1, False),
        ("auto", 2, 1, True),
        ("auto", 2, 2, False),
        (True, 1, 2, True),
        (False, 2, 1, False),
    ],
)
def test_only_an_exchange_between_machines_in_each_micro_batch_is_worth_cuts(
    setting, nodes, micro_batches, splits
):
    strategy = strategies.ddp(**SETTINGS, split_graph=setting)
    assert isinstance(strategy, DDPStrategy)
    strategy.num_nodes = nodes
    assert strategy.splits_graph(micro_batches) == splits


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "graphs"), [(True, 14), (False, 1)])
def test_gpt2_is_cut_into_14_graphs_or_none(on_ranks, splits, graphs):
    """Count them as one of eight ranks that exchange nothing."""

    def count(_rank):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        os.environ["WORLD_SIZE"] = "8"
        torch._dynamo.reset()
        found = []

        def backend(graph, _inputs):
            found.append(graph)
            return graph.forward

        model = GPT(50257, block_size=1024, n_layer=12, n_head=12, n_embd=768)
        model.compile(backend=backend, dynamic=False)
        module = torch.nn.Module()
        module.model = model
        module.forward = lambda *batch: model(*batch)
        wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        strategy = strategies.ddp(**SETTINGS, split_graph=splits)
        with strategy.compiling(micro_batches=1):
            wrapped(tokens, tokens)
        return len(found)

    assert on_ranks(1, count) == [graphs]
