"""The gradients of one step: each rank's own, their average, and the update that followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.pages.noise import Measurement
from lockstep.patches.torch import empty_buckets

Numbers = npt.NDArray[Any]


def average_like_ddp(ddp: DistributedDataParallel, in_buckets: bool) -> None:
    """Average the gradients of an unsynchronized backward pass, bit for bit as DDP would.

    This sums the same buckets in the same layout. DDP keeps its own buckets private, so these are
    copies: briefly one more copy of all gradients.

    Args:
        ddp: the wrapped model.
        in_buckets: whether gradients are in DDP's buckets, and stay there. DDP divides them by the
            number of ranks; it multiplies others by 1 / ranks, which may round differently.
    """
    ranks = dist.get_world_size(ddp.process_group)
    for bucket in empty_buckets(ddp):
        slots = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        for parameter, slot in slots:
            if in_buckets:
                torch.div(parameter.grad, ranks, out=slot)
            elif parameter.grad is not None:
                torch.mul(parameter.grad, 1 / ranks, out=slot)
        used = _used_anywhere([parameter for parameter, _ in slots], ddp)
        dist.all_reduce(bucket.buffer(), group=ddp.process_group)
        for (parameter, slot), is_used in zip(slots, used, strict=True):
            if in_buckets:
                parameter.grad.copy_(slot)
            else:
                parameter.grad = slot if is_used else None


def _used_anywhere(parameters: Sequence[Tensor], ddp: DistributedDataParallel) -> list[bool]:
    """Return which parameters have a gradient on any rank: all, unless DDP looks for unused."""
    if not ddp.find_unused_parameters:
        return [True] * len(parameters)
    has_gradient = [parameter.grad is not None for parameter in parameters]
    flags = torch.tensor(has_gradient, dtype=torch.int32, device=ddp.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return [bool(flag) for flag in flags.tolist()]


class Probe:
    """Reads the same few evenly spread values of every parameter on every rank.

    Args:
        model: the model with the parameters.
        values: how many values of each parameter; fewer if the parameter is smaller.
    """

    def __init__(self, model: nn.Module, values: int) -> None:
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.names = [*trained]
        self.parameters = [*trained.values()]
        self.positions = [_spread(parameter.numel(), values) for parameter in self.parameters]
        self._indices = [
            torch.tensor(spots, device=parameter.device)
            for spots, parameter in zip(self.positions, self.parameters, strict=True)
        ]
        self.exact = any(parameter.dtype == torch.float64 for parameter in self.parameters)

    def gradients(self) -> Tensor:
        """Return the gradients' values, then each gradient's norm, float64: (values + P)."""
        gradients = [_gradient(parameter) for parameter in self.parameters]
        norms = torch.stack(torch._foreach_norm(gradients))
        return torch.cat([self._pick(gradients), norms.double()])

    def weights(self) -> Tensor:
        """Return the parameters' values, float64: (values)."""
        return self._pick([parameter.detach() for parameter in self.parameters])

    def _pick(self, tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, self._indices, strict=True)
        return torch.cat([tensor.flatten()[index].double() for tensor, index in pairs])

    def split(self, values: Numbers) -> list[Numbers]:
        """Split the last axis, over all values, into one piece per parameter."""
        ends = np.cumsum([len(spots) for spots in self.positions])
        return np.split(values, ends[:-1], axis=-1)

    @property
    def count(self) -> int:
        """The total number of values read."""
        return sum(map(len, self.positions))


def _spread(size: int, values: int) -> list[int]:
    """Return up to `values` distinct positions below `size`, spread evenly but irregularly."""
    share = 0.6180339887498949  # fraction of the golden ratio, never in step with a row's length
    positions = {int((index + 1) * share % 1 * size) for index in range(values)}
    return sorted(positions)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.detach()


class MicroBatchNorms:
    """Measures the gradient of each micro-batch separately, and still leaves their sum.

    For a single rank: its micro-batches take the place of ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.squares: list[Tensor] = []  # squared norm of each micro-batch's part of the step
        self._sums: list[Tensor | None] = []

    def before_backward(self) -> None:
        """Set the sum so far aside."""
        self._sums = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def after_backward(self) -> None:
        """Measure, then add as autograd would have: old sum + new gradient."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        self.squares.append(norms.double().square().sum())
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            if total is None:
                continue
            if parameter.grad is not None:
                total.add_(parameter.grad)
            parameter.grad = total
        self._sums = []


@dataclass
class LocalStep:
    """This rank's values of one step; the vectors are as `Probe` reads them.

    A micro-batch counts as often as it has targets, if they differ (`CountedTargets`).
    """

    step: int
    scale: float  # loss scale, also in gradients up to the average: 1 unless precision=16-mixed
    samples: list[list[Any]]  # numbers of the first of this rank's samples
    losses: list[Tensor] = field(default_factory=list)  # of each micro-batch, with `scale`
    targets: list[Tensor] = field(default_factory=list)  # of each micro-batch; 1 if all are equal
    before: Tensor | None = None  # (values + P), this rank's own, with `scale`
    after: Tensor | None = None  # (values + P), the average, as the optimizer gets it
    weights: Tensor | None = None  # (values), before the update

    def as_vector(self, weights: Tensor, parts: list[Tensor], factor: Tensor | float) -> Tensor:
        """Return all numbers as one float64 vector, gradients without the loss scale.

        Args:
            weights: after the update.
            parts: squared norm of each micro-batch's gradient, if they were measured.
            factor: by which gradients were multiplied after the average.
        """
        assert self.before is not None
        assert self.after is not None
        assert self.weights is not None
        targets = torch.stack(self.targets).double()
        losses = torch.stack(self.losses).double() / self.scale
        loss = (losses * targets).sum() / targets.sum().clamp(min=1)
        before = self.before * factor / self.scale
        vectors = [before, self.after, self.weights, weights, loss.reshape(1), targets]
        if parts:
            vectors.append(torch.stack(parts) * factor**2 / self.scale**2)
        return torch.cat(vectors)


def from_all_ranks(tensor: Tensor) -> Numbers:
    """Return every rank's `tensor`, stacked by rank, on the host."""
    if not dist.is_initialized():
        return tensor[None].cpu().numpy()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.stack(gathered).cpu().numpy()


class Step:
    """One recorded step of all R ranks.

    Args:
        probe: the probe that read the values.
        table: every rank's `LocalStep.as_vector`.
        micro_batches: samples per micro-batch, and micro-batches per rank in a step.
    """

    def __init__(self, probe: Probe, table: Numbers, micro_batches: tuple[int, int]) -> None:
        count = probe.count
        size = len(probe.names)
        self.micro_size, self.accumulation = micro_batches
        lengths = [count, size, count, size, count, count, 1, self.accumulation]
        pieces = np.split(table, np.cumsum(lengths), axis=1)
        self.before, self.norms, self.after, self.mean_norms = pieces[:4]  # (R, values), (R, P)
        self.weights, self.updated = pieces[4:6]  # (R, values)
        self.losses = pieces[6][:, 0]  # (R,)
        self.targets = pieces[7]  # (R, micro-batches)
        self.part_squares = pieces[8]  # (R, micro-batches)
        self.ranks = len(table)

    @property
    def spread(self) -> float:
        """The largest difference between ranks after the average and the update; should be 0."""
        after = np.concatenate([self.after, self.updated], axis=1)
        return float(np.max(after.max(axis=0) - after.min(axis=0)))

    @property
    def measurement(self) -> Measurement | None:
        """The step's noise measurement, or None if there is nothing to compare.

        The step is a mean over its targets, so a part with n of N targets adds n / N of its own
        gradient. In the mean of the parts' squared norms, it counts as much: then the mean is that
        of equal parts, and their sizes need not be.
        """
        big = float(np.square(self.mean_norms[0]).sum())
        if self.ranks > 1:  # the average divides each rank's gradient by their number
            targets = self.targets.sum(axis=1)
            squares = np.square(self.norms).sum(axis=1) / self.ranks**2
        elif self.accumulation > 1:
            targets = self.targets[0]
            squares = self.part_squares[0]
        else:
            return None
        used = targets > 0
        parts = int(used.sum())
        if parts < 2:
            return None
        shares = targets[used] / targets.sum()
        small = float((squares[used] / shares).sum())
        samples = self.micro_size * self.accumulation * self.ranks
        return Measurement(samples / parts, samples, small, big)
