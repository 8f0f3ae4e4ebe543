"""Stacks of tensors on their way from each rank to all, while the ranks compute something else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions of torch use the first name, and warn about the second.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Gathering:
    """What has been sent, and where it arrives."""

    works: list[Any]
    sent: Tensor  # not freed before it has arrived
    parts: list[Tensor]

    def wait(self) -> Tensor:
        """Return the tensors of all ranks as one stack, in rank order."""
        for work in self.works:
            work.wait()
        if len(self.parts) == 1:
            return self.parts[0]
        return torch.cat(self.parts)


def gather_stacks(stack: Tensor, counts: Sequence[int]) -> Gathering:
    """Start sending this rank's `stack`, (count, ...), to all ranks; every rank must call this.

    Stacks of about the same length are filled up and gathered. If that doubled what is sent, as
    with few tensors on many ranks, each rank that has some broadcasts its own.

    Args:
        stack: contiguous.
        counts: the length of each rank's stack.
    """
    if len(counts) * max(counts) <= 2 * sum(counts):
        return _gather(stack, counts)
    return _broadcast(stack, counts)


def _gather(stack: Tensor, counts: Sequence[int]) -> Gathering:
    slots = max(counts)
    sent = stack
    if len(stack) < slots:
        sent = torch.cat([stack, stack.new_zeros(slots - len(stack), *stack.shape[1:])])
    received = stack.new_empty(len(counts) * slots, *stack.shape[1:])
    work = ALL_GATHER(received, sent, async_op=True)
    parts = [received]
    if len(counts) * slots > sum(counts):
        parts = [
            part[:count] for part, count in zip(torch.split(received, slots), counts, strict=True)
        ]
    return Gathering([work], sent, parts)


def _broadcast(stack: Tensor, counts: Sequence[int]) -> Gathering:
    received = stack.new_empty(sum(counts), *stack.shape[1:])
    works = []
    for rank, part in enumerate(torch.split(received, [*counts])):
        if not len(part):
            continue
        if rank == dist.get_rank():
            part.copy_(stack)
        works.append(dist.broadcast(part, src=rank, async_op=True))
    return Gathering(works, stack, [received])
