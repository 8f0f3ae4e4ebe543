"""Muon on shards of rows: the same training as on one rank, to the rounding of float64."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.optim import muon
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.muon import orthogonalization
from lockstep.muon import sharded as sharded_matrices
from lockstep.muon.sharded import ShardedMatrices

# Six rows leave the last of four ranks without any.
SHAPE = {"block_size": 8, "n_layer": 2, "n_head": 1, "n_embd": 6}
SAMPLES = 8
MICRO_BATCHES = 2  # on each rank


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(orthogonalization, "product_type", lambda _: torch.float64)


def parts_of(make_model, world_size):
    """Return a model and its optimizer, sharded if there are several ranks."""
    torch.manual_seed(0)
    model = make_model(50, **SHAPE).double()
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = muon(model.named_parameters(), lr=0.02, weight_decay=0.1)
    if world_size > 1:
        optimizer.placement = ShardedMatrices()
    return model, optimizer


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model, optimizer, rank, world_size, seed, skip=False):
    """Update once with accumulated and clipped gradients; return the mean loss of all ranks."""
    tokens = torch.randint(50, (SAMPLES, 9), generator=torch.Generator().manual_seed(seed % 2))
    share = tokens.chunk(world_size)[rank]
    total = torch.zeros((), dtype=torch.float64)
    for part in share.chunk(MICRO_BATCHES):
        loss = model(part[:, :-1], part[:, 1:]) / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    gradients = [weight.grad for weight in model.parameters()]
    norm = get_total_norm(gradients)
    clip_grads_with_norm_([*model.parameters()], 0.5, norm)
    if skip and rank == world_size - 1:
        for gradient in gradients:
            getattr(gradient, "_local_tensor", gradient).fill_(float("nan"))
    optimizer.found_inf = torch.tensor(float(skip))
    optimizer.step()
    optimizer.zero_grad()
    return float(total) / world_size


def trained(rank, world_size, make_model):
    """Return the losses of 20 steps, of which the tenth is skipped, and what was learned."""
    model, optimizer = parts_of(make_model, world_size)
    losses = [step(model, optimizer, rank, world_size, seed, skip=seed == 10) for seed in range(20)]
    states = [optimizer.state[weight] for weight in model.parameters()]
    values = [value for state in states for value in state.values()]
    weights = [whole(weight.detach()) for weight in model.parameters()]
    return losses, [tensor.numpy() for tensor in [*weights, *map(whole, values)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "world_size"),
    [(partial(GPT, bias=False), 2), (ModernGPT, 4)],
    ids=["gpt", "modern"],
)
def test_shards_learn_what_one_rank_learns_to_the_rounding_of_float64(
    on_ranks, make_model, world_size
):
    ((losses, learned),) = on_ranks(1, lambda rank: trained(rank, 1, make_model))
    assert losses[-1] < losses[0] - 0.1
    for found, theirs in on_ranks(world_size, lambda rank: trained(rank, world_size, make_model)):
        assert found == pytest.approx(losses, abs=1e-10)
        for ours, expected in zip(theirs, learned, strict=True):
            assert ours == pytest.approx(expected, rel=1e-8, abs=1e-9)


def sizes(rank):
    """Return the elements of this rank's momentum of matrices, and all elements of these."""
    model, optimizer = parts_of(ModernGPT, 4)
    step(model, optimizer, rank, 4, seed=0)
    momenta = [optimizer.state[matrix]["momentum"] for matrix in optimizer.matrices]
    kept = sum(momentum.to_local().numel() for momentum in momenta)
    return kept, sum(matrix.numel() for matrix in optimizer.matrices)


def test_each_rank_keeps_the_momentum_of_its_rows(on_ranks):
    found = on_ranks(4, sizes)
    assert sum(kept for kept, _ in found) == found[0][1]
    assert (
        max(kept for kept, _ in found) <= 0.34 * found[0][1]
    )  # a third of six rows, of others 1/4


@pytest.mark.slow
def test_captured_graphs_learn_what_the_code_does(on_ranks, monkeypatch):
    def capture(function):  # without machine code, which takes a minute to make
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(sharded_matrices, "compiled_for_each_shape", capture)

    def losses_of(rank, compiled):
        model, optimizer = parts_of(ModernGPT, 4)
        optimizer.placement = ShardedMatrices(compiled)
        return [step(model, optimizer, rank, 4, seed) for seed in range(2)]

    eager, graphs = (
        on_ranks(4, lambda rank, compiled=compiled: losses_of(rank, compiled))
        for compiled in (False, True)
    )
    assert graphs[0] == pytest.approx(eager[0], abs=1e-10)
