"""The training losses of the steps since the last line of the log, kept on the device."""

from typing import Any

import torch
from torch import Tensor

from lockstep_gpt.distributed.ranks import tensors_of_ranks


class StepLosses:
    """Adds the losses of training steps, with one sum for each micro-batch of a step.

    So the mean over all micro-batches and ranks has the same bits for any number of ranks: it adds
    the same numbers in the same order.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}  # index of the micro-batch -> sum over complete steps
        self.steps = 0  # complete steps in `sums`
        self.copies = 1  # neighboring ranks with the same micro-batches
        self.current: dict[int, Tensor] = {}  # the same index -> loss in a step not complete yet

    def add(self, index: int, loss: Tensor) -> None:
        """Add the loss of micro-batch `index` of the current step on this rank."""
        self.current[index] = loss.detach()

    def weigh(self, factors: list[Tensor]) -> None:
        """Multiply each loss of the current step by a factor."""
        for index, factor in enumerate(factors):
            self.current[index] = self.current[index] * factor

    def complete_step(self) -> None:
        """Add the current step to the sums."""
        for index, loss in self.current.items():
            self.sums[index] = self.sums[index] + loss if index in self.sums else loss
        self.steps += 1
        self.current = {}

    def forget_step(self) -> None:
        """Drop the losses of the current step."""
        self.current = {}

    def take(self) -> Tensor:
        """Return the mean losses since the last call, float64 on the host.

        Their shape is (ranks with samples of their own, micro-batches). All ranks must call this
        together.
        """
        assert self.steps, "called before a training step"
        means = self._sums_of_ranks().double() / self.steps
        self.sums = {}
        self.steps = 0
        return means

    def state(self) -> dict[str, Any]:
        """Return the sums since the last `take`, on the host, and their number of steps.

        All ranks must call this together.
        """
        if not self.steps:
            return {"sums": torch.zeros(0), "steps": 0}
        return {"sums": self._sums_of_ranks(), "steps": self.steps}

    def load(self, state: dict[str, Any], rank: int, world_size: int, micro_batches: int) -> None:
        """Continue with a saved state, also one of another number of ranks.

        Where a step has the saved number of micro-batches, each keeps its sum, on whichever rank
        it is now. Else only the mean over all of them can stay.

        Args:
            state: what `state` returned.
            rank: this one, among those with samples of their own.
            world_size: number of these ranks.
            micro_batches: of each rank in a step.
        """
        self.steps = state["steps"]
        self.sums = {}
        if not self.steps:
            return
        sums = state["sums"].flatten().clone()  # in the order of a step; not in a mapped file
        if len(sums) != world_size * micro_batches:
            mean = sums.double().mean().to(sums.dtype)
            sums = mean.expand(world_size * micro_batches)
        first = rank * micro_batches
        self.sums = {index: sums[first + index] for index in range(micro_batches)}

    def move_to(self, device: torch.device) -> None:
        """Move the sums to the device of the losses that follow."""
        self.sums = {index: total.to(device) for index, total in self.sums.items()}

    def _sums_of_ranks(self) -> Tensor:
        """Return the ranks' sums over their own samples, (ranks, micro-batches), on the host."""
        sums = tensors_of_ranks(torch.stack([*self.sums.values()]))
        return sums[:: self.copies].cpu()
