"""The training losses of the steps since the last line of the log, kept on the device."""

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
        self.current: dict[int, Tensor] = {}  # the same index -> loss in the newest step

    def add(self, index: int, loss: Tensor) -> None:
        """Add the loss of micro-batch `index` of a step on this rank; index 0 begins a step."""
        if index == 0:
            self._complete_step()
        self.current[index] = loss.detach()

    def weigh(self, factors: list[Tensor]) -> None:
        """Multiply each loss of the newest step by a factor."""
        for index, factor in enumerate(factors):
            self.current[index] = self.current[index] * factor

    def take(self) -> Tensor:
        """Return the mean losses since the last call, float64 on the host, (ranks, micro-batches).

        All ranks must call this together.
        """
        self._complete_step()
        assert self.steps, "called before a training step"
        sums = tensors_of_ranks(torch.stack([*self.sums.values()]))  # in the order of a step
        means = sums.cpu().double() / self.steps
        self.clear()
        return means

    def clear(self) -> None:
        """Forget all losses."""
        self.sums = {}
        self.steps = 0
        self.current = {}

    def _complete_step(self) -> None:
        if not self.current:
            return
        for index, loss in self.current.items():
            self.sums[index] = self.sums[index] + loss if index in self.sums else loss
        self.steps += 1
        self.current = {}
