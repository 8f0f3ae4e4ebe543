"""Each collective that training uses, over NCCL with one rank, whose results are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from clock import DEVICE, DRY, show, synchronize
from lockstep.muon.exchange import MatrixExchange
from lockstep.muon.orthogonalization import flops_of, orthogonalized
from lockstep.ranks.gathering import ALL_GATHER, gather_stacks
from lockstep.strategies.exact_sums import ExactSums
from torch import Tensor, nn

from parts.gradients import gradient_of
from parts.process_group import in_ddp, join

SHAPES = [(64, 32), (32, 128), (48, 48)]  # of Muon's matrices
STEPS = 3
BUCKET = 0.2  # MiB: some buckets, so that one is summed while the next is computed


def main() -> None:
    """Print a row for each kind."""
    join()
    checks: dict[str, Callable[[], bool]] = {
        "torch's own": torchs_own,
        "Muon's exchange of matrices": exchange_of_matrices,
        "Muon's gathered stacks": gathered_stacks,
        "exact sums in a side stream": exact_sums,
    }
    for name, check in checks.items():
        equal = check()
        backend = dist.get_backend()
        result = f"equal bits, {backend}" if equal else f"other bits, {backend}"
        show(f"collectives: {name}", result, "" if equal else "FAILED")


def torchs_own() -> bool:
    """Call each of torch's collectives that training uses."""
    x = torch.randn(1000, device=DEVICE)
    results = [x.clone()]
    dist.all_reduce(results[0])
    dist.broadcast(x, src=0)
    results.append(torch.empty_like(x))
    ALL_GATHER(results[-1], x)
    results.append(torch.empty_like(x))
    # Newer versions of torch use the first name, and warn about the second.
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(results[-1], x)
    results.append(torch.empty_like(x))
    dist.all_to_all_single(results[-1], x, [1000], [1000])
    dist.all_to_all_single(x.new_empty(0), x.new_empty(0), [0], [0])  # a rank without a matrix
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"step": 1})
    dist.barrier(device_ids=None if DRY else [0])
    vote = torch.ones(2, dtype=torch.int64)  # ranks vote on the CPU, while the GPU computes
    group = dist.new_group(backend="gloo")
    work: Any = dist.all_reduce(vote, dist.ReduceOp.MAX, group, async_op=True)
    work.wait()
    same = all(torch.equal(x, result) for result in results)
    return same and objects == [{"step": 1}] and bool((vote == 1).all())


def exchange_of_matrices() -> bool:
    """Orthogonalize matrices whose rows are sharded: over one rank, whole ones."""
    matrices = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in SHAPES]
    group: Any = dist.group.WORLD
    exchange = MatrixExchange(SHAPES, [flops_of(shape) for shape in SHAPES], group)
    found: dict[int, Tensor] = {}
    for numbers, results in exchange.apply(
        lambda wanted: [matrices[number] for number in wanted],
        lambda _, matrix: orthogonalized(matrix, torch.bfloat16),
    ):
        found.update(zip(numbers, results, strict=True))
    expected = [orthogonalized(matrix[None], torch.bfloat16)[0] for matrix in matrices]
    return all(torch.equal(found[number], matrix) for number, matrix in enumerate(expected))


def gathered_stacks() -> bool:
    """Gather a stack of matrices from all ranks: here, from this one."""
    stack = torch.randn(3, 8, 8, device=DEVICE, dtype=torch.bfloat16)
    return torch.equal(gather_stacks(stack, [len(stack)]).wait(), stack)


def exact_sums() -> bool:
    """Add gradients in one order, as with three ranks and more, and compare with plain ones."""
    both = zip(gradients(exact=True), gradients(exact=False), strict=True)
    return all(torch.equal(ours, plain) for ours, plain in both)


def gradients(exact: bool) -> list[Tensor]:
    """Return the gradients after some steps of a small model."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(257, 513), nn.GELU(), nn.Linear(513, 3)).to(DEVICE)
    data = torch.randn(16, 257, device=DEVICE)
    model: nn.Module = layers
    if exact:
        wrapped = in_ddp(layers, BUCKET)
        sums = ExactSums(layers, 1, torch.device(DEVICE), in_ddp=True)
        sums.factor(1)
        wrapped.register_comm_hook(None, sums.exchange)
        model = wrapped
    for _ in range(STEPS):
        model.zero_grad()
        model(data).square().mean().backward()
    synchronize()
    return [gradient_of(parameter).clone() for parameter in layers.parameters()]
